"""The kernels against the checker: distributions x shapes x dtypes x k x tie rules x orders, every kernel forced.

Written for a GPU; the same tests run in small sizes on the reference, which tries their own logic on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dsa_topk
from dsa_topk.testing import CallShape, distributions, recorded, shapes
from gpu_helpers import DTYPES, MODES, Mode, Outputs, Target, Verdicts, launched_as, select, shape_of, verify

KS = (37, 512, 1024, 2048, 8192)
WIDTHS = (
    131072,
    5003,
    20011,
    49153,
)  # the first is the longest context of the field; the others end in no round number


def run_all(
    target: Target, shape: CallShape, scores: torch.Tensor, mode: Mode, verdicts: Verdicts, about: str
) -> Outputs:
    """Check the backend's own choice, and note whether each forced launch gives the same bits."""
    usual, *forced = target.plans(shape.rows, shape.width, shape.k)
    with launched_as(usual):
        outputs = select(target, shape, scores, mode)
    verify(shape, scores, mode, outputs, about)
    for plan in forced:
        with launched_as(plan):
            verdicts.add(
                select(target, shape, scores, mode).differs(outputs), f"{about} {shape.name} k={shape.k} {mode} {plan}"
            )
    return outputs


def grid(target: Target, turn: int) -> Iterator[tuple[CallShape, Mode]]:
    """Every shape with every k. The rest rotates by ``turn`` (another for each distribution and dtype), so that over
    the 78 turns any two values of any two axes meet; the full product would be a hundred times as many calls."""
    rows, widths = (7, (300, 1025, 2500)) if target.small else (12, WIDTHS)
    ks = (KS[turn % 2],) if target.small else KS
    for i, k in enumerate(ks):
        width = widths[(turn + i) % len(widths)]
        for j, name in enumerate(shapes.NAMES):
            n = turn + 3 * i + j
            index_dtype = torch.int64 if n % 4 == 1 else torch.int32
            shape = shape_of(name, rows, width, k, target.device, turn % 3, index_dtype, (64, 48, 5)[n % 3])
            yield shape, MODES[n % len(MODES)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", distributions.NAMES)
def test_distribution(target: Target, name: str, dtype: torch.dtype) -> None:
    turn = 3 * distributions.NAMES.index(name) + DTYPES.index(dtype)
    verdicts, made = Verdicts(), {}
    for shape, mode in grid(target, turn):
        key = (shape.width, shape.k)
        if key not in made:
            made = {
                key: distributions.make(
                    name, shape.rows, shape.width, dtype=dtype, device=target.device, seed=turn, k=shape.k
                )
            }
        run_all(target, shape, made[key], mode, verdicts, name)
    verdicts.settle()


# One each of: smooth, ties at zero, constant, sorted, narrow, all bit patterns, NaN, stretched range.
WIDE_NAMES = ("normal", "half_zeros", "all_equal", "ascending", "narrow", "bit_patterns", "nan_both_signs", "outliers")


@pytest.mark.parametrize("width", [262144, 1048576])
@pytest.mark.parametrize("name", WIDE_NAMES)
def test_wide_rows(target: Target, name: str, width: int) -> None:
    """Few rows beyond the widths of the grid above: a block's shared memory is short, clusters are the usual choice."""
    width = width // 512 if target.small else width
    verdicts = Verdicts()
    for turn, (k, form) in enumerate([(512, "decode"), (2048, "ragged"), (8192, "mixed")]):
        dtype = DTYPES[turn]
        shape = shape_of(form, 3, width, k, target.device, turn)
        scores = distributions.make(name, 3, width, dtype=dtype, device=target.device, seed=turn, k=k)
        run_all(target, shape, scores, MODES[3 * turn], verdicts, name)
    verdicts.settle()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 37, 512, 2048])
def test_windows_at_the_edges(target: Target, k: int, dtype: torch.dtype) -> None:
    """Lengths around 0, k, a warp, the shortest sampled window and powers of two; starts at every alignment; columns
    outside the window that would win (+inf, NaN, the largest number) if one were taken for a candidate."""
    width, k = (900, min(k, 200)) if target.small else (9001, k)
    around = [0, 32, k, 2 * k, 256, 1024, 4096, 8192, width]
    lengths = sorted({n + d for n in around for d in (-1, 0, 1) if 0 <= n + d <= width})
    starts = [(7 * i) % 41 for i in range(len(lengths))]
    rows = len(lengths)
    lengths_ = torch.tensor(lengths, device=target.device)
    starts_ = torch.tensor(starts, device=target.device)
    shape = CallShape("edges", "positions", rows, width, k, lengths=lengths_, row_starts=starts_)
    scores = distributions.make("quantised", rows, width, dtype=dtype, device=target.device, k=k)
    column = torch.arange(width, device=target.device)
    inside = (column >= starts_[:, None]) & (column < (starts_ + lengths_)[:, None])
    verdicts = Verdicts()
    for turn, outside in enumerate([torch.inf, torch.nan, torch.finfo(dtype).max]):
        mode = Mode(tie_break="largest" if turn == 1 else "smallest", return_scores=turn == 2)
        run_all(target, shape, scores.masked_fill(~inside, outside), mode, verdicts, f"outside {outside}")
    verdicts.settle()


@pytest.mark.parametrize("page_size", [1, 3, 64, 100, 4096, 2**31 - 1])
def test_page_sizes(target: Target, page_size: int) -> None:
    """Division by a page size is a multiplication in the kernel: sizes that are no powers of two, and both ends."""
    rows, width, k = (3, 2000, 300) if target.small else (5, 100003, 2048)
    entries = -(-width // page_size)
    table = torch.randint(0, 50, (rows, entries), dtype=torch.int32).to(target.device)  # pages may repeat
    shape = CallShape("pages", "paged", rows, width, k, page_table=table, page_size=page_size)
    verdicts = Verdicts()
    for name in ("normal", "half_zeros"):
        scores = distributions.make(name, rows, width, device=target.device, k=k)
        for mode in (Mode(positions=True), Mode(order="score", return_scores=True, positions=True)):
            run_all(target, shape, scores, mode, verdicts, name)
    verdicts.settle()


BIG = (2**31, 2**32, 2**32 + 5, 2**40, 2**63 - 1)


@pytest.mark.parametrize("name", ["lengths", "row_starts", "row_to_batch", "page_table_starts"])
def test_integers_keep_their_exact_value(target: Target, name: str) -> None:
    """int64 beyond 32 bits, both signs: cut to 32 bits, 2**32 + 5 would be a harmless 5 and 2**63 a small negative."""
    values = [0, 3, *BIG, *(-value for value in BIG), -(2**63)]
    rows, width, k = len(values), 4000, 512
    vector = torch.tensor(values, device=target.device)
    table = torch.randint(0, 1000, (rows, 70), dtype=torch.int32).to(target.device)
    fields = {"page_table": table, "page_size": 64, name: vector}
    shape = CallShape(f"big {name}", "paged", rows, width, k, **fields)
    scores = distributions.make("normal", rows, width, device=target.device, k=k)
    verdicts = Verdicts()
    run_all(target, shape, scores, Mode(positions=True, return_scores=True), verdicts, name)
    verdicts.settle()


def test_offsets_wrap_like_32_bits(target: Target) -> None:
    """The stored value is the low half of the exact sum."""
    offsets = torch.tensor([0, 7, -5, 2**31 - 10, -(2**31), 2**40 + 3, -(2**62)], device=target.device)
    rows, width, k = len(offsets), 5000, 64
    scores = distributions.make("normal", rows, width, device=target.device, k=k)
    positions = dsa_topk.topk_positions(scores, None, k, backend=target.backend)
    got = dsa_topk.topk_ragged(scores, None, k, out_offsets=offsets, backend=target.backend)
    exact = (positions.long() + offsets[:, None]) % 2**32
    assert torch.equal(got.long() % 2**32, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_of_the_inputs(target: Target, dtype: torch.dtype) -> None:
    """Row strides (odd, none, with gaps), any base address, vectors with gaps, tables in wider buffers."""
    rows, width, k = (4, 1500, 200) if target.small else (6, 70001, 1024)
    plain = distributions.make("indexer", rows, width, dtype=dtype, device=target.device, k=k)
    shape = shape_of("chunked", rows, width, k, target.device)
    loose = shape.to(target.device)
    for name in ("lengths", "row_starts", "row_to_batch", "page_table_starts"):
        holes = torch.full((rows, 3), 2**20, dtype=torch.int32, device=target.device)
        holes[:, 1] = getattr(shape, name)
        setattr(loose, name, holes[:, 1])
    wide = torch.full(
        (shape.page_table.shape[0], shape.page_table.shape[1] + 9), 77, dtype=torch.int32, device=target.device
    )
    wide[:, 4:-5] = shape.page_table
    loose.page_table = wide[:, 4:-5]
    verdicts = Verdicts()
    for gap, first in [(0, 0), (1, 1), (3, 2), (5, 7), (64, 15)]:
        buffer = torch.full((rows * (width + gap) + first,), torch.inf, dtype=dtype, device=target.device)
        scores = buffer[first:].as_strided((rows, width), (width + gap, 1))
        scores.copy_(plain)
        run_all(target, loose, scores, Mode(positions=True), verdicts, f"gap {gap}, first element {first}")
    run_all(target, loose, plain[:1].expand(rows, width), Mode(), verdicts, "row stride 0")
    run_all(target, loose, plain.flip(0)[1:2].expand(rows, width), Mode(), verdicts, "row stride 0")
    verdicts.settle()


def test_recorded_real_scores(target: Target) -> None:
    data = {name: tensor.to(target.device) for name, tensor in recorded.load().items()}
    extend, decode = data["scores"], data["decode_scores"]
    window = {"lengths": data["lengths"], "row_starts": data["row_starts"]}
    verdicts = Verdicts()
    for dtype in DTYPES[: 1 if target.small else 3]:
        for mode in MODES[: 2 if target.small else 4]:
            for k in (37, 256):
                shape = CallShape("recorded extend", "positions", *extend.shape, k, **window)
                run_all(target, shape, extend.to(dtype), mode, verdicts, "recorded")
            for k in (512, 2048):
                shape = CallShape("recorded decode", "positions", *decode.shape, k)
                run_all(target, shape, decode.to(dtype), mode, verdicts, "recorded")
    verdicts.settle()
