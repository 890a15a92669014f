"""When a step loop that gives no sign of life counts as stalled, and when as hung. Called by `state` and `health`.

The loop gives a sign with every step, and every second when idle. A step that takes long is no stall: how long an
honest one takes on this machine is known from the warm-up, which runs the largest prefill and the largest decode.
"""

from __future__ import annotations

from paceline_server.engine.status import EngineStatus

HUNG_SECONDS = 120.0
"""A loop that is silent for longer hangs: the process is to be restarted. No honest step takes that long."""

_STALLED_SECONDS = 30.0
_STALLED_WARMUPS = 4.0
"""Attention over long contexts and busy neighbours may make a step several times as slow as the warm-up's."""


def stalled(status: EngineStatus) -> bool:
    """Whether a ready engine is silent for so long that it should get no new requests until it moves again."""
    return status.ready and status.step_age is not None and status.step_age > stall_limit(status)


def hung(status: EngineStatus) -> bool:
    """Whether the engine is silent for so long that only a restart helps."""
    return status.step_age is not None and status.step_age > HUNG_SECONDS


def stall_limit(status: EngineStatus) -> float:
    """Seconds of silence: 30, or four times the warm-up's where that is more, and never more than `HUNG_SECONDS`."""
    warmup = sum(phase.seconds or 0.0 for phase in status.phases if phase.name == "warmup")
    return min(max(_STALLED_SECONDS, _STALLED_WARMUPS * warmup), HUNG_SECONDS)
