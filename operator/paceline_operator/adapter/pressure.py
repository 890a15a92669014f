"""Decides how loaded an LLMService is, from what its pods reported: queue depth, TTFT p95 and TTFT pressure.

Pure: time is a parameter and nothing here reads the network. Called by the adapter's collector (for the HPA), by the
operator (printer columns QUEUE and TTFT-P95) and by local mode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline_operator.adapter.histogram import Histogram, merge
from paceline_operator.adapter.scrape import Sample

WINDOW_SECONDS = 60.0
"""How far back TTFT is looked at: four HPA periods, long enough to hold some requests of a quiet service."""
QUANTILE = 0.95
MAX_PRESSURE = 2.0
"""One HPA step at most doubles the replicas: a p95 of ten objectives says "too slow", not "ten times as many pods"."""
HOLD = 1.0
"""The pressure at which the HPA keeps the replicas it has: its target value is 1."""


@dataclass(frozen=True, slots=True)
class PodReport:
    """One pod of a service in one scrape round.

    `sample` is None when the scrape failed. `ready` is the pod's Ready condition. `loading` says that a replica is
    on its way (placed on a node, not Ready yet, within its start-up budget).
    """

    sample: Sample | None
    ready: bool
    loading: bool


@dataclass(frozen=True, slots=True)
class Pressure:
    """The load of one service at one moment.

    `queue_depth` counts requests waiting and running in all pods. `ttft_p95` is in seconds, None when no request got
    its first token within the window. `missing` is the number of Ready pods that did not answer. `measured_at` is when
    the latest sample in it was taken (the caller's clock), None before the first one.
    """

    queue_depth: float
    ttft_p95: float | None
    ttft_pressure: float
    missing: int
    measured_at: float | None


@dataclass(slots=True)
class _PodHistory:
    """What we remember of one pod: its last sample, and its TTFT observations of the window, scrape by scrape."""

    last: Sample
    increases: deque[tuple[float, Histogram]] = field(default_factory=deque)

    def add(self, sample: Sample) -> None:
        if sample.at <= self.last.at:
            return
        increase = sample.ttft.since(self.last.ttft)
        if increase.total > 0:
            self.increases.append((sample.at, increase))
        self.last = sample

    def forget_before(self, moment: float) -> None:
        while self.increases and self.increases[0][0] < moment:
            self.increases.popleft()


class ServiceLoad:
    """The sliding window of one LLMService: feed it every scrape round, read its pressure at any time.

    Memory is bounded by the pods of the last round times the rounds of one window.
    """

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._histories: dict[str, _PodHistory] = {}
        self._reports: Mapping[str, PodReport] = {}

    def update(self, reports: Mapping[str, PodReport]) -> None:
        """Take in one round: pod key → report. A pod that is not in it is gone, and so are its numbers.

        The first sample of a pod is only the point to count from: when its observations were made is not known.
        """
        self._histories = {key: history for key, history in self._histories.items() if key in reports}
        for key, report in reports.items():
            if report.sample is None:
                continue
            if history := self._histories.get(key):
                history.add(report.sample)
                history.forget_before(report.sample.at - self._window)
            else:
                self._histories[key] = _PodHistory(report.sample)
        self._reports = dict(reports)

    def read(self, now: float, ttft_objective_seconds: float) -> Pressure:
        """Tell the load at `now`, against the service's TTFT objective."""
        for history in self._histories.values():
            history.forget_before(now - self._window)
        p95 = merge(i for h in self._histories.values() for _, i in h.increases).quantile(QUANTILE)
        waiting = sum(report.sample.waiting for report in self._reports.values() if report.sample)
        missing = sum(_is_missing(report) for report in self._reports.values())
        return Pressure(
            queue_depth=self._queue_depth(),
            ttft_p95=p95,
            ttft_pressure=_ttft_pressure(
                p95, ttft_objective_seconds, waiting=waiting, settled=self._is_settled(), missing=missing
            ),
            missing=missing,
            measured_at=max((history.last.at for history in self._histories.values()), default=None),
        )

    def _is_settled(self) -> bool:
        """Whether the pods that there are show how many are needed: one is Ready and none is on its way."""
        serving = any(report.ready for report in self._reports.values())
        loading = any(report.loading for report in self._reports.values())
        return serving and not loading

    def _queue_depth(self) -> float:
        """Sum over the pods. A missing pod counts with what it last said, or as much as the pods that answered.

        A pod that neither answers nor is Ready holds no requests: no endpoint leads to it.
        """
        answered = [report.sample.depth for report in self._reports.values() if report.sample]
        typical = sum(answered) / len(answered) if answered else 0.0
        missing = (key for key, report in self._reports.items() if _is_missing(report))
        return sum(answered) + sum(self._last_depth(key, typical) for key in missing)

    def _last_depth(self, key: str, otherwise: float) -> float:
        history = self._histories.get(key)
        return history.last.depth if history else otherwise


def _is_missing(report: PodReport) -> bool:
    return report.sample is None and report.ready


def _ttft_pressure(p95: float | None, objective: float, *, waiting: float, settled: bool, missing: int) -> float:
    """Weigh p95 against the objective: 0 when idle, at most MAX_PRESSURE, HOLD where the numbers prove nothing yet.

    While a replica is loading, the p95 is the one of too few pods and would add more and more of them. While none is
    Ready, or there is none, everybody is turned away, which looks like idleness and would leave too few pods for the
    return. While a pod is missing, a low p95 may be half the truth and must not take one away. Requests that wait
    without any first token in the whole window have no p95, and are not idle.
    """
    if not settled:
        return HOLD
    measured = HOLD if waiting else 0.0
    if p95 is not None:
        measured = min(p95 / objective, MAX_PRESSURE)
    return max(measured, HOLD) if missing else measured
