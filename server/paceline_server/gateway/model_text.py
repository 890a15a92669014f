"""The text side of the model that the engine loaded: tokenizer and chat template. Called by `app` and `service`.

The engine says which folder it loaded; what is read from there is kept until it names another folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from paceline_server.engine.interface import Engine, ModelInfo, Task
from paceline_server.errors import InvalidRequest
from paceline_server.gateway.templates import ChatTemplate, TemplateRenderer, find_template
from paceline_server.gateway.tokenizer import ModelTokenizer

log = logging.getLogger("paceline.gateway")

_POLL_SECONDS = 0.05  # until the engine has named its model
_RECHECK_SECONDS = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelText:
    """How one model's text becomes token ids and back.

    Attributes:
        workers: threads for tokenising.
        renderer: None where the model has no chat template.
    """

    info: ModelInfo
    tokenizer: ModelTokenizer
    renderer: TemplateRenderer | None
    workers: Executor

    async def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            InvalidRequest: too long for any context, or it has a token that the model does not know.
        """
        self.tokenizer.refuse_hopeless(len(text), self.info.max_model_len, "prompt")
        ids = await self._in_worker(lambda: self.tokenizer.encode_text(text))
        self.refuse_unknown(ids, "prompt")
        return ids

    async def encode_texts(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """Token ids of several plain texts.

        Raises:
            InvalidRequest: one is too long for any context, or has a token that the model does not know.
        """
        for text in texts:
            self.tokenizer.refuse_hopeless(len(text), self.info.max_model_len, param)
        found = await self._in_worker(lambda: self.tokenizer.encode_texts(texts))
        for ids in found:
            self.refuse_unknown(ids, param)
        return found

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to the opening of the assistant's turn.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages, or they are too long
                for any context, or they have a token that the model does not know.
        """
        if self.renderer is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages", code="invalid_value"
            )
        limit = self.info.max_model_len
        self.tokenizer.refuse_hopeless(sum(len(message["content"]) for message in messages), limit, "messages")
        mark, guarded = await self._in_worker(lambda: self._guard(messages))
        rendered = await self.renderer.render(guarded, self.tokenizer.chars_that_fit(limit))
        ids = await self._in_worker(lambda: self.tokenizer.encode_chat(rendered, mark))
        self.refuse_unknown(ids, "messages")
        return ids

    def refuse_unknown(self, ids: Sequence[int], param: str) -> None:
        """Refuse token ids that the model does not have; they would take the engine down.

        Raises:
            InvalidRequest: there is one.
        """
        if max(ids, default=0) >= self.info.vocab_size:
            raise InvalidRequest(
                f"{param}: the model's token ids go from 0 to {self.info.vocab_size - 1}, not to {max(ids)}",
                param=param,
                code="invalid_value",
            )

    async def close(self) -> None:
        """End the template's helper processes."""
        if self.renderer is not None:
            await self.renderer.close()

    def _guard(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[dict[str, str]]]:
        """The messages with special tokens in the user's text marked; the role is from a fixed list."""
        special = self.tokenizer.special
        mark = special.mark_for(value for message in messages for value in message.values())
        return mark, [
            {key: value if key == "role" else special.guard(value, mark) for key, value in message.items()}
            for message in messages
        ]

    async def _in_worker(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


class TextKeeper:
    """Keeps `text` in step with the engine.

    Args:
        helpers: renderer processes per template.

    Attributes:
        loaded: set once there is a text side.
    """

    def __init__(self, engine: Engine, workers: Executor, helpers: int) -> None:
        self._engine = engine
        self._workers = workers
        self._helpers = helpers
        self._text: ModelText | None = None
        self.loaded = asyncio.Event()

    @property
    def text(self) -> ModelText | None:
        """None until the engine has named its model and its text side is loaded."""
        info = self._engine.info
        if self._text is not None and info is not None and info != self._text.info and info.folder == self._folder:
            self._text = replace(self._text, info=info)  # a restarted engine may have found room for other sizes
        return self._text

    @property
    def _folder(self) -> str | None:
        return None if self._text is None else self._text.info.folder

    async def run(self) -> None:
        """Follow the engine until cancelled.

        Raises:
            ModelUnsupported: the folder's tokenizer or chat template cannot be used.
        """
        try:
            while True:
                info = self._engine.info
                if info is not None and info.folder != self._folder:
                    await self._load(info)
                await asyncio.sleep(_POLL_SECONDS if self._text is None else _RECHECK_SECONDS)
        finally:
            if self._text is not None:
                await self._text.close()

    async def _load(self, info: ModelInfo) -> None:
        loop = asyncio.get_running_loop()
        folder = Path(info.folder)
        generates = info.task is Task.GENERATE
        tokenizer = await loop.run_in_executor(self._workers, lambda: ModelTokenizer.load(folder, decodes=generates))
        tokenizer.refuse_stray_ids(info.vocab_size)
        template = await loop.run_in_executor(self._workers, find_template, folder) if generates else None
        renderer = None if template is None else await self._start(template)
        old, self._text = self._text, ModelText(info, tokenizer, renderer, self._workers)
        self.loaded.set()
        if old is not None:
            await old.close()

    async def _start(self, template: ChatTemplate) -> TemplateRenderer:
        """Render once, so that the first chat does not wait for a process and a broken template is in the log early."""
        renderer = TemplateRenderer(template, self._helpers)
        try:
            await renderer.render([{"role": "user", "content": "Hi"}], max_chars=1 << 20)
        except InvalidRequest as error:
            log.warning("the chat template failed on a greeting: %s", error)
        return renderer
