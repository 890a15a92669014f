"""Sampling: the right distribution, filters as documented, and a draw that depends on seed and position only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.engine.batch import SamplingParams, SequenceSlice, StepBatch
from paceline_server.model import sampler
from paceline_server.model.packing import SamplingBatch, pack_sampling
from paceline_server.model.randomness import outputs, uniforms
from paceline_server.model.sampler import sample

VOCABULARY = 12
LOGITS = torch.linspace(2.0, -2.0, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.manual_seed(0))]


def batch_of(rows: list[tuple[SamplingParams, int]], banned: tuple[int, ...] = ()) -> SamplingBatch:
    """Settings of rows, each given by its parameters and the position that is drawn."""
    return pack_sampling(
        StepBatch([SequenceSlice([0], position - 1, [0], params, banned) for params, position in rows])
    )


def draws(count: int, logits: torch.Tensor = LOGITS, seed: int = 7, **params: Any) -> list[int]:
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
def test_tokens_follow_the_softmax_of_the_scaled_logits(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(0)
    assert chi_square(draws(20_000, temperature=temperature), expected) < limit(VOCABULARY - 1)


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
def test_filters_keep_and_renormalise_as_generate_does(filters: dict[str, Any]) -> None:
    expected = kept_by(LOGITS, **filters)
    freedom = max(1, int((expected > 0).sum()) - 1)
    assert chi_square(draws(10_000, **filters), expected) < limit(freedom)


@given(st.integers(0, 2**31), st.floats(0.05, 0.999), st.floats(0.05, 8.0))
@settings(max_examples=60, deadline=None)
def test_the_nucleus_is_exact_however_wide_it_is(seed: int, top_p: float, spread: float) -> None:
    # More tokens than the first look at the largest logits takes in, so wide nuclei need a second look.
    logits = torch.randn(3000, generator=torch.manual_seed(seed)) * spread
    inside = kept_by(logits, top_p=float(np.float32(top_p))) > 0
    tokens = draws(64, logits, seed=seed, top_p=top_p)
    assert inside[tokens].all()


def test_the_last_token_of_a_wide_nucleus_can_be_drawn() -> None:
    flat = torch.zeros(3000)
    flat[::2] = 1e-3  # a nucleus of 0.9 ends among the odd ones
    assert {token % 2 for token in draws(400, flat, top_p=0.9)} == {0, 1}


def test_zero_temperature_takes_the_most_likely_token_whatever_else_is_set() -> None:
    assert set(draws(50, temperature=0.0, top_k=5, top_p=0.9, min_p=0.1)) == {int(LOGITS.argmax())}


def test_banned_tokens_are_never_drawn_and_the_others_share_their_mass() -> None:
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
@settings(max_examples=60, deadline=None)
def test_a_draw_depends_neither_on_what_shares_the_batch_nor_on_the_order(
    rows: list[tuple[SamplingParams, int]], shuffler: Any
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


def test_seeds_and_positions_give_different_numbers_that_repeat() -> None:
    assert draws(200, seed=1) == draws(200, seed=1)
    assert draws(200, seed=1) != draws(200, seed=2)
    assert len(set(draws(200, seed=1))) > 5


def test_splitmix_gives_the_published_numbers() -> None:
    # The first outputs for the seed 1234567, as listed with the reference code at rosettacode.org.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert outputs(np.full(4, 1234567, dtype=np.uint64), np.arange(4)).tolist() == expected


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_numbers_are_uniform_and_uncorrelated_along_seeds_and_along_positions(axis: str) -> None:
    count = 50_000
    steps, still = np.arange(count), np.full(count, 3)
    seeds, positions = (steps, still) if axis == "seeds" else (still, steps)
    numbers = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    cells = (numbers * 64).astype(np.int64).tolist()
    assert chi_square(cells, torch.full((64,), 1 / 64)) < limit(63)
    for lag in (1, 2, 64):  # pairs fill the square evenly
        pairs = (numbers[:-lag] * 16).astype(np.int64) * 16 + (numbers[lag:] * 16).astype(np.int64)
        assert chi_square(pairs.tolist(), torch.full((256,), 1 / 256)) < limit(255)


def test_streams_are_no_shifts_of_one_another_even_where_seeds_differ_by_the_generators_step() -> None:
    seeds = np.array([5, (5 + 0x9E3779B97F4A7C15) % 2**64, 6], dtype=np.uint64)
    streams = uniforms(np.repeat(seeds, 200), np.tile(np.arange(200), len(seeds)))
    assert len(np.unique(streams)) == len(streams)


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (0.4999, 2), (0.5, 4), (1.0 - 2.0**-48, 4)])
def test_the_extremes_of_the_random_number_fall_on_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, number: float, token: int
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, positions: np.full(len(seeds), number))
    logits = torch.full((1, 6), -math.inf)
    logits[0, [2, 4]] = 1.0
    assert sample(logits, batch_of([(SamplingParams(), 1)])) == [token]
