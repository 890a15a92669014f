"""What a client may send: honoured, harmless, or refused by name."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.engine.batch import SamplingParams
from paceline_server.errors import InvalidRequest
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.requests import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "Hi"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def chat(**fields: Any) -> ChatRequest:
    return validate(ChatRequest, {"model": "m", "messages": [USER], **fields})


def completion(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"model": "m", "prompt": "Hi", **fields})


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "logprobs": False, "top_logprobs": None},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "functions": None},
        {"store": False, "metadata": {"a": "b"}, "user": "me", "parallel_tool_calls": True},
        {"stream_options": None, "stop": None, "seed": None, "max_tokens": None, "temperature": None, "stream": None},
        {"chat_template": None, "chat_template_kwargs": {}, "skip_special_tokens": True},
    ],
)
def test_values_that_change_nothing_are_taken(fields: dict[str, Any]) -> None:
    fields.pop("best_of", None)
    assert chat(**fields).messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("logit_bias", {str(token): -100 for token in range(300_000)}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("response_format", "json"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": "{}"}),
        ("tools", [{}] * 10_000),
        ("tool_choice", "required"),
        ("chat_template", "{{ messages }}"),
        ("echo", True),
        ("guided_json", {}),
        ("skip_special_tokens", False),
        ("modalities", ["text", "audio"]),
    ],
)
def test_other_values_of_fields_that_are_not_supported_are_refused_by_name(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert error.code == "unsupported_parameter"
    assert f"{field}: is not supported yet; leave it out" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(("field", "value"), [("logprobs", 0), ("best_of", 100_000), ("suffix", "x"), ("echo", True)])
def test_completions_refuse_their_own_unsupported_fields(field: str, value: Any) -> None:
    assert refusal(completion, **{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", 0, "must be greater than or equal to 1, not 0"),
        ("max_tokens", -5, "not -5"),
        ("max_tokens", "5", "integer, not '5'"),
        ("max_tokens", 2.5, "integer"),
        ("max_tokens", True, "integer, not True"),
        ("n", 0, "must be greater than or equal to 1, not 0"),
        ("n", 129, "less than or equal to 128"),
        ("n", 100_000, "less than or equal to 128"),
        ("n", True, "integer, not True"),
        ("n", "2", "integer"),
        ("temperature", 2.1, "less than or equal to 2"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", True, "number"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("min_p", 2, "less than or equal to 1"),
        ("seed", 2**63, "9223372036854775807"),
        ("seed", 10**400, "9223372036854775807"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("stop", ["a"] * 5, "at most 4 strings"),
        ("stop", ["x"] * 500_000, "at most 4 strings"),
        ("stop", "x" * 5_000_000, "1 to 1024 characters"),
        ("stop", "", "1 to 1024 characters"),
        ("stop", [1], "string"),
        ("stop", {}, "string"),
        ("stop_token_ids", [-1], "not negative"),
        ("stop_token_ids", [1] * 129, "at most 128"),
        ("stop_token_ids", [True], "integer"),
        ("stream", "yes", "boolean"),
        ("user", "u" * 513, "at most 512 characters"),
        ("metadata", {str(number): "" for number in range(17)}, "at most 16 strings"),
        ("model", 7, "string"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_and_limit(field: str, value: Any, says: str) -> None:
    error = refusal(chat, **{field: value})
    assert str(error.param).split("[")[0] == field
    assert says in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        None,
        [None],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "colour": "red"}],
        [{"role": "user", "content": "x", "tool_call_id": "1"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [USER] * 2049,
    ],
)
def test_bad_messages_are_refused_under_the_name_of_the_field(messages: Any) -> None:
    error = refusal(chat, messages=messages)
    assert error.param is not None
    assert error.param.startswith("messages")
    assert error.message.startswith(f"{error.param}: ")


def test_missing_fields_are_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatRequest, {})
    assert caught.value.message == "model: is required; messages: is required"
    assert caught.value.code == "missing_required_parameter"


def test_unknown_fields_are_named() -> None:
    error = refusal(chat, colour="red")
    assert error.message == "colour: is not a known field"
    error = refusal(chat, max_token=5)
    assert error.message == "max_token: is not a known field; did you mean max_tokens?"
    assert (error.param, error.code) == ("max_token", "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content: is required"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id: belongs to the role tool",
        ),
        (
            {"messages": [{"role": "user", "contents": "x", "content": "x"}]},
            "messages[0].contents: is not a known field; did you mean content?",
        ),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages: is not a known field; did you mean include_usage?",
        ),
        ({"messages": ["x"]}, "messages[0]: must be an object"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
         "messages[1].tool_calls: is not supported yet; leave it out or send [] or null"),
        ({"stop": ["a", ""]}, "stop[1]: must be a string of 1 to 1024 characters"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]: must be an integer that is not negative"),
        ({"metadata": {"a": 1}}, "metadata.a: must be a string of at most 512 characters"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens: must be at most max_tokens (3)"),
        ({"tier": "batch", "service_tier": "flex"}, "service_tier: says the same thing as tier; send one of them"),
    ],
)  # fmt: skip
def test_a_mistake_inside_a_field_is_named_by_its_whole_path(fields: dict[str, Any], message: str) -> None:
    error = refusal(chat, **fields)
    assert error.message == message
    assert error.param == message.split(":")[0]


@pytest.mark.parametrize(
    ("part", "place", "says", "code"),
    [
        *[
            ({"type": kind, kind: {}}, ".type", f"{kind} is not supported; only text is: ", "unsupported_value")
            for kind in ("image_url", "input_audio", "file", "video_url", "input_text", "input_image", "", "{place}")
        ],
        ({"type": "x" * 5_000_000}, ".type", "is not supported", "unsupported_value"),
        ({"text": "x"}, ".type", "is required", "missing_required_parameter"),
        ({"type": 7, "text": "x"}, ".type", "must be a string", "invalid_value"),
        ({"type": "text"}, ".text", "is required", "missing_required_parameter"),
        ({"type": "text", "text": ["x"]}, ".text", "must be a string", "invalid_value"),
        ({"type": "text", "text": "x", "cache_control": {}}, ".cache_control", "is not a known field",
         "unknown_parameter"),
        ("x", "", 'must be an object: {"type": "text", "text": "..."}', "invalid_value"),
        (None, "", "must be an object", "invalid_value"),
    ],
)  # fmt: skip
def test_a_part_of_a_message_that_is_not_taken_is_named_with_its_kind(
    part: Any, place: str, says: str, code: str
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, part]
    error = refusal(chat, messages=[USER, {"role": "user", "content": parts}])
    assert error.param == f"messages[1].content[1]{place}"
    assert error.message.startswith(f"{error.param}: ")
    assert says in error.message
    assert error.code == code
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("prompt", "param"), [([1, -1], "prompt[1]"), ([[1, "a"]], "prompt[0][1]"), ([[]], "prompt[0]")]
)
def test_a_token_that_is_none_is_named_by_its_place(prompt: Any, param: str) -> None:
    assert refusal(completion, prompt=prompt).param == param


FLOOD = {f"field{number}": number for number in range(100_000)}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (FLOOD, None, "the body has 100002 fields; at most 256 are looked at"),
        (
            {"messages": [USER, USER | FLOOD]},
            "messages[1]",
            "messages[1]: has 100002 fields; at most 256 are looked at",
        ),
        (
            {"stream": True, "stream_options": FLOOD},
            "stream_options",
            "stream_options: has 100000 fields; at most 256 are looked at",
        ),
    ],
    ids=["the body", "a message", "the options of a stream"],
)
def test_a_flood_of_unknown_fields_in_any_object_is_not_looked_at_one_by_one(
    fields: dict[str, Any], param: str | None, message: str
) -> None:
    """A mistake kept for each would take gigabytes, and the whole process with them."""
    tracemalloc.start()
    try:
        error = refusal(chat, **fields)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.param, error.message) == (param, message)
    assert peak < 40_000_000, "more than a copy or two of the object"


def test_every_mistake_is_named_up_to_a_bound() -> None:
    error = refusal(chat, temperature=9, top_p=9, seed="x", stop="", stream=1, n=0, colour="red")
    assert error.param == "temperature"
    assert "and 2 more mistakes" in error.message


@given(field=st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})), value=JSON)
def test_no_value_of_any_field_is_a_fault_of_the_server(field: str, value: Any) -> None:
    for model, prompt in ((ChatRequest, {"messages": [USER]}), (CompletionRequest, {"prompt": "Hi"})):
        if field in model.model_fields:
            with suppress(InvalidRequest):
                validate(model, {"model": "m", **prompt, field: value}).sampling()


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
def test_stream_options_need_a_stream(options: dict[str, Any]) -> None:
    for extra in ({}, {"stream": False}, {"stream": None}):
        assert refusal(chat, stream_options=options, **extra).param == "stream_options"
    assert chat(stream=True, stream_options=options).include_usage is bool(options.get("include_usage"))


def test_text_parts_are_joined_by_lines_and_an_empty_turn_is_legal() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": ""}, USER])
    assert [message.content for message in request.messages] == ["one\ntwo", "", "Hi"]


def test_a_message_that_a_client_echoes_back_is_taken() -> None:
    """The official client dumps an answer's message with its empty fields."""
    echoed = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": None}  # fmt: skip
    assert chat(messages=[echoed]).messages[0].content == "x"


@pytest.mark.parametrize(
    ("prompt", "taken"), [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", "")]
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_one(prompt: Any, taken: Any) -> None:
    assert completion(prompt=prompt).prompt == taken


@pytest.mark.parametrize(
    "prompt", [["a", "b"], ["x"] * 1_000_000, [[1], [2]], [], [[]], None, 7, [1, "a"], [1.5], [True], [-1], {}]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert str(refusal(completion, prompt=prompt).param).startswith("prompt")


def test_the_newer_name_of_the_output_limit_is_an_alias() -> None:
    assert chat(max_completion_tokens=5).output_limit == 5
    assert chat(max_completion_tokens=5, max_tokens=5).output_limit_field == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=5, min_tokens=6).param == "min_tokens"


def test_sampling_takes_defaults_and_bounds() -> None:
    assert chat(seed=7).sampling() == SamplingParams(1.0, 1.0, 0, 0.0, 7)
    assert chat(seed=7, temperature=1e-6, top_k=-1, min_p=None).sampling() == SamplingParams(0.0, 1.0, 0, 0.0, 7)
    assert chat(seed=7, top_p=0).sampling().top_p > 0
    assert chat(seed=-1).sampling().seed == 2**63 - 1


def test_requests_without_a_seed_get_different_ones() -> None:
    assert chat().sampling().seed != chat().sampling().seed
