"""Draws the next tokens of a batch from their logits, all rows at once, with torch's operators on any device.

`runner` calls it once a step, but where the CPU kernels run: there `native_sampler` does the same.

Greedy rows take an argmax, and so do the others, of their logits plus Gumbel noise: that is a draw from the softmax
(Maddison, Tarlow, Minka, "A* sampling", 2014). The noise is a function of the row's seed and position and of the token
id (`noise`), so a token does not depend on what shares its batch, and logits that the batch's shape moves in their
last bits change it only where two tokens nearly tie. (Inverting the distribution function at one number would not do:
there every small change moves all boundaries behind it.) Top-k, top-p and min-p become one threshold a row, found from
the largest logits only: nothing is sorted where none of them is set, and the whole vocabulary only where the nucleus is
that wide.

Filters apply in the order of transformers' `generate`: temperature, top-k, top-p over what top-k left, min-p. Tokens
that tie with the last one kept are kept too: which of them comes first in memory must not decide.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_server.model.noise import gumbels
from paceline_server.model.packing import COLDEST, SamplingBatch

_FIRST_CANDIDATES = 256
"""How many of the largest logits are looked at first for top-p; eight times as many in every further try."""


def sample(logits: Tensor, settings: SamplingBatch) -> list[int]:
    """Draw one token a row.

    Args:
        logits: [R, V] float32; overwritten.
        settings: of the R rows.
    """
    rows, tokens = settings.banned
    if len(rows):
        logits[torch.from_numpy(rows), torch.from_numpy(tokens)] = -math.inf
    random = np.flatnonzero(settings.temperature >= COLDEST)
    if len(random) == 0:
        return _as_ints(logits.argmax(dim=-1))
    if len(random) == len(logits):
        return _as_ints(_draw(logits, settings, random))
    chosen = logits.argmax(dim=-1)
    index = torch.from_numpy(random).to(logits.device)
    chosen[index] = _draw(logits[index], settings, random)
    return _as_ints(chosen)


def _draw(logits: Tensor, settings: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """[N] tokens for the N rows whose logits are given."""
    scaled = logits / _column(settings.temperature[rows], logits)
    filtered = np.flatnonzero((settings.top_k[rows] > 0) | (settings.top_p[rows] < 1.0) | (settings.min_p[rows] > 0.0))
    if len(filtered):
        index = torch.from_numpy(filtered).to(logits.device)
        kept = scaled[index]
        below = kept < _thresholds(kept, settings, rows[filtered])[:, None]
        scaled[index] = kept.masked_fill_(below, -math.inf)
    noise = gumbels(settings.seeds[rows], settings.positions[rows], like=scaled)
    return scaled.add_(noise).argmax(dim=-1)


def _thresholds(scaled: Tensor, settings: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """[N] smallest logit that each row keeps."""
    vocabulary = scaled.shape[-1]
    top_p = settings.top_p[rows]
    top_k = settings.top_k[rows]
    top_k = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    candidates = int(top_k[top_k < vocabulary].max(initial=1))
    if bool(((top_p < 1.0) & (top_k == vocabulary)).any()):
        candidates = max(candidates, _FIRST_CANDIDATES)
    while True:
        candidates = min(candidates, vocabulary)
        values = scaled.topk(candidates, dim=-1).values  # [N, C], descending
        keep = _ranks_kept(scaled, values, top_k, top_p)  # [N]
        open_ended = (keep.cpu().numpy() == candidates) & (candidates < top_k)
        if not bool((open_ended & (top_p < 1.0)).any()):
            break
        candidates *= 8
    last = values.gather(1, keep[:, None] - 1)[:, 0]
    last[torch.from_numpy(open_ended).to(last.device)] = -math.inf  # limited by min-p alone
    with np.errstate(divide="ignore"):
        log_min_p = torch.from_numpy(np.log(settings.min_p[rows])).to(last.device)
    return torch.maximum(last, values[:, 0] + log_min_p)


def _ranks_kept(scaled: Tensor, values: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """[N] how many of the C largest logits top-k and top-p keep, at least 1; C of them: perhaps more."""
    top_k_column, top_p_column = _column(top_k, values), _column(top_p, values)
    inside = torch.arange(values.shape[-1], device=values.device) < top_k_column
    weights = (values - values[:, :1]).exp_().masked_fill_(~inside, 0.0).double()
    everything = (scaled - values[:, :1]).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    total = torch.where(top_k_column < scaled.shape[-1], weights.sum(dim=-1, keepdim=True), everything)
    larger = weights.cumsum(dim=-1) - weights  # mass of the tokens before each
    nucleus = (larger < top_p_column * total) | (top_p_column >= 1.0)
    return (inside & nucleus).sum(dim=-1).clamp_(min=1)


def _column(values: NDArray[np.float32] | NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _as_ints(tokens: Tensor) -> list[int]:
    result: list[int] = tokens.tolist()
    return result
