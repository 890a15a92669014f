"""Secrets on one machine: a folder of the user's that looks as a cluster would mount them, one file a key.

The key KEY of the Secret NAME is the file NAME/KEY. Pods get links to these files, so that a change reaches a running
server as it does in a cluster. Used by `manifest`, which refuses files that hold no keys, and by `volumes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline_operator.local import key_file
from paceline_operator.spec import LLMServiceSpec
from paceline_operator.tenancy import TenantSpec

VARIABLE = "PACELINE_SECRETS"
"""The folder, where `paceline up` is not told by --secrets."""


def folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder of secrets; None where there is none."""
    return Path(environment[VARIABLE]) if environment.get(VARIABLE) else None


def mistakes(spec: LLMServiceSpec, secrets: Path | None) -> list[str]:
    """What is wrong with the secrets of tenants: not on this machine, no keys, or another tenant's keys."""
    found = []
    owners: dict[str, str] = {}
    for place, tenant in enumerate(spec.tenants):
        try:
            digests = [key_file.digest(entry) for entry in _entries(tenant, secrets)]
        except ValueError as error:
            found.append(f"spec.tenants[{place}].keysFrom: {error}")
            continue
        others = {owners.setdefault(digest, tenant.name) for digest in digests} - {tenant.name}
        found += [
            f"spec.tenants[{place}].keysFrom: {tenant.name} and {other} have a key in common; a key says whose request "
            "it is"
            for other in sorted(others)
        ]
    return found


def plain_key(spec: LLMServiceSpec, secrets: Path | None) -> str | None:
    """A key to call the service with; None where it needs none, or where only hashes of keys are on this machine."""
    if secrets is None or any(tenant.anonymous for tenant in spec.tenants):
        return None
    entries = (entry for tenant in spec.tenants for entry in _entries(tenant, secrets))
    return next((entry for entry in entries if not key_file.is_hash(entry)), None)


def link(secrets: Path | None, name: str, key: str, target: Path) -> bool:
    """Put a key of a Secret where a volume has it; False where there is no such key on this machine."""
    if secrets is None or not (secrets / name / key).is_file():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to((secrets / name / key).absolute())
    return True


def _entries(tenant: TenantSpec, secrets: Path | None) -> list[str]:
    """The keys of a tenant as they stand in its file; none where it needs none.

    Raises:
        ValueError: there is no such file, with the way to give it, or it is no file of keys.
    """
    if tenant.keys_from is None:
        return []
    reference = tenant.keys_from.secret_key_ref
    if secrets is None or not (secrets / reference.name / reference.key).is_file():
        flag = "" if secrets else f" and give --secrets FOLDER (or set {VARIABLE})"
        raise ValueError(
            f"a Secret is a file here: write the keys of {tenant.name}, one a line, "
            f"to {secrets or 'FOLDER'}/{reference.name}/{reference.key}{flag}"
        )
    return key_file.entries(secrets / reference.name / reference.key)
