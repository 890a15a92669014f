"""How much a request may generate, at and around the context's end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_server.engine.interface import ModelInfo
from paceline_server.errors import ContextLengthExceeded
from paceline_server.gateway.context import output_tokens, refuse_limit_beyond_context

LIMIT = 256
INFO = ModelInfo("/m", LIMIT, 400, (2,), 64, 16, "float32", "cpu", "fake")
SMALL_POOL = replace(INFO, num_blocks=8)  # 128 tokens


@pytest.mark.parametrize("asked", [None, 1, 2, LIMIT])
@pytest.mark.parametrize("prompt", [1, LIMIT - 2, LIMIT - 1])
def test_prompt_and_output_never_exceed_the_context(prompt: int, asked: int | None) -> None:
    output = output_tokens(prompt, asked, INFO, reject_on_oom=True)
    assert 1 <= output <= LIMIT - prompt
    assert output == min(asked or LIMIT, LIMIT - prompt)


@pytest.mark.parametrize("asked", [None, 1, LIMIT])
@pytest.mark.parametrize("prompt", [LIMIT, LIMIT + 1, 10 * LIMIT])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(prompt: int, asked: int | None) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        output_tokens(prompt, asked, INFO, reject_on_oom=False)
    assert f"{LIMIT} tokens" in caught.value.message
    assert f"{prompt} in the prompt" in caught.value.message
    assert "-" not in caught.value.message


@pytest.mark.parametrize("asked", [LIMIT + 1, 10**18, 10**400])
def test_more_output_than_the_context_is_refused_before_there_is_a_prompt(asked: int) -> None:
    with pytest.raises(ContextLengthExceeded, match="256 tokens") as caught:
        refuse_limit_beyond_context(asked, "max_tokens", INFO)
    assert caught.value.param == "max_tokens"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("asked", [None, 1, LIMIT])
def test_any_output_within_the_context_may_be_asked_for(asked: int | None) -> None:
    refuse_limit_beyond_context(asked, "max_tokens", INFO)


def test_what_the_kv_pool_can_never_hold_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"KV cache of this server holds 128 tokens.*130 tokens"):
        output_tokens(100, 30, SMALL_POOL, reject_on_oom=True)
    assert output_tokens(100, 28, SMALL_POOL, reject_on_oom=True) == 28


def test_without_a_limit_of_its_own_a_request_gets_what_the_pool_holds() -> None:
    assert output_tokens(100, None, SMALL_POOL, reject_on_oom=True) == 28


def test_an_operator_may_let_requests_try_that_might_not_fit() -> None:
    """The prompt still has to: it would wait for ever."""
    assert output_tokens(100, 30, SMALL_POOL, reject_on_oom=False) == 30
    with pytest.raises(ContextLengthExceeded, match=r"KV cache .* or have the cache made larger \(kv_cache\."):
        output_tokens(128, 30, SMALL_POOL, reject_on_oom=False)
