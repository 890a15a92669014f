"""A fresh replica takes over the prefixes that others have found hot, before it reports ready.

`loop` calls `take_over` between loading and readiness. Where the list comes from is configured: another replica's
`GET /prefixes`, or a file with what that said. Whatever goes wrong, the replica starts, only colder.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from time import monotonic
from urllib.request import Request, urlopen

from paceline_server.config import HandoverConfig
from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import HotPrefix, PrefixList

log = logging.getLogger("paceline.engine")

SECRET_VARIABLE = "PACELINE_HANDOVER_SECRET"
"""Environment variable with the secret that replicas share: the list holds what clients have asked."""

_MAX_BYTES = 64 << 20
_FETCH_SECONDS = 5.0


def prefixes_json(found: PrefixList) -> dict[str, object]:
    """The list as `GET /prefixes` says it."""
    prefixes = [{"root": one.root.hex(), "token_ids": list(one.token_ids), "uses": one.uses} for one in found.prefixes]
    return {"identity": found.identity, "prefixes": prefixes}


def parse_prefixes(text: str | bytes) -> PrefixList:
    """The list as another replica said it.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(text)
        prefixes = tuple(
            HotPrefix(bytes.fromhex(one["root"]), tuple(map(int, one["token_ids"])), int(one["uses"]))
            for one in data["prefixes"]
        )
        return PrefixList("", str(data["identity"]), prefixes)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a list of prefixes: {error!r}") from None


def take_over(core: EngineCore, config: HandoverConfig, clock: Callable[[], float] = monotonic) -> int:
    """Compute the prefixes of the configured peer, hottest first, for a bounded time; returns how many."""
    if config.peer is None:
        return 0
    deadline = clock() + config.max_seconds
    try:
        text = _within(min(_FETCH_SECONDS, config.max_seconds), partial(_read, config.peer))
        found = parse_prefixes(text)
    except (OSError, HTTPException, ValueError) as error:
        log.warning("starting without the hot prefixes of %s: %s", config.peer, error)
        return 0
    if found.identity != core.info.kv_identity:
        log.warning("starting without the hot prefixes of %s: it serves another model", config.peer)
        return 0
    taken = compute(core, found.prefixes[: config.max_prefixes], lambda: clock() < deadline)
    log.info("took over %d of %d hot prefixes of %s", taken, len(found.prefixes), config.peer)
    return taken


def compute(core: EngineCore, prefixes: Sequence[HotPrefix], may_go_on: Callable[[], bool]) -> int:
    """Compute prefixes one after the other while there is time and half the pool is left; returns how many."""
    room = core.info.kv_capacity_tokens // 2
    taken = 0
    for number, prefix in enumerate(prefixes):
        room -= len(prefix.token_ids)
        if room < 0 or not may_go_on():
            break
        name = f"handover {number}"
        if not core.submit_prefix(name, prefix):
            continue
        while core.has_work and may_go_on():
            core.step()
        if core.has_work:
            core.abort(name)
        else:
            taken += 1
    return taken


def _within(seconds: float, read: Callable[[], bytes]) -> bytes:
    """What `read` returns or raises, in a thread that is left to itself once the time is over.

    A socket's timeout is for each of its reads: it bounds neither a peer that sends a byte now and then nor a name
    server.

    Raises:
        TimeoutError: it takes longer.
    """
    answer: Future[bytes] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except Exception as error:  # whatever it is, it is raised below
            answer.set_exception(error)

    Thread(target=run, name="handover", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {seconds:g} s") from None


def _read(peer: str) -> bytes:
    if not peer.startswith(("http://", "https://")):
        with Path(peer).open("rb") as file:
            return _bounded(file.read(_MAX_BYTES + 1))
    request = Request(f"{peer.rstrip('/')}/prefixes")
    request.add_header("Authorization", f"Bearer {os.environ.get(SECRET_VARIABLE, '')}")
    with urlopen(request, timeout=_FETCH_SECONDS) as response:
        return _bounded(response.read(_MAX_BYTES + 1))


def _bounded(data: bytes) -> bytes:
    if len(data) > _MAX_BYTES:
        raise ValueError(f"the list is longer than {_MAX_BYTES} bytes")
    return data
