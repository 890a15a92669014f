"""From a rendered pod to the process that stands for its container: command and environment.

Pure. Two things differ from the container: it listens on 127.0.0.1 and on a port of its own (the pod's containerPort),
since all pods share this machine's network; and HOME and the model store are the user's. Called by the kubelet, and by
`manifest` to refuse what cannot be run before anything starts.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.local import pod as pods_
from paceline_operator.local import volumes
from paceline_operator.local.errors import CannotStart, NotSupportedLocally
from paceline_operator.local.probes import Probe

SERVER = "paceline-server"
TERMINATION_LOG = "PACELINE_TERMINATION_LOG"
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
# What a container says to a node, which means nothing to a process of the user: isolation and images.
_WITHOUT_MEANING = {"name", "image", "imagePullPolicy", "securityContext", "terminationMessagePath", "stdin", "tty"}
_HONOURED = {"command", "args", "env", "ports", "resources", "volumeMounts", "lifecycle", "terminationMessagePolicy"}
POD_WITHOUT_MEANING = {
    "affinity",
    "automountServiceAccountToken",
    "dnsPolicy",
    "enableServiceLinks",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
}
_POD_HONOURED = {"containers", "volumes", "terminationGracePeriodSeconds"}
_USERS_OWN = {"HOME"}
"""Variables of the pod that tell a container where it may write. A process may write where its user may."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start."""

    command: tuple[str, ...]
    env: dict[str, str]


def check(pod: Manifest) -> list[str]:
    """Everything in a pod (or pod template) that local mode does not do, in words; empty when it can run."""
    spec = pod["spec"]
    if len(spec["containers"]) != 1:
        extra = ", ".join(container["name"] for container in spec["containers"] if container["name"] != names.CONTAINER)
        return [f"containers {extra}: local mode runs the container {names.CONTAINER} only"]
    container = spec["containers"][0]
    mistakes = [
        f"{field}: not known to local mode" for field in sorted(set(spec) - _POD_HONOURED - POD_WITHOUT_MEANING)
    ]
    known = _HONOURED | _WITHOUT_MEANING | set(_PROBES)
    mistakes += [f"container field {field}: not known to local mode" for field in sorted(set(container) - known)]
    mistakes += _word_mistakes(container)
    mistakes += _lifecycle_mistakes(container.get("lifecycle", {}))
    mistakes += volumes.check(spec)
    for kind in _PROBES:
        try:
            Probe.parse(kind, pod)
        except NotSupportedLocally as error:
            mistakes.append(str(error))
    return mistakes


def _word_mistakes(container: Manifest) -> list[str]:
    """A cluster would take the image's own command, and expand $(VAR)."""
    if not container.get("command"):
        return ["container command: required, since there is no image that has one"]
    values = [variable.get("value", "") for variable in container.get("env", ())]
    words = (word for word in (*container["command"], *container.get("args", ()), *values) if "$(" in str(word))
    return [f"{word!r}: local mode does not expand $(VAR)" for word in words]


def _lifecycle_mistakes(lifecycle: Manifest) -> list[str]:
    """A preStop sleep waits for endpoints to go; the front door forgets a pod at once, so it is left out."""
    mistakes = ["lifecycle postStart: not known to local mode"] if "postStart" in lifecycle else []
    hooks = set(lifecycle.get("preStop", {})) - {"sleep"}
    return mistakes + [f"lifecycle preStop {hook}: local mode knows sleep only" for hook in sorted(hooks)]


def build(pod: Manifest, mounts: volumes.Mounts, machine: Mapping[str, str], extra: Mapping[str, str]) -> Launch:
    """The process of a pod's container.

    Args:
        pod: with its own containerPort.
        mounts: where its volumes lie.
        machine: the environment of this process, which the container's adds to; secrets are looked up in it.
        extra: variables of this one process.

    Raises:
        CannotStart: the program is not installed, or a secret is not in the environment.
    """
    container = pod["spec"]["containers"][0]
    words = [*container["command"], *container.get("args", ())]
    program, *arguments = (mounts.translate(word) for word in words)
    port = pods_.port(pod, names.PORT_NAME)
    env = {
        variable["name"]: mounts.translate(_value(variable, pod, machine))
        for variable in container.get("env", ())
        if variable["name"] not in _USERS_OWN
    }
    return Launch(
        command=(_find(program), *arguments, "--host", pods_.POD_IP, "--port", str(port)),
        env={**machine, **env, **extra},
    )


def _find(program: str) -> str:
    """The program beside this interpreter (the same virtual environment), else on the PATH."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        advice = f": pip install {program}" if program == SERVER else ""
        raise CannotStart("CreateContainerError", f"{program} is not installed on this machine{advice}")
    return found


def _value(variable: Manifest, pod: Manifest, machine: Mapping[str, str]) -> str:
    match variable:
        case {"value": str(value)}:
            return value
        case {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
            if key not in machine:
                message = f'secret "{secret}" is the environment here: set {key}'
                raise CannotStart("CreateContainerConfigError", message)
            return machine[key]
        case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name" | "metadata.namespace" as path}}}:
            return str(pod["metadata"][path.removeprefix("metadata.")])
        case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
            return pods_.POD_IP
        case {"name": str(name), "valueFrom": _}:
            raise CannotStart("CreateContainerConfigError", f"the source of variable {name} exists in a cluster only")
    return ""
