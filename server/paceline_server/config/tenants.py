"""The configuration's group `tenants`: who may call, with which keys, at what share, up to which limits, at what price.

Plain keys never stand in the configuration file: it holds hashes, or says where a Secret puts the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from paceline_server.config.group import Group, Positive
from paceline_server.keys import HASH_PATTERN

TierName = Literal["interactive", "standard", "batch"]
TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
KeyHash = Annotated[str, StringConstraints(pattern=HASH_PATTERN)]
Path = Annotated[str, StringConstraints(min_length=1)]
Price = Annotated[float, Field(ge=0)]

_PER_MILLION = "Price of a million of them, in the currency of your choice."


class PricesConfig(Group):
    """What a tenant's tokens cost; where they stand, cost is told in `usage` and in /metrics."""

    input_per_million: Price = Field(description=f"Prompt tokens that had to be computed. {_PER_MILLION}")
    cached_input_per_million: Price | None = Field(
        None, description="Prompt tokens found in the prefix cache; null is the price of the others."
    )
    output_per_million: Price = Field(description=f"Generated tokens. {_PER_MILLION}")


class TenantConfig(Group):
    """One tenant. Without any, everybody is served and needs no key; with some, a request without a known key is a 401.

    Limits are counted by each replica for itself, and in memory: with N replicas a tenant may use up to N times as
    much, and a replica that is restarted counts from zero. A running server takes over changes of this group.
    """

    name: TenantName = Field(
        description="In metrics and the access log: up to 63 letters, digits, dots, dashes and underscores."
    )
    anonymous: bool = Field(
        False,
        description="Requests without a key are this tenant's. At most one; an unknown key is refused all the same.",
    )
    key_hashes: tuple[KeyHash, ...] = Field(
        (), strict=False, description="Keys as `paceline-server hash-key` prints them: sha256: and 64 hex digits."
    )
    key_files: tuple[Path, ...] = Field(
        (),
        strict=False,
        description="Files of keys or of their hashes, one a line; read again when they change. "
        "Paths that are not absolute start from the folder PACELINE_KEYS_FOLDER of the environment.",
    )
    key_variables: tuple[Path, ...] = Field(
        (), strict=False, description="Environment variables with the same content; read once, at the start."
    )
    weight: float = Field(1.0, gt=0, description="Share of the engine (slo) and of a full queue, relative to others.")
    tier: TierName = Field("standard", description="Tier of requests that name none.")
    tiers: tuple[TierName, ...] = Field(
        ("interactive", "standard", "batch"),
        strict=False,
        description="Tiers that its requests may use; others are 403.",
    )
    min_priority: int = Field(
        0, le=0, description="Smallest priority that its requests may name: smaller goes first (policy priority)."
    )
    requests_per_minute: Positive | None = Field(
        None, description="Requests in any 60 seconds; one more is a 429. null is no limit."
    )
    tokens_per_minute: Positive | None = Field(
        None,
        description="Prompt and output tokens in any 60 seconds; null is no limit. "
        "Answers without max_tokens may exceed it, and have the tenant wait until that is made up for.",
    )
    daily_tokens: Positive | None = Field(
        None, description="Prompt and output tokens from midnight to midnight, UTC; null is no limit."
    )
    prices: PricesConfig | None = Field(None, description="What its tokens cost; null: no cost is told.")

    @model_validator(mode="after")
    def _somebody_gets_in(self) -> TenantConfig:
        if not (self.anonymous or self.key_hashes or self.key_files or self.key_variables):
            raise ValueError(
                f"the tenant {self.name} has no way in: give key_hashes, key_files, key_variables or anonymous: true"
            )
        if self.tier not in self.tiers:
            raise ValueError(f"tier ({self.tier}) must be one of tiers ({', '.join(self.tiers)})")
        return self


def check_together(tenants: Sequence[TenantConfig]) -> None:
    """What one tenant alone cannot know.

    Raises:
        ValueError: two of a name, two that are anonymous, or a key of two.
    """
    names = Counter(tenant.name for tenant in tenants)
    hashes = Counter(digest for tenant in tenants for digest in set(tenant.key_hashes))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"tenants: {', '.join(twice)} stands twice; names are unique")
    if sum(tenant.anonymous for tenant in tenants) > 1:
        raise ValueError("tenants: only one may be anonymous: requests without a key have to be somebody's")
    if shared := [digest for digest, count in hashes.items() if count > 1]:
        raise ValueError(f"tenants: the key {shared[0][:15]}… is of two tenants; a key says whose request it is")
