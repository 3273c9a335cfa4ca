"""Fault cases B38 to B79 that are calls: offsets beyond 32 bits, k, layout, order, repeatability, mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations as orders

import torch

from ..problem import Problem
from .common import FORMS, Case, Setting, Spec, integers, ladder, normal, permutations, wrap


def b38(s: Setting) -> Iterator[Spec]:
    """Rows that lie more than 2^31 and 2^32 elements apart; on a GPU also many outputs."""

    def far(stride: int, dtype: torch.dtype) -> Problem:
        width = 65536
        # Never touched in between, so a CPU with lazy allocation holds only the two rows.
        base = torch.empty(stride + width + 64, dtype=dtype, device=s.device)
        scores = base.as_strided((2, width), (stride, 1))
        # An offset cut to 32 bits lands in row 0 (or outside the buffer), whose answer is another one.
        scores[0] = ladder(1, width, s, 1)[0].to(dtype)
        scores[1] = -ladder(1, width, s, 2)[0].to(dtype)
        return wrap(scores, width, 2048)

    def many(rows: int, width: int, length: int) -> Problem:
        return wrap(normal(rows, width, s, 3), length, 2048)

    # 8.6 GB of address space each; float16 carries the larger stride in the same room.
    yield Spec("B38", "row stride 2^31 + 256", 65536, partial(far, 2**31 + 256, torch.float32))
    yield Spec("B38", "row stride 2^32 + 256", 65536, partial(far, 2**32 + 256, torch.float16))
    if not s.small:
        yield Spec("B38", "1,048,577 rows of 8", 8, partial(many, 1_048_577, 8, 8))
        yield Spec("B38", "16,385 rows of 262,144", 262144, partial(many, 16385, 262144, 262144))


def b39(s: Setting) -> Iterator[Spec]:
    """Many long rows in one call: scratch may not grow with them."""

    def make(rows: int, length: int) -> Problem:
        return wrap(normal(rows, length, s, 39), length, 2048)

    sizes = s.pick(((3, 262209),), ((4096, 262144), (4096, 262209), (16384, 65536), (256, 1048576)))
    for rows, length in sizes:
        yield Spec("B39", f"{rows} rows", length, partial(make, rows, length))


def _tied(s: Setting, rows: int, length: int, winners: int, ties: int, seed: int = 48) -> torch.Tensor:
    """``winners`` distinct scores, ``ties`` at the k-th value scattered evenly, the rest lower."""
    place = permutations(rows, length, s, seed)
    scores = torch.where(place < winners, 10.0 + place, -1.0 - place)
    every = torch.arange(length, device=s.device) * ties // length
    spread = torch.cat([torch.ones(1, dtype=torch.bool, device=s.device), every[1:] != every[:-1]])
    return torch.where(spread & (place >= winners), 5.0, scores).float()


def b47(s: Setting) -> Iterator[Spec]:
    """Scores rounded to 1/64: the same row gives the same bits in any batch, at any place, every time."""

    def make(rows: int, tie_break: str) -> Problem:
        row = (normal(1, 131072, s, 47) * 64).round() / 64
        # A wider batch of other rows around copies of one row; the checker compares each with the one answer.
        scores = (normal(rows, 131072, s, 48) * 64).round() / 64
        scores[:: max(1, rows // 3)] = row
        return wrap(scores, 131072, 2048, tie_break=tie_break, repeats=s.pick(2, 25), graph=True)

    for rows in s.pick((3,), (1, 7, 64)):
        for tie_break in ("smallest", "largest"):
            yield Spec("B47", f"quantised, {rows} rows, {tie_break}", 131072, partial(make, rows, tie_break))


def b48(s: Setting) -> Iterator[Spec]:
    """Hundreds of ties at the k-th value: the set and the order are fixed by the rule."""

    def make(ties: int, rows: int, tie_break: str) -> Problem:
        lengths = [65536 - 61 * (i % 97) for i in range(rows)]
        scores = _tied(s, rows, 65536, 300, ties)
        return wrap(scores, lengths, 512, tie_break=tie_break, repeats=s.pick(2, 20))

    for ties in (213, 400, 5000):
        for rows in s.pick((2,), (64, 192, 512)):
            for tie_break in ("smallest", "largest"):
                yield Spec("B48", f"{ties} ties, {rows} rows, {tie_break}", 65536, partial(make, ties, rows, tie_break))


def b51(s: Setting) -> Iterator[Spec]:
    """Order and tie rule are independent, for every k around the ties."""

    def make(k: int, order: str, tie_break: str) -> Problem:
        scores = _tied(s, 2, 16384, 300, 400)
        return wrap(scores, 16384, k, order=order, tie_break=tie_break, return_scores=True)

    for k in s.pick((1, 299, 300, 301, 512), (*range(1, 40), *range(290, 310), 500, 512, 600)):
        for order in ("position", "score"):
            for tie_break in ("smallest", "largest"):
                yield Spec("B51", f"k = {k}, {order}, {tie_break}", 16384, partial(make, k, order, tie_break))


def b55(s: Setting) -> Iterator[Spec]:
    """Long, short, empty and negative rows in every sequence within one launch: no state is left over."""

    def make(cycle: tuple[int, ...], rows: int) -> Problem:
        lengths = [cycle[i % len(cycle)] for i in range(rows)]
        return wrap(normal(rows, max(cycle), s, len(cycle)), lengths, 2048, graph=True)

    rows = s.pick(7, 528)
    cycles = [(40000, 100, 40000), (40000, 0, 2048, 40000), (131072, 2049, 1, 131072)]
    if not s.small:
        cycles += list(orders((100, 9000, 70000, -3)))
    for cycle in cycles:
        yield Spec("B55", f"lengths {cycle}", max(cycle), partial(make, tuple(cycle), rows))


_KS = (1, 2, 3, 63, 64, 65, 192, 511, 513, 1000, 1023, 1025, 2028, 2047, 2049, 2051, 4095, 4096, 8192)


def b58(s: Setting) -> Iterator[Spec]:
    """Every k is served exactly."""

    def make(k: int, length: int) -> Problem:
        return wrap(normal(2, max(length, 1), s, k), length, k, "ragged", starts=0)

    for k in _KS:
        for length in (k - 1, k, k + 1, s.pick(20000, 131072)):
            yield Spec("B58", f"k = {k}, length {length}", length, partial(make, k, length))


def b61(s: Setting) -> Iterator[Spec]:
    """Rows at any alignment: storage offset, stride and start; the winners sit at both ends of the window."""

    def make(offset: int, stride: int, start: int, length: int, dtype: torch.dtype) -> Problem:
        rows, width = 3, length + 5
        base = torch.full((rows * (length + 16) + 64,), float("nan"), device=s.device, dtype=dtype)
        scores = base.as_strided((rows, width), (length + stride, 1), offset)
        scores.fill_(float("inf"))  # the cells beside the windows; between the rows lie NaN
        window = scores[:, start : start + length]
        window.copy_(normal(rows, length, s, length))
        window[:, :2], window[:, -2:] = 50.0, 60.0
        return wrap(scores, length, 1000, starts=start)

    for length in s.pick((2049,), (2049, 8191, 65537)):
        for dtype in s.pick((torch.float32, torch.float16), (torch.float32, torch.bfloat16, torch.float16)):
            for offset in (0, 1, 2, 3, 7):
                for stride in (5, 6, 7, 8):
                    for start in (0, 1, 2, 3, 5):
                        name = f"offset {offset}, stride L + {stride}, start {start}, {dtype}"
                        yield Spec("B61", name, length, partial(make, offset, stride, start, length, dtype))


def overlap(s: Setting) -> Iterator[Spec]:
    """Rows that share memory: stride 0 and strides below the width, legal for inputs."""

    def make(stride: int, form: str) -> Problem:
        base = normal(1, 20000, s, 61)[0]
        scores = base.as_strided((6, 9000), (stride, 1), 3)
        return wrap(scores, [9000, 8999, 100, 0, 5000, 3], 512, form, starts=[0, 1, 2, 3, 4000, 8990])

    for stride in (0, 1, 7):
        for form in FORMS:
            yield Spec("overlap", f"row stride {stride}, {form}", 9000, partial(make, stride, form))


def b64(s: Setting) -> Iterator[Spec]:
    """No rows, or no columns."""

    def make(rows: int, width: int, form: str, batches: int) -> Problem:
        problem = wrap(torch.zeros(rows, width, device=s.device), None, 16, form, return_scores=True)
        if form == "paged":
            problem.shape.page_table = torch.zeros(batches, 4 if batches else 0, dtype=torch.int32, device=s.device)
            problem.shape.row_to_batch = integers(0, rows, s.device)
        return problem

    for rows, width in ((0, 9), (4, 0), (0, 0)):
        for form, batches in (("positions", 0), ("ragged", 0), ("paged", 0), ("paged", 2)):
            name = f"{rows} x {width}, {form}, {batches} tables"
            yield Spec("B64", name, 0, partial(make, rows, width, form, batches))


def b79(s: Setting) -> Iterator[Spec]:
    """24 equal leading bits and repeated values: the tie rule decides half of the set."""

    def make(tie_break: str, order: str) -> Problem:
        bits = 0x40490F00 + permutations(s.pick(1, 4), 131072, s, 79) % 256
        return wrap(bits.to(torch.int32).view(torch.float32), 131072, 2048, tie_break=tie_break, order=order)

    for tie_break in ("smallest", "largest"):
        for order in ("position", "score"):
            yield Spec("B79", f"24 equal bits, {tie_break}, {order}", 131072, partial(make, tie_break, order))


CASES = (
    Case("B38", "row offsets beyond 32 bits", b38),
    Case("B39", "scratch that grows with rows times columns", b39, quick=False),
    Case("B47", "replicated rows that select differently", b47),
    Case("B48", "ties at the k-th value that change from run to run", b48),
    Case("B51", "order and tie rule mixed up", b51),
    Case("B55", "state left over from the row before", b55),
    Case("B58", "k that no kernel was instantiated for", b58),
    Case("B61", "vector loads on unaligned rows", b61),
    Case("overlap", "rows that share memory", overlap),
    Case("B64", "empty batches and zero width", b64),
    Case("B79", "a tie rule that is only sometimes obeyed", b79),
)
