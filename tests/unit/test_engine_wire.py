"""Frames between gateway and engine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.interface import (
    EmbeddingOutput,
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    Task,
    Tier,
    TokenOutput,
)
from paceline_server.engine.status import EngineStats, StartupPhase
from paceline_server.engine.testing import model_info
from paceline_server.engine.wire import (
    Abort,
    Configure,
    Decoder,
    Embed,
    Embedded,
    Failed,
    Phase,
    Ready,
    Refused,
    Step,
    Submit,
    encode,
)

MESSAGES = [
    Configure('{"engine": {}}'),
    Submit(GenerationRequest("r", (1, 2, 3), 7, SamplingParams(0.5, 0.9, 40, 0.1, 2**63 - 1), (5,), True, 2, "salt")),
    Submit(GenerationRequest("q", (1,), 1, tier=Tier.BATCH, priority=-3, tenant="acme", weight=2.5, timeout=0.5)),
    Embed(EmbeddingRequest("e", ((1, 2), (3,)), 0.5)),
    Embedded((EmbeddingOutput("e", (b"\x00\x01", b""), 0.25), EmbeddingOutput("f", None)), EngineStats(steps=2)),
    Ready(replace(model_info(), task=Task.EMBED, dimensions=384, warnings=("slow",))),
    Abort("r"),
    Phase(StartupPhase("load_weights")),
    Phase(StartupPhase("load_weights", 1.5)),
    Ready(model_info()),
    Failed("ModelNotFound", "no such model"),
    Refused("r", "too long"),
    Refused("r", "too late", 1.5),
    Step(
        (TokenOutput("r", (1,), FinishReason.STOP, 16, 0.25), TokenOutput("s", (2,))),
        EngineStats(waiting=3, predicted_ttft_seconds={"standard": 0.1}, stage_seconds={"execute": 1.0}),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert list(Decoder().feed(encode(message))) == [message]


@given(cuts=st.lists(st.integers(0, 400), max_size=6).map(sorted))
def test_messages_are_found_however_the_stream_is_cut(cuts):
    stream = b"".join(map(encode, MESSAGES))
    decoder, received, start = Decoder(), [], 0
    for end in [*cuts, len(stream)]:
        received += decoder.feed(stream[start:end])
        start = max(start, min(end, len(stream)))
    assert received == MESSAGES
