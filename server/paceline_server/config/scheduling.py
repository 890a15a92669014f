"""The configuration's group `scheduling`: who goes first, and what each tier is held to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline_server.config.group import Group

_TIMEOUT = (
    "Seconds from its arrival after which a request of this tier is dropped or stopped; a request may ask for less, "
    "not for more. null is no limit."
)
_TPOT = "Target for a step that generates for this tier, in milliseconds: prefills get what fits. null is no target."


class InteractiveTier(Group):
    """Somebody waits in front of a screen."""

    ttft_ms: float = Field(100.0, gt=0, description="Target for the time to the first token, in milliseconds.")
    tpot_ms: float | None = Field(100.0, gt=0, description=_TPOT)
    timeout_seconds: float | None = Field(None, gt=0, description=_TIMEOUT)


class StandardTier(Group):
    """Requests that name no tier."""

    ttft_ms: float = Field(500.0, gt=0, description="Target for the time to the first token, in milliseconds.")
    tpot_ms: float | None = Field(250.0, gt=0, description=_TPOT)
    timeout_seconds: float | None = Field(None, gt=0, description=_TIMEOUT)


class BatchTier(Group):
    """Work that can wait for a quiet moment."""

    ttft_ms: float = Field(5000.0, gt=0, description="Target for the time to the first token, in milliseconds.")
    tpot_ms: float | None = Field(None, gt=0, description=_TPOT)
    timeout_seconds: float | None = Field(None, gt=0, description=_TIMEOUT)


class TiersConfig(Group):
    """What each tier is held to."""

    interactive: InteractiveTier = InteractiveTier()
    standard: StandardTier = StandardTier()
    batch: BatchTier = BatchTier()


class SchedulingConfig(Group):
    """Who goes first."""

    policy: Literal["slo", "fcfs", "priority", "sjf"] = Field(
        "slo",
        description="Order of those that wait. slo: tiers, fair shares between tenants, earliest deadline; fcfs: first "
        "come, first served; priority: the request's own number; sjf: shortest job first, by prompt and max_tokens.",
    )
    admission: Literal["none", "timeout", "target"] = Field(
        "timeout",
        description="What a request must be able to meet by forecast, else it is refused at once with a Retry-After: "
        "nothing, its own timeout, or its tier's ttft_ms as well. Forecasts need batcher continuous.",
    )
    max_bypass_ms: float = Field(
        500.0,
        ge=0,
        description="How long smaller requests may pass one whose turn it is and whose KV blocks do not fit yet.",
    )
    promote_after_seconds: float = Field(
        10.0,
        gt=0,
        description="How late a request may be, for each tier above its own, before its tier stops counting (slo).",
    )
    tiers: TiersConfig = TiersConfig()
