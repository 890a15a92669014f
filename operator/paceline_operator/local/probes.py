"""The kubelet's probes: httpGet, on the period and thresholds that the rendered pod names.

`Verdict` is the pure count of successes and failures; `Probe.check` asks once; `watch` asks for ever. Called by the
kubelet for the startup, liveness and readiness probe of a container.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from paceline_operator.cluster import Manifest
from paceline_operator.local import pod as pods_
from paceline_operator.local.errors import NotSupportedLocally

_ANSWER_BYTES = 1024  # of a failed probe's body, for the message


@dataclass(frozen=True, slots=True)
class Probe:
    """An httpGet probe, with Kubernetes' defaults where the pod leaves something out. Times in seconds."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    initial_delay: float = 0
    period: float = 10
    timeout: float = 1
    success_threshold: int = 1
    failure_threshold: int = 3

    @classmethod
    def parse(cls, kind: str, pod: Manifest) -> Probe | None:
        """Read the probe `kind` (startupProbe, …) of the pod's container; None when there is none.

        Raises:
            NotSupportedLocally: it is not an httpGet probe, or of a port that is not there.
        """
        probe: Manifest | None = pod["spec"]["containers"][0].get(kind)
        if probe is None:
            return None
        if "httpGet" not in probe:
            asks = ", ".join(sorted({"exec", "grpc", "tcpSocket"} & set(probe))) or "nothing"
            raise NotSupportedLocally(f"{kind} asks by {asks}: local mode knows httpGet probes only")
        get = probe["httpGet"]
        try:
            address = f"{get.get('host', pods_.POD_IP)}:{pods_.port(pod, get['port'])}"
        except KeyError as name:
            raise NotSupportedLocally(f"{kind} asks the port {name}, which the container does not have") from None
        return cls(
            url=f"{get.get('scheme', 'HTTP').lower()}://{address}{get.get('path', '/')}",
            headers={header["name"]: header["value"] for header in get.get("httpHeaders", ())},
            initial_delay=probe.get("initialDelaySeconds", 0),
            period=probe.get("periodSeconds", 10),
            timeout=probe.get("timeoutSeconds", 1),
            success_threshold=probe.get("successThreshold", 1),
            failure_threshold=probe.get("failureThreshold", 3),
        )

    async def check(self, session: aiohttp.ClientSession) -> str | None:
        """Ask once. None is success (a status from 200 to 399); else what was wrong."""
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        try:
            async with session.get(
                self.url, headers=self.headers, timeout=timeout, allow_redirects=False, ssl=False
            ) as answer:
                if 200 <= answer.status < 400:
                    return None
                body = (await answer.content.read(_ANSWER_BYTES)).decode(errors="replace").strip()
                return f"HTTP probe failed with statuscode: {answer.status}: {body}"
        except TimeoutError:
            return f"no answer from {self.url} within {self.timeout:g} s"
        except aiohttp.ClientError as error:
            return f"no answer from {self.url}: {error}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a row of answers means. `passing` is None until a threshold has been reached for the first time."""

    passing: bool | None = None
    message: str = ""
    row: int = 0  # equal answers in a row, the last one included
    row_succeeds: bool = False

    def after(self, failure: str | None, probe: Probe) -> Verdict:
        """The verdict with one more answer."""
        succeeds = failure is None
        row = self.row + 1 if succeeds == self.row_succeeds else 1
        reached = row >= (probe.success_threshold if succeeds else probe.failure_threshold)
        return Verdict(succeeds if reached else self.passing, failure or "", row, succeeds)


async def watch(probe: Probe, session: aiohttp.ClientSession) -> AsyncIterator[Verdict]:
    """Ask for ever, once a period: the verdict after each answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(probe.initial_delay)
    verdict = Verdict()
    while True:
        next_at = loop.time() + probe.period
        verdict = verdict.after(await probe.check(session), probe)
        yield verdict
        await asyncio.sleep(max(0.0, next_at - loop.time()))
