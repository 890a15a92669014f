"""How an engine is: the phases of its start, and what it has done. It tells the gateway; plain data, as `interface`.

`EngineStatus` answers /readyz and /healthz, `EngineStats` is what /metrics and backpressure read.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """One phase of a start; `seconds` is None while it runs."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine is, for /readyz and /healthz.

    Attributes:
        ready: warmed up and answering; False again while a lost engine is restarted.
        reason: Loading, EngineRestarting or Ready.
        step_age: seconds since the step loop last gave a sign of life, or None before it runs.
    """

    ready: bool
    reason: str
    message: str
    phases: tuple[StartupPhase, ...] = ()
    step_age: float | None = None

    @property
    def phase(self) -> str | None:
        """Name of the phase under way; None between two, and where the engine is ready."""
        return next((phase.name for phase in self.phases if phase.seconds is None), None)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and totals since the engine's start, sent with every step.

    Attributes:
        waiting: requests not yet scheduled for the first time, or preempted; none that has another answer running.
        running: answers that hold KV blocks.
        waiting_tokens: prompt tokens of those that wait.
        kv_usage: share of the pool's blocks in use by running sequences, 0..1.
        batch_sequences, batch_tokens: what the last step held.
        swapped_out_blocks, swapped_in_blocks: copied to host memory by preemptions, and back.
        offloaded_blocks: evicted by the device and kept, by what happened to them (stored in host memory, returned to
            the device, written to disk, read, failed reads).
        expirations: requests that ran out of their own time.
        oldest_waiting_seconds: age of the request that has waited longest.
        predicted_ttft_seconds: forecast for a short request that comes now, by tier; empty while nothing is known.
        stage_seconds: time spent by stage of the step loop (schedule, execute, update).
        step_costs: seconds that a step takes by itself, by token and by pair of tokens; empty while nothing is known.
    """

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    expirations: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    offloaded_blocks: dict[str, int] = field(default_factory=dict)
    batch_sequences: int = 0
    batch_tokens: int = 0
    oldest_waiting_seconds: float = 0.0
    predicted_ttft_seconds: dict[str, float] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    step_costs: dict[str, float] = field(default_factory=dict)
