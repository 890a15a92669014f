"""The engine's own core behind the gateway's seam, in the test's event loop: everything but the model is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline_server.engine.core import EngineCore
from paceline_server.engine.interface import FinishReason, GenerationRequest, TokenOutput
from paceline_server.engine.scheduler import SchedulerLimits
from paceline_server.engine.testing import FakeRunner, model_info
from paceline_server.errors import DeadlineExceeded
from paceline_server.testing import FakeEngine

VOCABULARY = 400  # more than the tokenizer of `testing.write_model` has; no token ends a sequence


class CoreEngine(FakeEngine):
    """An `Engine` that steps a core over a fake model whenever there is work, and checks its books after each step.

    Attributes:
        computed: prompt tokens that had to be computed, by request, in the order of their first tokens.
        steps: how many were run.
    """

    def __init__(self, folder: Path, *, length: int = 256, budget: int = 512, batch: int = 8, **core: Any) -> None:
        super().__init__(folder, max_model_len=length, num_blocks=4 * length // 16, vocab_size=VOCABULARY)
        info = model_info(num_blocks=length, block_size=4, max_model_len=length, vocab=VOCABULARY)
        info = replace(info, eos_token_ids=())
        self.core = EngineCore(FakeRunner(info), info, SchedulerLimits(batch, budget), **core)
        self.computed: dict[str, int] = {}
        self.steps = 0
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def stream(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[TokenOutput]]:
        """Run one request; leaving the context aborts it."""
        self.requests.append(request)
        self._note()
        refusal = self.core.submit(request)
        assert refusal is None, refusal
        queue = self._queues[request.request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_busy())
        try:
            yield self._outputs_of(queue)
        finally:
            del self._queues[request.request_id]
            self.core.abort(request.request_id)

    async def _step_while_busy(self) -> None:
        while self.core.has_work:
            self.steps += 1
            for output in self.core.step():
                if output.request_id not in self.computed:
                    prompt = next(one for one in self.requests if one.request_id == output.request_id).prompt_token_ids
                    self.computed[output.request_id] = len(prompt) - output.cached_tokens
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            self.core.scheduler.check_integrity()
            await asyncio.sleep(0)

    async def _outputs_of(self, queue: asyncio.Queue[TokenOutput]) -> AsyncIterator[TokenOutput]:
        started = False
        while True:
            output = await queue.get()
            if output.finish is FinishReason.TIMEOUT and not started:
                raise DeadlineExceeded("the request's time was over before it could start")
            started = True
            yield output
            if output.finish is not None:
                return
