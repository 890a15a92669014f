"""Claims about what shares a batch: iterations, `generate`, packing and buckets."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from benchmarks.batching import BATCHERS, CLIENTS, REQUESTS, make_core
from benchmarks.claims.rows import Measured
from benchmarks.clients import ClosedLoop, Job, mixed_jobs, run_clients
from benchmarks.machine import float_format
from paceline_server.engine.batchers import Batcher, Batching
from paceline_server.engine.loop import Loaded


def iteration_over_request(loaded: Loaded, *, quick: bool) -> Measured:
    """Continuous over static batches without padding, and over dynamic ones."""
    jobs = mixed_jobs(32 if quick else 64, loaded.info.vocab_size)
    runs = {
        name: run_clients(make_core(loaded, *BATCHERS[name]), jobs, CLIENTS)
        for name in ("continuous", "dynamic", "static, packed")
    }
    rate = {name: run.output_tokens_per_second for name, run in runs.items()}
    return Measured(
        {
            "iteration_over_request": rate["continuous"] / rate["static, packed"],
            "iteration_over_request_dynamic": rate["continuous"] / rate["dynamic"],
        },
        {name: asdict(run) for name, run in runs.items()},
    )


def over_generate(loaded: Loaded, *, quick: bool) -> Measured:
    """Continuous batching at 16 clients over transformers' `generate`, one request at a time, on the same jobs."""
    jobs = mixed_jobs(32 if quick else 64, loaded.info.vocab_size)
    ours = run_clients(make_core(loaded, *BATCHERS["continuous"]), jobs, CLIENTS).output_tokens_per_second
    alone = _generate(loaded, jobs[: 2 if quick else 12])
    return Measured({"over_generate": ours / alone}, {"continuous": ours, "generate": alone})


def packing(loaded: Loaded, *, quick: bool) -> Measured:
    """Prompt tokens/s of batches of prompts: packed, padded, and padded after sorting by length."""
    jobs = [Job(job.prompt, 1) for job in mixed_jobs(32 if quick else 96, loaded.info.vocab_size)]
    sorted_jobs = sorted(jobs, key=lambda job: len(job.prompt))
    packed, padded = Batching(Batcher.STATIC), Batching(Batcher.STATIC, packed=False)
    runs = {
        "packed": run_clients(make_core(loaded, packed, REQUESTS), jobs, len(jobs)),
        "padded": run_clients(make_core(loaded, padded, REQUESTS), jobs, len(jobs)),
        "buckets": run_clients(make_core(loaded, padded, REQUESTS), sorted_jobs, len(jobs)),
    }
    rate = {name: _useful_rate(run) for name, run in runs.items()}
    return Measured(
        {
            "packing_over_padding": rate["packed"] / rate["padded"],
            "buckets_over_padding": rate["buckets"] / rate["padded"],
        },
        {
            name: {"prompt_tokens_per_second": rate[name], "padded_tokens": run.padded_tokens}
            for name, run in runs.items()
        },
    )


def _useful_rate(run: ClosedLoop) -> float:
    return run.useful_tokens / run.seconds


@torch.inference_mode()
def _generate(loaded: Loaded, jobs: list[Job]) -> float:
    """Output tokens/s of `generate`, greedy, with its own KV cache, on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(loaded.info.folder, dtype=getattr(torch, float_format())).eval()
    generated, begin = 0, perf_counter()
    for job in jobs:
        prompt = torch.tensor([job.prompt])
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=job.output_tokens,
            max_new_tokens=job.output_tokens,
        )
        generated += answer.shape[1] - prompt.shape[1]
    seconds = perf_counter() - begin
    torch.set_num_threads(threads)
    return generated / seconds
