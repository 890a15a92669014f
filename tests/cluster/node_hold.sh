#!/usr/bin/env bash
# The node seen from outside: starts its namespaces, waits for their end and sweeps up the control groups.
# Usage: node_hold.sh STATE CGROUP INIT…, started by node.py, which reads STATE/node.pid.
# On SIGTERM, which the kernel sends when the test run dies, every process of the node ends at once.
set -u
state=$1 cgroup=$2
shift 2

sweep() {
  local groups
  for _ in $(seq 200); do # a killed process leaves its control group a moment later
    mapfile -t groups < <(find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup*$cgroup*" 2>/dev/null)
    [ ${#groups[@]} -eq 0 ] && return
    rmdir "${groups[@]}" 2>/dev/null || sleep 0.05
  done
  echo "control groups left: ${groups[*]}" >&2
}
trap sweep EXIT

setpriv --pdeathsig KILL unshare --mount --net --pid --fork --kill-child=KILL --mount-proc "$@" &
namespaces=$!
trap 'kill -KILL $namespaces 2>/dev/null' TERM INT

# the only child of unshare is the node's PID 1
until init=$(cat "/proc/$namespaces/task/$namespaces/children" 2>/dev/null) && [ -n "$init" ]; do
  kill -0 $namespaces 2>/dev/null || exit 1
  sleep 0.02
done
echo "${init% }" > "$state/node.pid.new" && mv "$state/node.pid.new" "$state/node.pid"

wait $namespaces
wait $namespaces 2>/dev/null # a trapped signal ends the first wait early
