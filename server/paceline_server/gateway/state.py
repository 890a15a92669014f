"""What the gateway's handlers share, under one key of the application. Made by `app`, read by the handlers."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from time import time

from aiohttp import web

from paceline_server.config import ServerConfig
from paceline_server.engine.interface import Engine, ModelInfo, Task
from paceline_server.errors import EngineUnavailable, NotServed
from paceline_server.gateway.accounts import Accounts
from paceline_server.gateway.backpressure import Backpressure
from paceline_server.gateway.drain import Drain
from paceline_server.gateway.exchange import EXCHANGE
from paceline_server.gateway.limits import BodyReader
from paceline_server.gateway.metrics import GatewayMetrics
from paceline_server.gateway.model_text import ModelText, TextKeeper
from paceline_server.gateway.stall import stalled
from paceline_server.gateway.tenants import Source, Tenant, TenantBook

_RETRY_AFTER_SECONDS = 5.0

_WRONG_TASK = {
    Task.GENERATE: "this model embeds texts and generates none: use /v1/embeddings",
    Task.EMBED: "this model generates text and embeds none: use /v1/chat/completions or /v1/completions",
}

_NO_PART_OF_AN_ANSWER = ("block_copy_seconds", "warnings")  # the first is measured anew at each start


class Gateway:
    """One server's gateway: its configuration, the engine, and what stands between."""

    def __init__(self, config: ServerConfig, engine: Engine, tenants: Source | None = None) -> None:
        gateway = config.gateway
        self.config = config
        self.engine = engine
        self.names = served_names(config)
        self.created = int(time())
        self.metrics = GatewayMetrics(engine, self.names[0])
        self.tenants = TenantBook(config.tenants, source=tenants)
        self.accounts = Accounts(config.tenants, self.metrics.tenants)
        self.drain = Drain(gateway.drain_seconds)
        self.bodies = BodyReader(gateway.max_body_bytes)
        self.backpressure = Backpressure(
            gateway.backpressure, config.batching.max_batch_size, stats=lambda: engine.stats
        )
        self.workers = ThreadPoolExecutor(gateway.worker_threads, thread_name_prefix="gateway-worker")
        self.texts = TextKeeper(engine, self.workers, helpers=gateway.worker_threads)
        self._fingerprint: tuple[ModelInfo, str] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here: the engine is warmed up and moves, and its tokenizer is loaded."""
        status = self.engine.status
        return status.ready and not stalled(status) and self.texts.text is not None and not self.drain.begun

    def require_text(self, task: Task | None = None) -> ModelText:
        """The model's text side, when requests can be served.

        Args:
            task: what the model must be for.

        Raises:
            EngineUnavailable: the engine or the tokenizer is not ready.
            NotServed: the model is for something else.
        """
        text, status = self.texts.text, self.engine.status
        if text is None or not status.ready:
            why = "the tokenizer is being loaded" if status.ready else status.message
            raise EngineUnavailable(f"the server is not ready: {why}; try again", retry_after=_RETRY_AFTER_SECONDS)
        if task is not None and text.info.task is not task:
            raise NotServed(_WRONG_TASK[task], param="model", code="model_not_supported")
        return text

    def require_model(self, name: str) -> None:
        """Check the model that a request names.

        Raises:
            NotServed: it is not one of ours.
        """
        if name not in self.names:
            raise NotServed(
                f"the model {name[:128]!r} is not served here; served is: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def fingerprint(self, info: ModelInfo) -> str:
        """`system_fingerprint`: changes with whatever may change a seeded answer."""
        if self._fingerprint is None or self._fingerprint[0] != info:
            self._fingerprint = info, fingerprint_of(self.config, info)
        return self._fingerprint[1]


GATEWAY = web.AppKey("gateway", Gateway)


def identify(request: web.Request) -> Tenant:
    """Whose request it is; noted in its exchange.

    Raises:
        Unauthorized: it has no key though it needs one, or an unknown one.
    """
    tenant = request[EXCHANGE].tenant = request.app[GATEWAY].tenants.identify(
        request.headers.getall("Authorization", [])
    )
    return tenant


def fingerprint_of(config: ServerConfig, info: ModelInfo) -> str:
    """A digest of the groups of a configuration, and of a model's facts, that may change a seeded answer."""
    groups = config.model_dump(mode="json", include={"engine", "batching", "kv_cache"})
    facts = {name: value for name, value in asdict(info).items() if name not in _NO_PART_OF_AN_ANSWER}
    digest = hashlib.sha256(json.dumps([groups, facts], sort_keys=True).encode())
    return "fp_" + digest.hexdigest()[:12]


def dress(request: web.Request, answer: web.StreamResponse) -> None:
    """Give an answer that has not gone out what every answer's head has."""
    answer.headers.update(request[EXCHANGE].headers)
    if request.app[GATEWAY].drain.begun:
        answer.force_close()  # the next request on this connection has to find another server


def served_names(config: ServerConfig) -> tuple[str, ...]:
    """The names that clients may use: the configured ones, else the model's own (ORG/NAME, or the folder's name)."""
    if config.engine.served_model_names:
        return config.engine.served_model_names
    path = config.engine.model_path
    if path.startswith("hf://"):
        return (path.removeprefix("hf://").split("@")[0],)
    return (path.rstrip("/").rsplit("/", maxsplit=1)[-1],)
