#!/usr/bin/env bash
# PID 1 of the node, in mount, network and process namespaces of its own; what it mounts nobody outside sees.
# Usage: node_init.sh STATE CGROUP NODE_IP GATEWAY_IP, started by node_hold.sh. Makes STATE/ready when the node can be entered.
set -euo pipefail
state=$1 cgroup=$2 node_ip=$3 gateway_ip=$4

mount --make-rshared / # so that pods can have mounts propagated from the node
mkdir -p /var/lib/cni
for folder in /run /var/log /var/lib/cni; do # where programs write without being asked
  mount -t tmpfs -o mode=755 tmpfs $folder
done
mkdir /run/netns

# show CONTENT PATH: inside the node, PATH reads as CONTENT
show() {
  local path shown
  path=$(realpath --canonicalize-missing "$2") shown=$(mktemp "$state/shown.XXXXXX")
  printf '%b\n' "$1" > "$shown"
  chmod 644 "$shown"
  [ -e "$path" ] || { mkdir -p "$(dirname "$path")" && touch "$path"; } # a link into /run, which is empty now
  mount --bind "$shown" "$path"
}
show "nameserver $node_ip" /etc/resolv.conf # never the machine's own
show "127.0.0.1 localhost\n$node_ip node0" /etc/hosts

# the kubelet insists on these values and would set them for the whole machine: it is shown what it wants
show 1 /proc/sys/vm/overcommit_memory
show 10 /proc/sys/kernel/panic
show 1 /proc/sys/kernel/panic_on_oops
sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1 # these belong to the network namespace

# a bridge without ports is the node's network card: there is not always a module for dummy devices
ip link set lo up
ip link add node0 type bridge
ip address add "$node_ip/24" dev node0
ip link set node0 up
ip route add default via "$gateway_ip" # leads nowhere, but without one no packet to a ClusterIP gets as far as NAT

# one control group a hierarchy (v1), or one (v2), under which the kubelet makes its own
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mkdir -p "/sys/fs/cgroup$cgroup"
else
  for hierarchy in /sys/fs/cgroup/*/; do mkdir -p "$hierarchy$cgroup" 2>/dev/null || true; done
fi

touch "$state/ready"
sleep infinity & # and meanwhile bash reaps whatever the node's programs leave behind
wait
