"""POST /v1/embeddings over a fake engine: shapes, refusals by name, and the same bookkeeping as generation."""

import base64
import struct

import openai
import pytest

from paceline_server.config import parse
from paceline_server.engine.interface import Task
from paceline_server.gateway import embeddings
from paceline_server.keys import hash_key
from paceline_server.testing import FakeEngine, served, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
async def server(folder):
    async with served(FakeEngine(folder, task=Task.EMBED, max_model_len=16)) as up:
        yield up


async def post(server, **body):
    response = await server.client.post("/v1/embeddings", json={"model": "tiny", **body})
    return response.status, await response.json()


async def test_the_official_client_gets_vectors_in_the_order_of_its_texts(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model="tiny", input=["one two", "three"])
    tokens = server.engine.embedded[0].inputs
    assert [item.index for item in answer.data] == [0, 1]
    assert [item.embedding for item in answer.data] == [[float(ids[0]), float(len(ids))] for ids in tokens]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    assert answer.model == "tiny"


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
async def test_token_ids_are_taken_as_they_are(server, given, tokens):
    status, body = await post(server, input=given)
    assert status == 200
    assert list(server.engine.embedded[0].inputs) == tokens
    assert [item["embedding"] for item in body["data"]] == [[float(ids[0]), float(len(ids))] for ids in tokens]


async def test_base64_carries_the_same_numbers_as_float(server):
    _, plain = await post(server, input="one", encoding_format="float")
    _, coded = await post(server, input="one", encoding_format="base64")
    numbers = struct.unpack("<2f", base64.b64decode(coded["data"][0]["embedding"]))
    assert list(numbers) == plain["data"][0]["embedding"]
    assert plain["object"] == "list"
    assert plain["data"][0]["object"] == "embedding"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "not empty"),
        ({"input": [[]]}, "input", "not empty"),
        ({"input": ["a", [1]]}, "input", "all be strings"),
        ({"input": [1.5]}, "input[0]", "integer"),
        ({"input": [[1], [2, -3]]}, "input[1][1]", "not negative"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [9999]}, "input", "token ids go from"),
        ({"input": "a", "dimensions": 1}, "dimensions", "have 2"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "stream": True}, "stream", "stream"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(server, body, param, words):
    status, answer = await post(server, **body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    assert server.engine.embedded == []


async def test_the_models_own_number_of_dimensions_may_be_asked_for(server):
    assert (await post(server, input="a", dimensions=2))[0] == 200


async def test_a_text_that_is_too_long_is_refused_with_both_counts_and_its_place(server):
    status, answer = await post(server, input=["a", "one two three four five " * 8])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "16 tokens" in answer["error"]["message"]
    assert "input 1" in answer["error"]["message"]


async def test_a_text_longer_than_a_batch_is_refused_with_its_field_and_place_before_the_engine_hears_of_it(folder):
    config = parse(
        {
            "engine": {"model_path": "m", "served_model_names": ["tiny"]},
            "batching": {"max_batch_size": 1, "max_tokens_in_batch": 8},
        }
    )
    async with served(FakeEngine(folder, task=Task.EMBED, max_model_len=16), config) as up:
        assert (await post(up, input=[[5] * 8]))[0] == 200
        status, answer = await post(up, input=[[5], [5] * 9])
        assert len(up.engine.embedded) == 1
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert "holds 8 tokens (batching.max_tokens_in_batch)" in error["message"]
    assert "input 1 has 9" in error["message"]


async def test_another_models_name_is_not_served(server):
    assert (await post(server, input="a", model="other"))[0] == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_model_that_embeds_generates_no_text(server, path):
    response = await server.client.post(path, json={"model": "tiny", "prompt": "a"})
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_supported", "model")
    assert "/v1/embeddings" in error["message"]


async def test_a_model_that_generates_embeds_no_text(folder):
    async with served(FakeEngine(folder)) as up:
        status, answer = await post(up, input="a")
    assert (status, answer["error"]["code"]) == (404, "model_not_supported")
    assert "/v1/chat/completions" in answer["error"]["message"]


async def test_an_engine_that_is_not_ready_and_a_server_that_drains_are_503(server):
    server.engine.ready = False
    assert (await post(server, input="a"))[0] == 503
    server.engine.ready = True
    server.gateway.drain.begin()
    assert (await post(server, input="a"))[0] == 503


async def test_requests_are_counted_and_timed_as_those_that_generate(server):
    await post(server, input="one two")
    await post(server, input=[])
    scrape = server.scrape()
    assert scrape['paceline_requests_total{outcome="completed"}'] == 1
    assert scrape['paceline_requests_total{outcome="refused"}'] == 1
    assert scrape["paceline_ttft_seconds_count"] == scrape["paceline_e2e_latency_seconds_count"] == 1
    assert scrape["paceline_prompt_tokens_total"] == len(server.engine.embedded[0].inputs[0])


async def test_a_clients_timeout_reaches_the_engine(server):
    await post(server, input="a", timeout=5.0)
    assert 4.0 < server.engine.embedded[0].timeout <= 5.0


async def test_more_tokens_than_a_request_may_have_in_all_are_refused_though_each_text_is_short_enough(server):
    full = [[5] * 16] * 2048
    assert (await post(server, input=full))[0] == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "MAX_TOKENS", 2048 * 16 - 1)
        status, answer = await post(server, input=full)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "32767" in answer["error"]["message"]
    assert "several requests" in answer["error"]["message"]
    assert len(server.engine.embedded) == 1


async def test_a_tenants_tokens_a_minute_hold_for_texts_and_the_engine_learns_whose_they_are(folder):
    key = "sk-texts-0123456789"
    tenant = {"name": "acme", "key_hashes": [hash_key(key)], "weight": 3, "tokens_per_minute": 20}
    engine = {"model_path": "/models/tiny", "served_model_names": ("tiny",)}
    config = parse({"gateway": {"host": "127.0.0.1", "port": 0}, "engine": engine, "tenants": [tenant]})
    async with served(FakeEngine(folder, task=Task.EMBED, max_model_len=16), config) as up:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "tiny", "input": [[5] * 8, [6] * 8]}
        first = await up.client.post("/v1/embeddings", json=body, headers=headers)
        second = await up.client.post("/v1/embeddings", json=body, headers=headers)
        error = (await second.json())["error"]
    assert (first.status, second.status, error["code"]) == (200, 429, "rate_limit_exceeded")
    assert int(second.headers["Retry-After"]) >= 1
    assert [(one.tenant, one.weight) for one in up.engine.embedded] == [("acme", 3.0)]
