"""The table of docs/claims.md, made from the result file.

    python -m benchmarks.claims.page        # after the file has changed by other means

Without a result file the page has no table. A test holds the page to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims.rows import CLAIMS
from benchmarks.results import FOLDER

PAGE = FOLDER.parents[1] / "docs" / "claims.md"
_BEGIN, _END = "<!-- made by `python -m benchmarks.claims` -->\n", "<!-- end -->\n"


def table(result: Mapping[str, object] | None) -> str:
    """The Markdown table, with the machine it was measured on; empty without a result."""
    if result is None:
        return ""
    ratios, machine = result["ratios"], result["machine"]
    assert isinstance(ratios, dict)
    assert isinstance(machine, dict)
    lines = ["| technique | claimed | source | here | of what |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        if claim.key in ratios:
            ours = f"**{ratios[claim.key]:.3g}x**"
            lines.append(f"| {claim.technique} | {claim.claimed} | {claim.source} | {ours} | {claim.ours} |")
    lines += ["", f"{machine['processor']}, {machine['cores']} cores, {str(result['date'])[:10]}.", ""]
    return "\n".join(lines)


def filled(page: str, result: Mapping[str, object] | None) -> str:
    """The page with its table renewed."""
    head, rest = page.split(_BEGIN)
    _, tail = rest.split(_END)
    return head + _BEGIN + table(result) + _END + tail


def read_result() -> Mapping[str, object] | None:
    """The result file, or None where nothing was measured yet."""
    path = FOLDER / "claims.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fill() -> Path:
    """Renew the table in the page; returns its path."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read_result()), encoding="utf-8")
    return PAGE


if __name__ == "__main__":
    print(fill())
