"""From the engine's tokens to what a client sees: text, stop strings, finish, count. Called by `generation`.

Pure: no clock, no I/O. Tokens are taken one at a time, so several accepted in one step give the same text, count and
finish reason as one a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_server.engine.interface import FinishReason
from paceline_server.gateway.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What new tokens brought.

    Attributes:
        text: to be shown now.
        tokens: how many of the new tokens count; those behind a stop string do not.
        finish: set once, on the last delta.
    """

    text: str
    tokens: int
    finish: FinishReason | None = None


class StopStrings:
    """Finds stop strings in text that comes in pieces; holds back an end that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was found behind it.

        Args:
            text: new text.
            may_stop: False lets whole stop strings pass as text.
        """
        text = self._held + text
        self._held = ""
        shown = ""
        while (found := self._first(text)) is not None:
            start, end = found
            if may_stop:
                return shown + text[:start], True
            shown, text = shown + text[:end], text[end:]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return shown + text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first, which no grouping of the text can change."""
        places = [(text.find(stop), len(stop)) for stop in self._stops]
        found = ((start, start + length) for start, length in places if start >= 0)
        return min(found, key=lambda place: (place[1], place[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextAssembly:
    """The text of one sequence.

    Args:
        detokenizer: fresh.
        stops: stop strings; they end the text and are not part of it.
        min_tokens: a stop string that is complete before that many tokens is text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> Delta:
        """Take one output of the engine. After a delta with `finish` no more may be pushed."""
        shown: list[str] = []
        for position, token in enumerate(token_ids):
            self._tokens += 1
            if finish is FinishReason.STOP and position == len(token_ids) - 1:
                break  # the stop token counts, and is no text
            text, stopped = self._stops.push(self._detokenizer.push(token), may_stop=self._tokens >= self._min_tokens)
            shown.append(text)
            if stopped:
                return Delta("".join(shown), position + 1, FinishReason.STOP)
        if finish is None:
            return Delta("".join(shown), len(token_ids))
        text, stopped = self._stops.push(self._detokenizer.flush())
        shown += [text] if stopped else [text, self._stops.flush()]
        return Delta("".join(shown), len(token_ids), FinishReason.STOP if stopped else finish)
