"""The configuration's group `observability`: what the server writes down about its traffic."""

from __future__ import annotations

from pydantic import Field

from paceline_server.config.group import AbsolutePath, Group


class ObservabilityConfig(Group):
    """What the server writes down about its traffic."""

    trace_path: AbsolutePath | None = Field(
        None,
        description="File, as an absolute path, to which the engine adds a line for each answer that has ended, for "
        "paceline-server simulate and tune: sizes, times, tier, tenant, keyed digests of the prompt's blocks, never "
        "text. null writes none.",
    )
    trace_max_mb: float = Field(
        64.0,
        gt=0,
        description="Size in MB at which that file becomes PATH.1, in place of an earlier one, and a new one is begun.",
    )
