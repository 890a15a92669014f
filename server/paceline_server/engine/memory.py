"""From what is loaded to empty block tables: device, swap space and offload tier. Called by `core`."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.engine.blocks import BlockManager
from paceline_server.engine.interface import ModelInfo
from paceline_server.engine.offload import OffloadTier
from paceline_server.engine.steptime import StepTimeModel
from paceline_server.engine.swapping import PreemptionCosts, SwapSpace
from paceline_server.engine.tables import BlockTables


def make_tables(
    info: ModelInfo, step_time: StepTimeModel, stored: Iterable[bytes], *, prefix_caching: bool
) -> BlockTables:
    """Block tables for a loaded model.

    Args:
        info: says how many blocks there are, and where.
        step_time: knows what computing tokens again costs.
        stored: digests of the blocks on disk.
        prefix_caching: keep freed blocks; without it there is nothing to offload.
    """
    tier = None
    if prefix_caching and info.offload_slots:
        slots = range(info.swap_slots, info.swap_slots + info.offload_slots)
        tier = OffloadTier(slots, info.offload_files, stored)
    return BlockTables(
        BlockManager(info.num_blocks, info.block_size, prefix_caching=prefix_caching),
        SwapSpace(info.swap_slots),
        PreemptionCosts(step_time, info.block_copy_seconds),
        tier,
    )
