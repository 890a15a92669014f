"""The claims, with their sources, and what a measurement of one is. `__main__` joins the two.

Factors are those of the abstracts and pages named; what they were measured against is part of them. "Up to" means that
somebody looked for the workload on which it is largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One technique.

    Attributes:
        key: of the result file's ratios.
        technique: what over what.
        source: who says so.
        claimed: the factor and what it was of, in the source's own units.
        ours: what our ratio is of.
    """

    key: str
    technique: str
    source: str
    claimed: str
    ours: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement came to.

    Attributes:
        ratios: by key; the first part of a key is its claim's.
        details: figures behind them.
    """

    ratios: Mapping[str, float]
    details: Mapping[str, object]


CLAIMS = (
    Claim(
        "iteration_over_request",
        "scheduling by iteration over by request",
        "Orca, OSDI 2022",
        "36.9x throughput at equal latency over FasterTransformer (GPT-3 175B)",
        "output tokens/s, 16 clients, over static batches of packed prompts",
    ),
    Claim(
        "over_generate",
        "continuous batching over one `generate` at a time",
        "vLLM, announcement of June 2023",
        "up to 24x throughput over Hugging Face Transformers",
        "output tokens/s, 16 clients, over transformers' `generate`, in one float format",
    ),
    Claim(
        "paged_over_contiguous",
        "paged KV over room for the longest sequence",
        "vLLM, SOSP 2023",
        "2-4x throughput at equal latency over FasterTransformer and Orca",
        "sequences held at once in the same memory, simulated",
    ),
    Claim(
        "prefix_cache",
        "shared prefixes cached over computed anew",
        "SGLang, NeurIPS 2024",
        "up to 6.4x throughput over other inference systems, by all that SGLang does",
        "requests/s, prompts of 768 shared and some 60 own tokens, answers of 16",
    ),
    Claim(
        "chunked_itl",
        "prompts in chunks over whole prompts",
        "SARATHI, 2023; Sarathi-Serve, OSDI 2024",
        "up to 10x decode throughput (LLaMA-13B); 2.6x capacity under latency targets over vLLM (Mistral-7B)",
        "p99 between two tokens of those that generate while long prompts come, whole over chunked",
    ),
    Claim(
        "chunked_ttft_spread",
        "prompts in chunks over whole prompts",
        "as above",
        "no factor given",
        "coefficient of variation of the short requests' time to the first token, whole over chunked",
    ),
    Claim(
        "packing_over_padding",
        "packed prompts over padded ones",
        "BucketServe, 2025 (for buckets)",
        "up to 3.58x throughput over UELLM",
        "prompt tokens/s in batches of 16",
    ),
    Claim(
        "buckets_over_padding",
        "padding within buckets of one length over padding",
        "BucketServe, 2025",
        "up to 3.58x throughput over UELLM",
        "prompt tokens/s in batches of 16, sorted by length first",
    ),
    Claim(
        "swap_over_recompute",
        "swapping a preempted sequence over computing it anew",
        "vLLM, SOSP 2023, ablation studies",
        "better with large blocks, worse with small ones; on a par between",
        "seconds to compute 1024 tokens over seconds to copy their KV out and in",
    ),
    Claim(
        "block_size",
        "blocks of 16 tokens over other sizes",
        "vLLM, SOSP 2023, ablation studies",
        "small blocks are slow, large ones waste memory; 16 is the default",
        "decode tokens/s of blocks of 128 over blocks of 16",
    ),
)
