"""The LLMService as types: parsed once, all mistakes at once with their paths, then trusted everywhere.

The CRD (crds/llmservices.paceline.dev.yaml) says the same to the API server; a test holds the two together.
Called by `reconcile` on what the API server stored, and by `local` on files of the user.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from paceline_operator import names
from paceline_operator.cluster import Key, Manifest
from paceline_operator.errors import FieldError, InvalidSpec, field_path
from paceline_operator.model_uri import ModelUri, parse_model_uri
from paceline_operator.quantity import parse_quantity
from paceline_operator.section import AbsolutePath, Count, Section
from paceline_operator.template import TemplateSpec
from paceline_operator.tenancy import SchedulingSpec, TenantSpec, check_together

_QUOTED_CHARACTERS: Final = 60  # of a refused value; what is longer is found by its path


def _quantity(value: object) -> str:
    """A number with a fraction is refused as by the CRD: JSON has no exact one, so it is written as a string."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a quantity; write a string such as '500m', '2' or '4Gi'")
    if parse_quantity(value) < 0:
        raise ValueError(f"{value!r} is negative")
    return str(value)


Quantity = Annotated[str, BeforeValidator(_quantity)]


class EngineSpec(Section):
    """Settings of gateway and engine that a user may choose; unset ones keep the server's defaults.

    Names are those of the engine configuration file, `desired.config` says which group each belongs to.
    """

    max_model_len: Count | None = None  # tokens
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quantization: Literal["int8"] | None = None
    attention_backend: Literal["auto", "reference", "cpu", "triton"] | None = None
    threads: Count | None = None
    tensor_parallel_size: Literal[1] | None = None  # more is not supported yet, nor are other values of those below
    pipeline_parallel_size: Literal[1] | None = None
    max_batch_size: Count | None = None  # sequences
    max_tokens_in_batch: Count | None = None  # tokens per step
    max_queue_delay_us: Annotated[int, Field(ge=0)] | None = None  # microseconds
    batcher: Literal["continuous", "dynamic", "static"] | None = None
    enable_continuous_batching: bool | None = None  # true is batcher continuous, false dynamic
    packed: bool | None = None
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    cpu_memory_gb: Annotated[float, Field(gt=0)] | None = None  # GiB
    block_size_tokens: Count | None = None  # tokens
    swap_space_gb: Annotated[float, Field(ge=0)] | None = None  # GiB
    host_memory_gb: Annotated[float, Field(ge=0)] | None = None  # GiB of evicted KV blocks
    disk_path: AbsolutePath | None = None
    disk_gb: Annotated[float, Field(ge=0)] | None = None  # GiB
    prefix_caching: bool | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] | None = None
    worker_threads: Count | None = None
    max_n: Annotated[int, Field(ge=1, le=128)] | None = None  # answers to one request
    max_body_bytes: Count | None = None  # bytes
    max_queued_requests: Count | None = None
    max_queued_tokens: Count | None = None
    reject_on_oom: bool | None = None
    overload_status: Literal[429, 503] | None = None
    trace_path: AbsolutePath | None = None
    trace_max_mb: Annotated[float, Field(gt=0)] | None = None  # megabytes

    @model_validator(mode="after")
    def _batchers_agree(self) -> EngineSpec:
        if None not in (self.batcher, self.enable_continuous_batching) and self.enable_continuous_batching != (
            self.batcher == "continuous"
        ):
            raise ValueError("batcher and enableContinuousBatching say different things: leave one of them out")
        return self

    @model_validator(mode="after")
    def _offload_is_whole(self) -> EngineSpec:
        disk = self.disk_path is not None
        if disk != bool(self.disk_gb) or (disk and not self.host_memory_gb):
            raise ValueError("diskPath, diskGb and hostMemoryGb go together: blocks go to disk by way of host memory")
        return self


class AutoscalingSpec(Section):
    """Bounds and targets of the HorizontalPodAutoscaler. The section's presence switches autoscaling on."""

    min_replicas: Count = 1
    max_replicas: Count
    target_queue_depth: Count = 8  # requests waiting + running, per replica
    ttft_objective_seconds: Annotated[float, Field(gt=0)] = 2.0
    scale_up_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 300

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> AutoscalingSpec:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"minReplicas ({self.min_replicas}) must not exceed maxReplicas ({self.max_replicas})")
        return self


class ResourcesSpec(Section):
    """Resources of the server's container, as in a pod."""

    limits: dict[str, Quantity] = Field(default_factory=dict)
    requests: dict[str, Quantity] = Field(default_factory=dict)


class SecretReference(Section):
    """A Secret of the service's namespace; one key of it becomes the server's variable of that key's name."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


class HandoverSpec(Section):
    """A fresh replica takes over the hottest prefixes of another one. The section's presence switches it on."""

    secret_ref: SecretReference
    max_prefixes: Count | None = None
    max_seconds: Annotated[float, Field(gt=0)] | None = None


def _one_gpu() -> ResourcesSpec:
    """A GPU, and what a server on one takes beside it: a pod that requests neither is evicted first."""
    return ResourcesSpec(limits={"nvidia.com/gpu": "1"}, requests={"cpu": "1", "memory": "4Gi"})


class LLMServiceSpec(Section):
    """`spec` of an LLMService."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    replicas: Annotated[int, Field(ge=0)] = 1
    image: Annotated[str, Field(min_length=1)] | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    resources: ResourcesSpec = Field(default_factory=_one_gpu)
    engine: EngineSpec = Field(default_factory=EngineSpec)
    scheduling: SchedulingSpec | None = None
    tenants: Annotated[list[TenantSpec], Field(max_length=100)] = Field(default_factory=list)
    autoscaling: AutoscalingSpec | None = None
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    startup_seconds: Annotated[int, Field(ge=1, le=86400)] = 1800
    model_secret_ref: SecretReference | None = None
    handover: HandoverSpec | None = None
    template: TemplateSpec = Field(default_factory=TemplateSpec)

    @field_validator("model")
    @classmethod
    def _model_is_supported(cls, model: str) -> str:
        parse_model_uri(model)
        return model

    @field_validator("tenants")
    @classmethod
    def _tenants_agree(cls, tenants: list[TenantSpec]) -> list[TenantSpec]:
        check_together(tenants)
        return tenants

    @model_validator(mode="after")
    def _forecasts_are_for_steps(self) -> LLMServiceSpec:
        batched = self.engine.batcher not in (None, "continuous") or self.engine.enable_continuous_batching is False
        if batched and self.scheduling is not None and self.scheduling.admission == "target":
            raise ValueError("scheduling.admission target needs engine.batcher continuous: nothing else is forecast")
        return self

    @property
    def model_uri(self) -> ModelUri:
        """The model's URI, taken apart."""
        return parse_model_uri(self.model)

    @property
    def uses_gpu(self) -> bool:
        """Whether the server runs on NVIDIA devices, which is what it is told as `device: cuda`."""
        return any(name.startswith(names.GPU_RESOURCE_PREFIX) for name in self._resource_names())

    @property
    def uses_accelerator(self) -> bool:
        """Whether a pod holds a device that a second pod may not get: any extended resource, of whatever vendor."""
        return any("/" in name and "kubernetes.io/" not in name for name in self._resource_names())

    def _resource_names(self) -> set[str]:
        return {*self.resources.limits, *self.resources.requests}


@dataclass(frozen=True, slots=True)
class LLMService:
    """An LLMService that has been understood: identity and typed specification."""

    key: Key
    uid: str
    generation: int
    spec: LLMServiceSpec

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.key.name

    @property
    def namespace(self) -> str:
        """Namespace of the object, and of all that is made for it."""
        return self.key.namespace


def parse_service(manifest: Manifest) -> LLMService:
    """Understand a stored LLMService. Raises InvalidSpec with all mistakes."""
    metadata = manifest["metadata"]
    return LLMService(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=parse_spec(manifest.get("spec") or {}),
    )


def parse_spec(spec: Mapping[str, Any]) -> LLMServiceSpec:
    """Understand `spec`. Raises InvalidSpec with all mistakes, each with its path from `spec`."""
    try:
        return LLMServiceSpec.model_validate(spec)
    except ValidationError as error:
        raise InvalidSpec(tuple(_field_error(detail) for detail in error.errors())) from error


def _field_error(detail: Any) -> FieldError:
    path = field_path(("spec", *detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return FieldError(path, f"unknown field{_suggestion(detail['loc'])}")
    if detail["type"] == "missing":
        return FieldError(path, "required")
    message = detail["msg"].removeprefix("Value error, ")
    told = "" if detail["type"] == "value_error" else _quoted(detail["input"])
    return FieldError(path, message[:1].lower() + message[1:] + told)


def _quoted(value: object) -> str:
    """`, not …` and the value as YAML has it, so that text is told from a number; only of a short scalar."""
    if not isinstance(value, str | bool | int | float):
        return ""
    written = json.dumps(value, ensure_ascii=False)
    return f", not {written}" if len(written) <= _QUOTED_CHARACTERS else ""


def _suggestion(location: Sequence[str | int]) -> str:
    """`, did you mean …?` when another section has this field, or the same section has one that is spelt alike."""
    name = str(location[-1])
    if paths := _paths_of(name):
        return f", did you mean {' or '.join(paths)}?"
    section: type[BaseModel] = LLMServiceSpec
    for part in location[:-1]:
        if isinstance(part, int):  # a place in a list
            continue
        field = next((info for info in section.model_fields.values() if info.alias == part), None)
        nested = section_type(field) if field else None
        if nested is None:
            return ""
        section = nested
    known = [info.alias or key for key, info in section.model_fields.items()]
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _paths_of(name: str) -> list[str]:
    """Where `spec`, or one of its sections of settings, has a field of exactly this name."""
    sections: dict[str, type[BaseModel]] = {"spec": LLMServiceSpec, "spec.engine": EngineSpec}
    sections |= {"spec.scheduling": SchedulingSpec, "spec.autoscaling": AutoscalingSpec}
    return [
        f"{path}.{name}"
        for path, section in sections.items()
        if name in {info.alias or field for field, info in section.model_fields.items()}
    ]


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """The type of a field that is a section of its own or a list of them; None for a plain value."""
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)
