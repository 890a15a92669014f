"""A plot of tuning: time to the first token against capacity, as SVG. `tune_command` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from paceline_server.simulator.tune import Candidate

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _PAD = 720, 440, 80, 60, 20
_STYLE = "font: 13px sans-serif; fill: #333"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps figures to places: both axes logarithmic."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> _Scale:
        xs, ys = [log10(x) for x, _ in points], [log10(y) for _, y in points]
        return cls(min(xs) - 0.05, max(xs) + 0.05, min(ys) - 0.05, max(ys) + 0.05)

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        x = (log10(point[0]) - self.left) / (self.right - self.left)
        y = (log10(point[1]) - self.low) / (self.high - self.low)
        return _LEFT + x * (_WIDTH - _LEFT - _PAD), _HEIGHT - _BOTTOM - y * (_HEIGHT - _BOTTOM - _PAD)


def frontier_svg(found: Sequence[Candidate], best: Sequence[Candidate], proposed: Candidate) -> str:
    """All candidates as dots, the frontier as a line, the proposal as a ring.

    Args:
        found: that carry the load; at least one.
    """
    scale = _Scale.of([_point(one) for one in found])
    dots = [_circle(scale.place(_point(one)), 3, "fill: #bbb", _name(one)) for one in found]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (scale.place(_point(one)) for one in best))
    marks = [_circle(scale.place(_point(one)), 4, "fill: #06c", _name(one)) for one in best]
    ring = _circle(scale.place(_point(proposed)), 9, "fill: none; stroke: #c30; stroke-width: 2", _name(proposed))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill: white"/>',
        *_axes(scale),
        *dots,
        f'<polyline points="{line}" style="fill: none; stroke: #06c"/>',
        *marks,
        ring,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _point(one: Candidate) -> tuple[float, float]:
    return 1e3 * one.prediction.ttft, one.prediction.capacity


def _name(one: Candidate) -> str:
    ttft, capacity = _point(one)
    limits = one.limits
    return f"{limits.max_batch_size} / {limits.max_tokens_in_batch}: {ttft:.0f} ms, {capacity:.0f} tok/s"


def _circle(place: tuple[float, float], radius: int, style: str, title: str) -> str:
    x, y = place
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="{style}"><title>{title}</title></circle>'


def _axes(scale: _Scale) -> list[str]:
    below, middle = _HEIGHT - _BOTTOM, (_HEIGHT - _BOTTOM) / 2
    lines = f"M {_LEFT} {_PAD} V {below} H {_WIDTH - _PAD}"
    return [
        f'<path d="{lines}" style="fill: none; stroke: #333"/>',
        _text(_LEFT, below + 20, f"{10**scale.left:.3g}"),
        _text(_WIDTH - _PAD - 40, below + 20, f"{10**scale.right:.3g}"),
        _text((_LEFT + _WIDTH) / 2 - 120, _HEIGHT - 12, "expected time to the first token, ms"),
        _text(_LEFT - 55, below, f"{10**scale.low:.3g}"),
        _text(_LEFT - 55, _PAD + 10, f"{10**scale.high:.3g}"),
        f'<text transform="translate(16 {middle + 90}) rotate(-90)" style="{_STYLE}">capacity, output tokens/s</text>',
    ]


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" style="{_STYLE}">{text}</text>'
