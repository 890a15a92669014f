"""What the values of a config.json must be, whatever the family: counts that count, numbers that are finite.

`config_file` asks before anything is computed from them: a length of zero, or an odd size of heads, would be found by
the kernels only, and they do not look. Keys that are missing or null are left to those who know the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline_server.errors import ModelUnsupported
from paceline_server.field_path import field_path

Count = Annotated[int, Field(gt=0)] | None
Number = Annotated[float, Field(gt=0)] | None
Base = Annotated[float, Field(gt=1)] | None  # of rotary frequencies: by it each pair turns more slowly than the last
Share = Annotated[float, Field(gt=0, le=1)] | None


def _token_ids(value: Any) -> Any:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError("must be a token id or a list of them")
    return value


class _Values(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Rope(_Values):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Base = None
    factor: Number = None
    low_freq_factor: Number = None
    high_freq_factor: Number = None
    original_max_position_embeddings: Number = None
    partial_rotary_factor: Share = None
    attention_factor: Number = None
    beta_fast: Number = None
    beta_slow: Number = None
    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low(cls, high: float | None, before: ValidationInfo) -> float | None:
        low = before.data.get("low_freq_factor")
        if high is not None and low is not None and high <= low:
            raise ValueError(f"must be above low_freq_factor ({low:g})")
        return high


class EndTokens(_Values):
    """Tokens that end a sequence, as config.json and generation_config.json name them."""

    eos_token_id: Annotated[Any, AfterValidator(_token_ids)] = None


class _Config(EndTokens):
    vocab_size: Count = None
    hidden_size: Count = None
    intermediate_size: Count = None
    num_hidden_layers: Count = None
    num_attention_heads: Count = None
    num_key_value_heads: Count = None
    head_dim: Count = None
    max_position_embeddings: Count = None
    sliding_window: Annotated[int, Field(ge=0)] | None = None
    rms_norm_eps: Number = None
    rope_theta: Base = None
    rope_local_base_freq: Base = None
    query_pre_attn_scalar: Number = None
    attn_logit_softcapping: Number = None
    final_logit_softcapping: Number = None
    embedding_multiplier: Number = None
    residual_multiplier: Number = None
    attention_multiplier: Number = None
    logits_scaling: Number = None
    partial_rotary_factor: Share = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None

    @model_validator(mode="after")
    def _sizes_go_together(self) -> _Config:
        heads, groups, layers = self.num_attention_heads, self.num_key_value_heads, self.num_hidden_layers
        if heads and groups and heads % groups:
            raise ValueError(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({groups})")
        size = self.head_dim or (self.hidden_size // heads if self.hidden_size and heads else 0)
        if size % 2:
            raise ValueError(f"heads of {size} elements (head_dim) have no pairs to turn")
        if layers and self.layer_types is not None and len(self.layer_types) != layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, and num_hidden_layers is {layers}")
        return self


def require_values(said: Mapping[str, Any], values: type[_Values] = _Config, file: str = "config.json") -> None:
    """Refuse what no model can have.

    Args:
        said: the file's content.
        values: what it may be.

    Raises:
        ModelUnsupported: with every such key and its value.
    """
    try:
        values.model_validate(said)
    except ValidationError as error:
        raise ModelUnsupported(f"{file}: {'; '.join(map(_say, error.errors(include_url=False)))}") from None


def _say(mistake: Any) -> str:
    message = str(mistake["msg"]).removeprefix("Value error, ")
    path = field_path(mistake["loc"])
    return f"{path}: {message}, not {str(mistake['input'])[:40]!r}" if path else message
