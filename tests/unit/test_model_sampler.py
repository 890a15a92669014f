"""Sampling: the right distribution, filters as documented, and a draw that depends on seed and position only."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model import native_sampler, sampler
from paceline_server.model.native import ThreadPool
from paceline_server.model.noise import gumbel, gumbels
from paceline_server.model.packing import SamplingBatch, pack_sampling
from paceline_server.model.randomness import outputs

VOCABULARY = 12
LOGITS = torch.linspace(2.0, -2.0, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.manual_seed(0))]


Sample = Callable[[torch.Tensor, SamplingBatch], list[int]]


@pytest.fixture(scope="module", params=["torch", "kernels"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Both ways to draw keep the same promises."""
    return sampler.sample if request.param == "torch" else partial(in_kernels, ThreadPool(2))


def in_kernels(pool: ThreadPool, logits: torch.Tensor, settings: SamplingBatch) -> list[int]:
    return native_sampler.sample(pool, logits.numpy(), settings)


def batch_of(rows: list[tuple[SamplingParams, int]], banned: tuple[int, ...] = ()) -> SamplingBatch:
    """Settings of rows, each given by its parameters and the position that is drawn."""
    return pack_sampling(
        StepBatch([SequenceSlice([0], position - 1, [0], params, banned) for params, position in rows])
    )


def draws(sample: Sample, count: int, logits: torch.Tensor = LOGITS, seed: int = 7, **params: Any) -> list[int]:
    """One row's draws at `count` positions."""
    rows = [(SamplingParams(seed=seed, **params), position) for position in range(1, count + 1)]
    return sample(logits.repeat(count, 1), batch_of(rows))


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    """Pearson's statistic over the tokens of positive probability; the others must not have been drawn."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    expected = probabilities.numpy() * len(tokens)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    return float((((counts - expected) ** 2)[possible] / expected[possible]).sum())


def limit(freedom: int) -> float:
    """The chi-square statistic that chance exceeds once in 100,000 (Wilson and Hilferty's approximation)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.2649 * math.sqrt(2 / (9 * freedom))) ** 3)


def kept_by(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """The distribution after the filters, written the long way: sort, cut, renormalise."""
    order = logits.argsort(descending=True)
    values = logits[order]
    if top_k:
        values[top_k:] = -math.inf
    probabilities = values.double().softmax(0)
    before = probabilities.cumsum(0) - probabilities
    keep = (before < top_p) & (probabilities >= min_p * probabilities[0])
    keep[0] = True
    return torch.zeros_like(probabilities).scatter_(0, order, (probabilities * keep) / (probabilities * keep).sum())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_follow_the_softmax_of_the_scaled_logits(sample: Sample, temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0)
    assert chi_square(draws(sample, 20_000, temperature=temperature), expected) < limit(VOCABULARY - 1)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 4},
        *({"top_p": top_p} for top_p in (1e-6, 0.3, 0.45, 0.6, 0.75, 0.85, 0.95)),
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.25},
        {"top_k": 1000},
    ],
)
def test_filters_keep_and_renormalise_as_generate_does(sample: Sample, filters: dict[str, Any]) -> None:
    expected = kept_by(LOGITS, **filters)
    freedom = max(1, int((expected > 0).sum()) - 1)
    assert chi_square(draws(sample, 10_000, **filters), expected) < limit(freedom)


@given(st.integers(0, 2**31), st.floats(0.05, 0.999), st.floats(0.05, 8.0))
@settings(max_examples=60)
def test_the_nucleus_is_exact_however_wide_it_is(sample: Sample, seed: int, top_p: float, spread: float) -> None:
    # More tokens than the first look at the largest logits takes in, so wide nuclei need a second look.
    logits = torch.randn(3000, generator=torch.manual_seed(seed)) * spread
    inside = kept_by(logits, top_p=float(np.float32(top_p))) > 0
    tokens = draws(sample, 64, logits, seed=seed, top_p=top_p)
    assert inside[tokens].all()


def test_the_last_token_of_a_wide_nucleus_can_be_drawn(sample: Sample) -> None:
    flat = torch.zeros(3000)
    flat[::2] = 1e-3  # a nucleus of 0.9 ends among the odd ones
    assert {token % 2 for token in draws(sample, 400, flat, top_p=0.9)} == {0, 1}


def test_zero_temperature_takes_the_most_likely_token_whatever_else_is_set(sample: Sample) -> None:
    assert set(draws(sample, 50, temperature=0.0, top_k=5, top_p=0.9, min_p=0.1)) == {int(LOGITS.argmax())}


def test_banned_tokens_are_never_drawn_and_the_others_share_their_mass(sample: Sample) -> None:
    banned = tuple(LOGITS.argsort(descending=True)[:3].tolist())
    rows = [(SamplingParams(seed=1), position) for position in range(1, 5001)]
    tokens = sample(LOGITS.repeat(len(rows), 1), batch_of(rows, banned))
    masked = LOGITS.clone()
    masked[list(banned)] = -math.inf
    assert chi_square(tokens, masked.softmax(0)) < limit(VOCABULARY - 4)
    greedy = sample(LOGITS[None].clone(), batch_of([(SamplingParams(temperature=0.0), 1)], banned))
    assert greedy == [int(masked.argmax())]


@st.composite
def mixed_rows(draw: st.DrawFn) -> list[tuple[SamplingParams, int]]:
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        top_k=st.sampled_from([0, 1, 5, 300]),
        min_p=st.sampled_from([0.0, 0.2]),
        seed=st.integers(0, 2**63 - 1),
    )
    return draw(st.lists(st.tuples(params, st.integers(1, 10_000)), min_size=1, max_size=8))


@given(mixed_rows(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_draw_depends_neither_on_what_shares_the_batch_nor_on_the_order(
    sample: Sample, rows: list[tuple[SamplingParams, int]], shuffler: Any
) -> None:
    # Logits on a coarse grid, as bfloat16 gives them: many tokens tie at the edge of a filter.
    logits = (torch.randn(len(rows), 2000, generator=torch.manual_seed(5)) * 4).round() / 2
    together = sample(logits.clone(), batch_of(rows))
    alone = [sample(logits[[row]].clone(), batch_of([rows[row]]))[0] for row in range(len(rows))]
    assert together == alone
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    shuffled = sample(logits[order].clone(), batch_of([rows[row] for row in order]))
    assert shuffled == [together[row] for row in order]


def test_seeds_and_positions_give_different_numbers_that_repeat(sample: Sample) -> None:
    assert draws(sample, 200, seed=1) == draws(sample, 200, seed=1)
    assert draws(sample, 200, seed=1) != draws(sample, 200, seed=2)
    assert len(set(draws(sample, 200, seed=1))) > 5


def test_splitmix_gives_the_published_numbers() -> None:
    # The first outputs for the seed 1234567, as listed with the reference code at rosettacode.org.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert outputs(np.full(4, 1234567, dtype=np.uint64), np.arange(4)).tolist() == expected


def noise(seeds: Any, positions: Any, vocabulary: int) -> torch.Tensor:
    """[R, V] uniform numbers that the Gumbel noise of R rows stands for."""
    rows = np.broadcast_arrays(np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.int64))
    return (-(-gumbels(rows[0], rows[1], torch.empty(1, vocabulary)).double()).exp()).exp()


ALONG = {
    "tokens": lambda: noise([3], [3], 200_000)[0],
    "positions": lambda: noise(3, np.arange(200_000), 3)[:, 2],
    "seeds": lambda: noise(np.arange(200_000), 3, 3)[:, 2],
}


@pytest.mark.parametrize("axis", ALONG)
def test_noise_is_uniform_and_uncorrelated_along_tokens_positions_and_seeds(axis: str) -> None:
    numbers = ALONG[axis]().numpy()
    cells = (numbers * 1024).astype(np.int64).tolist()
    assert chi_square(cells, torch.full((1024,), 1 / 1024)) < limit(1023)
    for lag in (1, 2, 3, 64, 4096):  # pairs fill the square evenly
        pairs = (numbers[:-lag] * 32).astype(np.int64) * 32 + (numbers[lag:] * 32).astype(np.int64)
        assert chi_square(pairs.tolist(), torch.full((1024,), 1 / 1024)) < limit(1023)


def test_the_noise_that_wins_is_uniform_down_to_one_in_a_hundred_thousand() -> None:
    """Against a flat vocabulary the largest of many values counts, so the far tail must be right."""
    numbers = noise(np.arange(200), 9, 49_152)
    top = 1 - numbers[numbers > 1 - 2.0**-16]
    cells = (top * 2.0**20).long().tolist()
    assert chi_square(cells, torch.full((16,), 1 / 16)) < limit(15)
    assert abs(len(cells) - 150) < 5 * math.sqrt(150)  # 200 * 49152 / 2^16


@pytest.mark.parametrize("neighbour", [(1, 0), (0, 1), (1, 1), (0x9E3779B97F4A7C15, -1), (2**63, 0)])
def test_rows_of_neighbouring_seeds_and_positions_have_nothing_in_common(neighbour: tuple[int, int]) -> None:
    """Nor are streams shifts of one another where seeds differ by the generator's step."""
    seed, position = neighbour
    one, other = noise([5, 5 + seed], [7, 7 + position], 50_000).numpy()
    pairs = (one * 16).astype(np.int64) * 16 + (other * 16).astype(np.int64)
    assert chi_square(pairs.tolist(), torch.full((256,), 1 / 256)) < limit(255)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_that_a_batchs_shape_moves_in_their_last_bits_give_the_same_tokens(
    sample: Sample, temperature: float
) -> None:
    """At least 99.9 % of them, though the tail is flat, as a small model's is.

    Inverting the distribution function at one number gives others for three to five draws in a thousand.
    """
    generator = torch.manual_seed(11)
    logits = torch.randn(2000, 8192, generator=generator) * 2.5
    moved = logits + 1e-6 * logits.abs().max() * torch.randn(logits.shape, generator=generator)
    settings = batch_of([(SamplingParams(seed=row, temperature=temperature), row % 40 + 1) for row in range(2000)])
    assert not torch.equal(logits, moved)
    before, after = sample(logits, settings), sample(moved, settings)
    assert len(set(before)) > 1000
    assert sum(one != other for one, other in zip(before, after, strict=True)) <= 2


def test_the_extremes_of_the_random_word_are_finite_noise(sample: Sample) -> None:
    """A token that alone is possible wins whatever its noise, and an impossible one never does."""
    lowest, highest = gumbel(torch.tensor([2**31 - 1, 0], dtype=torch.int32)).tolist()
    assert -3 < lowest < -2
    assert 21 < highest < 22
    logits = torch.full((5000, 6), -math.inf)
    logits[:, 4] = 1.0
    rows = [(SamplingParams(seed=row), 1) for row in range(5000)]
    assert set(sample(logits, batch_of(rows))) == {4}


@given(st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 4.0]), mixed_rows())
@settings(max_examples=80)
def test_the_kernels_draw_the_tokens_that_torch_draws(
    seed: int, spread: float, rows: list[tuple[SamplingParams, int]]
) -> None:
    """So that a seed means the same on every device. 49152 tokens and three, which fill no register."""
    generator = torch.manual_seed(seed)
    logits = torch.randn(len(rows), 49_155, generator=generator) * spread
    logits[:, ::7] = logits[:, ::7].round()  # many that tie
    kernels = in_kernels(ThreadPool(2), logits.clone(), batch_of(rows, banned=(3, 77)))
    assert kernels == sampler.sample(logits.clone(), batch_of(rows, banned=(3, 77)))


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_logits_that_are_no_numbers_are_not_drawn_by_the_kernels(params: dict[str, Any], odd: float) -> None:
    pool = ThreadPool(1)
    logits = torch.full((4, 100), odd)
    batch = batch_of([(SamplingParams(seed=row, **params), 1) for row in range(4)])
    assert in_kernels(pool, logits.clone(), batch) == [0] * 4  # some token must come out
    logits[:, 60] = -5.0
    assert in_kernels(pool, logits, batch) == [60] * 4
