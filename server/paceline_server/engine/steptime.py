"""How long a step takes: a running linear model of its time against its tokens and its context.

The step loop feeds it with every step it has run; chunk sizing (`pacing`) and the forecast of the time to the first
token (`forecast`) ask it. A step costs something by itself (launches, sampling, bookkeeping), something by token
(weights applied), and something by token and token before it (attention). Least squares over the recent past finds the
three; the past fades, so a machine that becomes slower is noticed within some dozen steps.

Steps with and without prefill fade apart: an hour of nothing but decoding must not make the model forget what a prompt
costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_FADE = 0.98  # weight of all earlier steps of a kind when one more is seen: a memory of about 50
_OUTLIER = (
    3.0  # a step this many times slower than expected counts as no slower: a pause of the machine is not the model
)
_RIDGE = 1e-4  # keeps a slope at 0 as long as nothing has shown it
_TRUSTED_AFTER = 4  # steps
_TOKENS = 1e2  # units that keep the sums of one magnitude
_PAIRS = 1e5


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on.

    Attributes:
        tokens: computed in the step.
        pairs: of a computed token and one that it attends to.
        prefills: whether any sequence computes more than one token.
    """

    tokens: int
    pairs: int
    prefills: bool

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]]) -> StepShape:
        """The shape of a step.

        Args:
            parts: by sequence: the position of its first token, and how many it computes.
        """
        tokens = pairs = 0
        prefills = False
        for start, count in parts:
            tokens += count
            pairs += pairs_of(start, count)
            prefills = prefills or count > 1
        return cls(tokens, pairs, prefills)


def pairs_of(start: int, count: int) -> int:
    """Pairs of a computed token and one that it attends to, itself included, for `count` tokens from `start` on."""
    return count * start + count * (count + 1) // 2


@dataclass(slots=True)
class _Moments:
    """Faded sums over the steps of one kind: of x·xᵀ, and of x·seconds, with x = (1, tokens, pairs)."""

    products: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    targets: list[float] = field(default_factory=lambda: [0.0] * 3)

    def add(self, x: tuple[float, float, float], seconds: float) -> None:
        for row in range(3):
            self.targets[row] = _FADE * self.targets[row] + x[row] * seconds
            for column in range(3):
                self.products[row][column] = _FADE * self.products[row][column] + x[row] * x[column]


class StepTimeModel:
    """Seconds of a step as `fixed + by_token * tokens + by_pair * pairs`; no coefficient is below 0."""

    def __init__(self) -> None:
        self._kinds = (_Moments(), _Moments())
        self._steps = 0
        self._coefficients: tuple[float, float, float] | None = None

    @property
    def known(self) -> bool:
        """Whether it has seen enough to say anything."""
        return self._steps >= _TRUSTED_AFTER

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a step by itself, by token, and by pair."""
        if self._coefficients is None:
            self._coefficients = self._solve()
        fixed, by_token, by_pair = self._coefficients
        return fixed, by_token / _TOKENS, by_pair / _PAIRS

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take a step that was run."""
        if self.known:
            seconds = min(seconds, _OUTLIER * self.seconds(shape.tokens, shape.pairs))
        self._kinds[shape.prefills].add((1.0, shape.tokens / _TOKENS, shape.pairs / _PAIRS), seconds)
        self._steps += 1
        self._coefficients = None

    def seconds(self, tokens: float, pairs: float) -> float:
        """Expected time of a step; 0 before anything was seen."""
        fixed, by_token, by_pair = self.coefficients
        return fixed + by_token * tokens + by_pair * pairs

    def _solve(self) -> tuple[float, float, float]:
        """Least squares; a slope that comes out negative is taken out, and the rest solved again."""
        matrix = [
            [self._kinds[0].products[row][column] + self._kinds[1].products[row][column] for column in range(3)]
            for row in range(3)
        ]
        right = [self._kinds[0].targets[row] + self._kinds[1].targets[row] for row in range(3)]
        for index in range(3):
            matrix[index][index] += _RIDGE * max(matrix[0][0], 1.0)
        used = [0, 1, 2]
        while True:
            solution = _solve_linear([[matrix[r][c] for c in used] for r in used], [right[r] for r in used])
            worst = min(range(len(used)), key=lambda place: solution[place])
            if solution[worst] >= 0.0 or len(used) == 1:
                break
            del used[worst]
        found = dict(zip(used, solution, strict=True))
        fixed, by_token, by_pair = (max(0.0, found.get(index, 0.0)) for index in range(3))
        return fixed, by_token, by_pair


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination for a symmetric positive definite matrix: no pivoting is needed."""
    size = len(right)
    for column in range(size):
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            for place in range(column, size):
                matrix[row][place] -= factor * matrix[column][place]
            right[row] -= factor * right[column]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][place] * solution[place] for place in range(row + 1, size))
        solution[row] = (right[row] - known) / matrix[row][row]
    return solution
