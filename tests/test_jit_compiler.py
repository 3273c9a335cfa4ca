"""The compiler side of dsa_topk.jit: targets, the search for nvcc, readable failures, and the real nvcc."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jit_fixture
from dsa_topk import jit
from dsa_topk.jit import archs, compiler, toolchain
from dsa_topk.jit.store import Store
from jit_fixture import SRC, Workshop, answer, needs_nvcc, use_real_nvcc

workshop = jit_fixture.workshop


# --- architectures


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("90a", ("90a",)),
        ("sm_100, 80,90a,100", ("80", "90a", "100")),
        (["120f", "compute_80"], ("80", "120f")),
    ],
)
def test_arch_names_are_made_canonical(text: str | list[str], names: tuple[str, ...]) -> None:
    assert archs.parse(text) == names


@pytest.mark.parametrize("text", ["", "75", "hopper", "90b", "9.0", "90a;100", "90a -o x"])
def test_bad_arch_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="archs"):
        archs.parse(text)


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "80"),
        ((8, 6), "80"),
        ((8, 7), "87"),
        ((8, 9), "80"),
        ((9, 0), "90a"),
        ((10, 0), "100"),
        ((10, 3), "100"),
        ((11, 0), "110"),
        ((12, 0), "120"),
        ((12, 1), "120"),
    ],
)
def test_each_device_gets_a_target_that_it_can_run(capability: tuple[int, int], target: str) -> None:
    assert archs.native(capability) == target
    assert archs.runs_on(target, capability)
    assert archs.acceptable(capability)[-1] == target


def test_devices_do_not_get_foreign_targets() -> None:
    assert not archs.runs_on("90a", (10, 0))
    assert not archs.runs_on("100a", (10, 3))
    assert not archs.runs_on("103", (10, 0))
    assert not archs.runs_on("80", (8, 7))
    assert "90" not in archs.acceptable((9, 0))
    with pytest.raises(ValueError, match=r"8\.0 or later"):
        archs.native((7, 5))


# --- compiler search


def test_nvcc_search_order(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path = tmp_path / "bin" / "nvcc"
    on_path.parent.mkdir()
    shutil.copy(workshop.toolkit / "bin" / "nvcc", on_path)
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    found = toolchain.search()
    assert found.nvcc == toolchain.Nvcc(workshop.toolkit / "bin" / "nvcc", "CUDA_HOME")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(toolchain, "_wheel_nvcc", lambda: "/wheels/nvcc")
    found = toolchain.search()
    assert found.nvcc == toolchain.Nvcc(Path("/wheels/nvcc"), "cuda.pathfinder")
    assert found.tried[0] == ("CUDA_HOME", "no executable /nonexistent/bin/nvcc")
    monkeypatch.setattr(toolchain, "_wheel_nvcc", lambda: None)
    assert toolchain.search().nvcc == toolchain.Nvcc(on_path, "PATH")


def test_toolkit_root_behind_a_wrapper_script(workshop: Workshop, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {workshop.toolkit}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    assert toolchain.toolkit_root(wrapper) == workshop.toolkit


def test_version_of_a_binary_is_remembered_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, memory = tmp_path / "nvcc", tmp_path / "compilers.json"
    binary.write_bytes(b"\x7fELF....")
    asked = itertools.count(1)
    monkeypatch.setattr(toolchain, "_run", lambda *_: f"Build {next(asked)}\n")
    assert [toolchain.version(binary, memory) for _ in range(2)] == ["Build 1", "Build 1"]
    os.utime(binary, ns=(1, 1))
    assert toolchain.version(binary, memory) == "Build 2"
    binary.write_bytes(b"\x7fELF.....")
    os.utime(binary, ns=(1, 1))
    assert toolchain.version(binary, memory) == "Build 3"
    memory.write_text("[broken")
    assert toolchain.version(binary, memory) == "Build 4"
    assert len(json.loads(memory.read_text())) == 1


def test_missing_host_compiler_is_said_before_compiling(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "Finder", workshop.finder)
    monkeypatch.setattr(toolchain.shutil, "which", lambda *_, **__: None)
    with pytest.raises(jit.JitError, match="no g\\+\\+"):
        workshop.build()
    assert "no g++" in (jit.unavailable_reason() or "")
    monkeypatch.setenv("NVCC_CCBIN", "/opt/g++")
    assert toolchain.host_compiler_problem() is None


# --- errors of the compiler


def test_compile_error_is_readable_and_leaves_nothing(workshop: Workshop) -> None:
    (workshop.sources / "answer.cuh").write_text("#define ANSWER nonsense\n")
    with pytest.raises(jit.JitError) as caught:
        workshop.build()
    error = caught.value
    assert error.first_error is not None
    assert "nonsense" in error.first_error
    assert error.command is not None
    assert "module.cu" in error.command
    assert error.hint
    assert error.log is not None
    log = error.log.read_text()
    assert log.startswith("$ cd ")
    assert error.first_error in log
    assert workshop.leftovers() == []
    assert workshop.entries() == []
    workshop.set_answer(42)
    assert answer(workshop.build().path) == 42


@pytest.mark.parametrize(
    ("output", "first", "hint"),
    [
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", "Unsupported gpu", "12.8"),
        ("x\n/usr/bin/ld: cannot find -lcudart_static\n", "cannot find", "nvidia-cuda-runtime"),
        ("warn\nmodule.cu:1:10: fatal error: tvm/ffi/c_api.h: No such file", "fatal error", "apache-tvm-ffi"),
        ("as: error writing: No space left on device\n", "No space", "full"),
        ("#error -- unsupported GNU version! gcc versions later than 15", "unsupported GNU", "NVCC_CCBIN"),
        ("ptxas x.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '9.0'", "fatal", "nvidia-nvvm"),
        ("", "(no output)", "dsa-topk info"),
    ],
)
def test_first_error_and_hint(output: str, first: str, hint: str, tmp_path: Path) -> None:
    error = compiler.failure(output, 1, "nvcc", tmp_path, tmp_path / "x.log", 0.1)
    assert first in (error.first_error or "")
    assert hint in (error.hint or "")


def test_a_compiler_that_leaves_a_torn_file_is_caught(workshop: Workshop) -> None:
    workshop.hook('for w in $keep; do case "$w" in */module.so) printf "\\177ELF" > "$w" ;; esac; done; exit 0')
    with pytest.raises(jit.JitError, match="reported success but left"):
        workshop.build()
    assert workshop.entries() == []
    assert workshop.leftovers() == []


# --- the real compiler


@needs_nvcc
def test_real_nvcc_cold_and_warm_times(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold one target under 30 s; warm in a fresh process, imports of torch and tvm_ffi apart, well under 1 s."""
    use_real_nvcc(monkeypatch)
    unit = (workshop.sources / "module.cu").read_text()
    (workshop.sources / "module.cu").write_text(unit + "__global__ void fill(int* x) { x[threadIdx.x] = ANSWER; }\n")
    begin = time.perf_counter()
    cold = workshop.build()
    assert (cold.how, workshop.runs()) == ("built", 0)  # the fake was not asked
    assert time.perf_counter() - begin < 30
    code = f"""
import time
import tvm_ffi
from pathlib import Path
begin = time.perf_counter()
from dsa_topk import jit
module = jit.load("90a", finder=jit.Finder(Path({str(workshop.sources)!r})))
print(module.answer(), time.perf_counter() - begin)
"""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    value, seconds = done.stdout.split()
    assert value == "42"
    assert float(seconds) < 1.0
    assert [name for name in Store(workshop.cache).names() if name != cold.key] == []


@needs_nvcc
def test_real_nvcc_error(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_nvcc(monkeypatch)
    (workshop.sources / "answer.cuh").write_text("#define ANSWER nonsense\n")
    with pytest.raises(jit.JitError) as caught:
        workshop.build()
    assert "nonsense" in (caught.value.first_error or "")


@needs_nvcc
def test_real_module_exports_nothing_but_its_functions(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_nvcc(monkeypatch)
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    path = workshop.build().path
    names = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in names.splitlines()} - {"_init", "_fini"}
    assert exported == {"__tvm_ffi_answer"}
