"""Drives a ContinuousBatchingPipeline by commands on stdin. Runs in OpenVINO's environment, without this package.

    python openvino_driver.py FOLDER [PRECISION]

Says {"ready": true} when the model is loaded. Then a line in is {"requests": [{"prompt", "max_tokens"}…], "clients": n}
or {…, "arrivals": [seconds…]}, and the line out is a list of {"sent", "arrivals", "ended", "output_tokens",
"prompt_tokens"}, times in seconds from the run's begin. One client holds one request at a time, as over HTTP.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from time import perf_counter, sleep
from typing import Any

import openvino_genai  # type: ignore[import-not-found]  # in its own environment


def main() -> None:
    """Load, then answer until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    pipeline = _load(*sys.argv[1:])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        records = _run(pipeline, command["requests"], command.get("clients"), command.get("arrivals"))
        print(json.dumps(records), file=answers, flush=True)


def _load(folder: str, precision: str | None = None) -> Any:
    config = openvino_genai.SchedulerConfig()
    config.cache_size = 2
    config.max_num_batched_tokens = 256
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = True
    properties = {"INFERENCE_PRECISION_HINT": precision} if precision else {}
    return openvino_genai.ContinuousBatchingPipeline(folder, config, "CPU", properties)


def _run(
    pipeline: Any, requests: list[dict[str, Any]], clients: int | None, arrivals: list[float] | None
) -> list[dict[str, Any]]:
    tokenizer = pipeline.get_tokenizer()
    line = deque(enumerate(requests))
    active: dict[int, tuple[Any, dict[str, Any]]] = {}
    records = []
    begin = perf_counter()
    while line or active:
        now = perf_counter() - begin
        while line and (len(active) < clients if clients else arrivals is not None and arrivals[line[0][0]] <= now):
            number, request = line.popleft()
            sent = arrivals[number] if arrivals else perf_counter() - begin
            ids = tokenizer.encode(request["prompt"], add_special_tokens=False).input_ids
            handle = pipeline.add_request(number, ids, _generation(request["max_tokens"]))
            record = {"sent": sent, "arrivals": [], "ended": 0.0, "output_tokens": 0, "prompt_tokens": ids.size}
            records.append(record)
            active[number] = handle, record
        if not active:
            assert arrivals is not None
            sleep(max(0.0, arrivals[line[0][0]] - (perf_counter() - begin)))
            continue
        pipeline.step()
        _read(active, tokenizer, perf_counter() - begin)
    return records


def _generation(max_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def _read(active: dict[int, tuple[Any, dict[str, Any]]], tokenizer: Any, now: float) -> None:
    """Take what a step brought, as text, as a server would have to."""
    for number, (handle, record) in list(active.items()):
        if handle.can_read():
            ids = [token for output in handle.read().values() for token in output.generated_ids]
            tokenizer.decode(ids)
            record["arrivals"].append(now)
            record["output_tokens"] += len(ids)
        if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
            record["ended"] = now
            del active[number]


if __name__ == "__main__":
    main()
