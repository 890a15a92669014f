"""What tokens cost. Pure. Used by `accounts` for the metrics and by `answers` for `usage`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.config.tenants import PricesConfig

_MILLION = 1_000_000
_DECIMALS = 12  # beyond that it is the noise of floating-point numbers


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one request, in the currency of the prices."""

    input: float
    cached_input: float
    output: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.input + self.cached_input + self.output

    def json(self) -> dict[str, float]:
        """The parts and their sum."""
        parts = {"input": self.input, "cached_input": self.cached_input, "output": self.output, "total": self.total}
        return {name: round(value, _DECIMALS) for name, value in parts.items()}


def cost_of(prices: PricesConfig, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Cost:
    """The cost of a request.

    Args:
        cached_tokens: those of the prompt that were found in the prefix cache.
    """
    cached_price = prices.cached_input_per_million
    return Cost(
        input=(prompt_tokens - cached_tokens) * prices.input_per_million / _MILLION,
        cached_input=cached_tokens * (prices.input_per_million if cached_price is None else cached_price) / _MILLION,
        output=completion_tokens * prices.output_per_million / _MILLION,
    )
