#!/usr/bin/env bash
# Makes .venv with both packages (editable), the test tools and the linters; `make env` calls it. Needs Python 3.11 or newer.
# Versions are those of constraints.txt. PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
  if new_enough "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "env: Paceline needs Python 3.11 or newer, and there is none on PATH (or PYTHON=… is older)" >&2
  exit 1
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  echo "env: making .venv with $("$python" --version)"
  if ! "$python" -m venv --clear .venv; then # Debian has this part of Python in a package of its own
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "env: install python3-venv, then try again" >&2; exit 1; }
    echo "env: installing python3-venv"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends python3-venv </dev/null
    "$python" -m venv --clear .venv
  fi
fi

# What uv's log tells: it has a line for the begin and one for the end of each large download, and none for what is at hand.
stage() {
  local begun ended
  begun=$(grep -c '^ *Downloading ' "$1" || true)
  ended=$(grep -c '^ *Downloaded ' "$1" || true)
  if [ "$ended" -lt "$begun" ]; then echo "$ended of $begun large downloads done"; else echo "unpacking and compiling"; fi
}

# Runs a command, says every half minute how far it is, and shows what it printed only when it fails.
quietly() {
  local log=.venv/install.log begin=$SECONDS next=30 child
  "$@" >"$log" 2>&1 &
  child=$!
  trap 'kill "$child" 2>/dev/null || true' EXIT
  while kill -0 "$child" 2>/dev/null; do
    if [ $((SECONDS - begin)) -ge "$next" ]; then
      echo "env: … $(stage "$log") after $((SECONDS - begin)) s"
      next=$((next + 30))
    fi
    sleep 0.5
  done
  trap - EXIT
  if ! wait "$child"; then
    cat "$log" >&2
    echo "env: failed: $*" >&2
    return 1
  fi
  echo "env: installed after $((SECONDS - begin)) s, .venv has $(du -sh .venv | cut -f1)"
}

echo "env: installing both packages, test tools and linters (the first time downloads about 3 GB, most of it PyTorch)"
.venv/bin/python -m pip install --quiet --constraint constraints.txt uv
# By default uv trusts a list of its own alone, and no private authority that this machine trusts and pip with it.
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
# Compiled to bytecode now: where Python may not write it later, importing torch takes twice the time, in every process.
quietly .venv/bin/uv pip install --python .venv/bin/python --compile-bytecode --constraint constraints.txt \
  --editable server --editable operator --group test --group lint
echo "env: compiling the CPU kernels"
.venv/bin/python -m paceline_server.model.native_build --here >/dev/null ||
  echo "env: without them the server computes on a CPU with its slower reference back end"
echo "env: ready in .venv"
