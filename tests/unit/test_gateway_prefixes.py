"""Hot prefixes are told to who knows the replicas' secret, and to nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline_server.engine.handover import SECRET_VARIABLE, parse_prefixes
from paceline_server.testing import FakeEngine, served


async def test_who_sends_the_secret_gets_the_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "between replicas")
    async with served(FakeEngine(folder)) as server:
        response = await server.client.get("/prefixes", headers={"Authorization": "Bearer between replicas"})
        assert response.status == 200
        found = parse_prefixes(await response.read())
    assert [tuple(one.token_ids) for one in found.prefixes] == [(5, 6, 7)]


@pytest.mark.parametrize("secret", [None, "", "between replicas"])
@pytest.mark.parametrize("sent", [None, "Bearer ", "Bearer wrong", "Bearer between replica", "Bearer \u00fc"])
async def test_nobody_else_does_and_cannot_tell_whether_there_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None, sent: str | None
) -> None:
    if secret is None:
        monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SECRET_VARIABLE, secret)
    async with served(FakeEngine(folder)) as server:
        response = await server.client.get("/prefixes", headers={} if sent is None else {"Authorization": sent})
        body = await response.json()
    assert response.status == 404
    assert body["error"]["message"] == "this server hands out no prefixes, or not to you"


async def test_a_secret_that_is_no_text_is_only_a_wrong_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "between replicas")
    async with served(FakeEngine(folder)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.client.port)
        writer.write(
            b"GET /prefixes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 404")
