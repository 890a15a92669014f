"""When a new request would get its first token. The step loop asks before it lets a request into the line.

Three things can hold a request up, and the forecast takes the longest of them:

- tokens: the prompts before it and its own, at the rate at which steps compute prompts (`steptime`, `pacing`);
- slots: as many sequences as may run do so, and somebody has to finish first;
- blocks: the KV pool is full, and somebody has to finish first.

When somebody finishes is known from what it may still generate and from how long recent answers were (`OutputLengths`).
While it waits, more urgent newcomers go before it: what they take of the engine makes the wait longer, as in a queue
with priorities: by 1 / (1 - their share of the service) after Cobham, "Priority Assignment in Waiting Line Problems",
1954.

The forecast is held to what really happens: requests that have started correct it, tier by tier, by the factor by which
it was wrong, and say how far off it may be.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp, log

from paceline_server.engine.interface import Tier
from paceline_server.engine.pacing import MUCH_SHORTER
from paceline_server.engine.queue import Backlog
from paceline_server.engine.sequence import Sequence
from paceline_server.engine.steptime import StepTimeModel, pairs_of

_REMEMBERED_LENGTHS = 256
_LEARNING = 0.05  # how far one error moves a quantile of their logarithms
_MAX_LOG = log(4.0)  # of a correction
_HIGH = 0.9
_MAX_OVERTAKEN = 0.999
_RATE_SECONDS = 5.0


class OutputLengths:
    """How long answers are, judged by the latest of them."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque()
        self._ended: list[int] = []  # lengths of those that ended by themselves, sorted
        self._sums: list[int] = [0]  # of the first n of them
        self._cut = 0  # of the latest, those that only their max_tokens ended

    @property
    def cut_share(self) -> float:
        """Share of answers that are as long as they may be; 1 while none was seen."""
        return self._cut / len(self._latest) if self._latest else 1.0

    def observe(self, length: int, *, cut: bool) -> None:
        """Take an answer of `length` tokens; `cut` where only its max_tokens ended it."""
        self._latest.append((length, cut))
        self._count(length, cut, 1)
        if len(self._latest) > _REMEMBERED_LENGTHS:
            self._count(*self._latest.popleft(), -1)
        self._sums = [0, *accumulate(self._ended)]

    def remaining(self, generated: int) -> float:
        """Mean tokens to come after `generated` ones, of an answer that ends by itself; at least 1."""
        place = bisect_right(self._ended, generated)
        longer = len(self._ended) - place
        if longer == 0:  # longer than all that were seen: as much again
            return max(1.0, generated)
        return max(1.0, (self._sums[-1] - self._sums[place]) / longer - generated)

    def _count(self, length: int, cut: bool, sign: int) -> None:
        if cut:
            self._cut += sign
        elif sign > 0:
            insort(self._ended, length)
        else:
            self._ended.remove(length)


class Departures:
    """When sequences will have finished, and what they leave behind: slots, or blocks.

    An answer either goes on to its limit, which is known, or ends by itself: then at any step with the same chance,
    one over the mean of what is still to come. The shares of the two are those of the latest answers. The place of one
    that ends by itself is taken by another like it, so their ends go on at that rate.

    Args:
        running: those that may finish.
        left_by: what comes free with one of them.
    """

    def __init__(self, lengths: OutputLengths, running: Iterable[Sequence], left_by: Callable[[Sequence], int]) -> None:
        cut = lengths.cut_share
        self._jumps: list[tuple[int, float]] = []  # steps until a limit, and what comes free then
        self._rate = 0.0  # comes free a step
        for sequence in running:
            left = left_by(sequence)
            self._jumps.append((sequence.max_tokens - sequence.num_output, cut * left))
            self._rate += (1.0 - cut) * left / lengths.remaining(sequence.num_output)
        self._jumps.sort()

    def steps_until(self, wanted: int) -> float:
        """Steps until so much is expected to have come free; 0 where nothing runs."""
        if wanted <= 0 or not self._jumps:
            return 0.0
        rate, jumped = self._rate, 0.0
        for steps, jump in self._jumps:
            if rate > 0.0 and (wanted - jumped) / rate <= steps:
                return (wanted - jumped) / rate
            jumped += jump
            if jumped + rate * steps >= wanted:
                return steps
        if rate > 0.0:
            return (wanted - jumped) / rate
        return self._jumps[-1][0] * wanted / jumped


class LogQuantile:
    """A quantile of ratios, that follows them.

    It goes up a little for a ratio above it and down for one below, so that it rests where the shares are right.

    Args:
        share: of the ratios that are below the quantile, in (0, 1).
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._log = 0.0

    @property
    def value(self) -> float:
        """The quantile."""
        return exp(self._log)

    def observe(self, ratio: float) -> None:
        """Take a ratio, > 0."""
        step = _LEARNING * (self._share if log(ratio) > self._log else self._share - 1.0)
        self._log = max(-_MAX_LOG, min(_MAX_LOG, self._log + step))


class ArrivalRate:
    """Arrivals per second, of the last few seconds: earlier ones fade."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._faded = 0.0  # arrivals, each weighted by exp(-age / _RATE_SECONDS) at the time of the last one

    def note(self, now: float) -> None:
        """Count one."""
        if self._first is None:
            self._first = self._last = now
        self._faded = 1.0 + self._faded * exp((self._last - now) / _RATE_SECONDS)
        self._last = max(now, self._last)

    def per_second(self, now: float) -> float:
        """The rate; 0 before anything came."""
        if self._first is None or now <= self._first:
            return 0.0
        seen = _RATE_SECONDS * (1.0 - exp((self._first - now) / _RATE_SECONDS))  # what the weights of all time sum to
        return self._faded * exp((self._last - now) / _RATE_SECONDS) / max(seen, _RATE_SECONDS / 10)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request whose time to the first token is asked for.

    Attributes:
        tokens: of its prompt, those found in the prefix cache taken off.
        blocks: that it takes from the free ones; those of its prefix that somebody holds are no such ones.
        ahead: what goes before it in the waiting line.
        overtaking: requests per second that will come later and go before it.
    """

    tier: Tier
    tokens: int
    blocks: int
    ahead: Backlog
    overtaking: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has free, and will have.

    Attributes:
        slots: sequences that may still enter.
        blocks: KV blocks that may still be handed out, the reserve of those that run taken off.
        block_size: tokens in a block.
        chunk: prompt tokens that a step computes now.
        left_by: blocks that come free with a running sequence, its part of the reserve included.
    """

    slots: int
    blocks: int
    block_size: int
    chunk: int
    left_by: Callable[[Sequence], int]


class Forecast:
    """Predicts times to first tokens.

    Args:
        model: what steps cost.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self.lengths = OutputLengths()
        self._model = model
        self._typical = {tier: LogQuantile(0.5) for tier in Tier}  # of actual over predicted
        self._high = {tier: LogQuantile(_HIGH) for tier in Tier}

    def correction(self, tier: Tier) -> float:
        """Factor that the latest errors of a tier ask for."""
        return self._typical[tier].value

    def margin(self, tier: Tier) -> float:
        """Factor within which nine of ten requests of a tier start, by the forecast's latest errors; at least 1."""
        return max(1.0, self._high[tier].value / self._typical[tier].value)

    def seconds(self, new: Newcomer, running: Iterable[Sequence], room: Room) -> float | None:
        """Seconds from now to the first token of a newcomer; None while steps are not known yet.

        Args:
            running: those that hold slots and blocks.
        """
        if not self._model.known:
            return None
        running = list(running)
        decodes = [sequence for sequence in running if sequence.remaining == 1]
        started = sum(sequence.remaining for sequence in running if sequence.remaining > 1)
        queued = new.ahead.tokens + new.tokens
        before = started if started < MUCH_SHORTER * queued else queued  # long ones under way get half of each step
        work = queued + before
        alone = self._step(decodes, 0)
        own = self._prefill(decodes, new.tokens, room.chunk, alone)
        computing = self._prefill(decodes, work, room.chunk, alone)
        steps = self._steps_until_room(new, running, room)
        if steps > 0:
            mixed = self._step(decodes, min(room.chunk, ceil(work / steps)))
            computing = max(computing, steps * mixed + own)
        waiting = max(0.0, computing - own)
        overtaken = min(_MAX_OVERTAKEN, new.overtaking * waiting / (new.ahead.requests + 1))
        return (own + waiting / (1.0 - overtaken)) * self.correction(new.tier)

    def observe(self, tier: Tier, predicted: float, actual: float) -> None:
        """Learn from a request that has started, after `actual` seconds where `predicted` had been said."""
        if predicted > 0.0 and actual > 0.0:
            ratio = actual / predicted * self.correction(tier)
            self._typical[tier].observe(ratio)
            self._high[tier].observe(ratio)

    def _prefill(self, decodes: list[Sequence], work: int, chunk: int, alone: float) -> float:
        """Time to compute `work` prompt tokens beside the decodes, `chunk` a step."""
        full, rest = divmod(work, chunk)
        seconds = full * self._step(decodes, chunk)
        return seconds + self._step(decodes, rest) if rest else max(seconds, alone)

    def _step(self, decodes: list[Sequence], prefill: int) -> float:
        pairs = sum(sequence.num_tokens for sequence in decodes) + pairs_of(0, prefill)
        return self._model.seconds(len(decodes) + prefill, pairs)

    def _steps_until_room(self, new: Newcomer, running: list[Sequence], room: Room) -> float:
        """Steps until all ahead and the newcomer can have a slot and blocks."""
        slots = new.ahead.requests + 1 - room.slots
        blocks = new.blocks + ceil(new.ahead.tokens / room.block_size) + new.ahead.requests - room.blocks
        return max(
            self._steps_until(slots, running, lambda _: 1),
            self._steps_until(blocks, running, room.left_by),
        )

    def _steps_until(self, wanted: int, running: list[Sequence], left_by: Callable[[Sequence], int]) -> float:
        return Departures(self.lengths, running, left_by).steps_until(wanted) if wanted > 0 else 0.0
