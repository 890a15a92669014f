"""Who may call: keys come in hashed, nobody gets in without one, and what a tenant may not use is refused by name."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from paceline_server import cli
from paceline_server.config import ServerConfig, parse
from paceline_server.config.tenants import TenantConfig
from paceline_server.errors import InvalidConfiguration, Unauthorized
from paceline_server.gateway.app import create_app
from paceline_server.gateway.state import GATEWAY
from paceline_server.gateway.tenants import EVERYBODY, TenantBook, follow
from paceline_server.keys import hash_key, hashes_of
from paceline_server.testing import FakeEngine, Served, served

A = 66
KEY, OTHER = "sk-team-a-0123456789", "sk-team-b-0123456789"
COMPLETION = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEAM_A = {"name": "team-a", "key_hashes": [hash_key(KEY)]}
TEAM_B = {"name": "team-b", "key_hashes": [hash_key(OTHER)], "tier": "batch", "tiers": ["batch"], "weight": 0.5}
FREE = {"name": "free", "anonymous": True}


def config(*tenants: dict[str, Any], **scheduling: Any) -> ServerConfig:
    engine = {"model_path": "/models/tiny", "served_model_names": ("tiny",)}
    gateway = {"host": "127.0.0.1", "port": 0}
    return parse({"gateway": gateway, "engine": engine, "tenants": list(tenants), "scheduling": scheduling})


def book(*tenants: dict[str, Any], **environment: str) -> TenantBook:
    return TenantBook(config(*tenants).tenants, environment)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def post(server: Served, key: str | None = KEY, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any]:
    body = {**(CHAT if "chat" in path else COMPLETION), **fields}
    response = await server.client.post(path, json=body, headers=bearer(key) if key else None)
    return response.status, (await response.json() if response.content_type == "application/json" else None)


async def test_without_tenants_everybody_is_served_whatever_key_they_send(folder: Path) -> None:
    async with served(FakeEngine(folder, [A]), config()) as server:
        assert [(await post(server, key))[0] for key in (None, "none", KEY)] == [200, 200, 200]
        assert (await server.client.get("/v1/models")).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_with_tenants_a_request_needs_a_key_that_is_known(folder: Path, path: str) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(TEAM_A, TEAM_B)) as server:
        for key, code in ((None, "missing_api_key"), ("none", "missing_api_key"), (KEY + "x", "invalid_api_key")):
            status, answer = await post(server, key, path)
            assert (status, answer["error"]["code"]) == (401, code)
            assert answer["error"]["type"] == "invalid_request_error"
            assert KEY not in answer["error"]["message"]
        assert (await post(server, KEY, path))[0] == 200
        assert server.scrape()['paceline_rejections_total{reason="unauthorized"}'] == 3
    assert [request.tenant for request in engine.requests] == ["team-a"]


async def test_a_refusal_says_how_to_authenticate_and_comes_before_the_body(folder: Path) -> None:
    async with served(FakeEngine(folder, [A], ready=True), config(TEAM_A)) as server:
        response = await server.client.post("/v1/completions", data=b"no json")
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert (await server.client.get("/v1/models")).status == 401
        assert (await server.client.get("/v1/models/tiny")).status == 401
        assert (await server.client.get("/v1/models", headers=bearer(KEY))).status == 200
        for path in ("/healthz", "/readyz", "/metrics"):  # a kubelet and a scraper have no key
            assert (await server.client.get(path)).status == 200


async def test_requests_without_a_key_are_the_anonymous_tenants_and_wrong_keys_stay_wrong(folder: Path) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(TEAM_A, FREE)) as server:
        assert (await post(server, None))[0] == 200
        for placeholder in ("", "none", "EMPTY"):
            assert (
                await server.client.post("/v1/completions", json=COMPLETION, headers=bearer(placeholder))
            ).status == 200
        assert (await post(server, "sk-wrong-0123456789"))[0] == 401
    assert [request.tenant for request in engine.requests] == ["free"] * 4


@pytest.mark.parametrize(
    "values", [["Basic dTpw"], [KEY], [f"Bearer {KEY}", f"Bearer {KEY}"], [f"Bearer {KEY} x"], ["Bearer " + "k" * 9999]]
)
def test_other_ways_to_send_a_key_are_refused(values: list[str]) -> None:
    with pytest.raises(Unauthorized, match="Bearer KEY"):
        book(TEAM_A, FREE).identify(values)


def test_the_scheme_has_no_case_and_spaces_around_a_key_do_not_count() -> None:
    assert book(TEAM_A).identify([f"bearer   {KEY} "]).name == "team-a"


async def test_weight_and_default_tier_of_the_tenant_reach_the_engine(folder: Path) -> None:
    engine = FakeEngine(folder, [A])
    async with served(engine, config(TEAM_A, TEAM_B)) as server:
        await post(server, OTHER)
        await post(server, OTHER, service_tier="auto")
    assert [(one.tenant, one.weight, one.tier) for one in engine.requests] == [("team-b", 0.5, "batch")] * 2


@pytest.mark.parametrize(
    ("fields", "param"), [({"tier": "interactive"}, "tier"), ({"service_tier": "priority"}, "service_tier")]
)
async def test_a_tier_that_a_tenant_may_not_use_is_refused_by_name(
    folder: Path, fields: dict[str, str], param: str
) -> None:
    async with served(FakeEngine(folder, [A]), config(TEAM_A, TEAM_B)) as server:
        status, answer = await post(server, OTHER, **fields)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (403, param, "tier_not_allowed")
        assert "team-b may not use the tier interactive; it may use batch" in answer["error"]["message"]
        assert (await post(server, KEY, **fields))[0] == 200


async def test_a_tenant_may_step_back_in_line_and_forward_only_as_far_as_it_may(folder: Path) -> None:
    tenants = (TEAM_A, {**TEAM_B, "min_priority": -5})
    async with served(FakeEngine(folder, [A]), config(*tenants, policy="priority")) as server:
        assert [(await post(server, KEY, priority=level))[0] for level in (9, 0, -1)] == [200, 200, 403]
        assert [(await post(server, OTHER, priority=level))[0] for level in (-5, -6)] == [200, 403]


def test_keys_come_from_files_and_variables_plain_or_hashed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the nightly job\n\n{hash_key(OTHER)}\r\n  {KEY}  \n")
    from_file = {"name": "file", "key_files": [str(file)]}
    from_variable = {"name": "variable", "key_variables": ["TEAM_KEY"]}
    tenants = book(from_file, from_variable, TEAM_KEY="sk-third-0123456789")
    assert tenants.identify([f"Bearer {KEY}"]).name == "file"
    assert tenants.identify([f"Bearer {OTHER}"]).name == "file"
    assert tenants.identify(["Bearer sk-third-0123456789"]).name == "variable"
    with pytest.raises(Unauthorized):
        tenants.identify([f"Bearer {hash_key(OTHER)}"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", ": no keys stand there"),
        ("# none\n", ": no keys stand there"),
        ("short", ", line 1: a key has 16"),
        (f"{KEY}\nwith a space in it", ", line 2"),
        ("schlüssel-schlüssel", ", line 1: a key is of printable ASCII"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_named_by_its_setting_without_its_content(
    tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(InvalidConfiguration) as caught:
        book(FREE, {"name": "a", "key_files": ["keys"]}, PACELINE_KEYS_FOLDER=str(tmp_path))
    assert str(caught.value).startswith(f"tenants[1].key_files[0] (tenant a){says}")
    assert str(tmp_path) not in str(caught.value), "a folder that an operator has made, and no user has written"
    assert all(line.strip() not in str(caught.value) for line in content.splitlines() if len(line) > 5)


def test_keys_that_are_not_there_are_named() -> None:
    with pytest.raises(InvalidConfiguration, match=r"key_files\[0\] \(tenant a\): cannot read /nowhere/keys: No such"):
        book({"name": "a", "key_files": ["/nowhere/keys"]})
    with pytest.raises(InvalidConfiguration, match=r"key_files\[0\] \(tenant a\): '/nowhere\\x00keys' is no path"):
        book({"name": "a", "key_files": ["/nowhere\0keys"]})
    with pytest.raises(InvalidConfiguration, match=r"key_variables\[0\] .*no variable TEAM_KEY"):
        book({"name": "a", "key_variables": ["TEAM_KEY"]})


def test_a_key_of_two_tenants_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    with pytest.raises(
        InvalidConfiguration, match=r"tenants\[0\] \(team-a\) and tenants\[1\] \(b\) have a key in common"
    ):
        book(TEAM_A, {"name": "b", "key_files": [str(tmp_path / "keys")]})


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ([{"name": "a"}], "a has no way in"),
        ([TEAM_A, TEAM_A], "team-a stands twice"),
        ([FREE, {"name": "open", "anonymous": True}], "only one may be anonymous"),
        ([TEAM_A, {**TEAM_B, "key_hashes": TEAM_A["key_hashes"]}], "of two tenants"),
        ([{**TEAM_B, "tier": "standard"}], r"tier \(standard\) must be one of tiers \(batch\)"),
        ([{**TEAM_A, "name": "a b"}], r"tenants\[0\]\.name"),
        ([{**TEAM_A, "name": ""}], r"tenants\[0\]\.name"),
        ([{**TEAM_A, "weight": 0}], r"tenants\[0\]\.weight"),
        ([{**TEAM_A, "tokens_per_minute": 0}], r"tenants\[0\]\.tokens_per_minute"),
        ([{**TEAM_A, "min_priority": 1}], r"tenants\[0\]\.min_priority"),
        ([{**TEAM_A, "prices": {"input_per_million": -1, "output_per_million": 1}}], "input_per_million"),
    ],
)
def test_tenants_that_make_no_sense_are_refused_by_name(tenants: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        config(*tenants)


@pytest.mark.parametrize("value", [[KEY], KEY, {KEY: 1}, [hash_key(KEY).upper()]])
def test_a_plain_key_in_the_configuration_is_refused_and_not_repeated(value: Any) -> None:
    with pytest.raises(InvalidConfiguration, match="hash-key") as caught:
        config({"name": "a", "key_hashes": value})
    assert KEY not in str(caught.value)


def test_no_plain_key_is_kept(tmp_path: Path) -> None:
    """Neither in the book nor in what goes to the engine's process."""
    (tmp_path / "keys").write_text(KEY)
    tenants = book({"name": "a", "key_files": [str(tmp_path / "keys")]})
    assert KEY not in repr(vars(tenants))
    assert KEY not in repr(tenants.identify([f"Bearer {KEY}"]))


async def test_a_changed_file_of_keys_is_taken_over_without_a_restart(tmp_path: Path) -> None:
    """As a kubelet changes it: a link that is swapped. One that cannot be used leaves the old keys in force."""
    file = tmp_path / "keys"
    file.write_text(KEY)
    tenants = book({"name": "a", "key_files": [str(file)]}, TEAM_B)
    task = asyncio.create_task(follow(tenants, period=0.01))
    try:
        for content, known in (("sk-new-0123456789abc", True), ("short", True), (OTHER, True), (KEY, False)):
            (tmp_path / "next").write_text(content)
            os.replace(tmp_path / "next", file)
            await asyncio.sleep(0.08)
            assert _knows(tenants, "sk-new-0123456789abc") is known
    finally:
        task.cancel()
    assert tenants.identify([f"Bearer {KEY}"]).name == "a"


async def test_changed_tenants_are_taken_over_while_serving_and_what_they_have_used_stays_used(folder: Path) -> None:
    """As a kubelet changes the ConfigMap. A file that makes no sense changes nothing."""
    now: list[list[dict[str, Any]]] = [[{**TEAM_A, "requests_per_minute": 2}]]
    app = create_app(config(*now[0]), FakeEngine(folder, [A]), lambda: config(*now[0]).tenants)
    book = app[GATEWAY].tenants
    async with TestClient(TestServer(app)) as client:
        await app[GATEWAY].texts.loaded.wait()

        async def call(key: str | None) -> int:
            response = await client.post("/v1/completions", json=COMPLETION, headers=bearer(key) if key else None)
            return response.status

        assert [await call(KEY) for _ in range(3)] == [200, 200, 429]
        now[0] = [{**TEAM_A, "requests_per_minute": 3}, TEAM_B]
        assert book.reread()
        assert [await call(KEY), await call(KEY), await call(OTHER)] == [200, 429, 200]
        now[0] = [TEAM_A, TEAM_A]
        with pytest.raises(InvalidConfiguration):
            book.reread()
        assert await call(OTHER) == 200
        now[0] = [{**TEAM_A, "tiers": ["standard"]}, FREE]
        assert book.reread()
        assert [await call(KEY), await call(OTHER), await call(None)] == [200, 401, 200]
        assert not book.reread()


def _knows(tenants: TenantBook, key: str) -> bool:
    try:
        return bool(tenants.identify([f"Bearer {key}"]).name)
    except Unauthorized:
        return False


def test_hash_key_reads_a_key_and_prints_what_the_configuration_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    assert cli.main(["hash-key"]) == 0
    printed = capsys.readouterr().out.strip()
    assert book({"name": "a", "key_hashes": [printed]}).identify([f"Bearer {KEY}"]).name == "a"
    monkeypatch.setattr("sys.stdin", io.StringIO("short"))
    assert cli.main(["hash-key"]) == 2
    assert "16 to 512 characters" in capsys.readouterr().err


def test_hashes_are_taken_as_they_are_and_keys_are_hashed() -> None:
    assert hashes_of(f"{KEY}\n{hash_key(KEY)}\n") == {hash_key(KEY)}


async def test_the_access_log_names_the_tenant_and_no_key(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with served(FakeEngine(folder, [A]), config(TEAM_A)) as server:
        await post(server, KEY)
        await post(server, OTHER)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "paceline.access"]
    assert [(line["tenant"], line["status"]) for line in lines] == [("team-a", 200), (None, 401)]
    assert all(key not in record.getMessage() for record in caplog.records for key in (KEY, OTHER))


def test_where_there_are_no_tenants_a_client_may_use_what_the_policy_knows() -> None:
    assert EVERYBODY.config.min_priority == -1000
    assert EVERYBODY.config == TenantConfig(name="everybody", anonymous=True, min_priority=-1000)
