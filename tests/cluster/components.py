"""What the test clusters are made of: each program, the Go module it is built from, and its version.

Pure data, read by `build`. Nothing is downloaded ready-made: Go's module proxy has the sources of everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.cache import KUBERNETES

MINIMUM_GO = (1, 26)  # asked for by etcd's and helm's go.mod

# CoreDNS with the two plugins that a test cluster uses: the stock program takes twice as long to build
_COREDNS = """\
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	dnsserver.Directives = []string{"bind", "kubernetes"}
	coremain.Run()
}
"""

# The first process of every pod: waits, reaps orphans, goes when told
_PAUSE = """\
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}
"""


@dataclass(frozen=True, slots=True)
class Component:
    """One program.

    Either `package` of `module`@`version` is built as it is, or `main` is the program's own source and the module is
    what it imports; a program with neither module nor imports has an empty `module`.
    """

    name: str
    module: str = ""
    version: str = ""
    package: str = "."
    main: str = ""
    version_variables: tuple[str, ...] = ()  # Go variables that hold the version, set by the linker


def _kubernetes(name: str) -> Component:
    variables = ("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion")
    return Component(name, "k8s.io/kubernetes", KUBERNETES, f"k8s.io/kubernetes/cmd/{name}", "", variables)


_ETCD = "go.etcd.io/etcd/server/v3"
_HELM = "helm.sh/helm/v3"

COMPONENTS = {
    component.name: component
    for component in (
        _kubernetes("kube-apiserver"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        _kubernetes("kubectl"),
        Component("etcd", _ETCD, "v3.6.16", _ETCD),
        Component("helm", _HELM, "v3.22.0", f"{_HELM}/cmd/helm", "", (f"{_HELM}/internal/version.version",)),
        Component("coredns", "github.com/coredns/coredns", "v1.12.4", main=_COREDNS),
        Component("pause", main=_PAUSE),
        Component("kind", "sigs.k8s.io/kind", "v0.33.0", "sigs.k8s.io/kind"),
    )
}

# What every machine gets: the API server for the operator's tests, helm for the chart's, kind to read its configuration
ALWAYS = ("kube-apiserver", "kube-controller-manager", "kubectl", "etcd", "helm", "kind")
NODE = (*ALWAYS, "kube-scheduler", "kubelet", "kube-proxy", "coredns", "pause")
