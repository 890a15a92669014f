"""Bodies are bounded in size, time, depth and sum; small requests cannot ask for huge work."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline_server.errors import InvalidRequest
from paceline_server.gateway import limits
from paceline_server.gateway.embedding_request import EmbeddingFields
from paceline_server.gateway.limits import Arrival
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.requests import ChatRequest, CompletionRequest
from paceline_server.testing import FakeEngine, Served, served, write_model

A = 66
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
EMBEDDING = {"model": "tiny", "input": "Hi"}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, None)
    return path


async def error(server: Served, status: int, data: Any, **options: Any) -> dict[str, Any]:
    """The error object of a refused body; a plain request works afterwards."""
    response = await server.client.post(PATH, data=data, **options)
    assert response.status == status
    found: dict[str, Any] = (await response.json())["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert (await server.client.post(PATH, json=COMPLETION)).status == 200
    return found


async def chunks(count: int, size: int = 65536) -> AsyncIterator[bytes]:
    """A chunked body of spaces."""
    for _ in range(count):
        yield b" " * size


async def test_a_body_beyond_the_limit_is_a_413_announced_or_chunked(folder: Path) -> None:
    async with served(FakeEngine(folder, [A]), max_body_bytes=100_000) as server:
        announced = await error(server, 413, b" " * 100_001)
        chunked = await error(server, 413, chunks(2))
        assert announced == chunked
        assert "100000 bytes (gateway.max_body_bytes)" in announced["message"]
        assert server.gateway.bodies._held_bytes == 0


async def test_a_large_announcement_is_refused_before_the_body_comes(folder: Path) -> None:
    """The answer is there although not one byte of 200 MB was sent."""
    async with served(FakeEngine(folder, [A])) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.close()
    assert head.startswith("HTTP/1.1 413")
    assert "Connection: close" in head


async def test_megabytes_are_taken_by_default(folder: Path) -> None:
    """Long chats are ordinary: what is wrong with this one is its length in tokens."""
    async with served(FakeEngine(folder, [A])) as server:
        found = await error(server, 400, json.dumps({**COMPLETION, "prompt": "é" * 800_000}).encode())
    assert found["code"] == "context_length_exceeded"


async def test_a_body_that_trickles_is_a_408(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.1)
    async with served(FakeEngine(folder, [A])) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.close()
        assert server.scrape()['paceline_rejections_total{reason="request_timeout"}'] == 1
    assert head.startswith("HTTP/1.1 408")
    assert "Connection: close" in head


def late(chunks: Iterable[tuple[float, int]]) -> float | None:
    """When a body of chunks (seconds since the one before, bytes) is found late; None where it is in time."""
    now = 0.0
    arrival = Arrival.begin(now)
    for gap, size in chunks:
        if now + gap > arrival.deadline:
            return arrival.deadline
        now += gap
        arrival.note(size, now)
    return None


def test_a_steady_body_may_take_as_long_as_it_needs() -> None:
    """Bytes buy time: what comes at the least rate is waited for."""
    assert late([(1.0, limits.MIN_BYTES_PER_SECOND)] * 3600) is None
    assert late([(10.0, 10 * limits.MIN_BYTES_PER_SECOND)] * 360) is None


def test_what_came_quickly_buys_no_long_pause() -> None:
    """32 MiB in a second would pay for half an hour of holding them."""
    assert late([(1.0, 32 << 20), (14.9, 1)]) is None
    assert late([(1.0, 32 << 20), (15.1, 1)]) == 16.0


def test_a_byte_now_and_then_is_too_slow() -> None:
    assert late([(1.0, 1)] * 60) == pytest.approx(15.0, abs=0.01)


@asynccontextmanager
async def unfinished(server: Served, size: int) -> AsyncIterator[asyncio.StreamReader]:
    """A connection whose body stays a byte short of `size`; entered when the rest has arrived."""
    reader, writer = await connect(server)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    writer.write(b" " * (size - 1))
    while all(arrival.received != size - 1 for arrival in server.gateway.bodies._being_read):
        await asyncio.sleep(0.01)
    try:
        yield reader
    finally:
        writer.close()


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


@pytest.mark.parametrize("size", [200, 50_000])
async def test_the_largest_of_too_large_bodies_has_to_go_and_not_the_one_that_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Who sends all but the last byte of many large bodies must not shut others out."""
    monkeypatch.setattr(limits, "BODIES_AT_ONCE", 1)
    monkeypatch.setattr(limits, "SMALL_BYTES", 0)
    async with served(FakeEngine(folder, [A]), max_body_bytes=100_000) as server:
        async with unfinished(server, 60_000) as largest, unfinished(server, 39_990):
            body = json.dumps(COMPLETION).encode()
            assert (await server.client.post(PATH, data=body + b" " * (size - len(body)))).status == 200
            assert await status(largest) == 503
        while server.gateway.bodies._being_read:
            await asyncio.sleep(0.01)
        assert server.gateway.bodies._held_bytes == 0


async def test_the_body_that_comes_is_refused_where_it_is_the_largest_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODIES_AT_ONCE", 1)
    monkeypatch.setattr(limits, "SMALL_BYTES", 0)
    async with served(FakeEngine(folder, [A]), max_body_bytes=100_000) as server, unfinished(server, 40_000):
        refused = await server.client.post(PATH, data=b" " * 90_000)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "bodies_full")
        assert len(server.gateway.bodies._being_read) == 1


async def test_small_bodies_are_no_part_of_the_sum(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to go on their account, not even where large ones fill the bound."""
    monkeypatch.setattr(limits, "BODIES_AT_ONCE", 1)
    monkeypatch.setattr(limits, "SMALL_BYTES", 1_000)
    async with (
        served(FakeEngine(folder, [A]), max_body_bytes=100_000) as server,
        unfinished(server, 99_999),
        unfinished(server, 1_001),
    ):
        assert (await server.client.post(PATH, json=COMPLETION)).status == 200
        assert len(server.gateway.bodies._being_read) == 2


async def test_the_slowest_of_too_many_bodies_has_to_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads without bodies cost their sender nothing, so they must not keep places."""
    monkeypatch.setattr(limits, "READ_AT_ONCE", 2)
    async with served(FakeEngine(folder, [A])) as server, unfinished(server, 1) as first, unfinished(server, 1):
        while len(server.gateway.bodies._being_read) < 2:
            await asyncio.sleep(0.01)
        assert (await server.client.post(PATH, json=COMPLETION)).status == 200
        assert await status(first) == 503


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"not json", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt":' * 100_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        ('{"model": "tiny", "prompt": "Hi"}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"model": "tiny", "prompt": "Hi"}', "BOM"),
        (b'{"model": "tiny", "prompt": "Hi", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model": "tiny", "prompt": "Hi", "temperature": NaN}', "NaN"),
    ],
)
async def test_bodies_that_parsers_choke_on_are_400(folder: Path, body: bytes, says: str) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        assert says in (await error(server, 400, body))["message"]


async def test_compressed_bodies_are_refused_unread(folder: Path) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    async with served(FakeEngine(folder, [A])) as server:
        found = await error(server, 400, bomb, headers={"Content-Encoding": "gzip"})
        assert "Content-Encoding" in found["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"X-Long: " + b"a" * 65536 + b"\r\n",
        b"".join(b"X-%d: a\r\n" % number for number in range(1000)),
    ],
    ids=["a long header", "many headers"],
)
async def test_headers_are_bounded(folder: Path, head: bytes) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        assert (await reader.readline()).split()[1] in (b"400", b"431")
        writer.close()


async def test_a_body_framed_otherwise_than_announced_is_a_400(folder: Path) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 100_000),
        ("best_of", 100_000),
        ("stop", ["x"] * 500_000),
        ("stop", "x" * 5_000_000),
        ("logprobs", -1),
        ("logprobs", 49_152),
        ("logit_bias", {str(token): -100 for token in range(300_000)}),
        ("prompt", ["x"] * 1_000_000),
        ("max_tokens", 10**18),
        ("prompt", "word " * 1_000_000),
        ("stop_token_ids", list(range(100_000))),
        ("min_tokens", 10**18),
    ],
)
async def test_huge_work_is_refused_by_field_before_anything_is_tokenised(folder: Path, field: str, value: Any) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        server.gateway.texts.text.tokenizer._encode = None
        response = await server.client.post(PATH, json={**COMPLETION, field: value})
        assert (response.status, (await response.json())["error"]["param"]) == (400, field)


HUGE = {
    "text": "x" * 1_000_000,
    "texts": ["x"] * 100_000,
    "numbers": list(range(100_000)),
    "object": {str(number): number for number in range(100_000)},
    "integer": 10**18,
}
LATER = {  # not refused as a value, but before it costs anything: 404, or by the context's length (tests above)
    ("model", "text"), ("prompt", "text"), ("prompt", "numbers"), ("input", "text"), ("input", "numbers"),
    ("dimensions", "integer"),
    ("max_tokens", "integer"), ("max_completion_tokens", "integer"), ("min_tokens", "integer"), ("seed", "integer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, EmbeddingFields])
def test_no_field_takes_a_huge_value_of_any_kind(model: type[BaseModel], kind: str) -> None:
    """Of the fields there are and of those to come: each is refused by its name, and the refusal is short."""
    plain = {ChatRequest: CHAT, CompletionRequest: COMPLETION, EmbeddingFields: EMBEDDING}[model]
    for field in model.model_fields:
        if (field, kind) in LATER:
            validate(model, {**plain, field: HUGE[kind]})
            continue
        with pytest.raises(InvalidRequest) as caught:
            validate(model, {**plain, field: HUGE[kind]})
        assert str(caught.value.param).replace("[", ".").split(".")[0] == field
        assert len(caught.value.message) < 1000


async def test_refusing_a_large_body_takes_no_more_memory_than_a_small_multiple_of_it(folder: Path) -> None:
    """The body, its JSON, and nothing of a size with them."""
    body = json.dumps({**COMPLETION, "prompt": ["word"] * 500_000, "n": 100_000}).encode()
    async with served(FakeEngine(folder, [A])) as server:
        await error(server, 400, body)  # what is made once
        tracemalloc.start()
        try:
            await error(server, 400, body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 15 * len(body)


async def test_too_many_messages_are_refused_with_the_limit(folder: Path) -> None:
    async with served(FakeEngine(folder, [A])) as server:
        messages = [{"role": "user", "content": "x"}] * 100_000
        response = await server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        found = (await response.json())["error"]
        assert (response.status, found["param"]) == (400, "messages")
        assert "2048" in found["message"]


async def connect(server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection, for requests that no client library would send."""
    url = server.client.make_url("/")
    return await asyncio.open_connection(url.host, url.port)
