"""How urgent a request is: its tier, its priority and its deadline, from what the client and the configuration say.

Pure. Called by `service` and `embeddings` between the check of the fields and the engine. A deadline counts from the
request's arrival here: reading a slow body and tokenising a long prompt are part of what the client waits for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline_server.config import SchedulingConfig
from paceline_server.config.tenants import TenantConfig
from paceline_server.engine.interface import Tier
from paceline_server.errors import DeadlineExceeded, InvalidRequest, TierNotAllowed
from paceline_server.gateway.fields import MAX_TIMEOUT_SECONDS
from paceline_server.gateway.requests import GenerationFields

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that the client waits; for proxies and clients that cannot write into the body."""

_SERVICE_TIERS = {"default": Tier.STANDARD, "flex": Tier.BATCH, "priority": Tier.INTERACTIVE}
_SERVICE_WORDS = {tier: word for word, tier in _SERVICE_TIERS.items()}
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")  # float() takes 1_000, 1e3 and digits of all scripts
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Urgency:
    """What a request asks of the scheduler.

    Attributes:
        timeout: seconds from its arrival at the gateway, or None for no limit.
        service_tier: OpenAI's word for `tier`, where the client used such a word and expects one back.
    """

    tier: Tier
    priority: int = 0
    timeout: float | None = None
    service_tier: str | None = None

    def remaining(self, elapsed: float) -> float | None:
        """Seconds that are left of the timeout; None where there is none.

        Args:
            elapsed: seconds since the request's arrival.

        Raises:
            DeadlineExceeded: nothing is left.
        """
        if self.timeout is None:
            return None
        if elapsed >= self.timeout:
            raise DeadlineExceeded(
                f"the request's time ({self.timeout:g} s) was over before it could be handed to the engine"
            )
        return self.timeout - elapsed


def urgency(
    fields: GenerationFields, header: str | None, scheduling: SchedulingConfig, tenant: TenantConfig
) -> Urgency:
    """What a request asks of the scheduler.

    Of the timeouts in the body, in the header and of the tier the smallest counts: each is the longest that somebody
    is willing to wait.

    Args:
        header: the value of `TIMEOUT_HEADER`.

    Raises:
        InvalidRequest: the header is no number of seconds, or the priority means nothing to the policy in force.
        TierNotAllowed: the tenant may not use the tier or the priority.
    """
    tier = _tier(fields, tenant)
    return Urgency(
        tier=tier,
        priority=_priority(fields.priority or 0, scheduling, tenant),
        timeout=_timeout(fields.timeout, header, tier, scheduling),
        service_tier=None if fields.service_tier is None else _SERVICE_WORDS[tier],
    )


def patience(asked: float | None, header: str | None, scheduling: SchedulingConfig, tenant: TenantConfig) -> Urgency:
    """What a request to embed asks of the engine: its tenant's tier, and how long its client waits.

    Args:
        asked: the timeout in the body, in seconds.
        header: the value of `TIMEOUT_HEADER`.

    Raises:
        InvalidRequest: the header is no number of seconds.
    """
    tier = Tier(tenant.tier)
    return Urgency(tier, timeout=_timeout(asked, header, tier, scheduling))


def _timeout(asked: float | None, header: str | None, tier: Tier, scheduling: SchedulingConfig) -> float | None:
    own = getattr(scheduling.tiers, tier.value).timeout_seconds
    return min((given for given in (asked, _header_seconds(header), own) if given is not None), default=None)


def _tier(fields: GenerationFields, tenant: TenantConfig) -> Tier:
    tier = fields.tier or _SERVICE_TIERS.get(fields.service_tier or "auto", Tier(tenant.tier))
    if tier not in tenant.tiers:
        field = "tier" if fields.tier else "service_tier"
        raise TierNotAllowed(
            f"{field}: the tenant {tenant.name} may not use the tier {tier}; it may use {', '.join(tenant.tiers)}",
            param=field,
            code="tier_not_allowed",
        )
    return tier


def _priority(asked: int, scheduling: SchedulingConfig, tenant: TenantConfig) -> int:
    """The priority as asked: who leaves it out has 0, whatever else the tenant may use."""
    if asked and scheduling.policy != "priority":
        raise InvalidRequest(
            f"priority: the scheduling policy here is {scheduling.policy}, which knows none; "
            "leave it out, send 0, or say how urgent the request is by tier",
            param="priority",
            code="unsupported_parameter",
        )
    if asked < tenant.min_priority:
        raise TierNotAllowed(
            f"priority: the tenant {tenant.name} may not use {asked}; its smallest is {tenant.min_priority}",
            param="priority",
            code="priority_not_allowed",
        )
    return asked


def _header_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(
            f"the header {TIMEOUT_HEADER} must be a number of seconds above 0 and at most {MAX_TIMEOUT_SECONDS}, "
            f"not {text[:_SHOWN_CHARS]!r}",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return seconds
