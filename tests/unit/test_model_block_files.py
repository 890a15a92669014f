"""KV blocks as files: what comes back is what was written, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline_server.engine.offload import FileAction, FileJob, FileResult
from paceline_server.errors import InvalidConfiguration
from paceline_server.model.block_files import BlockFolder
from paceline_server.model.identity import kv_identity
from paceline_server.model.testing import save_tiny_model

IDENTITY, OTHER = "0" * 32, "1" * 32
DIGEST = bytes(range(16))
BYTES = 1000


@pytest.fixture
def host() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (4, BYTES), dtype=np.uint8)


def wait(folder: BlockFolder) -> FileResult:
    (result,) = wait_for(folder, 1)
    return result


def wait_for(folder: BlockFolder, count: int) -> list[FileResult]:
    deadline = monotonic() + 20
    results: list[FileResult] = []
    while monotonic() < deadline:
        results += folder.results()
        if len(results) >= count:
            return results
        sleep(0.002)
    raise AssertionError("no result")


def write(root: Path, host: NDArray[np.uint8], identity: str = IDENTITY) -> Path:
    folder = BlockFolder(root, host, identity)
    folder.begin(FileJob(FileAction.WRITE, DIGEST, 0))
    assert wait(folder).ok
    return root / identity / f"{DIGEST.hex()}.kv"


def test_a_block_comes_back_bit_for_bit_in_another_process_life(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    write(tmp_path, host)
    memory = np.zeros_like(host)
    folder = BlockFolder(tmp_path, memory, IDENTITY)
    assert folder.stored() == [DIGEST]
    folder.begin(FileJob(FileAction.READ, DIGEST, 2))
    assert wait(folder) == FileResult(FileJob(FileAction.READ, DIGEST, 2), ok=True)
    assert np.array_equal(memory[2], host[0])
    assert not memory[[0, 1, 3]].any()


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
        lambda data: b"X" + data[1:],
        lambda data: data[:10] + b"\xff" + data[11:],
    ],
    ids=["truncated", "headless", "empty", "longer", "a bit flipped", "other magic", "other model"],
)
def test_a_file_that_is_not_whole_and_ours_is_a_miss_and_leaves_memory_alone(
    tmp_path: Path, host: NDArray[np.uint8], harm: Callable[[bytes], bytes]
) -> None:
    path = write(tmp_path, host)
    path.write_bytes(harm(path.read_bytes()))
    memory = np.zeros_like(host)
    folder = BlockFolder(tmp_path, memory, IDENTITY)
    folder.begin(FileJob(FileAction.READ, DIGEST, 1))
    assert not wait(folder).ok
    assert not memory.any()


def test_a_file_under_another_blocks_name_is_a_miss(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    path = write(tmp_path, host)
    path.rename(path.with_name(f"{bytes(16).hex()}.kv"))
    folder = BlockFolder(tmp_path, np.zeros_like(host), IDENTITY)
    folder.begin(FileJob(FileAction.READ, bytes(16), 1))
    assert not wait(folder).ok


def test_files_of_another_model_are_never_read_and_are_removed_but_nothing_else_is(
    tmp_path: Path, host: NDArray[np.uint8]
) -> None:
    write(tmp_path, host, OTHER)
    (tmp_path / "notes").mkdir()
    folder = BlockFolder(tmp_path, host, IDENTITY)
    assert folder.stored() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [IDENTITY, "notes"]


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    path = write(tmp_path, host)
    path.with_suffix(".part").write_bytes(b"half")
    assert BlockFolder(tmp_path, host, IDENTITY).stored() == [DIGEST]
    assert list(path.parent.iterdir()) == [path]


def test_a_deleted_or_unwritable_file_is_no_error(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    path = write(tmp_path, host)
    folder = BlockFolder(tmp_path, host, IDENTITY)
    folder.begin(FileJob(FileAction.DELETE, DIGEST))
    folder.begin(FileJob(FileAction.DELETE, DIGEST))
    folder.begin(FileJob(FileAction.READ, DIGEST, 1))
    assert not wait(folder).ok
    path.parent.rmdir()
    folder.begin(FileJob(FileAction.WRITE, DIGEST, 1))
    assert not wait(folder).ok


def test_a_folder_that_was_removed_is_made_anew_and_is_as_private_as_before(
    tmp_path: Path, host: NDArray[np.uint8]
) -> None:
    path = write(tmp_path, host)
    folder = BlockFolder(tmp_path, host, IDENTITY)
    rmtree(path.parent)
    folder.begin(FileJob(FileAction.WRITE, DIGEST, 1))
    assert not wait(folder).ok
    folder.begin(FileJob(FileAction.WRITE, DIGEST, 1))
    assert wait(folder).ok
    assert path.parent.stat().st_mode & 0o077 == 0


def test_writes_that_fail_leave_nothing_behind_and_do_not_flood_the_log(
    tmp_path: Path, host: NDArray[np.uint8], caplog: pytest.LogCaptureFixture
) -> None:
    folder = BlockFolder(tmp_path, host, IDENTITY)
    digests = [bytes([number]) * 16 for number in range(100)]
    for digest in digests:
        (tmp_path / IDENTITY / f"{digest.hex()}.kv").mkdir()  # nothing can be put there
        folder.begin(FileJob(FileAction.WRITE, digest, 0))
    assert not any(result.ok for result in wait_for(folder, len(digests)))
    assert not [*(tmp_path / IDENTITY).glob("*.part")]
    assert 0 < len(caplog.records) <= 7


def test_only_the_servers_user_may_read_the_blocks(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    path = write(tmp_path, host)
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path, host: NDArray[np.uint8]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfiguration, match=r"kv_cache\.offload\.disk_path"):
        BlockFolder(tmp_path / "file", host, IDENTITY)


def test_a_models_identity_changes_with_every_byte_of_it_and_with_the_layout(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "a")
    whole = kv_identity(folder, ("float32", 16), every_byte=True)
    assert kv_identity(folder, ("float32", 16), every_byte=True) == whole
    assert kv_identity(folder, ("bfloat16", 16), every_byte=True) != whole
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert kv_identity(folder, ("float32", 16), every_byte=True) != whole
