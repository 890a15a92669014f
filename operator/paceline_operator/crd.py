"""Whether the API server knows LLMServices as this operator does: the CRD is there, and not older than the operator.

An API server drops fields that its CRD lacks without a word, so an operator beside an old CRD would act on half of what
a user wrote. Asked by `run` before it takes the lease; what is amiss is said in the log and at /readyz.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from paceline_operator import names
from paceline_operator.cluster import Manifest
from paceline_operator.errors import ClusterUnavailable
from paceline_operator.kube import KubeClient
from paceline_operator.spec import LLMServiceSpec, section_type

logger = logging.getLogger(__name__)

# Every authenticated client may read what the API server publishes; reading the CRD itself would need a right.
_SCHEMA_PATH: Final = f"/openapi/v3/apis/{names.API_VERSION}"
_SCHEMA_NAME: Final = f"{'.'.join(reversed(names.GROUP.split('.')))}.{names.VERSION}.{names.KIND}"
_INTERVAL_SECONDS: Final = 2.0
_REMEDY: Final = "kubectl apply --server-side -f llmservices.paceline.dev.yaml, of the operator's version"


class CrdWatch:
    """Waits for a CRD that is new enough."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._complaint: str | None = "the CRD has not been looked at yet"

    @property
    def complaint(self) -> str | None:
        """What is wrong with the CRD, and the remedy; None when nothing is."""
        return self._complaint

    async def wait(self) -> None:
        """Return when the CRD has every field that this operator reads."""
        while True:
            try:
                complaint = complaint_about(await self._client.read_object(_SCHEMA_PATH))
            except ClusterUnavailable as error:
                complaint = str(error)
            if complaint and complaint != self._complaint:
                logger.error("waiting: %s", complaint)
            self._complaint = complaint
            if complaint is None:
                return
            await asyncio.sleep(_INTERVAL_SECONDS)


def complaint_about(published: Manifest | None) -> str | None:
    """What the published OpenAPI document lacks, in words; None when it has all."""
    schema = ((published or {}).get("components", {}).get("schemas") or {}).get(_SCHEMA_NAME)
    if schema is None:
        return f"the CRD of LLMService is not installed; remedy: {_REMEDY}"
    missing = list(_missing(LLMServiceSpec, schema.get("properties", {}).get("spec", {}), "spec"))
    if missing:
        return f"the CRD of LLMService is too old, it lacks {', '.join(missing)}; remedy: {_REMEDY}"
    return None


def _missing(section: type[BaseModel], schema: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of the section's fields that the schema lacks; a section that is missing whole is named once."""
    for name, info in section.model_fields.items():
        alias = info.alias or name
        field = schema.get("properties", {}).get(alias)
        if field is None:
            yield f"{path}.{alias}"
        elif nested := section_type(info):
            yield from _missing(nested, field.get("items", field), f"{path}.{alias}")
