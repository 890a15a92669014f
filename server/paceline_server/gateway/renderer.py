"""The program that renders a chat template; `templates` runs it as `python -m paceline_server.gateway.renderer`.

A template comes with a model and is somebody else's code. Jinja's sandbox keeps it from Python's internals but bounds
neither its time nor its memory, and a thread cannot be stopped. So it runs in a process of its own: without the
server's environment, under a limit on memory, and with an alarm that ends the process.

Frames on stdin and stdout are a length (4 bytes, big endian) and JSON. The first frame in holds the template, its
variables and the limits. Each further one is a chat, and is answered by one frame: {"text": …}, or {"refused": why}, or
{"too_long": true}.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_FRAME_HEADER_BYTES = 4
_REASON_CHARS = 1000


def main() -> None:
    """Serve frames until stdin ends."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they may reach the whole group; the gateway ends its helpers itself
        signal.signal(number, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(source)
    if first is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (first["memory_bytes"], first["memory_bytes"]))
    render = renderer(first["template"], first["variables"])
    while (chat := _receive(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, first["seconds"])  # SIGALRM's default action ends the process
        rendered = answer(render, chat)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sink, rendered)


def renderer(template: str, variables: dict[str, Any]) -> Callable[..., Iterable[str]]:
    """A function from messages to the pieces of the rendered chat.

    The environment is the one that transformers gives a template: the same whitespace rules, filters and globals.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace, dict=_Dict()
    )
    compiled: Template | None = None

    def render(messages: list[dict[str, Any]]) -> Iterable[str]:
        nonlocal compiled
        if compiled is None:  # a template that does not compile refuses every chat with the reason
            compiled = environment.from_string(template)
        return compiled.generate(messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables)

    return render


def answer(render: Callable[..., Iterable[str]], chat: dict[str, Any]) -> dict[str, Any]:
    """The answer to one chat: its text, or why there is none."""
    try:
        return _collect(render(chat["messages"]), chat["max_chars"])
    except MemoryError:
        return {"refused": "it took more memory than it may"}
    except TemplateError as error:
        return {"refused": str(error)[:_REASON_CHARS] or type(error).__name__}
    except Exception as error:  # whatever somebody else's code raises is an answer about this chat
        return {"refused": f"{type(error).__name__}: {error}"[:_REASON_CHARS]}


def _collect(pieces: Iterable[str], max_chars: int) -> dict[str, Any]:
    collected: list[str] = []
    chars = 0
    for piece in pieces:
        chars += len(piece)
        if chars > max_chars:
            return {"too_long": True}
        collected.append(piece)
    text = "".join(collected)
    text.encode()  # a template can spell half a surrogate pair, which no tokenizer takes
    return {"text": text}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's turns for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The block's body in place of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace that keeps no underscored names, which could lead to Python's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _SafeNamespace._check(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _SafeNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")


class _Dict:
    """`dict(…)` for templates, without the class's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    header = source.read(_FRAME_HEADER_BYTES)
    if len(header) < _FRAME_HEADER_BYTES:
        return None
    frame: dict[str, Any] = json.loads(source.read(int.from_bytes(header, "big")))
    return frame


def _send(sink: BinaryIO, frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode()
    sink.write(len(data).to_bytes(_FRAME_HEADER_BYTES, "big") + data)
    sink.flush()


if __name__ == "__main__":
    main()
