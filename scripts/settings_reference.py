"""Render docs/reference/settings.md from the configuration's own descriptions.

    python scripts/settings_reference.py            prints it
    python scripts/settings_reference.py --write    writes it

`make generate` writes it and a unit test holds the file to the code.
"""

from __future__ import annotations

import argparse
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline_server.config import ServerConfig

TARGET = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"

_HEADER = """# Engine configuration file

The file that `paceline-server serve --config FILE` reads: YAML, unknown keys refused, every mistake reported at once
with its path. Only `engine.model_path` is required. A small one:

```yaml
gateway: {host: 127.0.0.1, port: 8000}
engine:
  model_path: hf://HuggingFaceTB/SmolLM2-135M-Instruct
  served_model_names: [smollm2]
  quantization: int8
batching: {max_batch_size: 16}
kv_cache: {cpu_memory_gb: 0.5}
scheduling:
  tiers:
    interactive: {ttft_ms: 1000, timeout_seconds: 60}
tenants:
  - {name: visitors, anonymous: true, requests_per_minute: 60}
```

A running server reads the group `tenants` and the files of keys again every ten seconds; what tenants have used of a
limit that stays is not forgotten, and what cannot be used leaves the old ones in force. Everything else is read at its
start. So in a cluster a changed tenant or Secret reaches the servers within about a minute (the kubelet's time and
ours) without rolling pods; another Secret to mount, and every other change of this file, rolls them.

Generated from `server/paceline_server/config/`; change the descriptions there and run `make generate`.

## In an LLMService

The operator renders this file from an [LLMService](llmservice.md). A key of the groups `gateway`, `engine`, `batching`,
`kv_cache` and `observability`, and of the groups inside them, is a field of `spec.engine`: its last name in camelCase,
without the groups (`engine.max_model_len` is `spec.engine.maxModelLen`, `kv_cache.offload.disk_path` is
`spec.engine.diskPath`). The others:

| key of this file | in an LLMService |
|---|---|
| `engine.model_path` | `spec.model`; a `pvc://` is a folder in the pod |
| `engine.served_model_names` | none: the service's name, and `ORG/NAME` of an `hf://` model |
| `engine.device` | none: `cuda` where `spec.resources` names `nvidia.com/…` or is left out, else `cpu` |
| `gateway.host`, `gateway.port` | none: the defaults; `paceline up` has `--host` and `--port` |
| `gateway.drain_seconds` | `spec.drainSeconds` |
| `kv_cache.dtype` | `spec.engine.kvCacheDtype` |
| `kv_cache.handover.max_prefixes` | `spec.handover.maxPrefixes` |
| `kv_cache.handover.max_seconds` | `spec.handover.maxSeconds` |
| `kv_cache.handover.peer` | none: with `spec.handover`, the service's own address |
| `scheduling.…` | `spec.scheduling.…`, the same in camelCase |
| `tenants[].…` | `spec.tenants[].…`, the same in camelCase, but for keys |
| `tenants[].key_files` | `spec.tenants[].keysFrom`: a Secret, which the pod has as a file in `PACELINE_KEYS_FOLDER` |
| `tenants[].key_hashes`, `tenants[].key_variables` | none |

A field that is left out keeps the default of this page. `null` cannot be written there, since `kubectl apply` takes it
for a removal: where it is not the default, for `tpot_ms` of `interactive` and `standard`, an LLMService has
`tpotMs: 0`.
"""


def render() -> str:
    """The page as Markdown."""
    return "\n".join([_HEADER, *_sections(ServerConfig, ())])


def _sections(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    groups = {name: group for name, field in model.model_fields.items() if (group := _group(field))}
    settings = {name: field for name, field in model.model_fields.items() if name not in groups}
    lines: list[str] = []
    if settings:
        lines += [f"## `{'.'.join(path)}`", "", inspect.cleandoc(model.__doc__ or ""), ""]
        lines += ["| key | type | default | what it does |", "|---|---|---|---|"]
        lines += [_row(name, field) for name, field in settings.items()]
        lines.append("")
    for name, (group, suffix) in groups.items():
        lines += _sections(group, (*path, name + suffix))
    return lines


def _group(field: FieldInfo) -> tuple[type[BaseModel], str] | None:
    """The group that a field holds, and how its path goes on: `[]` where it is a list of them."""
    suffix = "[]" if typing.get_origin(field.annotation) is tuple else ""
    for part in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part, suffix
    return None


def _row(name: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
    bounds = [_bound(item) for item in field.metadata if _bound(item)]
    kind = ", ".join([_kind(field.annotation), *bounds])
    return f"| `{name}` | {kind} | {default} | {field.description} |"


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if annotation is None or annotation is types.NoneType:
        return "null"
    if origin is Literal:
        return " or ".join(f"`{_yaml(value)}`" for value in typing.get_args(annotation))
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        inner = [item for field in metadata for item in getattr(field, "metadata", [field])]
        return ", ".join([_kind(base), *(_bound(item) for item in inner if _bound(item))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(annotation))
    if origin is tuple:
        inner = _kind(typing.get_args(annotation)[0])
        return f"list of {inner}"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bound(item: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if (limit := getattr(item, name, None)) is not None:
            return f"{sign} {limit}"
    return ""


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_yaml, value))}]" if isinstance(value, tuple) else str(value)


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description="Render docs/reference/settings.md")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(render(), encoding="utf-8")
    else:
        print(render())


if __name__ == "__main__":
    main()
