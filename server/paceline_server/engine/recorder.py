"""Shadow mode: writes what was asked of a running engine as a trace that `simulate` and `tune` read. `loop` feeds it.

A line holds what scheduling sees, and no text. Which prompts begin alike is told by digests of their blocks, keyed with
a secret of this process that is written nowhere: nobody can test a guess against them, and they mean nothing beside
another run's.

The step loop only puts what has ended into a bounded queue; digests, JSON and the file belong to a thread. When the
queue is full lines are dropped, counted, and said so in the log.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from secrets import token_bytes
from threading import Thread
from time import time
from typing import Any, TextIO

from paceline_server.engine.interface import GenerationRequest, TokenOutput
from paceline_server.errors import InvalidConfiguration

_MAX_PENDING = 4096  # answers that have ended and are not written yet
_MAX_BLOCKS = 128  # of a prompt that get a digest: longer common prefixes are rare, and a line stays under 3 kB
_DIGEST_BYTES = 8
_MAX_LINE_BYTES = 1 << 16
_LINE_BEGIN = b'{"arrival":'

log = logging.getLogger("paceline.engine")


@dataclass(slots=True)
class _Asked:
    """A request under way: when it came, and the tokens of those of its answers that have not ended."""

    request: GenerationRequest
    arrival: float
    tokens: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ended:
    request: GenerationRequest
    arrival: float
    tokens: int


class TraceRecorder:
    """Writes a line for each answer that has ended or was given up; requests that were refused leave none.

    Args:
        path: file that lines are added to; where another process writes it, one of a name with this process's number.
        max_bytes: size at which the file is renamed to PATH.1, and a new one begun.
        block_tokens: prompt tokens that a digest stands for.
        clock: seconds since the epoch.

    Raises:
        InvalidConfiguration: the file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int, block_tokens: int, clock: Callable[[], float] = time) -> None:
        self._max_bytes = max_bytes
        self._block_tokens = block_tokens
        self._clock = clock
        self._key = token_bytes(32)
        self._asked: dict[str, _Asked] = {}
        self._ended: Queue[_Ended | None] = Queue(_MAX_PENDING)
        self._dropped = 0
        try:
            self._path, self._file = _own(path)
        except OSError as error:
            raise InvalidConfiguration(f"observability.trace_path: cannot write {path}: {error}") from None
        self._thread = Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    def submitted(self, request: GenerationRequest) -> None:
        """A request was taken."""
        self._asked[request.request_id] = _Asked(request, self._clock(), dict.fromkeys(range(request.n), 0))

    def saw(self, outputs: Iterable[TokenOutput]) -> None:
        """A step brought these."""
        for output in outputs:
            asked = self._asked.get(output.request_id)
            if asked is None or output.index not in asked.tokens:
                continue
            asked.tokens[output.index] += len(output.token_ids)
            if output.finish is not None:
                self._end(asked, output.index)

    def aborted(self, request_id: str, index: int | None = None) -> None:
        """A client gave up a request, or one answer of it; unknown ones are no error."""
        asked = self._asked.get(request_id)
        for one in () if asked is None else tuple(asked.tokens):
            if index in (None, one) and asked is not None:
                self._end(asked, one)

    def close(self) -> None:
        """Write what has ended so far, and end the thread."""
        self._ended.put(None)
        self._thread.join()

    def _end(self, asked: _Asked, index: int) -> None:
        ended = _Ended(asked.request, asked.arrival, asked.tokens.pop(index))
        if not asked.tokens:
            del self._asked[asked.request.request_id]
        try:
            self._ended.put_nowait(ended)
        except Full:
            self._dropped += 1
            if self._dropped & (self._dropped - 1) == 0:  # the first, second, fourth, eighth …
                log.warning("%d lines of the trace were dropped: %s is written too slowly", self._dropped, self._path)

    def _run(self) -> None:
        try:
            while (lines := self._take()) is not None:
                self._write(lines)
        except OSError as error:  # a full disk must not end the engine
            log.warning("the trace ends here: %s", error)
            with suppress(OSError):
                self._file.close()  # which tries once more to write
            _end_at_a_line(self._path)
        else:
            self._file.close()

    def _take(self) -> list[str] | None:
        """All that has ended, as lines; waits for the first. None when the recorder is closed."""
        ended = self._ended.get()
        lines: list[str] = []
        while ended is not None:
            lines.append(json.dumps(self._line(ended)) + "\n")
            try:
                ended = self._ended.get_nowait()
            except Empty:
                return lines
        self._write(lines)
        return None

    def _write(self, lines: list[str]) -> None:
        self._file.writelines(lines)
        self._file.flush()
        if self._file.tell() >= self._max_bytes:
            self._file.close()
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            self._path, self._file = _own(self._path)

    def _line(self, ended: _Ended) -> dict[str, Any]:
        request = ended.request
        line = {
            "arrival": round(ended.arrival, 6),
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": max(1, ended.tokens),
            "max_tokens": request.max_tokens,
            "tier": request.tier.value,
            "priority": request.priority,
            "tenant": request.tenant,
            "weight": request.weight,
            "timeout": request.timeout,
            "blocks": list(self._digests(request)),
            "block_tokens": self._block_tokens,
        }
        return {name: value for name, value in line.items() if value not in (None, [], "")}

    def _digests(self, request: GenerationRequest) -> Iterator[str]:
        """Digests of the prompt's full blocks, each of all tokens up to its end; other salts give other ones."""
        state = hashlib.blake2b(request.cache_salt.encode(), digest_size=_DIGEST_BYTES, key=self._key)
        size = self._block_tokens
        for index in range(min(_MAX_BLOCKS, len(request.prompt_token_ids) // size)):
            state.update(array("I", request.prompt_token_ids[index * size : (index + 1) * size]).tobytes())
            yield state.hexdigest()


def _own(path: Path) -> tuple[Path, TextIO]:
    """The file, or the one beside it when another process has it: lines of two servers must not mix.

    Digests of both have keys of their own, and renaming the file would take it from the other.

    Raises:
        OSError: it cannot be written.
    """
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        other = path.with_stem(f"{path.stem}-{os.getpid()}")
        log.warning("another server writes %s: the trace of this one is %s", path, other)
        return other, other.open("a", encoding="utf-8")
    _end_at_a_line(path)
    return path, file


def _end_at_a_line(path: Path) -> None:
    """Cut off the half of a line that a full disk or a killed process has left: no reader takes a file that has one."""
    with suppress(OSError), path.open("r+b") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _MAX_LINE_BYTES)
        file.seek(begin)
        ended, _, half = file.read().rpartition(b"\n")
        if half[: len(_LINE_BEGIN)] == _LINE_BEGIN[: len(half)]:  # whatever else stands there is not ours to cut
            file.truncate(begin + len(ended) + bool(ended))
