"""What one tenant has asked another cannot find out: not by time, not by `cached_tokens`, whatever it sends.

The gateway here stands before the engine's real scheduler and block manager; only the model is a fake. Time to the
first token is measured as what decides it: the prompt tokens that the engine had to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_engines import CoreEngine

from paceline_server.config import ServerConfig, parse
from paceline_server.gateway.tenants import EVERYBODY, TenantBook
from paceline_server.keys import hash_key
from paceline_server.testing import Served, served

KEYS = {"victim": "sk-victim-0123456789", "attacker": "sk-attacker-012345", "second": "sk-victims-second-key"}
SECRET = [5 + number % 90 for number in range(64)]
CHANGED = [*SECRET[:2], 99, *SECRET[3:]]


def config(*, anonymous: bool = False, tenants: bool = True) -> ServerConfig:
    named = [
        {"name": "victim", "key_hashes": [hash_key(KEYS["victim"]), hash_key(KEYS["second"])]},
        {"name": "attacker", "key_hashes": [hash_key(KEYS["attacker"])]},
    ]
    return parse({
        "gateway": {"host": "127.0.0.1", "port": 0},
        "engine": {"model_path": "/models/tiny", "served_model_names": ("tiny",)},
        "tenants": (named if tenants else []) + ([{"name": "free", "anonymous": True}] if anonymous else []),
    })  # fmt: skip


async def cached(server: Served, key: str | None, prompt: list[int] = SECRET, **fields: Any) -> int:
    """Prompt tokens that came from the cache, as usage tells; it agrees with what the engine computed."""
    response = await server.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields},
        headers={"Authorization": f"Bearer {KEYS[key]}"} if key else None,
    )
    assert response.status == 200
    found: int = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert list(server.engine.computed.values())[-1] == len(prompt) - found
    return found


@pytest.mark.parametrize("salt", ["", "the victim's own"])
@pytest.mark.parametrize(
    "guess",
    [
        lambda salt, effective: {},
        lambda salt, effective: {"prompt": CHANGED},
        lambda salt, effective: {"cache_salt": salt},
        lambda salt, effective: {"cache_salt": effective},
        lambda salt, effective: {"cache_salt": f"victim\0{salt}"},
    ],
    ids=["same", "one-token-changed", "same-salt", "salt-as-made", "forged-name"],
)
async def test_no_guess_of_another_tenant_hits_what_a_tenant_has_cached(
    folder: Path, guess: Callable[[str, str], dict[str, Any]], salt: str
) -> None:
    engine = CoreEngine(folder)
    async with served(engine, config()) as server:
        assert await cached(server, "victim", cache_salt=salt) == 0
        assert await cached(server, "attacker", **guess(salt, engine.requests[0].cache_salt)) == 0
        assert await cached(server, "victim", cache_salt=salt) == 60, "without a hit of its own this proves nothing"


async def test_the_keys_of_one_tenant_share_and_so_do_the_anonymous(folder: Path) -> None:
    async with served(CoreEngine(folder), config(anonymous=True)) as server:
        assert await cached(server, "victim") == 0
        assert await cached(server, "second") == 60
        assert await cached(server, None) == 0
        assert await cached(server, None) == 60
        assert await cached(server, None, cache_salt="mine") == 0


async def test_without_tenants_prompts_share_unless_their_salts_differ(folder: Path) -> None:
    async with served(CoreEngine(folder), config(tenants=False)) as server:
        assert await cached(server, None) == 0
        assert await cached(server, None) == 60
        assert await cached(server, None, cache_salt="a") == 0
        assert await cached(server, "victim", cache_salt="a") == 60


def test_the_namespace_is_the_same_in_every_replica_and_another_once_the_keys_have_changed() -> None:
    def salt(*keys: str, name: str = "a", asked: str | None = None) -> str:
        tenants = parse({
            "engine": {"model_path": "m"},
            "tenants": [{"name": name, "key_hashes": [hash_key(key) for key in keys]}],
        }).tenants  # fmt: skip
        return TenantBook(tenants, {}).identify([f"Bearer {keys[0]}"]).cache_salt(asked)

    first, second = KEYS["victim"], KEYS["second"]
    assert salt(first, second) == salt(second, first)
    assert len({salt(first), salt(first, second), salt(first, name="b"), salt(first, asked="x"), salt(second)}) == 5
    assert salt(first) == salt(first, asked="")
    assert EVERYBODY.cache_salt("x") == "x"
