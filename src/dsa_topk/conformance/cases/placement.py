"""Fault cases B20 to B37: lengths, windows, page tables. Where a row lies decides; random scores do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from dsa_topk.testing import CallShape

from ..problem import Problem
from .common import FORMS, Case, Setting, Spec, integers, normal, table, wrap

INT32_MIN, INT64_MIN, INT64_MAX = -(2**31), -(2**63), 2**63 - 1


def b20(s: Setting) -> Iterator[Spec]:
    """Negative lengths of padded draft rows among short and long ones."""
    cycle = [-4, -3, -2, -1, 0, 1, 5000, 131072, INT32_MIN]

    def make(rows: int, form: str, dtype: torch.dtype) -> Problem:
        scores = normal(rows, 131072, s, rows)
        lengths = [cycle[i % len(cycle)] for i in range(rows)]
        if dtype == torch.int64:
            lengths[: min(2, rows)] = [INT64_MIN, -(2**32) + 5][: min(2, rows)]
        problem = wrap(scores, lengths, 2048, form, index_dtype=dtype, graph=True)
        if form == "paged":  # a small table: 40 pages serve 2560 tokens
            assert problem.shape.page_table is not None
            problem.shape.page_table = problem.shape.page_table[:, :40]
        return problem

    for rows in s.pick((9,), (6, 8, 9, 300)):
        for form in FORMS:
            for dtype in (torch.int32, torch.int64):
                yield Spec("B20", f"{rows} rows, {form}, {dtype}", 131072, partial(make, rows, form, dtype))


def b21(s: Setting) -> Iterator[Spec]:
    """One negative length in each place of a batch of medium rows: it must return."""

    def make(place: int, k: int) -> Problem:
        lengths = [9000, 9001, 9002, 9003, 9004, 9005, 0]
        lengths.insert(place, -1)
        return wrap(normal(8, 16384, s, place), lengths, k, graph=True)

    for k in (512, 2048):
        for place in s.pick((0, 6), range(8)):
            yield Spec("B21", f"length -1 in row {place}, k = {k}", 9005, partial(make, place, k))


def b23(s: Setting) -> Iterator[Spec]:
    """k larger than the scores are wide."""

    def make(width: int, form: str) -> Problem:
        return wrap(normal(4, width, s, width), [0, 1, width - 1, width], 2048, form, return_scores=True)

    for width in (1, 63, 64, 65, 2047, 2048):
        for form in FORMS:
            yield Spec("B23", f"width {width}, {form}", width, partial(make, width, form))


def b24(s: Setting) -> Iterator[Spec]:
    """Lengths beyond the score width, or beyond what the table serves, in the last row too."""

    def make(length: int, start: int, entries: int, form: str) -> Problem:
        problem = wrap(normal(3, 4096, s, 24), length, 2048, form, starts=start, index_dtype=torch.int64, page_size=16)
        if form == "paged":
            # The table ends with its allocation: a load behind it is a load behind the buffer.
            problem.shape.page_table = table(3, entries, s.device)
        return problem

    for length in (4096, 4097, 8192, 2**31 - 1, INT64_MAX):
        for start in (0, 4000, INT64_MIN):
            for form, entries in (("positions", 0), ("ragged", 0), ("paged", 256), ("paged", 140), ("paged", 3)):
                name = f"length {length}, start {start}, {form} {entries or ''}"
                yield Spec("B24", name, 4096, partial(make, length, start, entries, form))


def b26(s: Setting) -> Iterator[Spec]:
    """As many leading slots as the caller can compute from length and k alone."""

    def make(next_n: int, k: int) -> Problem:
        lengths = [max(0, (seq - next_n + t + 1) // 4) for seq in range(1, 41) for t in range(next_n)]
        return wrap(normal(len(lengths), 16, s, next_n), lengths, k, "paged", page_size=4)

    for next_n in (1, 2, 3, 4):
        for k in (3, 8):
            yield Spec("B26", f"compressed lengths, {next_n} draft rows, k = {k}", 10, partial(make, next_n, k))


def _packed(s: Setting, form: str, page_size: int = 64, seed: int = 27) -> Problem:
    """Two requests of 3,000 and 5,000 keys packed along the columns, 7 and 9 queries."""
    lengths = [3000 - 6 + i for i in range(7)] + [5000 - 8 + i for i in range(9)]
    scores = normal(16, 8000, s, seed)
    problem = wrap(scores, lengths, 2048, form, starts=[0] * 7 + [3000] * 9, page_size=page_size)
    if form == "paged":
        problem.shape.page_table = table(2, -(-5000 // page_size), s.device)
        problem.shape.row_to_batch = integers([0] * 7 + [1] * 9, 16, s.device)
    if form == "ragged":
        problem.shape.out_offsets = problem.shape.row_starts
    return problem


def b27(s: Setting) -> Iterator[Spec]:
    """Packed requests: nothing outside a row's window is a candidate."""

    def make(form: str, rows: tuple[int, ...]) -> Problem:
        problem = _packed(s, form)
        if rows:
            problem = problem.take(torch.tensor(rows, device=s.device))
        problem.poison = True
        return problem

    for form in FORMS:
        for name, rows in (("two requests", ()), ("one request", (7, 8, 15)), ("one token", (9,))):
            yield Spec("B27", f"{name}, {form}", 5000, partial(make, form, rows))


def b29(s: Setting) -> Iterator[Spec]:
    """Scores start in the batch, tables start in the request: two different starts."""

    def make(page_size: int, starts: tuple[int, int]) -> Problem:
        problem = _packed(s, "paged", page_size)
        shape = problem.shape
        shape.page_table = table(2, -(-5000 // page_size) + max(starts), s.device)
        shape.page_table_starts = integers([starts[0]] * 7 + [starts[1]] * 9, 16, s.device)
        problem.return_positions = True
        return problem

    for page_size, starts in ((64, (0, 0)), (64, (1, 7)), (1, (0, 65)), (3, (2, 0))):
        yield Spec("B29", f"pages of {page_size}, table starts {starts}", 5000, partial(make, page_size, starts))


def b30(s: Setting) -> Iterator[Spec]:
    """Positions are relative to the window; an offset of the start makes columns of them; -1 stays -1."""

    def make(offset: int, length: int) -> Problem:
        problem = wrap(normal(4, 4200, s, 30), length, 2048, "ragged", starts=1000, return_positions=True)
        problem.shape.out_offsets = integers(offset, 4, s.device)
        return problem

    for offset in (0, 1000, -7):
        for length in (3000, 100):
            yield Spec("B30", f"offset {offset}, length {length}", length, partial(make, offset, length))


def b32(s: Setting) -> Iterator[Spec]:
    """Inputs are read only, whatever the form, the dtype and the route."""

    def make(form: str, dtype: torch.dtype, length: int) -> Problem:
        scores = normal(3, 9001, s, 32).to(dtype)
        return wrap(scores, length, 1000, form, starts=[1, 2, 3], return_scores=True, page_size=1)

    for form in FORMS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for length in (999, 1001, 8998):
                yield Spec("B32", f"{form}, {dtype}, length {length}", length, partial(make, form, dtype, length))


def b33(s: Setting) -> Iterator[Spec]:
    """Rows taken in chunks with the table of the whole batch; batch numbers that do not exist are empty rows."""

    def make(chunk: int) -> Problem:
        requests, rows = 9, s.pick(120, 1000)
        generator = torch.Generator().manual_seed(33)
        owner = torch.randint(-1, requests + 1, (rows,), generator=generator)
        problem = wrap(normal(rows, 700, s, 33), 690, 128, "paged", starts=7, page_size=8)
        problem.shape.page_table = table(requests, 90, s.device)
        problem.shape.row_to_batch = owner.to(device=s.device, dtype=torch.int64)
        return (
            problem if not chunk else problem.take(torch.arange(min(11, rows - chunk), rows - chunk, device=s.device))
        )

    for chunk in (0, 1, 64):
        yield Spec("B33", f"row_to_batch from -1 to B, chunk {chunk}", 690, partial(make, chunk))


def b34(s: Setting) -> Iterator[Spec]:
    """Tables that end before the longest window, flush with their buffer; k that is a multiple of nothing."""

    def make(k: int, page_size: int, short: int) -> Problem:
        problem = wrap(normal(5, 3000, s, k), 2990, k, "paged", page_size=page_size)
        full = -(-2990 // page_size)
        problem.shape.page_table = table(5, full, s.device)
        problem.shape.page_table_starts = integers([0, 1, short, full - 1, full], 5, s.device)
        problem.return_positions = True
        return problem

    for k in (2051, 64, 1):
        for page_size in (1, 64, 100):
            yield Spec("B34", f"k = {k}, pages of {page_size}", 2990, partial(make, k, page_size, 2))


def b35(s: Setting) -> Iterator[Spec]:
    """Speculative overshoot: lengths a few tokens beyond what the table serves."""

    def make(page_size: int) -> Problem:
        lengths = [4095, 4096, 4097, 4102, 6000, 1]
        problem = wrap(normal(6, 6000, s, 35), lengths, 2048, "paged", page_size=page_size, graph=True)
        problem.shape.page_table = table(6, 4096 // page_size, s.device)
        return problem

    for page_size in (1, 64):
        yield Spec("B35", f"table of 4096 tokens, pages of {page_size}", 4096, partial(make, page_size))


def b37(s: Setting) -> Iterator[Spec]:
    """Compact tables cut out of larger ones, both outputs, windows that end inside a page."""

    def make(page_size: int, tail: int) -> Problem:
        length = max(1, 3000 // page_size * page_size - page_size + tail)
        problem = wrap(normal(4, 3300, s, 37), length, 900, "paged", starts=[0, 1, 2, 3], page_size=page_size)
        problem.return_positions = problem.return_scores = True
        entries = -(-length // page_size)
        big = table(4, entries + 9, s.device)
        problem.shape = replace(problem.shape, page_table=big[:, 1 : entries + 1])
        return problem

    for page_size in (1, 2, 3, 16, 64, 100, 256):
        for tail in sorted({0, 1, page_size - 1}):
            yield Spec("B37", f"pages of {page_size}, {tail} in the last", 3000, partial(make, page_size, tail))


def hostile(s: Setting) -> Iterator[Spec]:
    """Every integer argument at its extremes at once."""
    ends = [INT64_MIN, INT64_MAX, -1, 0, 1, 2**31, INT32_MIN, 2**32 + 3, -(2**32) + 3, 49, 7]

    def make(turn: int, form: str, page_size: int) -> Problem:
        def column(shift: int) -> torch.Tensor:
            values = ends[shift % 11 :] + ends[: shift % 11]
            return torch.tensor(values, dtype=torch.int64, device=s.device)

        shape = CallShape("hostile", form, 11, 60, 20, lengths=column(0), row_starts=column(turn), page_size=page_size)
        if form == "ragged":
            shape.out_offsets = column(turn + 3)
        if form == "paged":
            pages = torch.tensor([[0, -1, INT32_MIN], [2**31 - 1, 5, 5]], dtype=torch.int32, device=s.device)
            shape.page_table = pages
            shape.row_to_batch = column(turn + 1) if turn % 3 else column(turn + 1).remainder(2)
            shape.page_table_starts = column(2 * turn) if turn % 2 else column(turn).remainder(4)
        scores = normal(11, 60, s, turn)
        return Problem("", shape, scores, return_positions=True, return_scores=True, graph=True)

    for turn in range(11):
        for form, page_size in (("positions", 1), ("ragged", 1), ("paged", 7), ("paged", 2**31 - 1)):
            name = f"extremes {turn}, {form}, pages of {page_size}"
            yield Spec("hostile", name, 60, partial(make, turn, form, page_size))


CASES = (
    Case("B20", "negative lengths of padded rows read as unsigned", b20),
    Case("B21", "a negative length that makes the launch hang", b21),
    Case("B23", "k larger than the physical width", b23),
    Case("B24", "lengths beyond the width or the table", b24),
    Case("B26", "written and reserved counts that disagree", b26),
    Case("B27", "candidates from another request's columns", b27),
    Case("B29", "one start used for scores and table", b29),
    Case("B30", "absolute columns where relative positions are meant", b30),
    Case("B32", "a call that writes its inputs", b32),
    Case("B33", "chunks of rows against a table of the whole batch", b33),
    Case("B34", "table reads past the end; k that is no multiple", b34),
    Case("B35", "lengths a few tokens beyond the table", b35),
    Case("B37", "strided tables, both outputs, ragged last pages", b37),
    Case("hostile", "integers at their extremes in every argument", hostile),
)
