"""The engine configuration file of a service, and the ConfigMap that carries it into the pods.

Only what the user set is written: defaults stay the server's, so that they can improve without an operator.

The ConfigMap is named by a hash of all that a server takes in at its start and never again. A change of that makes
another ConfigMap and rolls the pods; an old pod whose container starts again meanwhile still finds the one it was made
with. A change of what a server follows while it runs, its tenants' limits, is written into the ConfigMap that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import yaml

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.desired.metadata import child, digest
from paceline_operator.model_uri import Claim, Hub
from paceline_operator.spec import HandoverSpec, LLMService
from paceline_operator.tenancy import SchedulingSpec, TenantSpec

# Group of the configuration file for each field of spec.engine; see `server_path` for the key.
ENGINE_GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "max_model_len": ("engine",),
        "dtype": ("engine",),
        "quantization": ("engine",),
        "attention_backend": ("engine",),
        "threads": ("engine",),
        "tensor_parallel_size": ("engine",),
        "pipeline_parallel_size": ("engine",),
        "max_batch_size": ("batching",),
        "max_tokens_in_batch": ("batching",),
        "max_queue_delay_us": ("batching",),
        "batcher": ("batching",),
        "enable_continuous_batching": ("batching",),
        "packed": ("batching",),
        "gpu_memory_fraction": ("kv_cache",),
        "cpu_memory_gb": ("kv_cache",),
        "block_size_tokens": ("kv_cache",),
        "swap_space_gb": ("kv_cache",),
        "host_memory_gb": ("kv_cache", "offload"),
        "disk_path": ("kv_cache", "offload"),
        "disk_gb": ("kv_cache", "offload"),
        "prefix_caching": ("kv_cache",),
        "kv_cache_dtype": ("kv_cache",),
        "worker_threads": ("gateway",),
        "max_n": ("gateway",),
        "max_body_bytes": ("gateway",),
        "max_queued_requests": ("gateway", "backpressure"),
        "max_queued_tokens": ("gateway", "backpressure"),
        "reject_on_oom": ("gateway", "backpressure"),
        "overload_status": ("gateway", "backpressure"),
        "trace_path": ("observability",),
        "trace_max_mb": ("observability",),
    }
)


# Keys that stand in two groups of the file, and so cannot have their own name in spec.engine.
_RENAMED: Final[Mapping[str, str]] = MappingProxyType({"kv_cache_dtype": "dtype"})


def server_path(name: str) -> tuple[str, ...]:
    """Where the file has a field of spec.engine: its groups, and its key, which is mostly the field's own name."""
    return (*ENGINE_GROUPS[name], _RENAMED.get(name, name))


def engine_config(service: LLMService) -> dict[str, Any]:
    """The configuration file's content as a mapping, groups and keys in a stable order."""
    config: dict[str, Any] = {
        "gateway": {"drain_seconds": service.spec.drain_seconds},
        "engine": {
            "model_path": _model_path(service),
            "served_model_names": _served_model_names(service),
            "device": "cuda" if service.spec.uses_gpu else "cpu",
        },
    }
    for name, value in service.spec.engine.model_dump(exclude_none=True).items():
        *groups, key = server_path(name)
        group = config
        for part in groups:
            group = group.setdefault(part, {})
        group[key] = value
    if service.spec.handover is not None:
        config.setdefault("kv_cache", {})["handover"] = _handover(service, service.spec.handover)
    if service.spec.scheduling is not None:
        config["scheduling"] = _scheduling(service.spec.scheduling)
    if service.spec.tenants:
        config["tenants"] = [_tenant(tenant) for tenant in service.spec.tenants]
    return config


def render_config_map(service: LLMService) -> Manifest:
    """The ConfigMap with the engine configuration file."""
    text = yaml.safe_dump(engine_config(service), sort_keys=True, allow_unicode=True)
    return child(service, "v1", "ConfigMap", {"data": {names.CONFIG_FILE: text}}, name=config_map_name(service))


def config_map_name(service: LLMService) -> str:
    """The service's name and a hash: services that differ only in what a running server follows share it."""
    return f"{names.child_name(service.name)}-{digest(_read_at_start(service))}"


def _read_at_start(service: LLMService) -> dict[str, Any]:
    """The settings without tenants, and which files of keys a pod has: tenants of other files make no sense in it."""
    settings = {group: values for group, values in engine_config(service).items() if group != "tenants"}
    files = [[tenant.name, tenant.keys_from.model_dump()] for tenant in service.spec.tenants if tenant.keys_from]
    return {"settings": settings, "files": files}


def _handover(service: LLMService, handover: HandoverSpec) -> dict[str, Any]:
    """The peer is whichever ready replica the Service leads to, of an older revision too; without one it is refused."""
    limits = handover.model_dump(exclude_none=True, exclude={"secret_ref"})
    return {"peer": names.service_url(service.namespace, service.name), **limits}


def _scheduling(scheduling: SchedulingSpec) -> dict[str, Any]:
    """The group with the server's word for a tier that has no target of TPOT."""
    settings = scheduling.model_dump(exclude_none=True)
    for tier in settings.get("tiers", {}).values():
        if tier.get("tpot_ms") == 0:
            tier["tpot_ms"] = None
    return settings


def _tenant(tenant: TenantSpec) -> dict[str, Any]:
    """The tenant as the server knows it: its keys are a file, named as `desired.pod` mounts it, and never here."""
    settings = tenant.model_dump(exclude_none=True, exclude={"keys_from"})
    return settings if tenant.keys_from is None else {**settings, "key_files": [tenant.name]}


def _model_path(service: LLMService) -> str:
    """A claim's folder is a path inside the pod; hub URIs and folders mean the same to the server as to the user."""
    uri = service.spec.model_uri
    if isinstance(uri, Claim):
        return f"file://{names.PVC_MOUNT}/{uri.path}".rstrip("/")
    return service.spec.model


def _served_model_names(service: LLMService) -> list[str]:
    """The service's name, and the repository's, which clients of the hub's models already use."""
    uri = service.spec.model_uri
    return [service.name, uri.repository] if isinstance(uri, Hub) else [service.name]
