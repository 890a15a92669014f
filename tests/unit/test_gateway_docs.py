"""The reference pages and the code say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline_server.gateway import connection, limits, templates
from paceline_server.gateway.embedding_request import EmbeddingFields
from paceline_server.gateway.fields import MAX_LABEL_CHARS, MAX_METADATA, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS
from paceline_server.gateway.metrics import GatewayMetrics
from paceline_server.gateway.mistakes import validate
from paceline_server.gateway.requests import (
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Message,
    StreamOptions,
)
from paceline_server.gateway.strict_json import parse_object
from paceline_server.testing import FakeEngine

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
ENDPOINTS = {"chat/completions": ChatRequest, "completions": CompletionRequest, "embeddings": EmbeddingFields}


@pytest.fixture(scope="module")
def api() -> str:
    return (REFERENCE / "api.md").read_text(encoding="utf-8")


def rows(page: str, section: str) -> list[list[str]]:
    """The cells of each row of a section's table."""
    body = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("| `")
    ]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def declared() -> dict[str, set[str]]:
    """The fields of the request models, by endpoint; those inside another field with its name before a dot."""
    inner = {f"stream_options.{name}" for name in StreamOptions.model_fields}
    both = set(GenerationFields.model_fields) | inner
    messages = {f"messages.{name}" for name in Message.model_fields}
    chat = (set(ChatRequest.model_fields) | messages) - set(GenerationFields.model_fields)
    return {"both": both, "chat": chat, "completions": set(CompletionRequest.model_fields) - both}


def documented(api: str) -> dict[str, set[str]]:
    """The fields of the page's tables, by endpoint."""
    fields = {
        "both": {name for row in rows(api, "Honoured in both endpoints") for name in names(row[0])},
        "chat": {name for row in rows(api, "Honoured in chat completions") for name in names(row[0])},
        "completions": {name for row in rows(api, "Honoured in completions") for name in names(row[0])},
    }
    for field, _, endpoint in rows(api, "Not supported yet"):
        fields[endpoint] |= names(field)
    return fields


@pytest.mark.parametrize("endpoint", ["both", "chat", "completions"])
def test_every_field_of_a_request_is_in_the_reference_and_no_other(api: str, endpoint: str) -> None:
    expected = declared()[endpoint] - ({"logprobs"} if endpoint == "completions" else set())  # listed under both
    assert documented(api)[endpoint] == expected


def test_every_field_of_an_embedding_request_is_in_the_reference_and_no_other(api: str) -> None:
    assert {name for row in rows(api, "Embeddings") for name in names(row[0])} == set(EmbeddingFields.model_fields)


@pytest.mark.parametrize(("name", "endpoints"), [("README.md", 2), ("docs/reference/api.md", 3)])
def test_every_request_that_a_page_shows_is_one_that_the_gateway_takes(name: str, endpoints: int) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    shown = re.findall(r"/v1/([a-z/]+) -H 'Content-Type: application/json'[^']*'([^']*)'", page)
    assert len({endpoint for endpoint, _ in shown}) == endpoints
    for endpoint, body in shown:
        validate(ENDPOINTS[endpoint], parse_object(body.encode()))


def test_the_limits_of_the_reference_are_those_in_force(api: str) -> None:
    for sentence in (
        f"up to {MAX_STOPS} texts of up to {MAX_STOP_CHARS} characters",
        f"up to {MAX_STOP_TOKEN_IDS} token ids",
        f"1 to {MAX_MESSAGES} messages",
        f"text of up to {MAX_LABEL_CHARS} characters",
        f"up to {MAX_METADATA} texts by name",
        f"at most {templates.RENDER_SECONDS:g} s and {templates.RENDER_MEMORY_BYTES >> 30} GiB",
        f"nothing for {connection.STALLED_SECONDS:g} s",
        f"{limits.GRACE_SECONDS:g} s behind {limits.MIN_BYTES_PER_SECOND >> 10} KiB/s",
        f"{limits.READ_AT_ONCE} bodies",
        f"{limits.SMALL_BYTES >> 10} KiB of each",
    ):
        assert sentence in api, sentence


def test_the_reference_names_no_metric_that_is_not_exported() -> None:
    """That each exported one is named there is held by tests/contract."""
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    text = GatewayMetrics(FakeEngine(Path("/m")), "tiny").exposition().decode()
    exported = set(re.findall(r"# TYPE (\S+) ", text))
    assert {name for name in names(page) if name.startswith(("paceline_", "vllm:"))} <= exported
