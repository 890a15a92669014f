"""The file given to `paceline up` is checked whole: every mistake at once, with its path, before anything starts."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_operator.cluster import Key, Manifest
from paceline_operator.desired import render
from paceline_operator.local import manifest, volumes
from paceline_operator.local.errors import CannotStart, InvalidManifest
from paceline_operator.local.secrets import plain_key
from paceline_operator.spec import LLMService, parse_spec

ROOT = Path(__file__).resolve().parents[2]


def service(**spec: Any) -> Manifest:
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "x"},
        "spec": {"model": "hf://a/b", **spec},
    }


def load(folder: Path, document: Any, *, cpu: bool = False, secrets: Path | None = None) -> Manifest:
    file = folder / "service.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return manifest.load(file, cpu=cpu, secrets=secrets)


def mistakes(folder: Path, document: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidManifest) as raised:
        load(folder, document)
    return raised.value.mistakes


def overlay(**pod: Any) -> dict[str, Any]:
    return {"template": {"spec": pod}}


def server(**container: Any) -> dict[str, Any]:
    return overlay(containers=[{"name": "server", **container}])


def test_the_one_required_field_is_enough_and_the_rest_has_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path, service())
    assert loaded["metadata"] == {"name": "x", "namespace": "default"}
    assert loaded["spec"]["replicas"] == 1


def test_all_mistakes_of_a_file_are_told_at_once_each_with_its_path(tmp_path: Path) -> None:
    document = service(replicas=-1, modle="y", autoscaling={"minReplicas": 3, "maxReplicas": 2})
    document["metadata"] = {"name": "Not_A_Name"}
    document["extra"] = 1
    found = mistakes(tmp_path, document)
    for path in (
        "extra:",
        "metadata.name:",
        "spec.replicas:",
        "spec.modle: unknown field, did you mean model?",
        "spec.autoscaling:",
    ):
        assert any(mistake.startswith(path) for mistake in found), (path, found)


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ("spec: [", "not valid YAML"),
        ("", "it has nothing"),
        ("kind: ConfigMap", "it has ConfigMap"),
        ("kind: LLMService\n---\nkind: LLMService", "it has LLMService, LLMService; write each into a file of its own"),
        ("kind: LLMService\n---\nkind: Secret", "it has LLMService, Secret; give it a file with that LLMService alone"),
        ("- 1", "something without a kind"),
        ("apiVersion: paceline.dev/v1alpha1\nkind: LLMService\nmetadata: {name: x}", "spec: required"),
        ("apiVersion: v1\nkind: LLMService\nspec: {model: hf://a/b}", "metadata: required"),
    ],
)
def test_a_file_that_is_no_llmservice_is_refused_by_what_it_is(tmp_path: Path, document: str, word: str) -> None:
    assert any(word in mistake for mistake in mistakes(tmp_path, document))


def test_a_trace_and_a_disk_at_a_relative_path_are_refused_with_what_to_write(tmp_path: Path) -> None:
    engine = {"tracePath": "trace.jsonl", "diskPath": "blocks", "diskGb": 1, "hostMemoryGb": 1}
    found = mistakes(tmp_path, service(engine=engine))
    for field in ("spec.engine.diskPath", "spec.engine.tracePath"):
        assert any(mistake.startswith(f"{field}: must begin with /, such as /tmp/NAME") for mistake in found), found


def test_a_file_that_does_not_exist_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match=r"nowhere\.yaml cannot be run"):
        manifest.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"model": "pvc://claim/path"}, "write file:///PATH"),
        ({"handover": {"secretRef": {"name": "peers"}}}, "spec.handover: replicas find each other by an address of a"),
        ({"resources": {"limits": {"cpu": "many"}}}, "spec.resources.limits.cpu"),
        (overlay(containers=[{"name": "sidecar", "image": "x"}]), "containers sidecar"),
        (overlay(initContainers=[{"name": "init", "image": "x"}]), "initContainers"),
        (overlay(hostAliases=[]), "hostAliases"),
        (server(envFrom=[]), "envFrom"),
        (server(command=None), "container command: required"),
        (server(env=[{"name": "A", "value": "$(B)"}]), "does not expand $(VAR)"),
        (server(readinessProbe={"httpGet": {"path": "/", "port": "grpc"}}), "readinessProbe asks the port 'grpc'"),
        (server(volumeMounts=[{"name": "nowhere", "mountPath": "/a"}]), "volume nowhere, which the pod does not have"),
        (server(lifecycle={"preStop": {"exec": {"command": ["x"]}}}), "preStop exec"),
        (server(livenessProbe={"httpGet": None, "exec": {"command": ["x"]}}), "livenessProbe asks by exec"),
        (
            overlay(volumes=[{"name": "s", "projected": {"sources": [{"configMap": {"name": "x"}}]}}]),
            "projects more than",
        ),
        (overlay(volumes=[{"name": "s", "secret": {"secretName": "x"}}]), "volume s is of kind secret"),
        (server(volumeMounts=[{"name": "tmp", "mountPath": "/a", "subPath": "b"}]), "subPath"),
    ],
)
def test_what_only_a_cluster_does_is_refused_by_name(tmp_path: Path, spec: dict[str, Any], word: str) -> None:
    assert any(word in mistake for mistake in mistakes(tmp_path, service(**spec)))


@pytest.mark.parametrize(
    ("resources", "left"),
    [
        (None, {}),
        ({"limits": {"nvidia.com/gpu": "1", "memory": "4Gi"}}, {"limits": {"memory": "4Gi"}}),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1"}}),
    ],
)
def test_cpu_takes_the_nvidia_devices_out_of_the_resources(tmp_path: Path, resources: Any, left: Any) -> None:
    document = service(**({"resources": resources} if resources else {}))
    assert load(tmp_path, document, cpu=True)["spec"]["resources"] == left


def test_what_has_no_meaning_on_one_machine_is_noted_and_not_refused(tmp_path: Path) -> None:
    document = service(image="x", resources={"limits": {"memory": "4Gi"}}, **overlay(nodeSelector={"a": "b"}))
    notes = "\n".join(manifest.notes(load(tmp_path, document)))
    for field in ("spec.image", "spec.resources.limits", "spec.template.spec.nodeSelector"):
        assert field in notes


def test_where_files_stay_on_this_machine_is_noted(tmp_path: Path) -> None:
    """In a pod they go with it, and nobody has to look after them."""
    engine = {"tracePath": "/tmp/trace.jsonl", "diskPath": "/tmp/kv", "diskGb": 1, "hostMemoryGb": 1}
    trace, disk = sorted(manifest.notes(load(tmp_path, service(engine=engine))), reverse=True)
    assert trace.startswith("spec.engine.tracePath: /tmp/trace.jsonl of this machine")
    assert disk.startswith("spec.engine.diskPath: /tmp/kv of this machine")


HASH = "sha256:" + sha256(b"sk-team-a-0123456789").hexdigest()
TENANT = {"name": "team-a", "keysFrom": {"secretKeyRef": {"name": "api-keys", "key": "team-a"}}}


def test_a_secret_that_is_not_on_this_machine_is_refused_with_the_way_to_give_it(tmp_path: Path) -> None:
    document = service(tenants=[{"name": "free", "anonymous": True}, TENANT])
    (mistake,) = mistakes(tmp_path, document)
    assert mistake.startswith("spec.tenants[1].keysFrom: ")
    assert "write the keys of team-a, one a line, to FOLDER/api-keys/team-a and give --secrets FOLDER" in mistake
    with pytest.raises(InvalidManifest, match=f"to {tmp_path}/api-keys/team-a"):
        load(tmp_path, document, secrets=tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"# nobody yet\n\n", "holds no keys"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"sk-team-a-0123456789\n# new\nshort", "line 3: a key has 16 to 512 characters"),
        (b"sk-team-a 0123456789", "line 1: a key has"),
        (b"#" * ((1 << 20) + 1), "is larger than a file of keys can be"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_before_a_server_is_started(
    tmp_path: Path, content: bytes, says: str
) -> None:
    keys = tmp_path / "api-keys" / "team-a"
    keys.parent.mkdir()
    keys.write_bytes(content)
    with pytest.raises(InvalidManifest) as refused:
        load(tmp_path, service(tenants=[TENANT]), secrets=tmp_path)
    assert f"spec.tenants[0].keysFrom: {keys}" in str(refused.value)
    assert says in str(refused.value)
    assert "short" not in str(refused.value)


def test_a_key_of_two_tenants_is_refused_before_a_server_is_started_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "api-keys").mkdir()
    (tmp_path / "api-keys" / "team-a").write_text("sk-team-a-0123456789")
    (tmp_path / "api-keys" / "team-b").write_text(f"sk-team-b-0123456789\n{HASH}")
    other = {"name": "team-b", "keysFrom": {"secretKeyRef": {"name": "api-keys", "key": "team-b"}}}
    with pytest.raises(InvalidManifest, match=r"spec\.tenants\[1\]\.keysFrom: team-b and team-a have a key in common"):
        load(tmp_path, service(tenants=[TENANT, other]), secrets=tmp_path)


def test_a_secret_in_the_folder_becomes_a_file_that_the_server_is_pointed_at(tmp_path: Path) -> None:
    """As a link: a key that is changed there reaches the running server, as in a cluster."""
    keys = tmp_path / "secrets" / "api-keys" / "team-a"
    keys.parent.mkdir(parents=True)
    keys.write_text("sk-team-a-0123456789")
    spec = parse_spec(load(tmp_path, service(tenants=[TENANT]), secrets=tmp_path / "secrets")["spec"])
    children = render(LLMService(Key("default", "x"), "", 0, spec), manifest.IMAGE)
    pod = children.deployment["spec"]["template"]

    def mount() -> volumes.Mounts:
        folders = tmp_path / "pod", tmp_path / "store"
        return volumes.mount(pod, *folders, lambda kind, name: children.config_map, tmp_path / "secrets")

    env = {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"]}
    mounted = Path(mount().translate(env["PACELINE_KEYS_FOLDER"])) / "team-a"
    keys.write_text("sk-team-a-another-key")
    assert mounted.read_text() == "sk-team-a-another-key"
    keys.unlink()
    with pytest.raises(CannotStart, match="non-existent secret key: api-keys/team-a"):
        mount()


@pytest.mark.parametrize(
    ("content", "anonymous", "key"),
    [
        (f"# chat\n{HASH}\n sk-team-a-0123456789 \nsk-team-a-9876543210", False, "sk-team-a-0123456789"),
        (HASH, False, None),
        ("sk-team-a-0123456789", True, None),
    ],
)
def test_a_prompt_is_sent_with_a_key_of_the_first_tenant_where_one_is_needed(
    tmp_path: Path, content: str, anonymous: bool, key: str | None
) -> None:
    (tmp_path / "api-keys").mkdir()
    (tmp_path / "api-keys" / "team-a").write_text(content)
    tenants = [TENANT, *([{"name": "free", "anonymous": True}] if anonymous else [])]
    spec = parse_spec(load(tmp_path, service(tenants=tenants), secrets=tmp_path)["spec"])
    assert plain_key(spec, tmp_path) == key


def test_the_sample_that_make_demo_serves_can_be_run_here() -> None:
    loaded = manifest.load(ROOT / "manifests" / "samples" / "smollm2.yaml")
    assert loaded["metadata"]["name"] == "smollm2"
