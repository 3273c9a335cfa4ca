"""Every kernel takes every path of csrc/args.h, and is right on each; and offsets beyond 2**31 elements."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import dsa_topk
from dsa_topk import _plan
from dsa_topk.testing import CallShape, check_selection, distributions
from emulator.cases import NO_PLATEAU, NO_SECOND_TRY, between_the_samples, configuration
from gpu_helpers import DTYPES, GPU, Mode, forced_plans, launched_as, on_gpu, select, verify

ROWS, WIDTH, K = 64, 16384, 512

# path: (distribution, length, margin of the sampled bracket; None = the usual one)
WAYS = {
    "trivial": ("normal", K, None),
    "fast": ("normal", WIDTH, None),
    "second try": ("normal", WIDTH, 0.0),  # a bracket a few samples wide misses in most rows
    "plateau": ("plateau", WIDTH, None),  # 100 winners, then zeros
    "exact": ("normal", 200, None),  # too short to sample, with the smaller k
    "counted": ("all_nan", WIDTH, None),  # below the lowest number that a sample shows
}
# Kernels that hold a row: up to 4096 scores, no sample; a crowd is a second look, NaN takes the exact path.
HELD = {
    "trivial": ("normal", K, None),
    "fast": ("normal", 3000, None),
    "second try": ("plateau", 3000, None),
    "exact": ("all_nan", 3000, None),
}
LISTED = {"trivial": WAYS["trivial"], "fast": WAYS["fast"], "exact": ("all_nan", WIDTH, None)}


def ways_of(kernel: str, dtype: torch.dtype) -> dict[str, tuple[str, int, float | None]]:
    """The paths that a kernel's rows take, and how to make them."""
    kernel = configuration(kernel, dtype)
    if kernel.startswith(("Split", "Whole", "Spread")):
        return LISTED
    if kernel.startswith("Held"):
        return {path: way for path, way in HELD.items() if path != "second try" or kernel not in NO_SECOND_TRY}
    return WAYS


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", _plan.KERNELS)
def test_every_kernel_takes_every_path(kernel: str, dtype: torch.dtype) -> None:
    from dsa_topk.backends import cuda

    for path, (name, length, margin) in ways_of(kernel, dtype).items():
        k = 37 if length < K else K
        scores = distributions.make(name, ROWS, WIDTH, dtype=dtype, device="cuda", k=k)
        lengths = torch.full((ROWS,), length, dtype=torch.int32, device="cuda")
        shape = CallShape(path, "positions", ROWS, WIDTH, k, lengths=lengths)
        for plan in forced_plans(ROWS, WIDTH, k):
            if plan.kernel != kernel:
                continue
            plan = plan if margin is None else dataclasses.replace(plan, margin=margin)
            for mode in (Mode(), Mode(tie_break="largest", return_scores=True)):
                with launched_as(plan), cuda.count_paths() as counts:
                    outputs = select(GPU, shape, scores, mode)
                verify(shape, scores, mode, outputs, plan)
                taken = dict(zip(cuda.PATHS, counts.tolist(), strict=True))
                assert sum(taken.values()) == ROWS, f"{plan}: {taken}"
                assert taken[path] > 0, f"{plan}, {path}: {taken}"


@on_gpu
@pytest.mark.parametrize("margin", [0.0, 0.5, 20.0, 1e6])
@pytest.mark.parametrize(
    "name", ["normal", "indexer", "bit_patterns", "ulp_noise", "outliers", "nan_both_signs", "fp16_bin"]
)
def test_right_whatever_the_bracket(name: str, margin: float) -> None:
    """A bracket that is far too narrow misses, one that is far too wide fills every list: neither may change a bit."""
    rows, width, k = 24, 60001, 2048
    scores = distributions.make(name, rows, width, device="cuda", k=k)
    shape = CallShape(name, "positions", rows, width, k)
    for plan in forced_plans(rows, width, k):
        with launched_as(dataclasses.replace(plan, margin=margin)):
            outputs = select(GPU, shape, scores, Mode())
        verify(shape, scores, Mode(), outputs, f"{plan}, margin {margin}")


@on_gpu
def test_a_list_that_is_full_is_tried_again_narrower_or_counted() -> None:
    """A bracket that holds everything overflows every list; nothing is truncated, whatever settles the row then."""
    from dsa_topk.backends import cuda

    rows, width, k = 8, 131072, 2048
    scores = distributions.make("normal", rows, width, device="cuda", k=k)
    for plan in forced_plans(rows, width, k):
        with launched_as(dataclasses.replace(plan, margin=1e6)), cuda.count_paths() as counts:
            out = dsa_topk.topk_positions(scores, None, k, backend="cuda")
        check_selection(scores, None, k, out).raise_if_bad()
        taken = dict(zip(cuda.PATHS, counts.tolist(), strict=True))
        assert taken["second try"] + taken["counted"] + taken["exact"] == rows, f"{plan}: {taken}"


@on_gpu
@pytest.mark.parametrize("kernel", NO_PLATEAU)
def test_finite_scores_between_the_samples(kernel: str) -> None:
    """A sample of nothing but -inf, in rows without room for a plateau pass: a race on the sample's ends."""
    (case,) = between_the_samples((kernel, 1))
    call = case.call
    (plan,) = (plan for plan in forced_plans(*call.scores.shape, call.k) if plan.kernel == kernel)
    scores = call.scores.repeat(20, 1).to("cuda")
    with launched_as(plan):
        outs = [dsa_topk.topk_positions(scores, None, call.k, backend="cuda") for _ in range(50)]
    check_selection(scores, None, call.k, outs[0]).raise_if_bad()
    assert all(torch.equal(out, outs[0]) for out in outs)


def needs_memory(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, {free:.0f} are free")


@on_gpu
def test_strides_beyond_31_bits() -> None:
    """Rows of scores, table and outputs lie 2**30 elements apart, so that the third is past 2**31 elements."""
    needs_memory(12)
    rows, width, k, step, page_size = 3, 70001, 2048, 2**30 + 16, 64
    buffer = torch.zeros(2 * step + 1_000_000, dtype=torch.int32, device="cuda")

    def part(columns: int, first: int) -> torch.Tensor:
        return buffer.as_strided((rows, columns), (step, 1), first)

    scores = part(width, 100_000).view(torch.float32)
    scores.copy_(distributions.make("normal", rows, width, device="cuda"))
    table, out, positions = part(1200, 300_003), part(k, 400_001), part(k, 500_002)
    table.copy_(torch.randperm(rows * 1200).reshape(rows, 1200))
    for plan in (None, *forced_plans(rows, width, k)):
        out.fill_(-9)
        positions.fill_(-9)
        with launched_as(plan):
            dsa_topk.topk_paged(
                scores, None, k, page_table=table, page_size=page_size, out=out, out_positions=positions, backend="cuda"
            )
        verdict = check_selection(
            scores, None, k, out, form="paged", page_table=table, page_size=page_size, positions=positions
        )
        assert verdict.ok, f"{plan}: {verdict.reason}"


@on_gpu
@pytest.mark.parametrize("tie_break", ["smallest", "largest"])
def test_the_widest_row(tie_break: str) -> None:
    """N = 2**31 - 1: winners planted up to the last column, ties at both ends. (The checker would need 50 GB.)"""
    needs_memory(8)
    width, k = 2**31 - 1, 512
    scores = torch.zeros(1, width, dtype=torch.bfloat16, device="cuda")
    planted = [5, 6, 2**24 + 1, 2**30, 2**31 - 70, 2**31 - 2, *(2**23 * i + 3 * i for i in range(1, 250))]
    scores[0, torch.tensor(planted, device="cuda")] = 1.0
    taken = set(planted)
    ties = range(width) if tie_break == "smallest" else range(width - 1, -1, -1)
    free = (p for p in ties if p not in taken)
    want = sorted([*planted, *(next(free) for _ in range(k - len(planted)))])
    usual, *forced = [None, *forced_plans(1, width, k)]
    for plan in (usual, *(plan for plan in forced if plan.kernel.endswith("512"))):  # narrower blocks take seconds here
        with launched_as(plan):
            out = dsa_topk.topk_positions(scores, None, k, tie_break=tie_break, backend="cuda")
        assert out[0].tolist() == want, plan
