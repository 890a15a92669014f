"""What tenants use and owe: limits, counts and cost, one account each. Made by `state`, used by `reception`.

Accounts outlive a change of keys; they are as many as the configuration has tenants, and so are the metrics' labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline_server.config.tenants import TenantConfig
from paceline_server.errors import InsufficientAllowance, RequestError
from paceline_server.gateway.allowance import Allowance
from paceline_server.gateway.cost import cost_of
from paceline_server.gateway.exchange import Exchange
from paceline_server.gateway.metrics import TenantMetrics
from paceline_server.gateway.tenants import EVERYBODY, Tenant


class Account:
    """One tenant's."""

    def __init__(self, tenant: TenantConfig, metrics: TenantMetrics) -> None:
        self._tenant = tenant
        self._allowance = Allowance(tenant)
        self._metrics = metrics
        metrics.begin(tenant)

    def adopt(self, tenant: TenantConfig) -> None:
        """Go on under a changed configuration; what has been used stays used."""
        if tenant != self._tenant:
            self._tenant = tenant
            self._allowance.adopt(tenant)
            self._metrics.begin(tenant)

    def count_request(self, exchange: Exchange) -> None:
        """Let one more request in.

        Raises:
            RequestRateExceeded: the minute is full.
        """
        with self._told(exchange):
            self._allowance.count_request()

    @contextmanager
    def charge(self, exchange: Exchange, asked: int | None, room: int, answers: int = 1) -> Iterator[None]:
        """Reserve the tokens of a request; on leaving, book what it has used.

        A request that we refuse before its first token uses nothing. One whose client goes away by then has used its
        prompt: computing prompts for nobody must not be free.

        Args:
            asked: tokens that the client lets an answer have, or None.
            room: tokens that an answer may have in any case.
            answers: how many the client wants.

        Raises:
            InsufficientAllowance: it is over a limit.
        """
        with self._told(exchange):
            reservation = self._allowance.reserve(
                exchange.prompt_tokens, asked, room, answers, output=lambda: exchange.completion_tokens
            )
        refused = False
        try:
            yield
        except RequestError:
            refused = exchange.first_token is None
            raise
        finally:
            prompt, output = (0, 0) if refused else (exchange.prompt_tokens, exchange.completion_tokens)
            self._allowance.settle(reservation, prompt, output)
            if exchange.first_token is not None:
                self._bill(exchange)

    @contextmanager
    def _told(self, exchange: Exchange) -> Iterator[None]:
        """Put the limits into the answer's headers, and count refusals."""
        try:
            yield
        except InsufficientAllowance as error:
            self._metrics.rejections.labels(self._tenant.name, error.limit).inc()
            raise
        finally:
            exchange.headers.update(self._allowance.headers())

    def _bill(self, exchange: Exchange) -> None:
        cached = exchange.cached_tokens
        for kind, tokens in (
            ("input", exchange.prompt_tokens - cached),
            ("cached_input", cached),
            ("output", exchange.completion_tokens),
        ):
            self._metrics.tokens.labels(self._tenant.name, kind).inc(tokens)
        if self._tenant.prices is not None:
            cost = cost_of(self._tenant.prices, exchange.prompt_tokens, cached, exchange.completion_tokens)
            self._metrics.cost.labels(self._tenant.name).inc(cost.total)


class Accounts:
    """The accounts of all tenants, or the one of everybody."""

    def __init__(self, tenants: Sequence[TenantConfig], metrics: TenantMetrics) -> None:
        self._metrics = metrics
        self._accounts = {tenant.name: Account(tenant, metrics) for tenant in tenants or (EVERYBODY.config,)}

    def of(self, tenant: Tenant) -> Account:
        """A tenant's account, as its configuration is now."""
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant.config, self._metrics)
        account.adopt(tenant.config)
        return account
