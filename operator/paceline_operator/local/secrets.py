"""Secrets on one machine: a folder of the user's that looks as a cluster would mount them, one file a key.

The key KEY of the Secret NAME is the file NAME/KEY. Pods get links to these files, so that a change reaches a running
server as it does in a cluster. Used by `manifest`, which refuses what is not there, and by `volumes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline_operator.spec import LLMServiceSpec

VARIABLE = "PACELINE_SECRETS"
"""The folder, where `paceline up` is not told by --secrets."""


def folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder of secrets; None where there is none."""
    return Path(environment[VARIABLE]) if environment.get(VARIABLE) else None


def missing(spec: LLMServiceSpec, secrets: Path | None) -> list[str]:
    """The secrets of tenants that are not on this machine, each with its path and the way to give it."""
    found = []
    for place, tenant in enumerate(spec.tenants):
        if tenant.keys_from is None:
            continue
        reference = tenant.keys_from.secret_key_ref
        if secrets is None or not (secrets / reference.name / reference.key).is_file():
            flag = "" if secrets else f" and give --secrets FOLDER (or set {VARIABLE})"
            found.append(
                f"spec.tenants.{place}.keysFrom: a Secret is a file here: write the keys of {tenant.name}, one a line, "
                f"to {secrets or 'FOLDER'}/{reference.name}/{reference.key}{flag}"
            )
    return found


def plain_key(spec: LLMServiceSpec, secrets: Path | None) -> str | None:
    """A key to call the service with; None where it needs none, or where only hashes of keys are on this machine."""
    if secrets is None or any(tenant.anonymous for tenant in spec.tenants):
        return None
    references = (tenant.keys_from.secret_key_ref for tenant in spec.tenants if tenant.keys_from)
    lines = (line.strip() for one in references for line in (secrets / one.name / one.key).read_text().splitlines())
    return next((line for line in lines if line and not line.startswith(("#", "sha256:"))), None)


def link(secrets: Path | None, name: str, key: str, target: Path) -> bool:
    """Put a key of a Secret where a volume has it; False where there is no such key on this machine."""
    if secrets is None or not (secrets / name / key).is_file():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to((secrets / name / key).absolute())
    return True
