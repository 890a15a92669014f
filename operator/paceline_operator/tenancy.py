"""The sections `scheduling` and `tenants` of an LLMService: who goes first, and who may call. Used by `spec`.

What is unset keeps the server's default. Keys stand in Secrets and nowhere else: a tenant says in which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline_operator.section import Count, Section

TierName = Literal["interactive", "standard", "batch"]
Positive = Annotated[float, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]


class TierSpec(Section):
    """What a tier is held to."""

    ttft_ms: Positive | None = None  # milliseconds
    tpot_ms: Annotated[float, Field(ge=0)] | None = None  # milliseconds; 0 is no target, since apply drops a null
    timeout_seconds: Positive | None = None


class TiersSpec(Section):
    """The tiers, most urgent first."""

    interactive: TierSpec | None = None
    standard: TierSpec | None = None
    batch: TierSpec | None = None


class SchedulingSpec(Section):
    """Who goes first."""

    policy: Literal["slo", "fcfs", "priority", "sjf"] | None = None
    admission: Literal["none", "timeout", "target"] | None = None
    max_bypass_ms: Annotated[float, Field(ge=0)] | None = None  # milliseconds
    promote_after_seconds: Positive | None = None
    tiers: TiersSpec | None = None


class SecretKeyReference(Section):
    """One key of a Secret of the service's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]


class KeysFrom(Section):
    """Where a tenant's API keys are: one a line, plain or hashed."""

    secret_key_ref: SecretKeyReference


class PricesSpec(Section):
    """What a tenant's tokens cost."""

    input_per_million: Price
    cached_input_per_million: Price | None = None
    output_per_million: Price


class TenantSpec(Section):
    """One tenant."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
    keys_from: KeysFrom | None = None
    anonymous: bool | None = None
    weight: Positive | None = None
    tier: TierName | None = None
    tiers: Annotated[list[TierName], Field(min_length=1)] | None = None
    min_priority: Annotated[int, Field(ge=-1000, le=0)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    daily_tokens: Count | None = None
    prices: PricesSpec | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> TenantSpec:
        if self.keys_from is None and not self.anonymous:
            raise ValueError("nobody could call as this tenant: give keysFrom, or anonymous: true")
        tier = self.tier or "standard"
        if self.tiers is not None and tier not in self.tiers:
            raise ValueError(f"tier ({tier}) must be one of tiers ({', '.join(self.tiers)})")
        return self


def check_together(tenants: Sequence[TenantSpec]) -> None:
    """What one tenant alone cannot know.

    Raises:
        ValueError: two of a name, or two that are anonymous.
    """
    twice = [name for name, count in Counter(tenant.name for tenant in tenants).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} stands twice; names are unique")
    if sum(bool(tenant.anonymous) for tenant in tenants) > 1:
        raise ValueError("only one tenant may be anonymous")
