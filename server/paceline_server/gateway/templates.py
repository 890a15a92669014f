"""The model's chat template: finds it, and renders chats in helper processes. Loaded by `model_text`, called by `chat`.

What a template may do and why it runs in a process of its own is said in `renderer`. Here is its other end: a few
helpers, started when needed, one chat at a time each; a helper that ends, by its alarm or otherwise, is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_server.errors import ContextLengthExceeded, InvalidRequest, ModelUnsupported
from paceline_server.gateway.model_files import read_object, read_text

RENDER_SECONDS = 5.0
GRACE_SECONDS = 1.0
"""What a helper's own alarm may be late; then the gateway ends it. A stopped process has no alarm."""
START_SECONDS = 10.0
"""What the first chat of a fresh helper may take longer: Python starts, on a busy machine."""
RENDER_MEMORY_BYTES = 1 << 30

_FRAME_HEADER_BYTES = 4
_COMMAND = (sys.executable, "-m", "paceline_server.gateway.renderer")
# What Python itself needs to start; secrets of the server's environment are not for a template.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's source and the variables that it gets besides the chat: the special tokens by name."""

    source: str
    variables: Mapping[str, str]

    @property
    def knows_developer(self) -> bool:
        """Whether the template tells the role developer from others."""
        return "developer" in self.source


def find_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model's folder, or None where it has none.

    The places and their order are those of transformers: chat_template.jinja, then tokenizer_config.json (one template,
    or a list of named ones, of which "default" is taken), then chat_template.json.

    Raises:
        ModelUnsupported: one of these files is not what it should be.
    """
    config = read_object(folder / "tokenizer_config.json") or {}
    variables = dict(_special_tokens(read_object(folder / "special_tokens_map.json") or {}))
    variables.update(_special_tokens(config))
    source = (
        read_text(folder / "chat_template.jinja")
        or _named(config, folder / "tokenizer_config.json")
        or _named(read_object(folder / "chat_template.json") or {}, folder / "chat_template.json")
    )
    return ChatTemplate(source, variables) if source else None


class TemplateRenderer:
    """Renders chats with one template.

    Args:
        template: what to render with.
        helpers: processes that may render at the same time.
        seconds: time that one chat may take.
    """

    def __init__(self, template: ChatTemplate, helpers: int, seconds: float = RENDER_SECONDS) -> None:
        self.template = template
        self._seconds = seconds
        self._idle: list[_Helper] = []
        self._all: set[_Helper] = set()
        self._slots = asyncio.Semaphore(helpers)
        self._running: set[asyncio.Task[dict[str, Any]]] = set()

    async def render(self, messages: Sequence[Mapping[str, str]], max_chars: int) -> str:
        """The chat as the model reads it, with the opening of the assistant's turn at the end.

        Raises:
            InvalidRequest: the template refuses the chat (the message carries its own text), fails on it, or takes more
                time or memory than it may.
            ContextLengthExceeded: the rendered chat has more than `max_chars` characters.
        """
        answer = await self._take_turn({"messages": list(messages), "max_chars": max_chars})
        if answer.get("too_long"):
            raise ContextLengthExceeded(
                f"the rendered chat has more than {max_chars} characters, which no context can hold", param="messages"
            )
        if "refused" in answer:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {answer['refused']}",
                param="messages",
                code="invalid_value",
            )
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        """End the helpers."""
        for helper in list(self._all):
            await helper.end()
        self._all.clear()

    async def _take_turn(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Wait for a slot, which ends with its client, and exchange the chat, which does not."""
        await self._slots.acquire()
        # Shielded: a client that goes away must not leave half an answer in a helper's pipe.
        task = asyncio.create_task(self._exchange(chat))
        self._running.add(task)
        task.add_done_callback(self._end_turn)
        return await asyncio.shield(task)

    def _end_turn(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _exchange(self, chat: dict[str, Any]) -> dict[str, Any]:
        """The answer to a chat; by a second helper where one ended without its alarm: somebody may have ended it."""
        outcome = await self._try(chat)
        if isinstance(outcome, int) and outcome != -signal.SIGALRM:
            outcome = await self._try(chat)
        return {"refused": self._obituary(outcome)} if isinstance(outcome, int) else outcome

    async def _try(self, chat: dict[str, Any]) -> dict[str, Any] | int:
        """A helper's answer, or the exit code with which it ended instead."""
        helper = self._take_idle() or await self._start()
        try:
            async with asyncio.timeout(self._seconds + GRACE_SECONDS + (0.0 if helper.used else START_SECONDS)):
                answer = await helper.exchange(chat)
        except TimeoutError:
            self._all.discard(helper)
            await helper.kill()
            return -signal.SIGALRM
        except (asyncio.IncompleteReadError, ConnectionError):
            self._all.discard(helper)
            return await helper.end()
        self._idle.append(helper)
        return answer

    def _take_idle(self) -> _Helper | None:
        while self._idle:
            helper = self._idle.pop()
            if helper.runs:
                return helper
            self._all.discard(helper)
        return None

    async def _start(self) -> _Helper:
        first = {"template": self.template.source, "variables": dict(self.template.variables)}
        helper = await _Helper.start({**first, "seconds": self._seconds, "memory_bytes": RENDER_MEMORY_BYTES})
        self._all.add(helper)
        return helper

    def _obituary(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"it took longer than {self._seconds:g} s"
        return "it took more memory than it may, or ended its process otherwise"


class _Helper:
    """One renderer process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.used = False

    @classmethod
    async def start(cls, first: dict[str, Any]) -> _Helper:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        helper = cls(process)
        helper._send(first)
        return helper

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    async def exchange(self, frame: dict[str, Any]) -> dict[str, Any]:
        self._send(frame)
        await self._stdin.drain()
        size = int.from_bytes(await self._stdout.readexactly(_FRAME_HEADER_BYTES), "big")
        answer: dict[str, Any] = json.loads(await self._stdout.readexactly(size))
        self.used = True
        return answer

    async def end(self) -> int:
        """End the process if it still runs; returns its exit code."""
        if self._stdout.at_eof():  # it ends by itself: let it, for the sake of its exit code
            return await self._process.wait()
        return await self.kill()

    async def kill(self) -> int:
        """End the process whatever it does; returns its exit code."""
        with suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()

    def _send(self, frame: dict[str, Any]) -> None:
        data = json.dumps(frame).encode()
        self._stdin.write(len(data).to_bytes(_FRAME_HEADER_BYTES, "big") + data)


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """bos_token, eos_token and the like: a text, or an object that describes an added token."""
    for name, token in config.items():
        if name.endswith("_token"):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield name, text


def _named(config: Mapping[str, Any], path: Path) -> str | None:
    """The entry `chat_template` of the file `path`: a text, or the default one of a list."""
    given = config.get("chat_template")
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(map(_is_named_template, given)):
        raise ModelUnsupported(
            f"{path}: chat_template must be a string or a list of objects with name and template, both strings"
        )
    return next((entry["template"] for entry in given if entry["name"] == "default"), None)


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
