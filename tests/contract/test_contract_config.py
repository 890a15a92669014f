"""What the operator renders is what the server takes: configuration file, command, environment, metric names."""

import inspect
import re
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.alias_generators import to_camel, to_snake

from paceline_operator import names
from paceline_operator.desired import render
from paceline_operator.desired.config import ENGINE_GROUPS, engine_config, server_path
from paceline_operator.local import secrets
from paceline_operator.spec import EngineSpec, HandoverSpec, parse_service, section_type
from paceline_operator.tenancy import SchedulingSpec, TenantSpec
from paceline_operator.vocabulary import in_words_of_the_spec
from paceline_server import cli
from paceline_server.config import HandoverConfig, ServerConfig, parse
from paceline_server.config.tenants import PricesConfig, TenantConfig
from paceline_server.engine.handover import SECRET_VARIABLE
from paceline_server.errors import STARTUP_ERRORS, InvalidConfiguration
from paceline_server.gateway.tenants import KEYS_FOLDER, TenantBook
from paceline_server.model import store

EXAMPLES = {
    "max_model_len": 2048,
    "dtype": "bfloat16",
    "quantization": "int8",
    "attention_backend": "reference",
    "threads": 2,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_batch_size": 8,
    "max_tokens_in_batch": 256,
    "max_queue_delay_us": 500,
    "batcher": "static",
    "enable_continuous_batching": False,
    "packed": True,
    "gpu_memory_fraction": 0.5,
    "cpu_memory_gb": 0.5,
    "block_size_tokens": 32,
    "swap_space_gb": 0.5,
    "host_memory_gb": 0.5,
    "disk_path": "/cache",
    "disk_gb": 2.0,
    "prefix_caching": False,
    "kv_cache_dtype": "int8",
    "worker_threads": 1,
    "max_n": 4,
    "max_body_bytes": 1000,
    "max_queued_requests": 10,
    "max_queued_tokens": 1000,
    "reject_on_oom": False,
    "overload_status": 429,
    "trace_path": "/tmp/trace.jsonl",
    "trace_max_mb": 5.0,
}

COMPANIONS = ("disk_path", "disk_gb", "host_memory_gb")  # only together


def service(**spec):
    metadata = {"name": "smollm2", "namespace": "default", "uid": "u"}
    return parse_service({"metadata": metadata, "spec": {"model": "hf://org/name", **spec}})


def camel(name):
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def lookup(config, path):
    for part in path:
        config = getattr(config, part)
    return config


def settings_of(model: type[BaseModel], path=()):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, (*path, name))
        else:
            yield (*path, name)


def test_the_smallest_service_renders_a_configuration_that_the_server_takes():
    config = parse(engine_config(service()))
    assert config.engine.model_path == "hf://org/name"
    assert config.engine.served_model_names == ("smollm2", "org/name")
    assert config.engine.device == "cuda"
    assert config.gateway.drain_seconds == 60


@pytest.mark.parametrize("name", sorted(EngineSpec.model_fields))
def test_every_engine_setting_of_a_service_reaches_the_servers_key(name):
    wanted = (name, *(COMPANIONS if name in COMPANIONS else ()))
    config = parse(engine_config(service(engine={camel(one): EXAMPLES[one] for one in wanted})))
    assert lookup(config, server_path(name)) == EXAMPLES[name]


def test_every_setting_of_the_server_is_a_setting_of_the_service_or_set_by_the_operator():
    by_the_operator = {
        ("gateway", "host"),
        ("gateway", "port"),
        ("gateway", "drain_seconds"),
        ("engine", "model_path"),
        ("engine", "served_model_names"),
        ("engine", "device"),
    }
    offered = {server_path(name) for name in EngineSpec.model_fields}
    elsewhere = {("scheduling",), ("tenants",), ("kv_cache", "handover")}
    settings = {path for path in settings_of(ServerConfig) if not {path[:1], path[:2]} & elsewhere}
    assert settings == offered | by_the_operator


def test_the_page_of_settings_has_a_row_for_each_key_that_is_no_field_of_its_own_name_in_spec_engine():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    table = page.split("\n## In an LLMService\n")[1].split("\n## ")[0]
    told = {key for row in re.findall(r"^\| (`[^|]+)", table, re.M) for key in re.findall(r"`([\w.]+\.\w+)`", row)}
    by_the_rule = {server_path(name) for name in EngineSpec.model_fields if server_path(name)[-1] == name}
    elsewhere = {path for path in settings_of(ServerConfig) if path[0] not in ("scheduling", "tenants")} - by_the_rule
    assert told == {".".join(path) for path in elsewhere}


TIER = {"ttftMs": 50, "tpotMs": 20, "timeoutSeconds": 9}
SCHEDULING = {
    "policy": "priority",
    "admission": "target",
    "maxBypassMs": 100,
    "promoteAfterSeconds": 5,
    "tiers": {"interactive": TIER, "standard": TIER, "batch": TIER},
}
TENANT = {
    "name": "team-a",
    "keysFrom": {"secretKeyRef": {"name": "api-keys", "key": "a"}},
    "anonymous": True,
    "weight": 2,
    "tier": "batch",
    "tiers": ["standard", "batch"],
    "minPriority": -3,
    "requestsPerMinute": 60,
    "tokensPerMinute": 1000,
    "dailyTokens": 100_000,
    "prices": {"inputPerMillion": 1, "cachedInputPerMillion": 0.5, "outputPerMillion": 2},
}


def fields_of(model: type[BaseModel], path=()):
    """Every field of a section in the words of the configuration file, those of nested sections by their path."""
    for name, field in model.model_fields.items():
        nested = section_type(field)
        yield from fields_of(nested, (*path, name)) if nested else [(*path, name)]


def leaves(values, path=()):
    for name, value in values.items():
        yield from leaves(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]


def test_scheduling_and_tenants_have_the_servers_keys_in_camel_case_and_no_others():
    scheduling = {path for path in settings_of(ServerConfig) if path[0] == "scheduling"}
    assert {("scheduling", *path) for path in fields_of(SchedulingSpec)} == scheduling
    by_the_operator = {("key_hashes",), ("key_files",), ("key_variables",)}
    keys = {("keys_from", "secret_key_ref", "name"), ("keys_from", "secret_key_ref", "key")}
    tenant = {
        (name, *inner)
        for name, field in TenantConfig.model_fields.items()
        for inner in ([(price,) for price in PricesConfig.model_fields] if name == "prices" else [()])
    }
    assert set(fields_of(TenantSpec)) - keys == tenant - by_the_operator


def test_every_setting_of_scheduling_and_tenants_reaches_the_server():
    config = parse(engine_config(service(scheduling=SCHEDULING, tenants=[TENANT])))
    for path, value in leaves(SCHEDULING):
        assert lookup(config.scheduling, [to_snake(part) for part in path]) == value, path
    (tenant,) = config.tenants
    for path, value in leaves({name: value for name, value in TENANT.items() if name != "keysFrom"}):
        found = lookup(tenant, [to_snake(part) for part in path])
        assert found == (tuple(value) if isinstance(value, list) else value), path


def test_a_service_can_say_that_a_tier_has_no_target_of_tpot():
    """0, and not null: kubectl apply takes a null for the removal of the field, which has a default then."""
    config = parse(engine_config(service(scheduling={"tiers": {"interactive": {"tpotMs": 0}}})))
    assert config.scheduling.tiers.interactive.tpot_ms is None
    assert config.scheduling.tiers.standard.tpot_ms == 250


def test_the_servers_tenants_find_their_keys_where_the_pod_mounts_the_secrets(tmp_path):
    """What is mounted, where the variable points, and what the configuration names are one place."""
    other = {"name": "team.b", "keysFrom": {"secretKeyRef": {"name": "other", "key": "key.txt"}}}
    children = render(service(tenants=[{**TENANT, "anonymous": False}, other]), "image")
    pod = children.deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    (mount,) = (one for one in server["volumeMounts"] if one["name"] == "tenant-keys")
    (volume,) = (one for one in pod["volumes"] if one["name"] == "tenant-keys")
    assert mount["readOnly"]
    for source, key in zip(
        volume["projected"]["sources"], ("sk-team-a-0123456789", "sk-team-b-0123456789"), strict=True
    ):
        (item,) = source["secret"]["items"]
        (tmp_path / item["path"]).write_text(key)
    (variable,) = (one for one in server["env"] if one["name"] == KEYS_FOLDER)
    assert variable["value"] == mount["mountPath"]
    book = TenantBook(parse(engine_config(service(tenants=[TENANT, other]))).tenants, {KEYS_FOLDER: str(tmp_path)})
    assert book.identify(["Bearer sk-team-a-0123456789"]).name == "team-a"
    assert book.identify(["Bearer sk-team-b-0123456789"]).name == "team.b"


def test_a_key_that_the_server_cannot_use_is_told_by_the_field_that_names_its_secret(tmp_path):
    (tmp_path / TENANT["name"]).write_text("short")
    tenants = parse(engine_config(service(tenants=[TENANT]))).tenants
    with pytest.raises(InvalidConfiguration) as refused:
        TenantBook(tenants, {KEYS_FOLDER: str(tmp_path)})
    assert in_words_of_the_spec(str(refused.value)).startswith(
        "spec.tenants[0].keysFrom (tenant team-a), line 1: a key"
    )


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "content",
    [
        b"sk-team-a-0123456789",
        b"\n# old\n\tsk-team-a-0123456789 \r\n" + b"!" * 16 + b"\n" + b"~" * 512,
        b"k" * 15,
        b"k" * 513,
        b"sk-team-a 0123456789",
        "sk-schlüssel-0123456789".encode(),
        b"sk-team-a-0123456789\x0cshort",
        b"sha256:" + b"0" * 64,
        b"SHA256:" + b"0" * 64,
        b"",
        b"# none",
        b"sk-team-a-\xff0123456789",
        b"#" * (1 << 20),
        b"k" * 16 + b"\n" * (1 << 20),
        b"sk-other-0123456789",
        b"sha256:" + sha256(b"sk-other-0123456789").hexdigest().encode(),
    ],
)
def test_local_mode_takes_those_files_of_keys_that_the_server_takes(tmp_path, content, at):
    """The second tenant's file holds another key; the server and local mode are told of both."""
    references = [{"name": "keys", "key": name} for name in ("a", "b")]
    tenants = [{"name": one["key"], "keysFrom": {"secretKeyRef": one}} for one in references]
    wanted = service(tenants=tenants)
    (tmp_path / "keys").mkdir()
    contents = [b"sk-other-0123456789"]
    contents.insert(at, content)
    for name, one in zip("ab", contents, strict=True):
        (tmp_path / "keys" / name).write_bytes(one)
    try:
        TenantBook(parse(engine_config(wanted)).tenants, {KEYS_FOLDER: str(tmp_path / "keys")})
    except InvalidConfiguration:
        assert secrets.mistakes(wanted.spec, tmp_path)
    else:
        assert secrets.mistakes(wanted.spec, tmp_path) == []


def test_a_fresh_replica_asks_the_service_that_leads_to_the_others_with_the_secret_they_share():
    wanted = {"secretRef": {"name": "peers"}, "maxPrefixes": 9, "maxSeconds": 3}
    desired = render(service(handover=wanted), "image")
    handover = parse(yaml.safe_load(desired.config_map["data"][names.CONFIG_FILE])).kv_cache.handover
    metadata, (port,) = desired.service["metadata"], desired.service["spec"]["ports"]
    assert handover.peer == f"http://{metadata['name']}.{metadata['namespace']}.svc:{port['port']}"
    assert (handover.max_prefixes, handover.max_seconds) == (9, 3)
    (server,) = desired.deployment["spec"]["template"]["spec"]["containers"]
    secret = {"valueFrom": {"secretKeyRef": {"name": "peers", "key": SECRET_VARIABLE}}}
    assert {"name": SECRET_VARIABLE, **secret} in server["env"]


def test_every_limit_of_the_handover_is_one_of_the_servers():
    assert HandoverSpec.model_fields.keys() - {"secret_ref"} == HandoverConfig.model_fields.keys() - {"peer"}


def test_without_tenants_a_pod_has_no_volume_of_keys():
    pod = render(service(tenants=[{"name": "free", "anonymous": True}]), "image").deployment["spec"]["template"]["spec"]
    assert "tenant-keys" not in {volume["name"] for volume in pod["volumes"]}
    assert KEYS_FOLDER not in {item["name"] for item in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    "engine",
    [
        {"quantization": "int4"},
        {"tensorParallelSize": 2},
        {"pipelineParallelSize": 2},
        {"swapSpaceGb": -1},
        {"diskPath": "/cache"},
        {"tracePath": "trace.jsonl"},
        {"maxQueueDelayUs": -1},
        {"batcher": "adaptive"},
        {"batcher": "continuous", "enableContinuousBatching": False},
        {"gpuMemoryFraction": 1},
    ],
    ids=lambda engine: next(iter(engine)),
)
def test_what_the_server_refuses_is_refused_by_name_before_a_pod_starts(engine):
    with pytest.raises(Exception, match=next(iter(engine))) as refusal:
        service(engine=engine)
    assert type(refusal.value).__name__ == "InvalidSpec"


def test_the_pods_command_is_one_that_the_server_understands(tmp_path):
    desired = render(service(), "image")
    children = {child["kind"]: child for child in desired.children}
    container = children["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["paceline-server"]
    arguments = cli._parser().parse_args(container["args"])
    folder, name = arguments.config.parent, arguments.config.name
    assert str(folder) in {mount["mountPath"] for mount in container["volumeMounts"]}
    parse(yaml.safe_load(children["ConfigMap"]["data"][name]))
    assert container["ports"][0]["containerPort"] == parse({"engine": {"model_path": "m"}}).gateway.port


def test_the_pods_variables_are_ones_that_the_server_reads():
    deployment = next(
        child for child in render(service(modelSecretRef={"name": "s"}), "i").children if child["kind"] == "Deployment"
    )
    variables = {item["name"] for item in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {"PACELINE_MODEL_STORE", "HF_TOKEN"} <= variables
    assert "PACELINE_MODEL_STORE" in inspect.getsource(store)


def test_the_servers_own_refusals_are_the_ones_assumed_here():
    for group, key, value in (("engine", "quantization", "int4"), ("kv_cache", "gpu_memory_fraction", 1.0)):
        with pytest.raises(InvalidConfiguration, match=key):
            parse(
                {"engine": {"model_path": "m"}}
                | {group: {"model_path": "m", key: value} if group == "engine" else {key: value}}
            )


def test_the_servers_exit_status_is_the_one_at_which_paceline_up_ends_unless_the_engine_may_yet_start():
    statuses = {reason: error.exit_code for reason, error in STARTUP_ERRORS.items()}
    assert statuses.pop("EngineFailed") not in (0, names.EXIT_CONFIG)
    assert set(statuses.values()) == {names.EXIT_CONFIG}


def test_the_reference_lists_the_servers_reasons_by_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {names.EXIT_CONFIG} "))
    assert {reason for reason in STARTUP_ERRORS if f"`{reason}`" in row} == STARTUP_ERRORS.keys() - {"EngineFailed"}


@pytest.mark.parametrize("name", sorted(ENGINE_GROUPS))
def test_a_key_of_the_server_is_told_by_the_field_of_the_spec_that_sets_it(name):
    assert in_words_of_the_spec(f"{'.'.join(server_path(name))}: no") == f"spec.engine.{to_camel(name)}: no"
