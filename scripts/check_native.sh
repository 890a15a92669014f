#!/usr/bin/env bash
# Runs the tests of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer. `make check-native` runs it.
#
# The kernels find their library in the home folder's cache, so a home of its own keeps the instrumented one apart.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-.venv/bin/python}")
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

cat > "$home/c++" <<'WRAPPER'
#!/bin/sh
exec g++ "$@" -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
WRAPPER
chmod +x "$home/c++"

# Python itself is not instrumented: the runtime comes first, and what the interpreter never frees is no leak of ours.
HOME=$home CXX=$home/c++ LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
  "$python" -m pytest -q -p no:cacheprovider tests/unit/test_native_attention.py tests/unit/test_native_int8.py \
  tests/unit/test_native_few_rows.py tests/unit/test_model_sampler.py \
  "tests/unit/test_model_families.py::test_chunks_of_several_sequences_give_transformers_own_logits"
