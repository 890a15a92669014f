#!/usr/bin/env bash
# Serves the sample LLMService on this machine, asks it a question and ends; `make demo` calls it.
#   KEEP=1   leave it serving, and print how to talk to it and how to stop it
#   PORT=N   listen there (default: 8000 with KEEP, else any free port)
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/paceline ]; then make env; fi
.venv/bin/python scripts/demo_model.py >/dev/null

question="Name the capital city of France."
PATH=${PATH#"$PWD/.venv/bin:"} # so that what is printed can be typed: make puts our folder there, the user's shell does not
export PACELINE_PORT_OPTION="PORT=N" # what is to be written where a message says how to choose another port
case "${KEEP:-0}" in
  0 | no | false) exec .venv/bin/paceline up manifests/samples/smollm2.yaml --prompt "$question" --port "${PORT:-0}" ;;
  *) exec .venv/bin/paceline up manifests/samples/smollm2.yaml --prompt "$question" ${PORT:+--port "$PORT"} --detach ;;
esac
