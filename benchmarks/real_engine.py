"""The engine's core with the real model, in this process: what the simulator is held to. Needs `make model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep

import numpy as np

from paceline_server.config import SchedulingConfig, parse
from paceline_server.engine.batch import Runner, SamplingParams, StepBatch
from paceline_server.engine.core import EngineCore
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.steptime import StepShape
from paceline_server.model.startup import load
from paceline_server.simulator.driver import Pool
from paceline_server.simulator.machine import Machine
from paceline_server.simulator.trace import TraceRequest

MODEL = "hf://HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(slots=True)
class Timing:
    """When a request was there, and its tokens, in seconds since the start."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.arrival


def load_model(dtype: str = "float32", threads: int = 2, **kv_cache: float) -> Loaded:
    """The demo's model on the CPU, warmed up; steps may be larger than those of the warm-up.

    Args:
        kv_cache: settings of that group.
    """
    config = parse(
        {
            "engine": {"model_path": MODEL, "dtype": dtype, "device": "cpu", "threads": threads},
            "batching": {"max_batch_size": 16, "max_tokens_in_batch": 256},
            "kv_cache": {"cpu_memory_gb": 1.0} | kv_cache,
        }
    )
    return load(config, lambda _: None)


def load_core(limits: SchedulerLimits, threads: int = 2) -> EngineCore:
    """The core on the demo's model, in float32."""
    loaded = load_model(threads=threads)
    scheduling = SchedulingConfig(admission="none")
    return EngineCore(loaded.runner, loaded.info, limits, scheduling, prefix_caching=False)


class TimedRunner:
    """Implements `Runner`: another one, whose steps are written down.

    Attributes:
        steps: shape and seconds of each.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[tuple[StepShape, float]] = []

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Run one step."""
        shape = StepShape.of((piece.start, len(piece.token_ids)) for piece in batch.slices)
        begin = perf_counter()
        sampled = list(self._runner.execute(batch))
        self.steps.append((shape, perf_counter() - begin))
        return sampled


def timed_core(limits: SchedulerLimits, threads: int = 2) -> tuple[EngineCore, TimedRunner]:
    """The core on the demo's model, in float32, and its runner."""
    loaded = load_model(threads=threads)
    runner = TimedRunner(loaded.runner)
    return EngineCore(runner, loaded.info, limits, SchedulingConfig(admission="none"), prefix_caching=False), runner


def machine_of(steps: Sequence[tuple[StepShape, float]], overhead: float = 0.0) -> Machine:
    """Costs that make up the steps' times, by least squares over all of them; none is below 0.

    Their sum is that of the steps, whatever disturbed the machine meanwhile.

    Args:
        overhead: seconds of a step that the runner does not see.
    """
    rows = np.array([(1.0, shape.tokens, shape.pairs) for shape, _ in steps])
    seconds = np.array([taken + overhead for _, taken in steps])
    used = [0, 1, 2]
    while True:
        costs = dict(zip(used, np.linalg.lstsq(rows[:, used], seconds, rcond=None)[0], strict=True))
        if min(costs.values()) >= 0.0:
            return Machine(*(float(costs.get(index, 0.0)) for index in range(3)))
        used.remove(min(costs, key=lambda index: costs[index]))


def pool(core: EngineCore) -> Pool:
    """The core's KV cache, for the simulator."""
    return Pool(core.info.num_blocks, core.info.block_size, prefix_caching=False)


def run(core: EngineCore, trace: Sequence[TraceRequest]) -> list[Timing]:
    """Run a trace in real time; every answer is as long as the trace says."""
    begin, submitted = perf_counter(), 0
    timings = [Timing(request.arrival) for request in trace]
    while submitted < len(trace) or core.has_work:
        now = perf_counter() - begin
        while submitted < len(trace) and trace[submitted].arrival <= now:
            request = replace(
                trace[submitted].request(submitted), sampling=SamplingParams(temperature=0.0), ignore_eos=True
            )
            core.submit(request, begin + trace[submitted].arrival)
            submitted += 1
        if not core.has_work:
            sleep(max(0.0, trace[submitted].arrival - now))
            continue
        for output in core.step():
            timings[int(output.request_id)].tokens += [perf_counter() - begin] * len(output.token_ids)
    return timings
