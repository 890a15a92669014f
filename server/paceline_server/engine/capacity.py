"""What one request may ask for at most, whatever else is there. Made by `core` for what is loaded.

The gateway refuses first what can never run, so that such a refusal here is the gateway's bug or an info that has
changed with a restart; it must not take the engine down.
"""

from __future__ import annotations

from paceline_server.engine.interface import GenerationRequest, ModelInfo


class Capacity:
    """Of a loaded model.

    Args:
        whole_prompt: tokens of the longest prompt that is computed in one piece; None where prompts are in parts.
    """

    def __init__(self, info: ModelInfo, whole_prompt: int | None) -> None:
        self._info = info
        self._whole_prompt = whole_prompt
        self._tokens = min(info.max_model_len, info.kv_capacity_tokens)

    def output_tokens(self, request: GenerationRequest) -> int:
        """Tokens that each of its answers may have."""
        return min(request.max_tokens, self._tokens - len(request.prompt_token_ids))

    def why_never(self, request: GenerationRequest) -> str | None:
        """Why a request can never run, or None."""
        prompt = len(request.prompt_token_ids)
        if prompt == 0 or request.max_tokens < 1:
            return "a request needs at least one prompt token and one output token"
        if request.n < 1:
            return f"a request asks for at least one answer, not {request.n}"
        if request.deterministic and not self._info.deterministic:
            backend = self._info.attention_backend
            return f"deterministic needs the back end cpu (engine.attention_backend), not {backend}"
        if request.weight <= 0:
            return f"a tenant's weight is above 0, not {request.weight}"
        if prompt + 1 > self._tokens:
            return f"the prompt has {prompt} tokens, and the engine holds {self._tokens} with at least one output token"
        if self._whole_prompt is not None and prompt > self._whole_prompt:
            held = f"a batch here holds {self._whole_prompt} (batching.max_tokens_in_batch)"
            return f"the prompt has {prompt} tokens, and {held}"
        return None
