"""Fuzzing: hypothesis over calls that it can shrink, the seeded generator that the GPU driver uses, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_topk import cli
from dsa_topk.conformance import adapters
from dsa_topk.conformance.generate import SMALL, Limits, random_problem
from dsa_topk.conformance.problem import Problem
from dsa_topk.conformance.runner import run_problem
from dsa_topk.testing import CallShape
from dsa_topk.testing.keys import raw_bits

TORCH = adapters.get("torch")
INT64 = st.one_of(st.integers(-5, 40), st.integers(-(2**63), 2**63 - 1))
SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 65504.0, 1e-45]),
    st.floats(width=32),
)


@st.composite
def calls(draw: st.DrawFn) -> Problem:
    """Any small call: any scores, any integers, any page size, any flags."""
    form = draw(st.sampled_from(["positions", "ragged", "paged"]))
    rows, width, k = draw(st.integers(0, 4)), draw(st.integers(0, 24)), draw(st.integers(1, 30))
    values = draw(st.lists(SCORES, min_size=rows * width, max_size=rows * width))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scores = torch.tensor(values, dtype=torch.float32).view(rows, width).to(dtype)

    def column(among: st.SearchStrategy[int] = INT64) -> torch.Tensor | None:
        drawn = draw(st.one_of(st.none(), st.lists(among, min_size=rows, max_size=rows)))
        return None if drawn is None else torch.tensor(drawn, dtype=torch.int64)

    shape = CallShape("hypothesis", form, rows, width, k, lengths=column(), row_starts=column())
    if form == "ragged":
        offsets = column()
        shape.out_offsets = torch.zeros(rows, dtype=torch.int64) if offsets is None else offsets
    if form == "paged":
        batches, entries = draw(st.integers(0, 3)), draw(st.integers(0, 5))
        size = batches * entries
        pages = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size))
        shape.page_table = torch.tensor(pages, dtype=torch.int32).view(batches, entries)
        shape.page_size = draw(st.one_of(st.integers(1, 9), st.integers(1, 2**31 - 1)))
        shape.row_to_batch = column(st.one_of(st.integers(-1, 3), INT64))
        if shape.row_to_batch is None and batches < rows:
            shape.row_to_batch = torch.zeros(rows, dtype=torch.int64)
        shape.page_table_starts = column(st.one_of(st.integers(-1, 6), INT64))
    return Problem(
        "hypothesis",
        shape,
        scores,
        order=draw(st.sampled_from(["position", "score"])),
        tie_break=draw(st.sampled_from(["smallest", "largest"])),
        return_scores=draw(st.booleans()),
        return_positions=draw(st.booleans()),
    )


@settings(max_examples=400, deadline=None)  # about 4 s; the machine is shared, so no deadline per example
@given(calls())
def test_torch_meets_the_contract_on_any_call(call: Problem) -> None:
    outcome = run_problem(TORCH, call)
    assert outcome.status == "exact", outcome


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**40))
def test_torch_meets_the_contract_on_generated_calls(seed: int) -> None:
    outcome = run_problem(TORCH, random_problem(seed, "cpu", SMALL))
    assert outcome.status == "exact", outcome


def test_generated_calls_repeat() -> None:
    for seed in range(30):
        one, two = random_problem(seed, "cpu", SMALL), random_problem(seed, "cpu", SMALL)
        assert one.describe() == two.describe()
        for name, tensor in one.tensors().items():
            other = two.tensors()[name]
            if name == "scores":  # NaN is not equal to itself
                tensor, other = raw_bits(tensor), raw_bits(other)
            assert torch.equal(tensor, other)


def test_generated_calls_cover_the_contract() -> None:
    """Over 1,000 seeds every kind of argument occurs, hostile ones included."""
    seen: dict[str, int] = {}

    def count(name: str, present: Any) -> None:
        seen[name] = seen.get(name, 0) + bool(present)

    for seed in range(1000):
        call = random_problem(seed, "cpu", SMALL)
        shape, scores = call.shape, call.scores
        count(call.form, True)
        count(str(scores.dtype), True)
        count("unaligned", scores.storage_offset() % 4)
        count("padded rows", shape.rows > 1 and scores.stride(0) > shape.width)
        count("shared rows", shape.rows > 1 and scores.stride(0) < shape.width)
        count("no rows", shape.rows == 0)
        count("k above width", shape.k > shape.width)
        count("k below width", shape.k < shape.width)
        count("no lengths", shape.lengths is None)
        count("order=score", call.order == "score")
        count("largest", call.tie_break == "largest")
        count("scores returned", call.return_scores)
        count("positions returned", call.return_positions)
        if shape.lengths is not None:
            count("int64", shape.lengths.dtype == torch.int64)
            count("strided integers", shape.rows > 1 and shape.lengths.stride(0) > 1)
            count("negative lengths", (shape.lengths < 0).any())
            count("over-long lengths", (shape.lengths > shape.width).any())
        if shape.row_starts is not None:
            count("starts off 4", (shape.row_starts % 4 != 0).any())
            count("starts outside", ((shape.row_starts < 0) | (shape.row_starts > shape.width)).any())
        if call.form == "paged":
            assert shape.page_table is not None
            count("page size no power of two", shape.page_size & (shape.page_size - 1))
            count("short tables", shape.page_table.shape[1] * shape.page_size < shape.width)
            count("negative pages", (shape.page_table < 0).any())
            count("strided tables", not shape.page_table.is_contiguous())
            count("table starts", shape.page_table_starts is not None)
            if shape.row_to_batch is not None:
                batches = shape.page_table.shape[0]
                count("batch numbers outside", ((shape.row_to_batch < 0) | (shape.row_to_batch >= batches)).any())
    rare = {name: number for name, number in seen.items() if number < 5}
    assert not rare, rare


# ---- the command ---------------------------------------------------------------------------------------------------

PLANT = """
import torch
from dsa_topk import cli
from dsa_topk.conformance import adapters
_torch = adapters.get("torch")

def off_by_one(problem):
    '''Exact up to 40 candidates; then the last column of the window is not seen.'''
    start, count = problem.windows()
    problem = problem.take(torch.arange(problem.shape.rows))
    problem.shape.lengths = torch.where(count > 40, count - 1, count)
    return problem.shape.call(problem.scores, backend="torch", tie_break=problem.tie_break)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


FUZZ = ["fuzz", "--device", "cpu", "--max-elements", "4000", "--json", "out.json"]


def test_fuzz_command_records_what_it_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*FUZZ, "--calls", "40", "--seed", "11"]) == 0
    assert "torch, seed 11: 40 calls" in capsys.readouterr().out
    first = json.loads((folder / "out.json").read_text())
    assert (first["seed"], first["calls"], first["counts"]) == (11, 40, {"exact": 40})
    rows = [random_problem(11 * 2**32 + i, "cpu", Limits(max_elements=4000)).shape.rows for i in range(40)]
    assert first["rows"] == sum(rows), "the calls of a seed are always the same"


def test_fuzz_command_finds_and_minimises_a_planted_fault(folder: Path) -> None:
    (folder / "plant.py").write_text(PLANT)
    assert cli.run([*FUZZ, "--calls", "60", "--backend", "plant:off_by_one"]) == 1
    failures = json.loads((folder / "out.json").read_text())["failures"]
    assert failures
    for failure in failures:
        small = Problem.load(folder / failure["file"])
        assert small.shape.rows == 1
        assert 41 <= small.shape.width <= 60, "just long enough to show the fault"
        assert run_problem(TORCH, small).status == "exact"


def test_fuzz_command_refuses_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--backend", "nobody"), ("--backend", "cuda"), ("--mode", "loose")):
        assert cli.run(["fuzz", "--device", "cpu", *arguments]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, arguments


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_meets_the_contract_on_generated_calls() -> None:
    """300 calls; the long runs are `dsa-topk fuzz`."""
    cuda = adapters.get("cuda")
    for seed in range(300):
        outcome = run_problem(cuda, random_problem(seed, "cuda"))
        assert outcome.good, f"seed {seed}: {outcome}"
