"""The engine configuration file: parsed once, every mistake reported at once."""

from math import inf, nan
from typing import get_args

import pytest
from pydantic import BaseModel

from paceline_server.config import ServerConfig, load, parse
from paceline_server.errors import InvalidConfiguration


def test_a_model_path_is_all_that_has_to_be_said():
    config = parse({"engine": {"model_path": "hf://org/name"}})
    assert config.gateway.port == 8000
    assert config.kv_cache.block_size_tokens == 16


def test_all_mistakes_are_named_with_their_paths_in_one_error():
    data = {
        "engine": {"model_path": "m", "max_model_len": -1, "tensor_parallel_size": 2},
        "kv_cache": {"blok_size": 16},
        "gateway": {"backpressure": {"overload_status": 418}},
    }
    with pytest.raises(InvalidConfiguration) as error:
        parse(data)
    text = str(error.value)
    assert text.startswith("4 mistakes")
    for path in (
        "engine.max_model_len",
        "engine.tensor_parallel_size",
        "kv_cache.blok_size: unknown key",
        "gateway.backpressure.overload_status",
    ):
        assert path in text


def test_a_place_in_a_list_is_written_in_brackets_as_kubectl_does():
    with pytest.raises(InvalidConfiguration, match=r"tenants\[1\]\.weight: [^$]* tenants\[1\]\.tiers\[0\]: "):
        parse({"engine": {"model_path": "x"}, "tenants": [{"name": "a"}, {"name": "b", "weight": -1, "tiers": ["x"]}]})


def test_a_missing_model_path_is_named():
    with pytest.raises(InvalidConfiguration, match=r"engine\.model_path: is required"):
        parse({"engine": {}})
    with pytest.raises(InvalidConfiguration, match="engine: is required"):
        parse({})


def test_a_list_of_names_and_whole_numbers_for_fractions_are_fine():
    config = parse({"engine": {"model_path": "m", "served_model_names": ["a", "b"]}, "kv_cache": {"cpu_memory_gb": 2}})
    assert config.engine.served_model_names == ("a", "b")
    assert ServerConfig.model_validate_json(config.model_dump_json()) == config


def test_a_step_budget_below_the_batch_size_is_refused_with_both_numbers():
    with pytest.raises(InvalidConfiguration, match=r"max_tokens_in_batch \(8\).*max_batch_size \(16\)"):
        parse({"engine": {"model_path": "m"}, "batching": {"max_batch_size": 16, "max_tokens_in_batch": 8}})


@pytest.mark.parametrize("path", ["trace.jsonl", "./trace.jsonl", "~/trace.jsonl", ""])
def test_a_path_that_is_written_to_is_absolute_or_refused_by_name(path):
    disk = {"offload": {"host_memory_gb": 1, "disk_path": path, "disk_gb": 1}}
    with pytest.raises(InvalidConfiguration) as error:
        parse({"engine": {"model_path": "m"}, "observability": {"trace_path": path}, "kv_cache": disk})
    for name in ("observability.trace_path: ", "kv_cache.offload.disk_path: "):
        assert name + ("must begin with /" if path else "") in str(error.value)


@pytest.mark.parametrize("peer", ["prefixes.json", "~/prefixes.json", "peer:8000", "ftp://peer/prefixes"])
def test_a_peer_that_is_neither_a_url_nor_an_absolute_path_is_refused_by_name(peer):
    with pytest.raises(InvalidConfiguration, match=r"kv_cache.handover.peer: must begin with http:// or https://, or"):
        parse({"engine": {"model_path": "m"}, "kv_cache": {"handover": {"peer": peer}}})


@pytest.mark.parametrize("peer", ["http://peer:8000", "https://peer/", "/var/lib/prefixes.json", None])
def test_a_peer_is_a_url_or_a_file_that_is_found_from_anywhere(peer):
    config = parse({"engine": {"model_path": "m"}, "kv_cache": {"handover": {"peer": peer}}})
    assert config.kv_cache.handover.peer == peer


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("engine: {model_path: m}\ngateway: {port: 1234}\n")
    assert load(path).gateway.port == 1234
    assert load(path, {("gateway", "port"): 99}).gateway.port == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("engine: [", "not valid YAML"),
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("engine: m\n", "engine"),
        ("engine: {model_path: m}\ngateway: {port: true}\n", "gateway.port"),
        ("engine: {model_path: m}\ngateway: {port: '80'}\n", "gateway.port"),
        ("engine: {model_path: m}\ngateway: {port: 1}\ngateway: {host: x}\n", "the key 'gateway' stands twice"),
        ("engine: {model_path: m, model_path: n}\n", "the key 'model_path' stands twice"),
        ("engine: {? [a] : b}\n", "not valid YAML"),
        ("engine: {model_path: 2026-13-45}\n", "not valid YAML"),
        ("engine: {model_path: m}\ngateway: {port: " + "1" * 9_999 + "}\n", "not valid YAML"),
        ("[" * 9_999, "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "engine.yaml"
    path.write_text(content)
    with pytest.raises(InvalidConfiguration, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


def numbers(group=ServerConfig, path=()):
    """Paths of all keys that hold a fraction."""
    for name, field in group.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, (*path, name))
        if float in kinds:
            yield (*path, name)


@pytest.mark.parametrize("value", [inf, -inf, nan])
@pytest.mark.parametrize("path", [*numbers()], ids=".".join)
def test_no_number_is_infinite(path, value):
    data = {"engine": {"model_path": "m"}, "tenants": [{"name": "a", "anonymous": True}]}
    given = data
    for group in path[:-1]:
        given = given.setdefault(group, {})
        given = given[0] if isinstance(given, list) else given
    given[path[-1]] = value
    with pytest.raises(InvalidConfiguration, match=path[-1]):
        parse(data)


def test_a_file_that_is_not_there_is_named_and_how_to_name_another(tmp_path):
    """What `docker run` of the server's image prints when nothing is mounted."""
    with pytest.raises(InvalidConfiguration, match=r"cannot read .*/nowhere\.yaml: .* --config .* mounted"):
        load(tmp_path / "nowhere.yaml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidConfiguration, match=f"cannot read {tmp_path}: .*[Dd]irectory"):
        load(tmp_path)
