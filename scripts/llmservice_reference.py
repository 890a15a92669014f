"""Render docs/reference/llmservice.md from the CRD, the reasons in the operator's code and the server's defaults.

    python scripts/llmservice_reference.py            prints it
    python scripts/llmservice_reference.py --write    writes it

`make generate` writes it and a unit test holds the file to its sources.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic.alias_generators import to_snake

from paceline_operator.desired.config import server_path
from paceline_server.config import TenantConfig, parse

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reference" / "llmservice.md"
CRD = ROOT / "crds" / "llmservices.paceline.dev.yaml"
CONDITIONS = ROOT / "operator" / "paceline_operator" / "conditions.py"
SERVER = parse({"engine": {"model_path": "hf://org/name"}})

_HEADER = """# LLMService

`paceline.dev/v1alpha1`, short name `llm`, namespaced. Only `spec.model` is required; unknown fields are refused.

Generated from `crds/llmservices.paceline.dev.yaml`, `operator/paceline_operator/conditions.py` and the server's
configuration; run `make generate`.
"""

_CHILDREN = """## What is made from it

In the same namespace, under the service's name (cut and given a hash where it is too long or has dots), owned by the
LLMService so that deleting it takes them away: a Deployment, a Service on port 8000, a PodDisruptionBudget that gives
up one pod at a time (a budget of your own for the same pods would stop evictions: a pod may have one), and, with
`spec.autoscaling`, a HorizontalPodAutoscaler on the LLMService's `/scale`. The [engine configuration](settings.md) is
in a ConfigMap of that name and a hash of what a server reads when it starts: a pod that starts again in the middle of a
rollout finds the settings that it was made with, and a ConfigMap goes when no pod may mount it any more. An object of a
child's name that belongs to somebody else is left alone, and the condition says `NameConflict`.
"""

_ENGINE = """What `spec.engine`, `spec.scheduling`, `spec.tenants` and `spec.handover` leave out is the server's to
decide: their defaults in the table are those of the server of this release. The page of settings says more of each, and
[which key each field is](settings.md#in-an-llmservice)."""

_CONDITION_INTRO = """A reason of `Ready` that is not in the table is the server's own (`ModelNotFound`,
`ModelUnauthorized`, `ModelUnsupported`, `NoGPU`, `OutOfMemory`, `InvalidConfiguration`, `NativeUnavailable`,
`EngineFailed`) or Kubernetes' own (`CreateContainerConfigError`, `Evicted` …), passed on as it is. An Event is written
when a condition changes.
"""


def render() -> str:
    """The page as Markdown."""
    version = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    lines = [_HEADER]
    for part in ("spec", "status"):
        lines += [f"## `{part}`", "", "| field | type | default | what it is |", "|---|---|---|---|"]
        lines += [_row(*field) for field in _fields(properties[part], part)]
        lines.append("")
    lines += [_ENGINE, "", "## Rules", "", *(f"- {rule}" for rule in _rules(properties["spec"])), ""]
    lines += ["## Columns of `kubectl get llm`", "", _columns(version["additionalPrinterColumns"]), "", _CHILDREN]
    lines += ["## Conditions and reasons", "", _CONDITION_INTRO]
    lines += ["| condition or reason | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in _reasons()]
    return "\n".join(lines) + "\n"


def _columns(columns: list[dict[str, Any]]) -> str:
    """The columns; kubectl leaves those of a lower priority out of its usual table."""
    return ", ".join(
        f"{c['name'].upper()} (`{c['jsonPath']}`{', only with `-o wide`' if c.get('priority') else ''})"
        for c in columns
    )


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field, name in required
        yield from _fields(field, f"{path}.{name}")
        if field.get("type") == "array":
            yield from _fields(field["items"], f"{path}.{name}[]")


def _row(path: str, field: dict[str, Any], required: bool) -> str:
    kind = "quantity" if field.get("x-kubernetes-int-or-string") else str(field.get("type", "any"))
    if "enum" in field:
        kind = " or ".join(f"`{_text(value)}`" for value in field["enum"])
    bounds = []
    if "minimum" in field:
        bounds.append(f"{'>' if field.get('exclusiveMinimum') else '≥'} {field['minimum']}")
    if "maximum" in field:
        bounds.append(f"{'<' if field.get('exclusiveMaximum') else '≤'} {field['maximum']}")
    default = "**required**" if required else _default(path, field)
    about = " ".join(str(field.get("description", "")).split())
    return f"| `{path}` | {', '.join([kind, *bounds])} | {default} | {about} |"


def _default(path: str, field: dict[str, Any]) -> str:
    """The CRD's own default, or the server's for a field that the CRD leaves to it; empty where that is nothing."""
    value = field["default"] if "default" in field else None if "properties" in field else _server_default(path)
    return "" if value is None else f"`{_text(value)}`"


def _server_default(path: str) -> Any:
    section, *rest = (to_snake(name) for name in path.removeprefix("spec.").split("."))
    if section == "tenants[]":
        setting = TenantConfig.model_fields.get(".".join(rest))
        return setting.default if setting else None
    if not rest or section not in ("engine", "scheduling", "handover"):
        return None
    groups = {"scheduling": ("scheduling", *rest), "handover": ("kv_cache", "handover", *rest)}
    return reduce(getattr, groups[section] if section in groups else server_path(rest[0]), SERVER)


def _rules(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield " ".join(rule["message"].split())
    for name, field in schema.get("properties", {}).items():
        for message in (*_rules(field), *_rules(field.get("items", {}))):
            yield f"`{name}`: {message}" if not message.startswith("`") else message


def _reasons() -> Iterator[tuple[str, str]]:
    source = CONDITIONS.read_text(encoding="utf-8")
    for match in re.finditer(r'^ *[A-Z_]+(?:: Final)? = "([A-Za-z]+)"  # (.+)$', source, re.MULTILINE):
        yield match[1], match[2]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).strip().removesuffix("\n...")


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description="Render docs/reference/llmservice.md")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        TARGET.write_text(render(), encoding="utf-8")
    else:
        print(render())


if __name__ == "__main__":
    main()
