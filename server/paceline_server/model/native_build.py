"""Compiles the C++ kernels in csrc/ for this processor, once, or finds them compiled. `native` loads the result.

One library for each instruction set, from the same sources: the choice is made when a library is opened, so an image
that holds all of them serves any processor. The sources use neither torch's nor Python's headers, so a library
depends on no version of either, and compiling takes seconds.

`python -m paceline_server.model.native_build` compiles every set into the package, for an image without a compiler;
with `--here` only this processor's.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline_server.errors import NativeUnavailable

log = logging.getLogger("paceline.native")

SOURCES = Path(__file__).parent / "csrc"

BUNDLED = SOURCES / "built"
"""Libraries that were compiled ahead, with an image."""

CACHE = Path.home() / ".cache" / "paceline" / "native"
"""Libraries that were compiled on this machine."""

_FLAGS = (
    *("-shared", "-fPIC", "-O3", "-std=c++20", "-pthread", "-fopenmp-simd", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math"),  # nobody here reads errno or floating-point exceptions
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A kind of processor.

    Attributes:
        requires: features as /proc/cpuinfo calls them.
        flags: of the compiler.
    """

    name: str
    requires: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "bmi2", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni"}
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")

INSTRUCTION_SETS = (
    InstructionSet("avx512_bf16", _AVX512 | {"avx512_bf16"}, (*_AVX512_FLAGS, "-mavx512bf16")),
    InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2", _AVX2, ("-march=x86-64-v3",)),
    InstructionSet("baseline", frozenset(), ()),
)
"""Best first; the last one runs on any processor that the compiler compiles for."""


def best_instruction_set() -> InstructionSet:
    """The best one that this processor has."""
    features = _processor_features()
    return next(candidate for candidate in INSTRUCTION_SETS if candidate.requires <= features)


def find_or_build(instructions: InstructionSet, cache: Path = CACHE) -> Path:
    """The library for an instruction set: bundled, cached, or compiled now.

    Several processes may ask at once: one compiles, the others wait for it.

    Raises:
        NativeUnavailable: it has to be compiled, and there is no compiler, or it fails.
    """
    name = library_name(instructions)
    for folder in (BUNDLED, cache):
        if (folder / name).is_file():
            return folder / name
    compiler = find_compiler()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{name}.lock"):
            if not (cache / name).is_file():
                log.info("compiling the CPU kernels for %s with %s, once", instructions.name, compiler)
                compile_library(compiler, instructions, cache / name)
    except OSError as error:
        raise NativeUnavailable(f"the CPU kernels cannot be kept in {cache}: {error}") from None
    return cache / name


def find_compiler() -> str:
    """The path of a C++ compiler: $CXX, or a usual name.

    Raises:
        NativeUnavailable: none is installed.
    """
    wanted = os.environ.get("CXX")
    found = next(
        (path for name in ([wanted] if wanted else ["g++", "c++", "clang++"]) if (path := shutil.which(name))), None
    )
    if found is None:
        raise NativeUnavailable("no C++ compiler is installed to compile the CPU kernels with (install g++)")
    return found


def compile_library(compiler: str, instructions: InstructionSet, target: Path, *flags: str) -> None:
    """Compile into `target`, which appears whole or not at all.

    Raises:
        NativeUnavailable: the compiler refuses; with what it says.
    """
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as unfinished:
        path = Path(unfinished.name)
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        command = [compiler, *_FLAGS, *instructions.flags, *flags, *sources, "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = result.stderr.strip()[-2000:] or "without a word: is memory short?"
            raise NativeUnavailable(
                f"{compiler} could not compile the CPU kernels (status {result.returncode}): {said}"
            )
        path.chmod(0o755)
        path.replace(target)
    finally:
        path.unlink(missing_ok=True)


def build_into(folder: Path, wanted: tuple[InstructionSet, ...]) -> list[Path]:
    """Compile instruction sets into a folder, those that it lacks; returns the libraries.

    Raises:
        NativeUnavailable: see `find_or_build`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = [folder / library_name(instructions) for instructions in wanted]
    for instructions, library in zip(wanted, libraries, strict=True):
        if not library.is_file():
            compile_library(find_compiler(), instructions, library)
    return libraries


def instruction_sets_of_this_architecture() -> tuple[InstructionSet, ...]:
    """All that this compiler can compile for."""
    return INSTRUCTION_SETS if platform.machine() == "x86_64" else INSTRUCTION_SETS[-1:]


def library_name(instructions: InstructionSet) -> str:
    """Changes with everything that the library depends on."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, instructions.flags)).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"paceline-{instructions.name}-{digest.hexdigest()[:16]}.so"


def _processor_features() -> frozenset[str]:
    """What /proc/cpuinfo lists; nothing on a processor that is no x86."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Compile into the package; returns the exit code."""
    wanted = (best_instruction_set(),) if arguments == ["--here"] else instruction_sets_of_this_architecture()
    try:
        sys.stdout.writelines(f"{library}\n" for library in build_into(BUNDLED, wanted))
    except NativeUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
