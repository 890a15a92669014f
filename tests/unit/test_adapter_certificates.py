"""The adapter's certificate: self-made, shared by replicas, renewed in time, trusted by the API server throughout."""

import base64
import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509

from paceline_operator.adapter.certificates import (
    LIFETIME,
    RENEW_BEFORE,
    CertificateStore,
    ServingCertificate,
    make_certificate,
    needs_renewal,
)
from paceline_operator.adapter.errors import SetupError
from paceline_operator.adapter.front_proxy import AUTHORITY_KEY, CONFIG_MAP_PATH, NAMES_KEY, read_front_proxy
from paceline_operator.adapter.testing import FakeObjects, shake_hands
from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable, StaleObservation

HOST = "paceline-adapter.paceline-system.svc"
NOW = datetime.now(UTC)
SECRET, API_SERVICE = "/secret", "/apiservice"


@pytest.fixture
def objects() -> FakeObjects:
    """What the chart installs: a Secret without data, an APIService without caBundle."""
    objects = FakeObjects()
    objects.put(SECRET, {"kind": "Secret"})
    objects.put(API_SERVICE, {"spec": {"group": "custom.metrics.k8s.io"}})
    return objects


def store(source: FakeObjects) -> CertificateStore:
    return CertificateStore(source, SECRET, API_SERVICE, HOST)


def handshake(server: ServingCertificate, bundle: bytes) -> None:
    """Shake hands in memory; raises ssl.SSLError when a client that trusts `bundle` refuses."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_into(server_context)
    shake_hands(server_context, ssl.create_default_context(cadata=bundle.decode()), HOST)


def test_a_client_that_trusts_the_bundle_trusts_the_certificate() -> None:
    certificate = make_certificate(HOST, NOW)
    handshake(certificate, certificate.bundle)


def test_a_client_of_another_bundle_does_not() -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(make_certificate(HOST, NOW), make_certificate(HOST, NOW).bundle)


def test_the_bundle_still_trusts_the_previous_certificate_and_drops_the_one_before() -> None:
    first = make_certificate(HOST, NOW)
    second = make_certificate(HOST, NOW, first.bundle)
    third = make_certificate(HOST, NOW, second.bundle)
    handshake(first, second.bundle)
    handshake(second, third.bundle)
    assert len(x509.load_pem_x509_certificates(third.bundle)) == 2
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(first, third.bundle)


def test_a_certificate_is_renewed_long_before_it_ends() -> None:
    certificate = make_certificate(HOST, NOW)
    last_day = NOW + LIFETIME - RENEW_BEFORE
    assert not needs_renewal(certificate, HOST, last_day - timedelta(minutes=1))
    assert needs_renewal(certificate, HOST, last_day + timedelta(minutes=1))


@pytest.mark.parametrize("part", ["bundle", "certificate", "private_key"])
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_what_cannot_be_read_is_renewed(part: str, content: bytes) -> None:
    good = make_certificate(HOST, NOW)
    parts = {"bundle": good.bundle, "certificate": good.certificate, "private_key": good.private_key}
    assert needs_renewal(ServingCertificate(**{**parts, part: content}), HOST, NOW)


def test_a_certificate_for_another_name_or_with_another_key_is_renewed() -> None:
    certificate = make_certificate(HOST, NOW)
    assert needs_renewal(certificate, "renamed.paceline-system.svc", NOW)
    mixed = ServingCertificate(certificate.bundle, certificate.certificate, make_certificate(HOST, NOW).private_key)
    assert needs_renewal(mixed, HOST, NOW)


async def test_the_first_start_fills_the_secret_and_the_ca_bundle(objects: FakeObjects) -> None:
    certificate = await store(objects).current()
    data = objects.objects[SECRET]["data"]
    assert base64.b64decode(data["tls.crt"]) == certificate.certificate
    assert base64.b64decode(objects.objects[API_SERVICE]["spec"]["caBundle"]) == certificate.bundle
    assert objects.objects[API_SERVICE]["spec"]["group"] == "custom.metrics.k8s.io"


async def test_a_second_replica_and_a_restart_use_what_is_there_and_write_nothing(objects: FakeObjects) -> None:
    first = await store(objects).current()
    objects.patches.clear()
    assert await store(objects).current() == first
    assert objects.patches == []


async def test_a_wiped_ca_bundle_is_put_back(objects: FakeObjects) -> None:
    first = await store(objects).current()
    del objects.objects[API_SERVICE]["spec"]["caBundle"]
    await store(objects).current()
    assert base64.b64decode(objects.objects[API_SERVICE]["spec"]["caBundle"]) == first.bundle


class Racing(FakeObjects):
    """Another replica writes its certificate between our read and our write."""

    winner: Manifest | None = None

    async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
        """Lose the first write to the Secret."""
        if path == SECRET and self.winner is None:
            self.winner = {**patch, "data": _data(make_certificate(HOST, NOW))}
            await super().patch_object(path, self.winner)
        return await super().patch_object(path, patch)


def _data(certificate: ServingCertificate) -> dict[str, Any]:
    parts = (certificate.bundle, certificate.certificate, certificate.private_key)
    return {
        key: base64.b64encode(part).decode() for key, part in zip(("ca.crt", "tls.crt", "tls.key"), parts, strict=True)
    }


async def test_of_two_replicas_that_start_together_both_use_the_first_ones_certificate() -> None:
    racing = Racing()
    racing.put(SECRET, {})
    racing.put(API_SERVICE, {"spec": {}})
    certificate = await store(racing).current()
    assert racing.winner is not None
    assert _data(certificate) == racing.winner["data"]


async def test_a_missing_secret_or_api_service_is_named_with_what_to_do(objects: FakeObjects) -> None:
    del objects.objects[API_SERVICE]
    with pytest.raises(SetupError, match=r"adapter\.apiService\.enabled"):
        await store(objects).current()
    del objects.objects[SECRET]
    with pytest.raises(SetupError, match="chart"):
        await store(objects).current()


async def test_an_api_server_that_is_down_is_told_apart_from_a_missing_object(objects: FakeObjects) -> None:
    objects.down = True
    with pytest.raises(ClusterUnavailable):
        await store(objects).current()


async def test_a_secret_that_vanishes_in_between_is_looked_at_again(objects: FakeObjects) -> None:
    class Vanishing(FakeObjects):
        async def patch_object(self, path: str, patch: Manifest) -> Manifest | None:
            return None

    vanishing = Vanishing()
    vanishing.objects = objects.objects
    with pytest.raises(StaleObservation):
        await store(vanishing).current()


async def test_the_front_proxy_is_what_the_cluster_publishes() -> None:
    source = FakeObjects()
    source.put(CONFIG_MAP_PATH, {"data": {AUTHORITY_KEY: "PEM", NAMES_KEY: json.dumps(["a", "b"])}})
    front_proxy = await read_front_proxy(source)
    assert (front_proxy.authority, front_proxy.allowed_names) == ("PEM", frozenset({"a", "b"}))


@pytest.mark.parametrize("config_map", [None, {}, {"data": {"client-ca-file": "PEM"}}])
async def test_a_cluster_without_aggregation_layer_is_refused_with_what_to_do(config_map: Manifest | None) -> None:
    source = FakeObjects()
    if config_map is not None:
        source.put(CONFIG_MAP_PATH, config_map)
    with pytest.raises(SetupError, match="--requestheader-client-ca-file"):
        await read_front_proxy(source)
