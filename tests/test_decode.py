"""The decode kernels on the CPU, where they would break first: emulator/decode_cases.py (issue 5 points 2 and 6)."""

from __future__ import annotations

import pytest
import torch

from dsa_topk.testing import distributions, shapes
from emulator.build import compiler
from emulator.cases import BF16, FP16, FP32, NO_SECOND_TRY, Case
from emulator.decode_cases import (
    CAPACITY,
    DECODE_GROUPS,
    DECODE_ROUTES,
    LONG_ROW,
    SAMPLED_ROUTES,
    SHARES,
    long_held,
    owned_columns,
    sampled_columns,
    shares_of_the_buffer,
    short_windows,
    threads_of,
)
from emulator.emulated import emulated, new_counters, prepare
from emulator.process import Options

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++")

DTYPES = (FP32, BF16, FP16)
TRIVIAL, FAST, SECOND_TRY, _, EXACT = range(5)  # csrc/args.h


def name_of(value: object) -> str:
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value)


def run(case: Case, counters: torch.Tensor | None = None) -> None:
    if case.cluster > 8:
        case.options.resident = 2  # the emulator's stacks for more of them pass the system's limit of mappings
    wrong = case.wrong(emulated(), counters)
    assert wrong is None, wrong


# Size: every decode kernel, clusters of 2, 3, 5 and 16; half a minute in all, most of it the cluster of 16.
@pytest.mark.parametrize("route", DECODE_ROUTES, ids=name_of)
@pytest.mark.parametrize("group", DECODE_GROUPS)
def test_group(group: str, route: tuple[str, int]) -> None:
    for case in DECODE_GROUPS[group](route):
        run(case)


def paths_taken(cases: list[Case]) -> list[int]:
    """Rows by path of the cases; the emulator counts from its start on."""
    counters = new_counters()
    run(cases[0], counters)
    before = counters.clone()
    for case in cases:
        run(case, counters)
    return (counters - before).tolist()


@pytest.mark.parametrize("kernel", CAPACITY)
def test_what_is_held_and_one_more(kernel: str) -> None:
    """A row of exactly the capacity is on the fast path, misaligned or not; one more is right, and slow."""
    full = CAPACITY[kernel]
    storage = distributions.make("normal", 1, full + 8, seed=1)[0]
    for shift in range(4):
        scores = storage[shift:][None, : full + 1]
        assert scores.data_ptr() // 4 % 4 == shift, "the case depends on where torch puts a tensor"
        cases = []
        for n in (full - shift, full - shift + 1):
            cases.append(Case(f"{n} of {full}", prepare(scores, torch.tensor([n]), 2048), kernel))
        assert paths_taken(cases[:1])[FAST] == 1
        assert paths_taken(cases[1:])[EXACT] == 1


@pytest.mark.parametrize("kernel", CAPACITY)
def test_the_misleading_rows_mislead(kernel: str) -> None:
    """Else `misleading_maxima` would test nothing: with winners elsewhere the same scores take the fast path."""
    full, threads = CAPACITY[kernel], threads_of(kernel)
    k, other = threads + 88, EXACT if kernel in NO_SECOND_TRY else SECOND_TRY
    generator = torch.Generator().manual_seed(1)
    row = torch.rand(1, full, generator=generator)
    scattered = row.clone()
    scattered[0, torch.randperm(full, generator=generator)[:threads]] += 3.0
    row[0, owned_columns(kernel, torch.randint(8, (threads,), generator=generator))] += 3.0
    assert paths_taken([Case("one a thread", prepare(row, None, k), kernel)])[other] == 1
    assert paths_taken([Case("scattered", prepare(scattered, None, k), kernel)])[FAST] == 1


@pytest.mark.parametrize("route", [("Whole512", 1), ("Whole1024", 1), ("Split512", 3)], ids=name_of)
def test_the_misleading_samples_are_what_is_sampled(route: tuple[str, int]) -> None:
    """Scores that the sample alone sees send the row the other way; without them it is on the fast path."""
    kernel, blocks = route
    n = 12_000
    noise = torch.rand(1, n, generator=torch.Generator().manual_seed(1))
    seen = sampled_columns(kernel, n)
    assert seen.sum() > 0.9 * 4 * threads_of(kernel)  # neighbours may draw the same piece
    row = torch.where(seen, noise + 10.0, noise)
    assert paths_taken([Case("sampled", prepare(row, None, 5000 if blocks == 1 else 2500), kernel, blocks)])[EXACT] == 1
    assert paths_taken([Case("noise", prepare(noise, None, 2500), kernel, blocks)])[FAST] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", SAMPLED_ROUTES, ids=name_of)
def test_short_windows_take_the_fast_path(route: tuple[str, int], dtype: torch.dtype) -> None:
    """Windows of k + 1 to 3072 scores in a wide buffer; 16-bit and quantised scores have ties at the k-th."""
    for seed, name in enumerate(("normal", "indexer", "quantised")):
        for case in short_windows(route, seed, dtype, name, ("smallest", "largest", "largest")[seed]):
            assert case.least_fast == (0 if name == "quantised" else round(0.9 * case.call.scores.shape[0]))
            run(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", SAMPLED_ROUTES, ids=name_of)
def test_rows_shorter_than_their_buffer_take_the_fast_path(route: tuple[str, int], dtype: torch.dtype) -> None:
    """A sample of what lies behind a row's end, +inf and NaN here, is discarded or drawn anew."""
    for case in shares_of_the_buffer(route, 1, dtype):
        assert case.least_fast == case.call.scores.shape[0]
        run(case)


def test_long_rows_shorter_than_their_buffer_take_the_fast_path() -> None:
    """Their sample is larger; rows that are cut below its length keep what they have of it, or draw a smaller one."""
    for route in (("Split512", 2), ("Spread512", 3)):
        (case,) = shares_of_the_buffer(route, 1, FP32, LONG_ROW + 20_000, 2048)
        assert case.least_fast == len(SHARES)
        run(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_longest_held_rows(dtype: torch.dtype) -> None:
    """Fast with up to 128 copies of the k-th score, and exact with more."""
    for case in long_held(("Held32K", 1), 1, dtype):
        taken = paths_taken([case])
        assert sum(taken) == 3
        assert taken[FAST] == 2, (case.name, taken)
        assert taken[EXACT] == 1, (case.name, taken)


@pytest.mark.parametrize("k", [100, 2048])
def test_same_bits_by_every_decode_kernel_whatever_the_batch(k: int) -> None:
    """Against the one-block kernel of prefill; rows of a batch meet in other blocks, clusters and schedules."""
    n = 4096
    names = ("indexer", "half_zeros", "quantised", "normal")
    scores = torch.cat([distributions.make(name, 1, n, seed=5, k=k) for name in names])
    lengths = torch.tensor([n, n - 1, k + 1, n // 2 + k // 2], dtype=torch.int32)
    want = prepare(scores, lengths, k)
    emulated().run(want, kernel="Row128")
    assert want.out is not None
    for i, (kernel, blocks) in enumerate(DECODE_ROUTES):
        for rows in ([0, 1, 2, 3], [2], [3, 1, 1]) if blocks < 5 else ([2, 1],):
            call = prepare(scores[rows].contiguous(), lengths[rows], k)
            emulated().run(call, kernel=kernel, cluster=blocks, options=Options(seed=i, resident=2))
            assert call.out is not None
            assert torch.equal(call.out, want.out[rows]), (kernel, blocks, rows)


def test_every_schedule_of_the_rare_ways() -> None:
    """Rounds by key and by position, and lists that overflow, under 16 seeds of each kind of schedule."""
    for route, group in ((("Held4K", 1), "plateaus"), (("Held8K", 1), "of_one_bin"), (("Split512", 3), "one_slice")):
        for case in list(DECODE_GROUPS[group](route))[::5]:
            for seed in range(16):
                case.options = Options(seed=seed, schedule=seed % 4, preempt=(0, 32, 1024)[seed % 3])
                run(case)


@pytest.mark.parametrize("kernel", ["Held8K", "Held16K"])
def test_rows_that_no_register_holds(kernel: str) -> None:
    """Rows longer than the kernel holds take the exact path. It shares its memory with what thread 0 has noted by then:
    an offset got among the counters, and as many slots stayed unwritten (found on a GPU, in 16-bit scores)."""
    width, k = 20011, 512
    shape = shapes.make("prefill_cp", rows=12, width=width, k=k, seed=3)
    scores = distributions.make("all_nan", 12, width, dtype=torch.bfloat16, seed=5, k=k)
    for seed in range(3):
        call = prepare(scores, shape.lengths, k, form=shape.form, **shape.kwargs())
        wrong = Case(f"{kernel} seed {seed}", call, kernel, options=Options(seed=seed)).wrong(emulated())
        assert wrong is None, wrong
