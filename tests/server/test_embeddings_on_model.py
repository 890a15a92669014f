"""The whole server with a real embedding model: the vectors of transformers' own way, over HTTP, in any company."""

import asyncio
from contextlib import asynccontextmanager, suppress

import numpy as np
import openai
import pytest
import torch
from aiohttp.test_utils import TestServer
from transformers import AutoModel, AutoTokenizer

from paceline_server.config import parse
from paceline_server.engine.client import EngineClient
from paceline_server.gateway.app import create_app

pytestmark = pytest.mark.timeout(600)

TEXTS = [
    "A man is eating food.",
    "",
    "The quick brown fox [SEP] jumps over the lazy dog",
    "naïve 你好 🧑‍🚀 ÅNGSTRÖM",
    "Zwei Züge fahren morgens von Zürich nach Genf und halten unterwegs nirgends an. " * 6,
]


@asynccontextmanager
async def serving(folder, **batching):
    """A gateway in this process, an engine in its own; yields the official client."""
    config = parse(
        {
            "engine": {"model_path": str(folder), "served_model_names": ("minilm",), "device": "cpu", "threads": 1},
            "batching": batching,
        }
    )
    engine = EngineClient(config)
    supervisor = asyncio.create_task(engine.supervise())
    try:
        async with TestServer(create_app(config, engine)) as server:
            async with asyncio.timeout(300):
                while (await ready(server)) != 200:
                    assert not supervisor.done(), supervisor.exception()
                    await asyncio.sleep(0.2)
            async with openai.AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none") as client:
                yield client
    finally:
        supervisor.cancel()
        with suppress(asyncio.CancelledError):
            await supervisor


async def ready(server):
    async with openai.DefaultAsyncHttpxClient() as http:
        return (await http.get(str(server.make_url("/readyz")))).status_code


@torch.inference_mode()
def by_transformers(folder, texts):
    """Each text alone: mean of the last hidden states, length 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        hidden = model(**tokenizer(text, return_tensors="pt", truncation=False)).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.array(vectors)


async def test_vectors_over_http_are_those_of_transformers_in_any_company(minilm_model):
    expected = by_transformers(minilm_model, TEXTS)
    async with serving(minilm_model, max_queue_delay_us=2000) as client:
        together = await client.embeddings.create(model="minilm", input=TEXTS)
        alone = await asyncio.gather(
            *(client.embeddings.create(model="minilm", input=text) for text in TEXTS for _ in range(3))
        )
    for index, item in enumerate(together.data):
        assert expected[index] @ np.array(item.embedding) >= 0.9999
    for index, answer in enumerate(alone):
        assert expected[index // 3] @ np.array(answer.data[0].embedding) >= 0.9999


async def test_what_the_model_cannot_do_is_refused_by_name_and_the_server_goes_on(minilm_model):
    async with serving(minilm_model, max_tokens_in_batch=64, max_batch_size=8) as client:
        with pytest.raises(openai.NotFoundError, match="embeds texts"):
            await client.completions.create(model="minilm", prompt="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
            await client.embeddings.create(model="minilm", input="word " * 300)
        with pytest.raises(openai.BadRequestError, match=r"batching\.max_tokens_in_batch"):
            await client.embeddings.create(model="minilm", input="word " * 100)
        answer = await client.embeddings.create(model="minilm", input="word")
    assert len(answer.data[0].embedding) == 384
