"""Why an address cannot be listened on, and what to do: often a service of ours is there. Called by `served`."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from paceline_operator.local.errors import AddressInUse
from paceline_operator.local.invocation import another_port, paceline
from paceline_operator.local.state import StateFolder


def refusal(host: str, port: int, error: OSError, environment: Mapping[str, str]) -> AddressInUse:
    """What to say of an address that the system has refused with this error."""
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    match error.errno:
        case errno.EADDRINUSE:
            holder = _service_at(port, environment)
            remedy = f"{_about(holder) if holder else 'stop what is there'}, or choose another with {another_port()}"
        case errno.EACCES:
            remedy = f"choose a port from 1024 on, with {another_port()}"
        case _:
            remedy = "choose an address of this machine with --host"
    return AddressInUse(f"cannot listen on {host}:{port} ({why}): {remedy}")


def _service_at(port: int, environment: Mapping[str, str]) -> StateFolder | None:
    """The service of this user that is up at the port."""
    for folder in StateFolder.all(environment):
        snapshot = folder.read()
        if snapshot is not None and urlsplit(snapshot.url).port == port:
            return folder
    return None


def _about(holder: StateFolder) -> str:
    namespace, name = holder.path.parts[-2:]
    words = ("down", name) if namespace == "default" else ("down", name, "-n", namespace)
    return f"the LLMService {name} is up there: stop it with `{paceline(*words)}`"
