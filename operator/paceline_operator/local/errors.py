"""What can go wrong in local mode alone, below the operator's own error tree.

    PacelineError
    └── LocalError               `paceline` says it and exits with 1
        ├── InvalidManifest      the file holds no LLMService that can run; carries every mistake
        ├── AlreadyRunning       the service is up in another process
        ├── NotRunning           no such service is known on this machine
        ├── AddressInUse         the service's address cannot be listened on; says who is there
        ├── NotSupportedLocally  the pod asks for something that local mode does not do; names it
        ├── CannotStart          the container cannot be created; carries the kubelet's reason
        ├── StartFailed          the service does not become ready, and waiting longer would not change that
        └── RequestFailed        the prompt got no complete answer

`NotSupportedLocally` and `CannotStart` become the waiting reason of the pod; the others reach the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_operator.errors import PacelineError


class LocalError(PacelineError):
    """Root of what local mode raises on purpose. Its text is written for the user."""


class InvalidManifest(LocalError):
    """The file does not describe an LLMService that can run here. All mistakes, one a line."""

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join([f"{source} cannot be run:", *(f"  {mistake}" for mistake in mistakes)]))
        self.mistakes = tuple(mistakes)


class AlreadyRunning(LocalError):
    """The service is up already, in another process of this machine."""


class NotRunning(LocalError):
    """The service is not up on this machine."""


class AddressInUse(LocalError):
    """The address of the front door is taken, or not for this user."""


class NotSupportedLocally(LocalError):
    """The pod asks for something that only a cluster does."""


class CannotStart(LocalError):
    """The container cannot be created. `reason` is the kubelet's word for it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class StartFailed(LocalError):
    """The service cannot become ready as it is."""


class RequestFailed(LocalError):
    """The request of --prompt was refused or its answer ended early."""
