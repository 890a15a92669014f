"""Histograms as Prometheus exposes them, reduced to what a sliding window needs. Used by scrape and pressure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many observations fell into each bucket since the process started, or within a window.

    `bounds` are inclusive upper bounds in ascending order and end with +Inf; `counts[i]` is the number of observations
    in bucket i alone (not cumulative).
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def from_cumulative(cls, buckets: Mapping[float, float]) -> Histogram:
        """Build from the `le` buckets of the text format: upper bound → observations at or below it.

        Raises:
            ValueError: without a +Inf bucket, or when a larger bound holds fewer observations than a smaller one.
        """
        bounds = tuple(sorted(buckets))
        if not bounds or bounds[-1] != math.inf:
            raise ValueError("a histogram needs a bucket le=+Inf")
        cumulative = [0.0, *(buckets[bound] for bound in bounds)]
        counts = tuple(after - before for before, after in itertools.pairwise(cumulative))
        if not all(0 <= count < math.inf for count in counts):  # also refuses NaN
            raise ValueError("bucket counts of a histogram never fall as the bound rises")
        return cls(bounds, counts)

    @property
    def total(self) -> float:
        """Number of observations in all buckets."""
        return sum(self.counts)

    def since(self, earlier: Histogram) -> Histogram:
        """What was observed after `earlier` was read.

        A count that fell, or other buckets, mean that the process restarted in between: everything it holds is new
        then. This is the reset rule of Prometheus' `increase()`.
        """
        if self.bounds != earlier.bounds:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return self if any(count < 0 for count in counts) else Histogram(self.bounds, counts)

    def quantile(self, q: float) -> float | None:
        """Estimate the q-quantile (0..1), or None without observations.

        Linear inside a bucket, and the highest finite bound when it falls into +Inf: the rule of Prometheus'
        `histogram_quantile()`.
        """
        total = self.total
        if total <= 0:
            return None
        rank, seen, lower = q * total, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count > 0 and seen + count >= rank:
                return lower if bound == math.inf else lower + (bound - lower) * max(rank - seen, 0.0) / count
            seen, lower = seen + count, bound if bound != math.inf else lower
        return lower


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Add histograms up. Pods of two releases may have different buckets: the result has the bounds of all of them."""
    counts: dict[float, float] = {math.inf: 0.0}
    for histogram in histograms:
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
            counts[bound] = counts.get(bound, 0.0) + count
    bounds = tuple(sorted(counts))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds))
