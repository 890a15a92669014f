"""The whole adapter on a fake API server: what it serves, what it follows while it runs, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from paceline_operator.adapter.certificates import make_certificate
from paceline_operator.adapter.errors import SetupError
from paceline_operator.adapter.front_proxy import AUTHORITY_KEY, CONFIG_MAP_PATH, NAMES_KEY
from paceline_operator.adapter.server import api_service_path, certificate_store, running_adapter
from paceline_operator.adapter.settings import AdapterSettings
from paceline_operator.adapter.testing import FakeObjects

SETTINGS = AdapterSettings(namespace="ops", host="127.0.0.1", interval_seconds=0.02)
SECRET = "/api/v1/namespaces/ops/secrets/paceline-adapter-tls"


@pytest.fixture
def source() -> FakeObjects:
    """A cluster on which the chart is installed, without any LLMService."""
    source = FakeObjects()
    authority = make_certificate("front-proxy", datetime.now(UTC)).bundle.decode()
    source.put(CONFIG_MAP_PATH, {"data": {AUTHORITY_KEY: authority, NAMES_KEY: '["front-proxy"]'}})
    source.put(SECRET, {})
    source.put(api_service_path(), {"spec": {}})
    return source


@pytest.fixture
async def settings(source: FakeObjects, free_port: Callable[[], int]) -> AsyncIterator[AdapterSettings]:
    """Settings of an adapter that runs."""
    settings = replace(SETTINGS, port=free_port())
    async with running_adapter(settings, source, upkeep_seconds=0.02):
        yield settings


async def get(settings: AdapterSettings, path: str, bundle: bytes) -> int:
    """Ask as somebody who trusts this bundle: the status code."""
    trust = ssl.create_default_context(cadata=bundle.decode())
    host = "paceline-adapter.ops.svc"
    reader, writer = await asyncio.open_connection("127.0.0.1", settings.port, ssl=trust, server_hostname=host)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def trusted(source: FakeObjects) -> bytes:
    """The bundle that the API server has."""
    return base64.b64decode(source.objects[api_service_path()]["spec"]["caBundle"])


async def test_it_serves_what_the_api_server_trusts_and_becomes_ready(
    settings: AdapterSettings, source: FakeObjects
) -> None:
    assert await get(settings, "/healthz", trusted(source)) == 200
    async with asyncio.timeout(60):
        while await get(settings, "/readyz", trusted(source)) != 200:
            await asyncio.sleep(0.01)
    assert await get(settings, "/apis/custom.metrics.k8s.io/v1beta2", trusted(source)) == 401


async def test_it_follows_a_certificate_that_another_replica_has_renewed(
    settings: AdapterSettings, source: FakeObjects
) -> None:
    await source.patch_object(SECRET, {"data": None})
    renewed = await certificate_store(settings, source).current()
    async with asyncio.timeout(60):
        while True:
            try:
                assert await get(settings, "/healthz", renewed.bundle) == 200
                break
            except ssl.SSLCertVerificationError:
                await asyncio.sleep(0.01)


async def test_it_outlives_an_api_server_that_is_away(settings: AdapterSettings, source: FakeObjects) -> None:
    bundle = trusted(source)
    source.down = True
    async with asyncio.timeout(60):
        while source.refused < 4:  # rounds and upkeeps
            await asyncio.sleep(0.01)
    assert await get(settings, "/healthz", bundle) == 200
    source.down = False
    async with asyncio.timeout(60):
        while await get(settings, "/readyz", bundle) != 200:
            await asyncio.sleep(0.01)


async def test_an_incomplete_installation_is_refused_before_anything_listens(
    source: FakeObjects, free_port: Callable[[], int]
) -> None:
    del source.objects[SECRET]
    settings = replace(SETTINGS, port=free_port())
    with pytest.raises(SetupError, match=SECRET):
        async with running_adapter(settings, source):
            pytest.fail("it started")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", settings.port)


async def test_leaving_closes_the_port(source: FakeObjects, free_port: Callable[[], int]) -> None:
    settings = replace(SETTINGS, port=free_port())
    async with running_adapter(settings, source):
        assert await get(settings, "/healthz", trusted(source)) == 200
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", settings.port)
