"""LLMServices as `kubectl get llm` prints them, with the replicas: columns come from the CRD, the layout is kubectl's.

Called by `paceline status`, and by `paceline up` after a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any

import yaml

from paceline_operator.cluster import Manifest

_PADDING = 3  # kubectl's tab writer
_REPLICAS = "Replicas"  # ready ones with `kubectl get -o wide`, whose columns hold one field; ready/desired here
_STEP = re.compile(r"""\.(?P<key>\w+)|\[\?\(@\.(?P<field>\w+)\s*==\s*"(?P<value>[^"]*)"\)\]""")
"""The two steps of JSONPath that our columns use: a key, and the item of a list whose field has a value."""


@cache
def printer_columns() -> tuple[Manifest, ...]:
    """The CRD's additionalPrinterColumns that kubectl shows without `-o wide`, and the replicas."""
    crd = yaml.safe_load((resources.files("paceline_operator") / "crd.yaml").read_text(encoding="utf-8"))
    (version,) = crd["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    return tuple(column for column in columns if column.get("priority", 0) == 0 or column["name"] == _REPLICAS)


def table(services: Sequence[Manifest], now: datetime) -> str:
    """The services, a line each below the heading; ages as of `now`."""
    heading = ["NAME", *(column["name"].upper() for column in printer_columns())]
    rows = [heading, *([service["metadata"]["name"], *_cells(service, now)] for service in services)]
    widths = [max(len(row[index]) for row in rows) + _PADDING for index in range(len(heading))]
    lines = ("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _cells(service: Manifest, now: datetime) -> list[str]:
    return [
        _replicas(service)
        if column["name"] == _REPLICAS
        else _format(column["type"], _find(service, column["jsonPath"]), now)
        for column in printer_columns()
    ]


def _replicas(service: Manifest) -> str:
    return f"{service.get('status', {}).get('readyReplicas', 0)}/{service['spec']['replicas']}"


def _find(value: Any, path: str) -> Any:
    """What a JSONPath leads to, None for nothing."""
    steps = list(_STEP.finditer(path))
    assert "".join(step[0] for step in steps) == path, f"{path} has a step that is not known here"
    for step in steps:
        if step["key"] is not None:
            value = value.get(step["key"]) if isinstance(value, dict) else None
        else:
            items = (item for item in value or () if item.get(step["field"]) == step["value"])
            value = next(items, None)
    return value


def _format(kind: str, value: Any, now: datetime) -> str:
    if value is None:
        return ""
    if kind == "date":
        return age(now - datetime.fromisoformat(value))
    return f"{value:.17g}" if isinstance(value, float) and value.is_integer() else str(value)


def age(passed: timedelta) -> str:
    """A duration as kubectl writes ages (k8s.io/apimachinery/pkg/util/duration, HumanDuration)."""
    seconds = max(0, int(passed.total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m" + (f"{seconds % 60}s" if seconds % 60 else "")
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h" + (f"{minutes % 60}m" if minutes % 60 else "")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d" + (f"{hours % 24}h" if hours % 24 else "")
    years = days // 365
    if years < 2:
        return f"{days}d"
    if years < 8:
        return f"{years}y" + (f"{days % 365}d" if days % 365 else "")
    return f"{years}y"
