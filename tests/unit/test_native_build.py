"""Finding and compiling the kernels: bundled, cached, compiled once, and what happens where that is impossible."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from paceline_server.config import EngineConfig
from paceline_server.errors import InvalidConfiguration, NativeUnavailable
from paceline_server.model import backend, native, native_build
from paceline_server.model.backend import choose_backend
from paceline_server.model.native_build import INSTRUCTION_SETS, best_instruction_set, find_or_build

BASELINE = INSTRUCTION_SETS[-1]


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that notes each call; `$out` is the file that it is to write."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\necho call >> {folder}/calls\nfor out; do :; done\n{body}\n")
    path.chmod(0o755)
    return path


def choose(dtype: str = "float32", device: str = "cpu", kv_dtype: str | None = None, **engine: str) -> str:
    model = LlamaConfig().to_dict()
    return choose_backend(EngineConfig(model_path="x", **engine), model, dtype, kv_dtype or dtype, device).name


def test_this_processor_gets_a_library() -> None:
    assert find_or_build(best_instruction_set()).is_file()


def test_the_best_set_whose_features_are_all_there_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_processor_features", lambda: frozenset("avx2 fma bmi2 f16c avx512f".split()))
    assert best_instruction_set().name == "avx2"
    monkeypatch.setattr(native_build, "_processor_features", lambda: frozenset())
    assert best_instruction_set() is BASELINE


def test_processes_that_build_at_once_compile_once(tmp_path: Path) -> None:
    fake_compiler(tmp_path, "sleep 0.3; echo library > $out")
    program = (
        f"from pathlib import Path; from paceline_server.model import native_build; here = Path({str(tmp_path)!r});"
        "native_build.BUNDLED = here / 'bundled';"
        "print(native_build.find_or_build(native_build.INSTRUCTION_SETS[-1], here / 'cache'))"
    )
    environment = {"CXX": str(tmp_path / "c++"), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "library\n"
    assert (tmp_path / "calls").read_text() == "call\n"


def test_every_process_looks_for_the_same_library() -> None:
    program = "from paceline_server.model.native_build import *; print(*map(library_name, INSTRUCTION_SETS))"
    names = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(names) == 1
    assert len(set(names.pop().split())) == len(INSTRUCTION_SETS)


def test_a_bundled_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "BUNDLED", tmp_path / "built")
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo library > $out")))
    libraries = native_build.build_into(tmp_path / "built", INSTRUCTION_SETS)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert [find_or_build(instructions, tmp_path / "cache") for instructions in INSTRUCTION_SETS] == libraries


def test_what_the_compiler_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'internal error 7' >&2; exit 1")))
    with pytest.raises(NativeUnavailable, match="internal error 7"):
        find_or_build(BASELINE, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.fixture
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "library", lambda: native.Library(str(find_or_build(BASELINE, tmp_path))))


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_auto_takes_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        assert choose() == "reference"
    assert "no C++ compiler" in caplog.text


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("engine", [{"attention_backend": "cpu"}, {"quantization": "int8"}])
def test_without_a_compiler_what_needs_the_kernels_is_refused(engine: dict[str, str]) -> None:
    with pytest.raises(NativeUnavailable, match="install g\\+\\+"):
        choose(**engine)


def test_a_library_that_cannot_be_loaded_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was compiled for a newer C library raises OSError as well."""
    damaged = tmp_path / "kernels.so"
    damaged.write_text("no library")
    monkeypatch.setattr(native, "library", lambda: native.Library(str(damaged)))
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        assert choose() == "reference"
    assert str(damaged) in caplog.text
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        choose(attention_backend="cpu")


def test_a_compilers_pages_stay_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The drawback goes to /readyz, which asks nobody for a key, and is a line of `paceline up`."""
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "printf 'no header x.h\\nin secret\\n' >&2; exit 1")))
    monkeypatch.setattr(native, "library", lambda: native.Library(str(find_or_build(BASELINE, tmp_path / "cache"))))
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        choice = choose_backend(EngineConfig(model_path="x"), LlamaConfig().to_dict(), "float32", "float32", "cpu")
    assert choice.drawback is not None
    assert choice.drawback.endswith("no header x.h")
    assert "secret" in caplog.text


def test_a_model_that_the_kernels_do_not_do_gets_the_reference_and_a_line_that_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        mixtral = MixtralConfig().to_dict()
        choice = choose_backend(EngineConfig(model_path="x"), mixtral, "float32", "float32", "cpu")
    assert choice.name == "reference"
    assert choice.drawback is not None
    assert "does not do model_type mixtral" in choice.drawback
    assert choice.drawback in caplog.text


def test_auto_takes_the_kernels_where_they_can_run_and_the_reference_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    assert choose() == "cpu"
    assert choose("float16") == "reference"
    assert choose(device="cuda") == "triton"


@pytest.mark.parametrize(
    ("dtype", "device", "engine", "message"),
    [
        ("float16", "cpu", {"attention_backend": "cpu"}, "attention_backend: cpu needs engine.dtype"),
        ("float32", "cuda", {"attention_backend": "cpu"}, "needs engine.device cpu"),
        ("bfloat16", "cuda", {"quantization": "int8"}, "quantization: int8 needs engine.device cpu"),
    ],
)
def test_kernels_that_cannot_run_what_is_asked_are_refused_by_key(
    dtype: str, device: str, engine: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        choose(dtype, device, **engine)


@pytest.mark.parametrize("interpreter", [None, "0"])
def test_the_gpu_kernels_are_refused_on_a_cpu_unless_they_are_interpreted(
    interpreter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(attention_backend="triton") == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    if interpreter is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    with pytest.raises(InvalidConfiguration, match=r"attention_backend: triton needs a GPU \(engine.device\), not cpu"):
        choose(attention_backend="triton")


def test_a_gpu_without_triton_gets_the_reference_and_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        assert choose(device="cuda") == "reference"
    assert "needs the package triton" in caplog.text


def test_a_gpu_without_a_c_compiler_gets_the_reference_and_a_line_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton would fail at the first launch, in the warm-up, at every start."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger=backend.log.name):
        assert choose(device="cuda") == "reference"
    assert "install gcc" in caplog.text
    with pytest.raises(InvalidConfiguration, match="attention_backend: triton needs a C compiler"):
        choose(device="cuda", attention_backend="triton")
    monkeypatch.setenv("CC", "/opt/cc")
    assert choose(device="cuda") == "triton"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quantization": "int8"}, "engine.quantization: int8"),
        ({"kv_dtype": "int8"}, "kv_cache.dtype: int8"),
        ({"kv_dtype": "bfloat16"}, "kv_cache.dtype: bfloat16"),
    ],
)
def test_own_formats_take_the_kernels_and_are_refused_where_those_are_not_wanted(
    asked: dict[str, Any], said: str
) -> None:
    assert choose(**asked) == "cpu"
    with pytest.raises(InvalidConfiguration, match=f"{said} is not done by engine.attention_backend reference"):
        choose(**asked, attention_backend="reference")
    with pytest.raises(InvalidConfiguration, match=f"{said} needs engine.device cpu"):
        choose(device="cuda", **asked)
