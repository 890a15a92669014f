"""The custom.metrics API over real TLS: what the HPA gets, what others get, and that only the API server gets in."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from paceline_operator.adapter.api import Clocks, make_app, quantity
from paceline_operator.adapter.certificates import LIFETIME, make_certificate
from paceline_operator.adapter.errors import UnknownService
from paceline_operator.adapter.front_proxy import FrontProxy, TlsFront
from paceline_operator.adapter.pressure import Pressure
from paceline_operator.cluster import Key
from paceline_operator.errors import ClusterUnavailable

HOST = "paceline-adapter.paceline-system.svc"
BASE = "/apis/custom.metrics.k8s.io/v1beta2"
METRIC = f"{BASE}/namespaces/default/llmservices.paceline.dev/demo"


class FakeLoad:
    """A load source with one service, default/demo."""

    ready = True
    stalled = False
    down = False
    value = Pressure(queue_depth=10, ttft_p95=2.5, ttft_pressure=1.25, missing=0, measured_at=990.0)

    async def pressure(self, key: Key) -> Pressure:
        """Answer for the one service."""
        if self.down:
            raise ClusterUnavailable("no answer")
        if key != Key("default", "demo"):
            raise UnknownService(f"no LLMService {key}")
        return self.value


class Authority:
    """A certificate authority of a test, with the client certificates that it signs."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "front-proxy-ca")])
        own = self._builder(self._name, self._key.public_key()).add_extension(x509.BasicConstraints(True, None), True)
        self.pem = own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number(), now, now + LIFETIME)

    def client(self, common_name: str, folder: Path) -> tuple[Path, Path]:
        """Sign a client certificate; returns its file and that of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        certificate = (
            self._builder(subject, key.public_key()).add_extension(usage, False).sign(self._key, hashes.SHA256())
        )
        files = folder / f"{common_name}.crt", folder / f"{common_name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return files


class Adapter:
    """The API served on a local port, and requests to it with or without a client certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.load = FakeLoad()
        self.authority = Authority()
        self.front_proxy = FrontProxy(self.authority.pem, frozenset({"front-proxy"}))
        self.certificate = make_certificate(HOST, datetime.now(UTC))
        self.tls = TlsFront(self.front_proxy, self.certificate)
        clocks = Clocks(monotonic=lambda: 1000.0, wall=lambda: 1_900_000_000.0)
        self.runner = web.AppRunner(make_app(self.load, self.tls.admits, clocks))
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port."""
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.tls.context).start()
        self.port = self.runner.addresses[0][1]

    def client_context(self, identity: tuple[Path, Path] | None, bundle: bytes | None = None) -> ssl.SSLContext:
        """Trust `bundle` as the API server trusts a caBundle."""
        context = ssl.create_default_context(cadata=(bundle or self.certificate.bundle).decode())
        if identity:
            context.load_cert_chain(*identity)
        return context

    async def get(self, path: str, identity: tuple[Path, Path] | None = None, **kwargs: Any) -> tuple[int, Any]:
        """Ask as the given client: status and body, parsed where it is JSON."""
        context = self.client_context(identity)
        method = kwargs.pop("method", "GET")
        async with (
            aiohttp.ClientSession(f"https://127.0.0.1:{self.port}") as session,
            session.request(method, path, ssl=context, server_hostname=HOST, **kwargs) as response,
        ):
            json = response.content_type == "application/json"
            return response.status, await (response.json() if json else response.text())

    async def ask(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        """Ask as the API server does."""
        return await self.get(path, self.authority.client("front-proxy", self.folder), **kwargs)


@pytest.fixture
async def adapter(tmp_path: Path) -> AsyncIterator[Adapter]:
    adapter = Adapter(tmp_path)
    await adapter.start()
    yield adapter
    await adapter.runner.cleanup()


async def test_discovery_lists_the_two_metrics_of_llmservices(adapter: Adapter) -> None:
    status, body = await adapter.ask(BASE)
    assert status == 200
    assert (body["kind"], body["groupVersion"]) == ("APIResourceList", "custom.metrics.k8s.io/v1beta2")
    assert [item["name"] for item in body["resources"]] == [
        "llmservices.paceline.dev/queue_depth",
        "llmservices.paceline.dev/ttft_pressure",
    ]
    assert all(item["namespaced"] and item["kind"] == "MetricValueList" for item in body["resources"])


@pytest.mark.parametrize(("metric", "value", "window"), [("queue_depth", "10", None), ("ttft_pressure", "1250m", 60)])
async def test_a_metric_is_one_item_with_a_quantity(
    adapter: Adapter, metric: str, value: str, window: int | None
) -> None:
    status, body = await adapter.ask(f"{METRIC}/{metric}")
    assert status == 200
    (item,) = body["items"]
    assert (body["kind"], item["metric"], item["value"]) == ("MetricValueList", {"name": metric}, value)
    assert item["describedObject"] == {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "LLMService",
        "namespace": "default",
        "name": "demo",
    }
    assert item.get("windowSeconds") == window


async def test_the_timestamp_is_when_the_pods_were_last_heard(adapter: Adapter) -> None:
    _, body = await adapter.ask(f"{METRIC}/queue_depth")
    assert body["items"][0]["timestamp"] == "2030-03-17T17:46:30Z"  # 10 s before 1_900_000_000


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"{METRIC}/gpu_temperature", "queue_depth and ttft_pressure"),
        (f"{BASE}/namespaces/default/llmservices.paceline.dev/absent/queue_depth", "default/absent"),
        (f"{BASE}/namespaces/other/llmservices.paceline.dev/demo/queue_depth", "other/demo"),
        (f"{BASE}/namespaces/default/pods/demo/queue_depth", "llmservices.paceline.dev"),
        (f"{BASE}/nodes/n/queue_depth", ""),
        ("/apis/custom.metrics.k8s.io/v1beta1", ""),
        ("/openapi/v2", ""),
        ("/", ""),
    ],
)
async def test_what_does_not_exist_is_a_404_status_object(adapter: Adapter, path: str, says: str) -> None:
    status, body = await adapter.ask(path)
    assert (status, body["kind"], body["status"], body["code"], body["reason"]) == (
        404,
        "Status",
        "Failure",
        404,
        "NotFound",
    )
    assert says in body["message"]


@pytest.mark.parametrize(
    "path",
    [
        f"{BASE}/namespaces/default/llmservices.paceline.dev/*/queue_depth",
        f"{METRIC}/queue_depth?labelSelector=a%3Db",
        f"{METRIC}/queue_depth?metricLabelSelector=a%3Db",
    ],
)
async def test_selectors_and_wildcards_are_refused_by_name(adapter: Adapter, path: str) -> None:
    status, body = await adapter.ask(path)
    assert (status, body["reason"]) == (400, "BadRequest")
    assert "by" in body["message"]
    assert "name" in body["message"]


async def test_an_empty_selector_is_none(adapter: Adapter) -> None:
    """The HPA sends one with every request."""
    status, _ = await adapter.ask(f"{METRIC}/queue_depth?metricLabelSelector=&labelSelector=")
    assert status == 200


async def test_writing_is_a_405_status_object(adapter: Adapter) -> None:
    status, body = await adapter.ask(f"{METRIC}/queue_depth", method="POST")
    assert (status, body["reason"]) == (405, "MethodNotAllowed")


async def test_an_api_server_that_does_not_list_is_a_503_and_not_a_404(adapter: Adapter) -> None:
    adapter.load.down = True
    status, body = await adapter.ask(f"{METRIC}/queue_depth")
    assert (status, body["reason"]) == (503, "ServiceUnavailable")


async def test_nobody_without_the_front_proxys_certificate_gets_in(adapter: Adapter) -> None:
    for path in (BASE, f"{METRIC}/queue_depth", "/", "/healthz/../metrics"):
        status, body = await adapter.get(path, headers={"X-Remote-User": "system:admin"})
        assert (status, body["reason"]) == (401, "Unauthorized")


async def test_a_certificate_of_the_authority_under_another_name_does_not_get_in(adapter: Adapter) -> None:
    status, _ = await adapter.get(BASE, adapter.authority.client("somebody", adapter.folder))
    assert status == 401


async def test_a_certificate_of_another_authority_fails_the_handshake(adapter: Adapter) -> None:
    identity = Authority().client("front-proxy", adapter.folder)
    with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
        await adapter.get(BASE, identity)


async def test_probes_need_no_certificate_and_tell_the_state(adapter: Adapter) -> None:
    assert await adapter.get("/healthz") == (200, "ok")
    assert await adapter.get("/readyz") == (200, "ok")
    adapter.load.stalled, adapter.load.ready = True, False
    assert (await adapter.get("/healthz"))[0] == 503
    assert (await adapter.get("/readyz"))[0] == 503


async def test_a_new_certificate_and_authority_count_from_the_next_handshake_on(adapter: Adapter) -> None:
    (adapter.folder / "old").mkdir()
    old_identity = adapter.authority.client("front-proxy", adapter.folder / "old")
    assert (await adapter.get(BASE, old_identity))[0] == 200
    new_certificate = make_certificate(HOST, datetime.now(UTC), adapter.certificate.bundle)
    adapter.authority = Authority()
    adapter.certificate = new_certificate
    assert adapter.tls.update(FrontProxy(adapter.authority.pem, frozenset()), new_certificate)
    assert (await adapter.ask(BASE))[0] == 200
    with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
        await adapter.get(BASE, old_identity)


async def test_a_client_without_sni_is_served_with_the_new_certificate_too(adapter: Adapter) -> None:
    """Go sends none when it calls an address; the context must be swapped all the same."""
    adapter.certificate = make_certificate(HOST, datetime.now(UTC))
    adapter.tls.update(adapter.front_proxy, adapter.certificate)
    context = adapter.client_context(None)
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", adapter.port, ssl=context, server_hostname="")
    writer.close()
    await writer.wait_closed()


def test_without_allowed_names_every_certificate_of_the_authority_is_admitted() -> None:
    peer = {"subject": ((("commonName", "anybody"),),)}
    assert FrontProxy("", frozenset()).admits(peer)
    assert not FrontProxy("", frozenset()).admits(None)
    assert not FrontProxy("", frozenset({"aggregator"})).admits(peer)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (10, "10"), (1.25, "1250m"), (0.0004, "0"), (2.0, "2"), (1.9999, "2"), (123456789, "123456789")],
)
def test_quantities_are_whole_or_in_thousandths(value: float, text: str) -> None:
    assert quantity(value) == text


@given(st.floats(0, 1e9))
def test_a_quantity_is_the_number_to_the_thousandth(value: float) -> None:
    text = quantity(value)
    parsed = int(text[:-1]) / 1000 if text.endswith("m") else int(text)
    assert abs(parsed - value) <= 0.000501
