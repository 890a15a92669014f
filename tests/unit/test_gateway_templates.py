"""A model's chat template is somebody else's code: it renders as in transformers, and can do nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from paceline_server.errors import ContextLengthExceeded, InvalidRequest, ModelUnsupported
from paceline_server.gateway import templates
from paceline_server.gateway.renderer import answer, renderer
from paceline_server.gateway.templates import ChatTemplate, TemplateRenderer, find_template

Make = Callable[..., TemplateRenderer]
HI = [{"role": "user", "content": "Hi"}]
MAX_CHARS = 1_000_000
CHAT = {"messages": HI, "max_chars": MAX_CHARS}


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """A function from a template to its renderer."""
    made: list[TemplateRenderer] = []

    def start(source: str, seconds: float = 5.0) -> TemplateRenderer:
        made.append(TemplateRenderer(ChatTemplate(source, {}), 1, seconds))
        return made[-1]

    yield start
    for one in made:
        await one.close()


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "Hi\n"),
        ("{{ bos_token }}{{ messages[0]['content'] | trim }}", "<s>Hi"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ add_generation_prompt }} {{ tools }} {{ documents }}", "True None None"),
        ("{{ dict(a=1)['a'] }}", "1"),
    ],
)
def test_a_template_renders_as_in_transformers(source: str, rendered: str) -> None:
    assert answer(renderer(source, {"bos_token": "<s>"}), CHAT) == {"text": rendered}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "namespace"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "namespace"),
        ("{{ missing.content }}", "undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% if", "unexpected"),
        ("{{ '\\ud800' }}", "surrogates"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_answered_with_the_reason(source: str, says: str) -> None:
    assert says in answer(renderer(source, {}), CHAT)["refused"]


async def test_a_refusal_is_the_callers_error_with_the_templates_own_words(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        await make("{{ raise_exception('System role not supported') }}").render(HI, MAX_CHARS)
    assert (caught.value.param, caught.value.code) == ("messages", "invalid_value")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = 9 %}{{ 7 ** (n ** n) }}",
    ],
)
async def test_a_template_without_end_is_ended_and_the_next_chat_gets_a_fresh_helper(source: str, make: Make) -> None:
    """The condition is on the text, so the same renderer can do both."""
    template = make("{% if messages[0].content == 'bad' %}" + source + "{% endif %}ok", seconds=0.5)
    with pytest.raises(InvalidRequest, match=r"longer than 0\.5 s"):
        await template.render([{"role": "user", "content": "bad"}], MAX_CHARS)
    assert await template.render(HI, MAX_CHARS) == "ok"


async def test_a_stopped_helper_is_ended_and_its_slot_is_free_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own alarm never comes, so the gateway keeps a deadline of its own."""
    monkeypatch.setattr(templates, "GRACE_SECONDS", 0.2)
    template = make("ok", seconds=0.3)
    assert await template.render(HI, MAX_CHARS) == "ok"
    (helper,) = template._all
    os.kill(helper._process.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match=r"longer than 0\.3 s"):
        await asyncio.wait_for(template.render(HI, MAX_CHARS), 60)
    assert not helper.runs
    assert await template.render(HI, MAX_CHARS) == "ok"


async def test_a_chat_is_not_refused_for_a_helper_that_somebody_else_has_ended(make: Make) -> None:
    chats = make("{{ messages[0].content }}")
    await chats.render(HI, MAX_CHARS)
    (helper,) = chats._all
    os.kill(helper._process.pid, signal.SIGKILL)
    assert await chats.render(HI, MAX_CHARS) == "Hi"
    assert helper not in chats._all


async def test_a_chat_whose_client_goes_while_it_waits_for_a_helper_is_not_rendered(make: Make) -> None:
    """The one that a helper has begun is: its answer must not be left in the pipe for the next one."""
    template = make("{{ messages[0].content }}", seconds=60.0)
    assert await template.render(HI, MAX_CHARS) == "Hi"
    (helper,) = template._all
    os.kill(helper._process.pid, signal.SIGSTOP)
    gone = [asyncio.create_task(template.render([{"role": "user", "content": "x"}], MAX_CHARS)) for _ in range(5)]
    while not template._running:
        await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert len(template._running) == 1
    os.kill(helper._process.pid, signal.SIGCONT)
    assert await template.render(HI, MAX_CHARS) == "Hi"
    assert template._all == {helper}


async def test_memory_is_bounded(make: Make) -> None:
    """Two gigabytes do not fit the helper, whatever the machine has."""
    template = make("{% set n = 2 * 10 ** 9 %}{{ 'a' * n }}", seconds=30)
    with pytest.raises(InvalidRequest, match="memory"):
        await template.render(HI, MAX_CHARS)


async def test_a_rendered_chat_is_cut_off_where_no_context_could_hold_it(make: Make) -> None:
    template = make("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}")
    with pytest.raises(ContextLengthExceeded, match="1000000 characters"):
        await template.render(HI, MAX_CHARS)


async def test_secrets_of_the_servers_environment_are_not_there_for_a_template(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from the process itself: not even an escape from the sandbox would find them."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = make("ok")
    await template.render(HI, MAX_CHARS)
    (helper,) = template._all
    assert b"HF_TOKEN" not in environment(helper._process.pid)


def test_a_template_may_come_from_any_of_the_places_that_transformers_reads(tmp_path: Path) -> None:
    """The file wins over the configuration, of a list the default is taken, and chat_template.json comes last."""
    assert find_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert find_template(tmp_path) == ChatTemplate("legacy", {})
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}})
    )
    assert find_template(tmp_path) == ChatTemplate("listed", {"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "old"}))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path) == ChatTemplate("file", {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b"{bad", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object, not a list"),
        ("tokenizer_config.json", '{"eos_token": "é"}'.encode("latin-1"), "not UTF-8"),
        ("tokenizer_config.json", b"[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "a list of objects with name and template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "a list of objects with name"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}', "both strings"),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}', "must be a string or a list"),
        ("special_tokens_map.json", b"null", "must hold a JSON object, not null"),
        ("chat_template.json", b"[]", "must hold a JSON object, not a list"),
        ("chat_template.json", b'{"chat_template": 5}', "must be a string or a list"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelUnsupported, match=f"{re.escape(name)}.*{re.escape(says)}"):
        find_template(tmp_path)


def test_a_folder_in_a_files_place_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(ModelUnsupported, match=r"chat_template\.jinja cannot be read"):
        find_template(tmp_path)
