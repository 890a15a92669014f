"""Writes the files that are made from others. Run by `make generate`; a test runs it with --check.

helm/paceline/templates/crd.yaml   from crds/llmservices.paceline.dev.yaml
operator/paceline_operator/crd.yaml   the same, for `paceline status`, which prints its columns
manifests/install.yaml             from helm/paceline, with its default values
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRD = Path("crds/llmservices.paceline.dev.yaml")
CRD_PACKAGED = Path("operator/paceline_operator/crd.yaml")
CRD_TEMPLATE = Path("helm/paceline/templates/crd.yaml")
CHART = Path("helm/paceline")
INSTALL = Path("manifests/install.yaml")
NAMESPACE = "paceline-system"
HELM_LABELS = ("app.kubernetes.io/managed-by:", "helm.sh/chart:")
KUBERNETES = "1.30.0"  # the oldest that the chart supports; a helm without a cluster assumes one of its own
HEADER = "# Generated from {source} by scripts/sync_generated.py: change that, then run `make generate`.\n"
TAKES_OVER = """#
# `kubectl apply` of this file takes custom.metrics.k8s.io over from whoever serves it, such as prometheus-adapter, and
# `kubectl delete` removes the API. Look first: `kubectl get apiservice | grep custom.metrics.k8s.io`. Helm refuses
# where it is another's. This renders the file without the adapter, and without the namespace:
#     helm template paceline helm/paceline -n paceline-system --set adapter.enabled=false
"""


def render_crd_template(crd: str) -> str:
    """Wrap the CRD for the chart: optional, and kept on uninstall with every LLMService."""
    metadata = "metadata:\n"
    assert crd.count(f"\n{metadata}") == 1, "the CRD has one metadata at the top level"
    kept = crd.replace("{{", '{{ "{{" }}').replace(
        f"\n{metadata}", f"\n{metadata}  annotations:\n    helm.sh/resource-policy: keep\n", 1
    )
    return f"{HEADER.format(source=CRD)}{{{{- if .Values.crd.install }}}}\n{kept.rstrip()}\n{{{{- end }}}}\n"


def render_install(helm: str, root: Path = ROOT) -> str:
    """Render the chart with its default values, and the namespace that `helm --create-namespace` would make.

    Labels that say "managed by Helm" are left out: these objects are not.
    """
    command = [helm, "template", "paceline", str(root / CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    objects = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = "".join(line for line in objects.splitlines(keepends=True) if not line.strip().startswith(HELM_LABELS))
    namespace = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
    return HEADER.format(source=CHART) + TAKES_OVER + namespace + objects


def find_helm() -> str | None:
    """Find helm: $PACELINE_KUBE_BIN, the cache of `make cluster`, PATH."""
    cache = Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()
    folders = [Path(os.environ["PACELINE_KUBE_BIN"])] if "PACELINE_KUBE_BIN" in os.environ else []
    folders += sorted(cache.glob("kube-*"), reverse=True)
    return next((str(f / "helm") for f in folders if os.access(f / "helm", os.X_OK)), shutil.which("helm"))


def sync(path: Path, content: str, *, check: bool) -> bool:
    """Write a file, or with `check` print how it differs. Returns whether it was as it should be."""
    file = ROOT / path
    current = file.read_text(encoding="utf-8") if file.exists() else ""
    if current == content:
        return True
    if check:
        lines = difflib.unified_diff(
            current.splitlines(), content.splitlines(), str(path), "generated", lineterm="", n=1
        )
        print("\n".join(list(lines)[:40]))
    else:
        file.write_text(content, encoding="utf-8")
        print(f"wrote {path}")
    return False


def main() -> int:
    """Bring all generated files up to date; with --check change nothing and fail when one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a file is out of date")
    check = parser.parse_args().check
    helm = find_helm()
    if helm is None:
        print(
            "helm is neither in $PACELINE_KUBE_BIN nor in the cache nor on PATH: run `make cluster` once",
            file=sys.stderr,
        )
        return 2
    crd = (ROOT / CRD).read_text(encoding="utf-8")
    current = sync(CRD_TEMPLATE, render_crd_template(crd), check=check)
    current &= sync(CRD_PACKAGED, HEADER.format(source=CRD) + crd, check=check)
    current &= sync(INSTALL, render_install(helm), check=check)
    return 0 if current or not check else 1


if __name__ == "__main__":
    sys.exit(main())
