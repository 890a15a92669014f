"""The operating system's programs that a node needs: which are missing, and how to install them. Used by `node`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cluster.errors import Failed, Unavailable
from cluster.progress import step

CNI_PLUGINS = Path("/usr/lib/cni")

# a program that is looked for, and Debian's package of it
_PROGRAMS = {
    "containerd": "containerd",
    "conntrack": "conntrack",
    "ctr": "containerd",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nsenter": "util-linux",
    "runc": "runc",
    "setpriv": "util-linux",
    "sysctl": "procps",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}


def missing() -> list[str]:
    """Return the packages whose programs this machine lacks."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return sorted({package for program, package in _PROGRAMS.items() if not shutil.which(program, path=path)})


def install() -> None:
    """Install what is missing with apt-get, saying so.

    Raises:
        Unavailable: where there is no apt-get.
        Failed: when apt-get fails, with what it said.
    """
    packages = missing()
    if not packages:
        return
    if not shutil.which("apt-get"):
        raise Unavailable(f"a node needs these packages and there is no apt-get to install them: {' '.join(packages)}")
    with step(f"apt-get install {' '.join(packages)}"):
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *packages)


def _apt_get(*args: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", "-qq", *args],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(f"apt-get {args[0]} failed: {done.stderr.strip()[-2000:]}")
