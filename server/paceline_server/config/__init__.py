"""The engine configuration file: one schema, parsed once into frozen groups.

`load` reads the file, `parse` validates a mapping; both report every mistake at once, each with its path, and refuse
unknown keys. The operator renders the same vocabulary from an LLMService; docs/reference/settings.md is generated
from the descriptions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from paceline_server.config.group import Group, Positive
from paceline_server.config.kv_cache import HandoverConfig, KVCacheConfig
from paceline_server.config.observability import ObservabilityConfig
from paceline_server.config.scheduling import SchedulingConfig, TiersConfig
from paceline_server.config.tenants import TenantConfig, check_together
from paceline_server.errors import InvalidConfiguration
from paceline_server.field_path import field_path

__all__ = [
    "BackpressureConfig",
    "BatcherName",
    "BatchingConfig",
    "EngineConfig",
    "GatewayConfig",
    "HandoverConfig",
    "KVCacheConfig",
    "SchedulingConfig",
    "ServerConfig",
    "TenantConfig",
    "TiersConfig",
    "load",
    "parse",
]


class BackpressureConfig(Group):
    """Bounds of the waiting queue."""

    max_queued_requests: Positive = Field(1024, description="Requests that may wait; one more is refused at once.")
    max_queued_tokens: Positive | None = Field(
        None, description="Prompt tokens that may wait in all, shared as places are; null means no bound of its own."
    )
    reject_on_oom: bool = Field(
        True, description="Refuse a request whose prompt and max_tokens could never fit the KV pool (400) up front."
    )
    overload_status: Literal[503, 429] = Field(503, description="HTTP status of a refusal for want of room.")


class GatewayConfig(Group):
    """The HTTP side."""

    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")
    worker_threads: Positive = Field(2, description="Threads that tokenise and render chat templates.")
    max_n: int = Field(16, ge=1, le=128, description="Answers that one request may ask for (its field n).")
    max_body_bytes: Positive = Field(32 * 1024 * 1024, description="Largest request body, in bytes; beyond it 413.")
    drain_seconds: float = Field(
        60.0, ge=0, description="How long running streams may take to finish after SIGTERM or POST /drain."
    )
    backpressure: BackpressureConfig = BackpressureConfig()


class EngineConfig(Group):
    """The model and where it runs."""

    model_path: str = Field(
        min_length=1, description="hf://ORG/NAME[@REVISION], file:///absolute/folder, or a folder's path."
    )
    served_model_names: tuple[str, ...] = Field(
        (), strict=False, description="Names that clients may use; empty means the model's own name."
    )
    tensor_parallel_size: Literal[1] = Field(1, description="Only 1 is supported.")
    pipeline_parallel_size: Literal[1] = Field(1, description="Only 1 is supported.")
    max_model_len: Positive | None = Field(
        None, description="Longest sequence, prompt and output, in tokens; null takes the model's own limit."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and KV cache; auto is the checkpoint's on a GPU and float32 on a CPU. float16 is for "
        "GPUs: the CPU kernels do not compute in it, and the server warns that it is slower.",
    )
    quantization: Literal["int8"] | None = Field(
        None, description="int8 quantizes the weights at load, on a CPU; null computes with engine.dtype."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    attention_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto",
        description="Implementation of attention and layers: reference is plain torch, cpu our C++ kernels (needs a "
        "C++ compiler, once), triton our GPU kernels; auto takes cpu on a CPU and triton on a GPU where it can, "
        "and warns where it cannot (log, /readyz, paceline up).",
    )
    threads: Positive | None = Field(None, description="Compute threads on a CPU; null takes all cores given.")


BatcherName = Literal["continuous", "dynamic", "static"]


class BatchingConfig(Group):
    """What a step may hold, and when requests join and leave a batch."""

    max_batch_size: Positive = Field(64, description="Sequences that run together.")
    max_tokens_in_batch: Positive = Field(
        512,
        description="Token budget of a step: decodes first, then prefills. Of a batch by request and of embeddings: "
        "all prompt tokens together; a longer prompt is refused.",
    )
    max_queue_delay_us: int = Field(
        0,
        ge=0,
        description="Longest wait for company when the engine is idle, in microseconds. The wait in force follows the "
        "arrivals: 0 when traffic is low. Static batches always wait so long, unless they are full.",
    )
    batcher: BatcherName | None = Field(
        None,
        description="continuous: sequences join and leave at every step; dynamic: a batch is computed to its end, "
        "those that finish leave it; static: those that finish keep their place and are answered with the last one. "
        "null is continuous. Embeddings are always dynamic.",
    )
    enable_continuous_batching: bool | None = Field(
        None, description="Another way to say it: true is batcher continuous, false is dynamic; null leaves it there."
    )
    packed: bool = Field(
        True, description="false pads every prompt of a batch to its longest, to show what that costs (static only)."
    )

    @property
    def kind(self) -> BatcherName:
        """The batcher that the two settings come to."""
        return self.batcher or ("dynamic" if self.enable_continuous_batching is False else "continuous")

    @model_validator(mode="after")
    def _settings_agree(self) -> BatchingConfig:
        if self.enable_continuous_batching is not None and self.batcher is not None:
            asked = "continuous" if self.enable_continuous_batching else "dynamic or static"
            if (self.batcher == "continuous") != self.enable_continuous_batching:
                raise ValueError(
                    f"enable_continuous_batching: {str(self.enable_continuous_batching).lower()} asks for batcher "
                    f"{asked}, and batcher says {self.batcher}: leave one of them out"
                )
        if not self.packed and self.kind != "static":
            raise ValueError(f"packed: false needs batcher: static, not {self.kind}: nothing else pads")
        return self


class ServerConfig(Group):
    """The whole file."""

    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig
    batching: BatchingConfig = BatchingConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    tenants: tuple[TenantConfig, ...] = Field((), strict=False)
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _budget_holds_the_decodes(self) -> ServerConfig:
        if self.batching.max_tokens_in_batch < self.batching.max_batch_size:
            raise ValueError(
                f"batching.max_tokens_in_batch ({self.batching.max_tokens_in_batch}) must be at least "
                f"batching.max_batch_size ({self.batching.max_batch_size}): "
                "every running sequence decodes one token a step"
            )
        return self

    @model_validator(mode="after")
    def _forecasts_are_for_steps(self) -> ServerConfig:
        if self.scheduling.admission == "target" and self.batching.kind != "continuous":
            raise ValueError(
                f"scheduling.admission: target needs batching.batcher: continuous, not {self.batching.kind}: "
                "nothing is forecast for batches by request; take timeout or none"
            )
        return self

    @model_validator(mode="after")
    def _tenants_agree(self) -> ServerConfig:
        check_together(self.tenants)
        return self


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice in a mapping is an error: the second would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping.

        Raises:
            ConstructorError: a key stands twice.
        """
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def parse(data: Mapping[str, Any], overrides: Mapping[tuple[str, str], Any] | None = None) -> ServerConfig:
    """Validate a configuration mapping.

    Args:
        data: the file's content.
        overrides: values by (group, key) that win over the file: command-line flags.

    Raises:
        InvalidConfiguration: with every mistake, one a line, each with its path.
    """
    merged = {group: dict(keys) if isinstance(keys, Mapping) else keys for group, keys in data.items()}
    for (group, key), value in (overrides or {}).items():
        target = merged.setdefault(group, {})
        if isinstance(target, dict):
            target[key] = value
    try:
        return ServerConfig.model_validate(merged)
    except ValidationError as error:
        raise InvalidConfiguration(_explain(error)) from None


def load(path: Path, overrides: Mapping[tuple[str, str], Any] | None = None) -> ServerConfig:
    """Read and validate a configuration file.

    Raises:
        InvalidConfiguration: the file cannot be read, is not a YAML mapping, or has mistakes (all of them reported).
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise InvalidConfiguration(
            f"cannot read {path}: there is no such file. --config names the configuration; in a container it has to be "
            "mounted (docs/reference/settings.md has its keys)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"cannot read {path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # PyYAML lets what dates and int() say pass
        raise InvalidConfiguration(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, Mapping):
        raise InvalidConfiguration(
            f"{path} must hold a mapping of gateway, engine, batching, kv_cache, scheduling and tenants"
        )
    try:
        return parse(data, overrides)
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"{path}: {error}") from None


def _explain(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False)
    lines = [f"{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''} in the configuration"]
    for mistake in mistakes:
        path = field_path(mistake["loc"])
        lines.append(f"  {path + ': ' if path else ''}{_say(mistake)}")
    return "\n".join(lines)


def _say(mistake: Any) -> str:
    message = str(mistake["msg"]).removeprefix("Value error, ")
    if mistake["type"] == "extra_forbidden":
        return "unknown key"
    if mistake["type"] == "missing":
        return "is required"
    if "key_hashes" in mistake["loc"]:  # what stands there may be a plain key, and this text goes to the log
        return "must be a list of what `paceline-server hash-key` prints: sha256: and 64 hex digits"
    scalar = not isinstance(mistake["input"], dict | list | tuple)
    return f"{message}, not {mistake['input']!r}" if mistake["loc"] and scalar else message
