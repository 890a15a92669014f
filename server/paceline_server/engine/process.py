"""The engine process's entry point: the loop with the real model.

`client` starts it as `python -m paceline_server.engine.process FD`. When the gateway goes away (end of file on the
socket, or the parent-death signal while a long call runs) the process ends.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

from paceline_server.config import ServerConfig
from paceline_server.engine.loop import Loaded, LoadedEncoder, Wire, run
from paceline_server.logs import configure_logging
from paceline_server.model.phases import OnPhase, find_model
from paceline_server.model.sentence import is_sentence_model

_PR_SET_PDEATHSIG = 1  # prctl(2)


def _load(config: ServerConfig, on_phase: OnPhase) -> Loaded | LoadedEncoder:
    folder = find_model(config.engine.model_path, on_phase)
    # Imported once a model is there, and only what it needs: torch takes seconds.
    if is_sentence_model(folder):
        from paceline_server.model import encoder_startup  # noqa: PLC0415 (it brings torch)

        return encoder_startup.load(config, folder, on_phase)
    from paceline_server.model import startup  # noqa: PLC0415 (once a model is there)

    return startup.load(config, on_phase)


def main() -> int:
    """Serve over the inherited socket; returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway drains, then closes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging()
    return run(Wire(socket.socket(fileno=int(sys.argv[1]))), _load)


if __name__ == "__main__":
    sys.exit(main())
