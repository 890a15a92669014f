"""KV blocks as files: the disk below host memory. Made by `startup`; a thread of its own does the work.

A file holds one block under a header that says whose it is. It is written beside its place and renamed, so that a crash
leaves no half of it there; whatever else may be wrong with it, a checksum tells. What is not whole and ours is a miss.
The folder belongs to one server: its files are a cache, and those of another model found there are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import struct
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from paceline_server.engine.offload import FileAction, FileJob, FileResult
from paceline_server.errors import InvalidConfiguration

log = logging.getLogger("paceline.model")

_HEADER = struct.Struct("<8s16s16sQ16s")  # magic, identity, digest, bytes, checksum of the bytes
_MAGIC = b"PLKV0001"
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[0-9a-f]{32}\.kv")


class BlockFolder:
    """Implements `engine.offload.BlockFiles`.

    Args:
        root: where the files go; made where it is missing.
        host: slots of host memory, [slots, block_bytes].
        identity: of the model and its layout, 32 hexadecimal digits; files of another one are never read.

    Raises:
        InvalidConfiguration: the folder cannot be used.
    """

    def __init__(self, root: Path, host: NDArray[np.uint8], identity: str) -> None:
        self._host = host
        self._identity = bytes.fromhex(identity)
        self._folder = root / identity
        try:
            self._make_folder()
            self._remove_others(root)
            self._stored = self._list()
        except OSError as error:
            raise InvalidConfiguration(f"kv_cache.offload.disk_path {root} cannot be used: {error}") from None
        self._jobs: SimpleQueue[FileJob] = SimpleQueue()
        self._results: SimpleQueue[FileResult] = SimpleQueue()
        self._failures = 0
        threading.Thread(target=self._work, name="kv block files", daemon=True).start()

    def stored(self) -> list[bytes]:
        """Digests of the blocks that were there at the start, least recently used first."""
        return self._stored

    def begin(self, job: FileJob) -> None:
        """Start a job; jobs are done one after the other."""
        self._jobs.put(job)

    def results(self) -> list[FileResult]:
        """Results since the last call."""
        found: list[FileResult] = []
        while True:
            try:
                found.append(self._results.get_nowait())
            except Empty:
                return found

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                ok = self._do(job)
            except OSError as error:
                self._complain(job, error)
                ok = False
            if job.action is not FileAction.DELETE:
                self._results.put(FileResult(job, ok))

    def _complain(self, job: FileJob, error: OSError) -> None:
        self._failures += 1
        if (
            self._failures & (self._failures - 1) == 0
        ):  # the first, second, fourth, eighth …: a full disk fails them all
            path, action = self._path(job.digest), job.action.value
            log.warning("KV block file %s: %s failed: %s (%d such failures)", path, action, error, self._failures)

    def _do(self, job: FileJob) -> bool:
        if job.action is FileAction.DELETE:
            self._path(job.digest).unlink(missing_ok=True)
            return True
        assert job.slot is not None, "a job that writes or reads has a slot"
        return self._write(job.digest, job.slot) if job.action is FileAction.WRITE else self._read(job.digest, job.slot)

    def _write(self, digest: bytes, slot: int) -> bool:
        content = self._host[slot].tobytes()
        path = self._path(digest)
        unfinished = path.with_suffix(".part")
        header = _HEADER.pack(_MAGIC, self._identity, digest, len(content), _checksum(content))
        try:
            unfinished.write_bytes(header + content)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)  # a disk that is full must not be filled by halves
            self._make_folder()  # for the next block, where somebody has tidied up
            raise
        return True

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # KV tells the prompts that it was made of

    def _read(self, digest: bytes, slot: int) -> bool:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return False
        header, content = data[: _HEADER.size], memoryview(data)[_HEADER.size :]
        size = self._host.shape[1]
        if len(content) != size or header != _HEADER.pack(_MAGIC, self._identity, digest, size, _checksum(content)):
            log.warning("KV block file %s is damaged, and is computed anew", path)
            return False
        self._host[slot].data[:] = content
        os.utime(path)
        return True

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def _list(self) -> list[bytes]:
        for unfinished in self._folder.glob("*.part"):
            unfinished.unlink()
        files = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(self._folder)]
        return [bytes.fromhex(name.removesuffix(".kv")) for _, name in sorted(files) if _FILE_NAME.fullmatch(name)]

    def _remove_others(self, root: Path) -> None:
        for entry in root.iterdir():
            if entry != self._folder and entry.is_dir() and _FOLDER_NAME.fullmatch(entry.name):
                shutil.rmtree(entry)


def _checksum(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
