"""Hostile calls that the contract gives a meaning: integers at their extremes, odd sizes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsa_topk._call import Call
from dsa_topk.testing import distributions

from .memory import INT32, INT64, UNWRITTEN

NEAR = (0, 1, -1, 2, 7, 8, -7, 299, 300, 301, 40, 41)  # around the sizes below
EXTREMES = {
    INT32: (*NEAR, 2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1),
    INT64: (
        *NEAR,
        2**31,
        -(2**31) - 1,
        2**32,
        2**32 + 5,
        -(2**32) + 3,
        2**62,
        -(2**62),
        2**63 - 1,
        -(2**63),
        2**63 - 8,
    ),
}

Named = Iterator[tuple[str, Call]]


def pick(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """``rows`` extremes in an order of their own for each seed."""
    values = torch.tensor(EXTREMES[dtype], dtype=dtype)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    return values[order.repeat(rows // len(values) + 1)[:rows]]


def make(form: str, seed: int = 0, *, rows: int = 20, width: int = 300, k: int = 7, **given: Any) -> Call:
    """A call of ordinary arguments but for ``given``; type, distribution and switches go by the seed."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    name = ("bit_patterns", "normal", "half_zeros", "infinities")[seed % 4]
    scores = distributions.make(name, rows, width, dtype=dtype, seed=seed, k=k) if rows and width else None
    call = Call(
        form,  # type: ignore[arg-type]
        torch.empty(rows, width, dtype=dtype) if scores is None else scores,
        torch.full((rows,), width, dtype=INT32),
        k,
        order="score" if seed % 5 == 4 else "position",
        tie_break="largest" if seed % 2 else "smallest",
        return_scores=seed % 3 == 1,
    )
    if form == "ragged":
        call.out_offsets = torch.arange(rows, dtype=INT32) * width
    elif form == "paged":
        generator = torch.Generator().manual_seed(seed)
        call.page_table = torch.randint(0, 1 << 20, (max(rows, 1), 40), generator=generator, dtype=INT32)
        call.page_size = 8
    for name, value in given.items():
        setattr(call, name, value)
    call.out = torch.full((rows, call.k), UNWRITTEN, dtype=INT32) if call.out is None else call.out
    if form != "positions" and call.out_positions is None and seed % 2 == 0:
        call.out_positions = torch.full((rows, call.k), UNWRITTEN, dtype=INT32)
    return call


def one_extreme() -> Named:
    """Each integer tensor alone at the extremes of its type, in every form that has it."""
    for form in ("positions", "ragged", "paged"):
        own = {"positions": (), "ragged": ("out_offsets",), "paged": ("row_to_batch", "page_table_starts")}[form]
        for number, name in enumerate(("lengths", "row_starts", *own)):
            for dtype in (INT32, INT64):
                for seed in (number, number + 7):
                    yield f"{form} {name} {dtype} {seed}", make(form, seed, **{name: pick(dtype, 20, seed)})


def all_extremes() -> Named:
    """All integer tensors at their extremes at once, each in another order, types mixed; page sizes too."""
    for form in ("positions", "ragged", "paged"):
        for seed in range(12):
            names = ["lengths", "row_starts"]
            if form == "ragged":
                names.append("out_offsets")
            elif form == "paged":
                names += ["row_to_batch", "page_table_starts"]
            given: dict[str, Any] = {
                name: pick((INT32, INT64)[(seed + i) % 2], 20, seed * 10 + i) for i, name in enumerate(names)
            }
            if seed % 3 == 2:  # half of the rows have a length that leaves something to select
                given["lengths"] = torch.where(torch.arange(20) % 2 == 0, 300, given["lengths"].to(INT64))
            if form == "paged":
                given["page_size"] = (1, 3, 8, 64, 2**31 - 1, 2**30)[seed % 6]
            yield f"{form} {seed}", make(form, seed, **given)


def pages() -> Named:
    """Table entries at their extremes, tables without rows or entries, pages larger than any row."""
    entries = torch.tensor([-1, -(2**31), 2**31 - 1, 0, 1, 0x7EADBEEF, -7], dtype=INT32)
    for seed, page_size in enumerate((1, 3, 8, 64, 299, 2**30, 2**31 - 1)):
        table = entries.repeat(20 * 40 // 7 + 1)[: 20 * 40].view(20, 40).clone()
        yield f"entries, page size {page_size}", make("paged", seed, page_table=table, page_size=page_size)
        starts = torch.arange(20) * 3 - 10
        yield f"starts, page size {page_size}", make("paged", seed, page_table_starts=starts, page_size=page_size)
    for seed, shape in enumerate([(0, 40), (20, 0), (0, 0), (1, 1)]):
        near = torch.arange(20) % 3 - 1
        yield f"table {shape}", make("paged", seed, page_table=torch.zeros(shape, dtype=INT32), row_to_batch=near)


def sizes() -> Named:
    """The extremes of k, rows and columns."""
    for form in ("positions", "ragged", "paged"):
        for seed, (rows, width, k) in enumerate(
            [
                (3, 300, 1),
                (3, 300, 300),
                (3, 300, 301),
                (2, 300, 8192),
                (2, 8500, 8192),
                (3, 0, 5),
                (3, 1, 1),
                (0, 9, 3),
            ]
        ):
            lengths = torch.tensor([width, k - 1, k + 1][:rows], dtype=INT64)
            yield f"{form} {rows} x {width}, k = {k}", make(form, seed, rows=rows, width=width, k=k, lengths=lengths)
            yield (
                f"{form} {rows} x {width}, k = {k}, all",
                make(form, seed + 1, rows=rows, width=width, k=k, lengths=None),
            )


def spread(values: torch.Tensor, row_stride: int, poison: float = float("inf")) -> torch.Tensor:
    """A copy of ``values`` with its rows ``row_stride`` apart, and in the gaps what would win, were it looked at."""
    rows, columns = values.shape
    storage = torch.full(((rows - 1) * row_stride + columns,), poison, dtype=values.dtype)
    view = storage.as_strided((rows, columns), (row_stride, 1))
    view.copy_(values)
    return view


def layouts() -> Named:
    """Strides of 0, 1, odd and huge ones, rows that overlap, outputs in the gaps of a buffer."""
    for seed in range(3):
        plain = make("positions", seed)
        line = distributions.make("normal", 1, 20 * 300, dtype=plain.scores.dtype, seed=seed, k=7)[0]
        for stride in (0, 1, 7, 299):
            yield (
                f"scores' row stride {stride}, {seed}",
                make("positions", seed, scores=line.as_strided((20, 300), (stride, 1))),
            )
        for stride in (301, 329, 1024):
            yield f"scores' row stride {stride}, {seed}", make("paged", seed, scores=spread(plain.scores, stride))
        for dtype in (INT32, INT64):
            lengths = torch.full((60,), 250, dtype=dtype)
            yield f"lengths' stride 0, {seed}", make("ragged", seed, lengths=lengths[:1].expand(20))
            yield f"lengths' stride 3, {seed}", make("ragged", seed, lengths=lengths[::3], row_starts=lengths[1:41:2])
        for stride in (0, 1, 57):
            table = torch.randint(0, 9999, (20 * 60,), dtype=INT32).as_strided((20, 40), (stride, 1))
            yield f"table's row stride {stride}, {seed}", make("paged", seed, page_table=table)
        out = torch.full((20 * 20,), UNWRITTEN, dtype=INT32)
        yield f"out's row stride 19, {seed}", make("ragged", seed, out=out.as_strided((20, 7), (19, 1), 5))
    # a stride without meaning, since there is one row (or column) only
    for seed, stride in enumerate((0, 1, 2**31, 2**62)):
        one: dict[str, Any] = {
            "scores": torch.randn(300).as_strided((1, 300), (stride, 1)),
            "lengths": torch.full((1,), 300).as_strided((1,), (stride,)),
            "page_table": torch.arange(40, dtype=INT32).as_strided((1, 40), (stride, 1)),
            "row_to_batch": torch.zeros(1, dtype=INT32).as_strided((1,), (stride,)),
            "out": torch.full((7,), UNWRITTEN, dtype=INT32).as_strided((1, 7), (stride, 1)),
        }
        yield f"one row, stride {stride}", make("paged", seed, rows=1, **one)
        column = torch.randn(5).as_strided((5, 1), (1, stride))
        yield f"one column, stride {stride}", make("positions", seed, rows=5, width=1, k=2, scores=column)


LEGAL: dict[str, Callable[[], Named]] = {f.__name__: f for f in (one_extreme, all_extremes, pages, sizes, layouts)}
