"""What is known of one HTTP exchange, for its log line and its metrics. Made by `middleware`, filled on the way.

It never holds text of a prompt or an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic, time
from uuid import uuid4

from aiohttp import web

from paceline_server.engine.interface import FinishReason
from paceline_server.gateway.stream import EventStream
from paceline_server.gateway.tenants import Tenant


@dataclass(slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        id: unique; goes out as the header x-request-id and inside the ids of answers.
        started: monotonic seconds at arrival.
        created: Unix time at arrival.
        tenant: whose it is, once that is known.
        error: why it was refused or failed, in a word.
        generates: it asks for text, and is counted.
        stream: the event stream, once its head has been sent.
        headers: that every answer to it has.
    """

    id: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=monotonic)
    created: int = field(default_factory=lambda: int(time()))
    tenant: Tenant | None = None
    error: str | None = None
    generates: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    finish: FinishReason | None = None
    stream: EventStream | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.headers["x-request-id"] = self.id

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.started


EXCHANGE = web.RequestKey("exchange", Exchange)
