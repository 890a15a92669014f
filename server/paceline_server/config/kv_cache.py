"""The configuration's group `kv_cache`: how large the cache is, and where its blocks come from and go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline_server.config.group import AbsolutePath, Group, Positive


class OffloadConfig(Group):
    """Where cached blocks go that the device evicts, to come back when their prefix is asked for again."""

    host_memory_gb: float = Field(0.0, ge=0, description="Host memory for evicted blocks, in GiB; 0 lets them go.")
    disk_path: AbsolutePath | None = Field(
        None,
        description="Folder, as an absolute path, of this server alone for blocks that host memory is too small for; "
        "they outlive the process. Whoever can read it can learn prompts from it.",
    )
    disk_gb: float = Field(0.0, ge=0, description="Files in disk_path at most, in GiB.")

    @model_validator(mode="after")
    def _disk_is_whole(self) -> OffloadConfig:
        if (self.disk_path is None) != (self.disk_gb == 0):
            raise ValueError("disk_path and disk_gb go together: set both, or neither")
        if self.disk_path is not None and self.host_memory_gb == 0:
            raise ValueError("disk_path needs host_memory_gb above 0: blocks come from disk by way of host memory")
        return self


class HandoverConfig(Group):
    """Prefixes that a fresh replica takes over from another one before it reports ready."""

    peer: str | None = Field(
        None,
        min_length=1,
        description="Base URL of a replica or of their Service, whose GET /prefixes is asked with the secret in "
        "PACELINE_HANDOVER_SECRET; or the absolute path of a file with such an answer. null starts cold.",
    )
    max_prefixes: Positive = Field(64, description="Prefixes that are taken over at most, hottest first.")
    max_seconds: float = Field(20.0, gt=0, description="Time that a start may spend on them.")

    @field_validator("peer")
    @classmethod
    def _found_from_anywhere(cls, peer: str | None) -> str | None:
        if peer is not None and not peer.startswith(("http://", "https://", "/")):
            raise ValueError(
                "must begin with http:// or https://, or with / for a file: a relative path would lie wherever the "
                "server was started"
            )
        return peer


class KVCacheConfig(Group):
    """The paged KV cache."""

    gpu_memory_fraction: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights, steps, CUDA graphs and KV cache together.",
    )
    cpu_memory_gb: float = Field(1.0, gt=0, description="KV cache on a CPU, in GiB.")
    block_size_tokens: Positive = Field(16, description="Tokens in a block.")
    dtype: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="Of keys and values; auto is engine.dtype, and bfloat16 beside weights of int8. Other than "
        "engine.dtype needs a CPU. bfloat16 holds twice the tokens of float32 and is read in half the time; int8, with "
        "a scale for each token and head, holds nearly four times as many.",
    )
    swap_space_gb: float = Field(
        0.0,
        ge=0,
        description="Host memory for the KV of preempted requests, in GiB; they are swapped where that is cheaper than "
        "computing them again. 0 always computes again.",
    )
    offload: OffloadConfig = OffloadConfig()
    handover: HandoverConfig = HandoverConfig()
    prefix_caching: bool = Field(True, description="Keep the blocks of finished sequences for prompts that share them.")
