"""Where the end-to-end tests' cluster comes from, with stand-ins on PATH for the programs that would make one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cluster import cache, kind, node, sources
from cluster.errors import Failed, Unavailable
from cluster.hostroot import SOURCE_TREE, HostRoot

# writes its name and arguments to a log; ends with 1 when told to by the name of the sub-command
STAND_IN = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case " $* " in *" {failing} "*) echo "it does not work" >&2; exit 1;; esac
"""

BUILT = ("kind", "kubectl", "helm")  # the others come from PATH

Install = Callable[..., Path]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that puts stand-ins on PATH or into an otherwise empty cache, and returns the log of their calls."""
    programs, built, log = tmp_path / "programs", tmp_path / "cache" / f"kube-{cache.KUBERNETES}", tmp_path / "log"
    programs.mkdir()
    built.mkdir(parents=True)
    log.touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_TEST_KUBECONFIG", raising=False)

    def install(*names: str, failing: str = "-") -> Path:
        for name in names:
            program = (built if name in BUILT else programs) / name
            program.write_text(STAND_IN.format(log=log, failing=failing))
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        return log

    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return install


def calls(log: Path) -> list[str]:
    return log.read_text().splitlines()


def test_kind_makes_the_cluster_where_an_engine_runs(stand_ins: Install, tmp_path: Path) -> None:
    """A cluster left by a killed run is replaced, images go in by `kind load`, and it is deleted at the end."""
    log = stand_ins("docker", "kind", "kubectl", "helm")
    state = tmp_path / "state"
    state.mkdir()
    with sources.running(state) as cluster:
        cluster.import_image(tmp_path / "image.tar")
        assert cluster.host_root == kind.HOST_ROOT
    this = f"--name=paceline-test --kubeconfig={state}/kubeconfig"
    made = [call for call in calls(log) if call.startswith("kind")]
    assert made == [
        f"kind delete cluster {this}",
        f"kind create cluster {this} --config={state}/kind.yaml --wait=180s",
        f"kind load image-archive {tmp_path}/image.tar --name=paceline-test",
        f"kind delete cluster {this}",
    ]


def test_a_kind_cluster_is_deleted_when_a_test_fails(stand_ins: Install, tmp_path: Path) -> None:
    log = stand_ins("docker", "kind", "kubectl", "helm")
    with pytest.raises(ZeroDivisionError), sources.running(tmp_path):
        raise ZeroDivisionError
    assert calls(log)[-1].startswith("kind delete cluster")


def test_a_kind_cluster_that_does_not_come_up_says_what_kind_said(stand_ins: Install, tmp_path: Path) -> None:
    stand_ins("docker", "kind", "kubectl", "helm", failing="create")
    with pytest.raises(Failed, match="it does not work"), sources.running(tmp_path):
        pass


def test_kinds_node_sees_this_machines_folders_under_one_root() -> None:
    folders = [Path("/usr"), Path("/home/me/paceline")]
    config = yaml.safe_load(kind.configuration(folders))
    (node_config,) = config["nodes"]
    assert [(mount["hostPath"], mount["containerPath"]) for mount in node_config["extraMounts"]] == [
        ("/usr", "/paceline-host/usr"),
        ("/home/me/paceline", "/paceline-host/home/me/paceline"),
    ]
    volumes = HostRoot(kind.HOST_ROOT, tuple(folders)).volumes()
    assert [volume["hostPath"]["path"] for volume in volumes] == [
        mount["containerPath"] for mount in node_config["extraMounts"]
    ]


def test_kind_itself_can_read_its_configuration(tmp_path: Path) -> None:
    """Kind refuses unknown fields before it asks for an engine, and there is none at this address."""
    try:
        program = cache.require("kind") / "kind"
    except Unavailable as reason:
        pytest.skip(str(reason))
    config = tmp_path / "kind.yaml"
    config.write_text(kind.configuration([Path("/usr")]))
    command = [program, "create", "cluster", f"--name={kind.NAME}-unread", f"--config={config}"]
    nowhere = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/absent", "KIND_EXPERIMENTAL_PROVIDER": "docker"}
    said = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False).stderr
    assert "ERROR: failed to create cluster" in said
    assert "decode config" not in said


def test_the_users_cluster_goes_before_an_engine(
    stand_ins: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made, and nothing may be put on its nodes."""
    log = stand_ins("docker", "kind", "kubectl", "helm")
    kubeconfig = tmp_path / "mine.yaml"
    kubeconfig.write_text("{}")
    monkeypatch.setenv("PACELINE_TEST_KUBECONFIG", str(kubeconfig))
    with sources.running(tmp_path) as cluster:
        assert cluster.kubeconfig == kubeconfig
        assert cluster.host_root is None
        with pytest.raises(Failed, match=r"mine\.yaml"):
            cluster.import_image(tmp_path / "image.tar")
    assert calls(log) == [f"kubectl --kubeconfig={kubeconfig} get --raw=/readyz"]


def test_a_kubeconfig_that_is_not_there_is_named(
    stand_ins: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TEST_KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(Unavailable, match="absent is not a file"), sources.running(tmp_path):
        pass


def test_without_engine_or_root_the_reason_names_every_way(
    stand_ins: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins("docker", failing="info")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match=r"needs root.*PACELINE_TEST_KUBECONFIG.*Docker"), sources.running(tmp_path):
        pass


def test_programs_that_are_not_built_are_named_with_the_command_that_builds_them(
    stand_ins: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(Unavailable, match=r"kubelet.*make cluster"), node.running(tmp_path):
        pass


def test_a_pod_of_this_python_sees_interpreter_packages_and_source_tree_once() -> None:
    """Folders within other folders are not mounted twice, and every mount is read-only."""
    host = HostRoot.of_this_python(Path("/"), SOURCE_TREE / "tests")
    assert not [a for a in host.folders for b in host.folders if a != b and a.is_relative_to(b)]
    for needed in (Path(os.__file__), Path(yaml.__file__), SOURCE_TREE):
        assert any(needed.is_relative_to(folder) for folder in host.folders), needed
    pod: dict[str, list[dict[str, object]]] = {"containers": [{"name": "a"}, {"name": "b"}]}
    host.add_to_pod(pod)
    assert all(container["volumeMounts"] == host.mounts() for container in pod["containers"])
    assert '"readOnly": false' not in json.dumps(pod)
