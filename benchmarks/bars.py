"""Bar charts as SVG, for the pages that show results. Written by hand: a plotting library would be all they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH, _LABELS, _BAR, _GAP, _HEAD = 640, 150, 22, 8, 34
_COLOURS = ("#2f6f8f", "#8fb339", "#d98e04", "#b0413e", "#6b5b95")


@dataclass(frozen=True, slots=True)
class Chart:
    """One group of bars.

    Attributes:
        values: by bar.
        unit: written behind each value.
    """

    title: str
    values: Mapping[str, float]
    unit: str = ""


def draw(charts: Sequence[Chart], path: Path) -> Path:
    """Write the charts below each other into one SVG file; returns its path."""
    body, top = [], 0
    for chart in charts:
        body.append(_chart(chart, top))
        top += _HEAD + len(chart.values) * (_BAR + _GAP) + _GAP
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n',
        encoding="utf-8",
    )
    return path


def _chart(chart: Chart, top: int) -> str:
    longest = max(chart.values.values()) or 1.0
    parts = [f'<text x="8" y="{top + 22}" font-weight="bold">{escape(chart.title)}</text>']
    for row, (name, value) in enumerate(chart.values.items()):
        y = top + _HEAD + row * (_BAR + _GAP)
        width = (_WIDTH - _LABELS - 110) * value / longest
        parts.append(
            f'<text x="8" y="{y + 16}">{escape(name)}</text>'
            f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[row % len(_COLOURS)]}"/>'
            f'<text x="{_LABELS + width + 6:.1f}" y="{y + 16}">{value:.3g} {escape(chart.unit)}</text>'
        )
    return "".join(parts)
