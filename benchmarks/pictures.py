"""The two pictures of a comparison, as SVG: throughput against latency, and one run over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 760, 420, 56
_COLOURS = (
    "#2f6f8f",
    "#8fb339",
    "#d98e04",
    "#b0413e",
    "#6b5b95",
    "#3c7a57",
    "#a05195",
    "#7f7f7f",
    "#17becf",
    "#444444",
)
_ROW, _GAP = 4, 1


@dataclass(frozen=True, slots=True)
class Point:
    """One server in one workload.

    Attributes:
        latency: seconds to the first token.
        throughput: output tokens per second.
    """

    name: str
    latency: float
    throughput: float


Span = tuple[float, float, float]
"""When a request was sent, had its first token and ended, in seconds."""


def scatter(title: str, points: Sequence[Point], path: Path) -> Path:
    """Throughput upwards, time to first token to the right: the better, the nearer to the upper left corner."""
    right, top = (1.15 * max(values) for values in zip(*((one.latency, one.throughput) for one in points), strict=True))
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    body = [_text(_MARGIN, 28, title, weight="bold"), _frame(right, top)]
    for number, point in enumerate(points):
        x = _MARGIN + width * point.latency / right
        y = _HEIGHT - _MARGIN - height * point.throughput / top
        colour = _COLOURS[number % len(_COLOURS)]
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>')
        anchor = "end" if x > _WIDTH - 3 * _MARGIN else "start"
        body.append(_text(x + (-10 if anchor == "end" else 10), y + 4, point.name, anchor=anchor))
    return _write(path, _WIDTH, _HEIGHT, body)


def timeline(runs: Mapping[str, Sequence[Span]], path: Path) -> Path:
    """Each request a line: pale until its first token, dark until its end. One block of lines a server, one scale."""
    longest = max(end for spans in runs.values() for _, _, end in spans)
    scale = (_WIDTH - 2 * _MARGIN) / longest
    body: list[str] = []
    top = 12.0
    for number, (name, spans) in enumerate(runs.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        finish = max(end for _, _, end in spans)
        body.append(_text(_MARGIN, top + 16, f"{name}: {len(spans)} requests in {finish:.1f} s", weight="bold"))
        top += 24
        for sent, first, end in sorted(spans):
            x, middle, last = (_MARGIN + scale * moment for moment in (sent, first, end))
            body.append(_bar(x, top, middle - x, colour, 0.3) + _bar(middle, top, last - middle, colour, 1.0))
            top += _ROW + _GAP
        top += 10
    body.append(_text(_MARGIN, top + 14, "pale: until the first token; dark: until the last. 0 s"))
    body.append(_text(_WIDTH - _MARGIN, top + 14, f"{longest:.0f} s", anchor="end"))
    return _write(path, _WIDTH, int(top) + 26, body)


def _frame(right: float, top: float) -> str:
    left, bottom = _MARGIN, _HEIGHT - _MARGIN
    return (
        f'<path d="M{left} {_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>'
        + _text(left - 6, _MARGIN + 4, f"{top:.0f}", anchor="end")
        + _text(left - 6, bottom + 4, "0", anchor="end")
        + _text(left, _MARGIN - 12, "output tokens/s")
        + _text(_WIDTH - _MARGIN, bottom + 20, f"{right:.2f} s", anchor="end")
        + _text(_WIDTH // 2, bottom + 36, "median time to first token", anchor="middle")
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: str, opacity: float) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{_ROW}"'
    return f'<rect {shape} fill="{colour}" fill-opacity="{opacity}"/>'


def _write(path: Path, width: int, height: int, body: Sequence[str]) -> Path:
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n',
        encoding="utf-8",
    )
    return path
