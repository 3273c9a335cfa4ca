"""The build gates (tools/gates.py): the reading of ptxas' report, the budget rules, and that a spill really fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dsa_topk.jit import archs, source, toolchain

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "gates.py"
needs_nvcc = pytest.mark.skipif(toolchain.search().nvcc is None, reason="no nvcc on this machine")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gates", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gates"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gates = _load()

# As ptxas 13.0 prints it; a device function that was not inlined comes after its kernel.
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3dsa3rowILi4EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3dsa3rowILi4EEEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 1 barriers, 1040 bytes smem
ptxas info    : Compiling entry function '_Z4bulkPi' for 'sm_90a'
ptxas info    : Function properties for _Z4bulkPi
    832 bytes stack frame, 1024 bytes spill stores, 1100 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 848 bytes cumulative stack size
ptxas info    : Compile time = 2.1 ms
ptxas info    : Function properties for _Z6helperi
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def read() -> list:
    usages = gates.parse(REPORT, "90a")
    gates.demangle(usages)
    return usages


def test_report_is_read() -> None:
    row, bulk, helper = read()
    assert row == gates.Usage("dsa::row<4>(float*)", "sm_90a", 39, 0, 0, 0, 1040)
    assert bulk == gates.Usage("bulk(int*)", "sm_90a", 32, 832, 1024, 1100, 0)
    assert helper == gates.Usage("helper(int)", "sm_90a", None, 16, 0, 0, 0)


def test_spills_and_stack_frames_fail_in_kernels_and_functions() -> None:
    assert gates.judge(read(), {"dsa::row": 39, "bulk": 32}) == [
        "sm_90a bulk(int*): spills 1024 bytes stored, 1100 bytes loaded",
        "sm_90a bulk(int*): stack frame of 832 bytes",
        "sm_90a helper(int): stack frame of 16 bytes",
    ]


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ({"dsa::row": 39}, None),
        ({"dsa::row": 38}, "39 registers, the budget 'dsa::row' allows 38"),
        ({"dsa::row": 10, "dsa::row<4>": 40}, "budget 'dsa::row' matches no kernel"),
        ({"dsa::row": {"sm_90a": 38, "*": 255}}, "allows 38"),
        ({"dsa::row": {"sm_80": 10, "*": 39}}, None),
        ({"dsa::row": {"sm_80": 10}}, "no budget"),
        ({}, "39 registers and no budget"),
        ({"dsa::row": 39, "dsa::gone": 64}, "budget 'dsa::gone' matches no kernel"),
    ],
)
def test_budget(budget: dict, problem: str | None) -> None:
    problems = gates.judge(read()[:1], budget)
    if problem is None:
        assert problems == []
    else:
        assert any(problem in text for text in problems), problems


def test_no_kernel_at_all_fails() -> None:
    assert gates.judge([], {}) == ["no kernel was compiled at all"]


def test_suggested_budget_joins_the_instances_of_a_kernel() -> None:
    usages = [*read()[:1], gates.Usage("dsa::row<8>(float*)", "sm_80", 44)]
    assert gates.suggest(usages) == {"dsa::row": 44}
    assert gates.judge(usages, gates.suggest(usages)) == []


def test_budget_file_of_the_repository_is_well_formed() -> None:
    assert isinstance(gates.read_budget(gates.BUDGET), dict)


@pytest.mark.parametrize("text", ["[]", '{"a": "64"}', '{"a": {"sm_80": null}}', "{"])
def test_bad_budget_file(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "budget.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        gates.read_budget(path)
    assert gates.main(["--budget", str(path)]) == 2
    assert "gates:" in capsys.readouterr().err


def test_flags_keep_exact_arithmetic_and_explicit_targets() -> None:
    flags = " ".join((*source.DEVICE_FLAGS, *source.LINK_FLAGS))
    assert "fast_math" not in flags
    assert "fast-math" not in flags
    assert "ftz" not in flags
    assert source.gencode(("90a",)) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert set(archs.TARGETS) == {"80", "90a", "100", "120"}


CLEAN = "__global__ void clean(float* p) { p[threadIdx.x] *= 2.0f; }\n"
# 128 live values in at most 32 registers.
SPILL = """\
__global__ void __launch_bounds__(1024, 2) spill(float* p) {
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) p[(i * 7 % 128) * 1024 + threadIdx.x] = v[i] * v[(i + 1) % 128] + v[(i + 13) % 128];
}
"""


def run(tmp_path: Path, unit: str, budget: dict, *more: str) -> int:
    (tmp_path / "module.cu").write_text(unit)
    path = tmp_path / "budget.json"
    path.write_text(json.dumps(budget))
    return int(gates.main(["--source", str(tmp_path), "--budget", str(path), *more]))


@needs_nvcc
def test_all_targets_pass_with_a_clean_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, CLEAN, {"clean": 32}) == 0
    out = capsys.readouterr().out
    for arch in archs.TARGETS:
        assert f"sm_{arch}" in out
    assert "0 problem(s), 4 target(s)" in out


@needs_nvcc
def test_a_real_spill_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, CLEAN + SPILL, {"clean": 32, "spill": 32}, "--arch", "90a") == 1
    out = capsys.readouterr().out
    assert "FAILED sm_90a spill(float*): spills" in out
    assert "FAILED sm_90a spill(float*): stack frame" in out
    assert "clean(float*): spills" not in out


@needs_nvcc
def test_a_target_that_does_not_compile_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = CLEAN + "#if __CUDA_ARCH__ == 800\n#error no sm_80 here\n#endif\n"
    assert run(tmp_path, unit, {"clean": 32}, "--arch", "80,90a") == 1
    assert "no sm_80 here" in capsys.readouterr().err
