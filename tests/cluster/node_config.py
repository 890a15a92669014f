"""The configuration files of a node's programs. Pure: names and folders in, text out. Used by `node`.

The settings with a reason beside them cost time to find; the rest is what each program's reference asks for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster.images import PAUSE
from cluster.packages import CNI_PLUGINS

NODE_NAME = "node0"
NODE_IP = "10.89.0.2"  # all addresses are inside the node's own network namespace, and collide with nothing outside
GATEWAY_IP = "10.89.0.1"
POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Renders the files of one node, whose folder is `state` and whose control group is `cgroup`."""

    state: Path
    cgroup: str  # path below each hierarchy of /sys/fs/cgroup, with a leading slash

    @property
    def containerd_socket(self) -> Path:
        """Where containerd listens."""
        return self.state / "containerd.sock"

    @property
    def cni_folder(self) -> Path:
        """Where containerd looks for the pod network's description."""
        return self.state / "cni"

    def containerd(self) -> str:
        """Render containerd.toml (version 2 of its format)."""
        return f"""\
version = 2
root = "{self.state}/containerd"
state = "{self.state}/containerd-state"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{self.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.state}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true # works without CAP_SYS_RESOURCE
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{self.cni_folder}"
"""

    def pod_network(self) -> str:
        """Render the CNI network: a bridge, addresses from one range, and host ports."""
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": POD_RANGE}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(self.state / "cni-addresses"),
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "hairpinMode": True}
        host_ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        plugins = [{**bridge, "ipam": addresses}, host_ports]
        return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}, indent=1)

    def kubelet(self) -> str:
        """Render the kubelet's configuration: it evicts nothing and removes no image."""
        never = dict.fromkeys(("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%")
        return _document(
            "kubelet.config.k8s.io/v1beta1",
            "KubeletConfiguration",
            authentication={
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.state / "ca.crt")},
            },
            authorization={"mode": "Webhook"},
            cgroupDriver="cgroupfs",
            cgroupRoot=self.cgroup,
            clusterDNS=[NODE_IP],
            clusterDomain="cluster.local",
            containerRuntimeEndpoint=f"unix://{self.containerd_socket}",
            enforceNodeAllocatable=["pods"],
            evictionHard=never,
            failSwapOn=False,
            imageGCHighThresholdPercent=100,
            maxOpenFiles=20000,
            nodeStatusUpdateFrequency="4s",
            oomScoreAdj=0,  # as containerd's: no CAP_SYS_RESOURCE
            podLogsDir=str(self.state / "pod-logs"),
            resolvConf="",
            syncFrequency="10s",
            volumePluginDir=str(self.state / "volume-plugins"),
        )

    def kube_proxy(self) -> str:
        """Render kube-proxy's configuration; its connection tracking limits are the machine's and stay as they are."""
        return _document(
            "kubeproxy.config.k8s.io/v1alpha1",
            "KubeProxyConfiguration",
            clientConnection={"kubeconfig": str(self.state / "kube-proxy.kubeconfig")},
            clusterCIDR=POD_RANGE,
            conntrack={"maxPerCore": 0, "min": 0},
            hostnameOverride=NODE_NAME,
            mode="iptables",
            oomScoreAdj=0,
        )

    def coredns(self) -> str:
        """Render the Corefile: cluster names only, for there is nothing else to reach."""
        kubeconfig = self.state / "kubeconfig"
        return f".:53 {{\n  bind {NODE_IP}\n  kubernetes cluster.local {{\n    kubeconfig {kubeconfig}\n  }}\n}}\n"


def _document(api_version: str, kind: str, **settings: Any) -> str:
    return yaml.safe_dump({"apiVersion": api_version, "kind": kind, **settings})
