"""How long prompt and answer may be, by context, KV pool and batches. Called by `service` and `embeddings`.

The choices, also in docs/reference/api.md: a prompt must leave room for one token. `max_tokens` above the context
length is refused; one that reaches past the end only together with the prompt is cut to what is left.
"""

from __future__ import annotations

from paceline_server.engine.interface import ModelInfo
from paceline_server.errors import ContextLengthExceeded


def refuse_limit_beyond_context(asked: int | None, field: str, info: ModelInfo) -> None:
    """Refuse, before anything is tokenised, an output limit that no prompt could leave room for.

    Raises:
        ContextLengthExceeded: more output than the context is long.
    """
    if asked is not None and asked > info.max_model_len:
        shown = str(asked) if asked < 10**20 else "far more"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {info.max_model_len} tokens. However, {field} asks for {shown}.",
            param=field,
        )


def refuse_beyond_batch(tokens: int, budget: int, field: str, subject: str) -> None:
    """Refuse a text that is computed in one piece, and is longer than the batches that it would have to be in.

    Args:
        budget: tokens that a batch holds.
        field: of the request, which the text came in.
        subject: the text, in the message.

    Raises:
        ContextLengthExceeded: the text fits no batch.
    """
    if tokens > budget:
        raise ContextLengthExceeded(
            f"A batch of this server holds {budget} tokens (batching.max_tokens_in_batch). However, {subject} has "
            f"{tokens}, and is not computed in parts. Shorten it.",
            param=field,
        )


def output_tokens(prompt_tokens: int, asked: int | None, info: ModelInfo, *, reject_on_oom: bool) -> int:
    """Tokens that may be generated, at least 1; prompt and output never exceed the context.

    Args:
        asked: the client's limit, or None.
        reject_on_oom: refuse what would not fit the KV pool if the output became as long as it may.

    Raises:
        ContextLengthExceeded: the prompt leaves no room for a token, or it does not fit the KV pool.
    """
    pool = info.kv_capacity_tokens
    room = min(info.max_model_len, pool) - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(_too_long(prompt_tokens, info))
    if asked is None:
        return room
    output = min(asked, info.max_model_len - prompt_tokens)
    if reject_on_oom and prompt_tokens + output > pool:
        raise ContextLengthExceeded(
            f"The KV cache of this server holds {pool} tokens. However, you asked for {prompt_tokens + output} tokens "
            f"({prompt_tokens} in the prompt, {output} in the answer). Shorten one of them."
        )
    return output


def _too_long(prompt_tokens: int, info: ModelInfo) -> str:
    asked = (
        f"However, you asked for at least {prompt_tokens + 1} tokens ({prompt_tokens} in the prompt, 1 in the answer). "
        "Shorten the prompt"
    )
    if info.max_model_len <= info.kv_capacity_tokens:
        return f"This model's maximum context length is {info.max_model_len} tokens. {asked}."
    setting = "cpu_memory_gb" if info.device == "cpu" else "gpu_memory_fraction"
    return (
        f"The KV cache of this server holds {info.kv_capacity_tokens} tokens. {asked}, or have the cache made larger "
        f"(kv_cache.{setting})."
    )
