"""Whose request it is: from the header Authorization to a tenant. Asked by the handlers before anything else.

Looking a key up leaks nothing by the time it takes. The key is hashed first, so that what is compared is not under the
caller's control byte by byte; and what the table is indexed by is an HMAC of that hash under a secret of this process,
so that nobody can even foresee which entries a guess is compared with.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_server.config.tenants import TenantConfig
from paceline_server.errors import InvalidConfiguration, Unauthorized
from paceline_server.gateway.fields import MAX_PRIORITY
from paceline_server.keys import hash_key, hashes_of

log = logging.getLogger("paceline.gateway")

REREAD_SECONDS = 10.0
KEYS_FOLDER = "PACELINE_KEYS_FOLDER"
"""Variable: where `key_files` that are no absolute paths are looked for; else in the working directory."""
MAX_KEY_FILE_BYTES = 1 << 20  # a Secret holds no more

_PLACEHOLDERS = ("none", "empty")  # what people write for clients that insist on a key; no key is that short
Source = Callable[[], Sequence[TenantConfig]]
"""Reads the tenants of the configuration; raises InvalidConfiguration where they make no sense."""

_HOW = "send a key as `Authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who calls.

    Attributes:
        config: what it may do.
        salt_key: makes the namespace of its cached prefixes; empty where there are no tenants.
    """

    config: TenantConfig
    salt_key: bytes = b""

    @property
    def name(self) -> str:
        """In metrics, the access log and the scheduler's books."""
        return self.config.name

    def cache_salt(self, asked: str | None) -> str:
        """The salt under which a request's prefixes are cached: the tenant's own, and the client's inside it.

        It is derived from the tenant's keys. A client that sends another tenant's salt, or even what this made of it,
        stays in its own namespace; and who sees the hashes of cached blocks cannot try prompts on them.
        """
        if not self.salt_key:
            return asked or ""
        return hmac.digest(self.salt_key, (asked or "").encode(), "sha256").hex()


EVERYBODY = Tenant(TenantConfig(name="everybody", anonymous=True, min_priority=-MAX_PRIORITY))
"""Whose requests they are where no tenants are configured."""


class TenantBook:
    """The tenants by their keys.

    Args:
        configs: none: everybody is served.
        environment: where `key_variables` are looked up, and `KEYS_FOLDER`.
        source: reads the tenants anew; None where they do not change.

    Raises:
        InvalidConfiguration: a file or a variable of keys cannot be used.
    """

    def __init__(
        self,
        configs: Sequence[TenantConfig],
        environment: Mapping[str, str] = os.environ,
        source: Source | None = None,
    ) -> None:
        self._configs: Sequence[TenantConfig] = ()
        self._environment = environment
        self._source = source
        self._secret = secrets.token_bytes(32)
        self._keys: dict[str, frozenset[str]] = {}
        self._by_key: dict[bytes, Tenant] = {}
        self._anonymous: Tenant | None = EVERYBODY
        self._take(configs)

    @property
    def watched(self) -> bool:
        """Whether there are files that may change."""
        return self._source is not None or any(config.key_files for config in self._configs)

    def identify(self, authorization: Sequence[str]) -> Tenant:
        """The tenant of a request.

        Args:
            authorization: the values of the header, in the order in which they came.

        Raises:
            Unauthorized: no key though one is needed, or an unknown one.
        """
        if self._anonymous is EVERYBODY:
            return EVERYBODY
        key = _bearer(authorization)
        if key is None:
            if self._anonymous is None:
                raise Unauthorized(f"no API key was sent; {_HOW}", code="missing_api_key")
            return self._anonymous
        tenant = self._find(key)
        if tenant is None:
            raise Unauthorized(f"the API key is not known here; {_HOW}", code="invalid_api_key")
        return tenant

    def reread(self) -> bool:
        """Read tenants and keys again; returns whether any have changed. Nothing changes where one cannot be read.

        Raises:
            InvalidConfiguration: the configuration, a file or a variable of keys cannot be used, or a key is of two.
        """
        return self._take(self._configs if self._source is None else self._source())

    def _take(self, configs: Sequence[TenantConfig]) -> bool:
        keys = {config.name: _keys_of(place, config, self._environment) for place, config in enumerate(configs)}
        if (keys, configs) == (self._keys, self._configs):
            return False
        tenants = [Tenant(config, _salt_key(config.name, keys[config.name])) for config in configs]
        self._by_key = self._index(tenants, keys)
        self._keys, self._configs = keys, configs
        anonymous = next((tenant for tenant in tenants if tenant.config.anonymous), None)
        self._anonymous = anonymous if configs else EVERYBODY
        return True

    def _index(self, tenants: Sequence[Tenant], keys: Mapping[str, frozenset[str]]) -> dict[bytes, Tenant]:
        found: dict[bytes, Tenant] = {}
        for place, tenant in enumerate(tenants):
            for digest in keys[tenant.name]:
                other = found.setdefault(self._blind(digest), tenant)
                if other is not tenant:
                    raise InvalidConfiguration(
                        f"tenants[{tenants.index(other)}] ({other.name}) and tenants[{place}] ({tenant.name}) have a "
                        "key in common; a key says whose request it is"
                    )
        return found

    def _find(self, key: str) -> Tenant | None:
        try:
            digest = hash_key(key)
        except ValueError:
            return None
        return self._by_key.get(self._blind(digest))

    def _blind(self, digest: str) -> bytes:
        return hmac.digest(self._secret, digest.encode(), "sha256")


async def follow(book: TenantBook, period: float = REREAD_SECONDS) -> None:
    """Read tenants and keys again every `period` seconds until cancelled; what cannot be used leaves the old ones."""
    complaint = ""
    while True:
        await asyncio.sleep(period)
        try:
            if await asyncio.to_thread(book.reread):
                log.info("tenants or their keys have changed")
            complaint = ""
        except InvalidConfiguration as error:
            if str(error) != complaint:
                log.error("tenants and their keys stay as they were: %s", error)
            complaint = str(error)


def _bearer(authorization: Sequence[str]) -> str | None:
    """The key that was sent; None where there is none, an empty one, or a placeholder of clients that insist on one.

    Raises:
        Unauthorized: several, or another scheme.
    """
    if len(authorization) > 1:
        raise Unauthorized(f"the header Authorization stands twice; {_HOW}", code="invalid_api_key")
    scheme, _, key = (authorization[0] if authorization else "").strip().partition(" ")
    if scheme and scheme.lower() != "bearer":
        raise Unauthorized(f"only the scheme Bearer is known here; {_HOW}", code="invalid_api_key")
    key = key.strip()
    return None if key.lower() in ("", *_PLACEHOLDERS) else key


def _salt_key(name: str, keys: frozenset[str]) -> bytes:
    """Equal in all replicas and after restarts; another one once a key is added or taken away."""
    return hashlib.sha256("\n".join([name, *sorted(keys)]).encode()).digest()


def _keys_of(place: int, config: TenantConfig, environment: Mapping[str, str]) -> frozenset[str]:
    """The keys of the tenant at that place of the list."""
    keys = set(config.key_hashes)
    for index, name in enumerate(config.key_files):
        source = f"tenants[{place}].key_files[{index}] (tenant {config.name})"
        keys |= _hashes(source, _read(source, Path(environment.get(KEYS_FOLDER, "")) / name))
    for index, name in enumerate(config.key_variables):
        source = f"tenants[{place}].key_variables[{index}] (tenant {config.name})"
        if name not in environment:
            raise InvalidConfiguration(f"{source}: the environment has no variable {name}")
        keys |= _hashes(source, environment[name])
    return frozenset(keys)


def _read(source: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
        if len(data) > MAX_KEY_FILE_BYTES:
            raise InvalidConfiguration(f"{source}: what stands there is larger than a file of keys can be")
        return data.decode()
    except OSError as error:
        raise InvalidConfiguration(f"{source}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"{source}: what stands there is not UTF-8 text") from None
    except ValueError:
        raise InvalidConfiguration(f"{source}: {str(path)!r} is no path") from None


def _hashes(source: str, text: str) -> frozenset[str]:
    try:
        found = hashes_of(text)
    except ValueError as error:
        raise InvalidConfiguration(f"{source}, {error}") from None
    if not found:
        raise InvalidConfiguration(f"{source}: no keys stand there")
    return found
