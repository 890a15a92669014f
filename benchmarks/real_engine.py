"""The engine's core with the real model, in this process: what the simulator is held to. Needs `make model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep

from paceline_server.config import SchedulingConfig, parse
from paceline_server.engine.batch import SamplingParams
from paceline_server.engine.core import EngineCore
from paceline_server.engine.loop import Loaded
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.model.startup import load
from paceline_server.simulator.driver import Pool
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
