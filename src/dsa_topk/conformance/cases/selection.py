"""Fault cases B01 to B18: ties, keys, ranges, infinities and NaN. What is in a row decides; its place does not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ..problem import Problem
from .common import FORMS, Case, Setting, Spec, from_bits, ladder, normal, permutations, plateau, wrap

INF, NAN = float("inf"), float("nan")


def b01(s: Setting) -> Iterator[Spec]:
    """Plain Gaussian rows so long that one coarse bin outgrows any candidate buffer."""

    def make(length: int, seed: int) -> Problem:
        return wrap(normal(s.pick(2, 64), length, s, seed), length, 2048, repeats=s.pick(2, 20))

    for length in s.pick((65536, 262144), (65536, 131072, 262144, 1048576)):
        for seed in range(s.pick(1, 4)):
            yield Spec("B01", f"normal seed {seed}", length, partial(make, length, seed))


def b03(s: Setting) -> Iterator[Spec]:
    """ReLU plateaus: more ties than a tie buffer holds."""

    def row(kind: str, winners: int, form: str, rows: int, tie_break: str) -> Problem:
        if kind == "relu":
            scores = (normal(rows, 8192, s, 3) - 1.28).relu()
        elif kind == "zeros":
            scores = torch.zeros(rows, 8320, device=s.device)
        else:
            scores = plateau(rows, 8320, winners, s, winners)
        return wrap(scores, scores.shape[1], 2048, form, tie_break=tie_break, graph=rows == 64)

    for winners in (0, 1, 100, 1023, 1024, 1025, 2047, 2048, 2049):
        for form, tie_break in (("paged", "smallest"), ("ragged", "largest")):
            for rows in s.pick((2,), (1, 64)):
                name = f"plateau of {winners} winners, {form}, {rows} rows"
                yield Spec("B03", name, 8320, partial(row, "plateau", winners, form, rows, tie_break))
    for kind in ("relu", "zeros"):
        for form in FORMS:
            for tie_break in ("smallest", "largest"):
                name = f"{kind}, {form}, {tie_break}"
                yield Spec("B03", name, 8320, partial(row, kind, 0, form, s.pick(2, 64), tie_break))


def b04(s: Setting) -> Iterator[Spec]:
    """4,139 distinct scores in one float16 bin around the k-th place."""

    def make(part: str, tie_break: str) -> Problem:
        rows = s.pick(2, 64)
        place = permutations(rows, 7613, s, 4)
        crowd = from_bits(0x3F800000 + 29 * (place - 889)).float()
        winners = 2 + 0.87 * place / 889
        scores = torch.where(place < 889, winners, torch.where(place < 889 + 4139, crowd, -1.0)).float()
        if part != "shuffled":
            inside = (place >= 889) & (place < 889 + 4139)
            key = torch.where(inside, 0, 1) if part == "first" else torch.where(inside, 1, 0)
            if part == "middle":
                key = torch.where(inside, 1, torch.where(place % 2 == 0, 0, 2))
            scores = scores.gather(1, key.argsort(dim=1, stable=True))
        return wrap(scores, 7613, 2048, tie_break=tie_break, repeats=s.pick(2, 50))

    for part in ("shuffled", "first", "middle", "last"):
        yield Spec("B04", f"one float16 bin, {part}", 7613, partial(make, part, "smallest"))


def b07(s: Setting) -> Iterator[Spec]:
    """Five scales in one call, each row within one float16 bin."""

    def make(form: str) -> Problem:
        length = 65536
        rows = [
            ladder(1, length, s, 0, 0x7F7F0000),
            ladder(1, length, s, 1, 0x00000001),
            ladder(1, length, s, 2, 0xBF800000),
            ladder(1, length, s, 3, 0x30000000, 64),
            ladder(1, length, s, 4),
        ]
        return wrap(torch.cat(rows), length, 2048, form)

    for form in s.pick(("positions",), FORMS):
        yield Spec("B07", f"lowest bits decide, {form}", 65536, partial(make, form))


def b08(s: Setting) -> Iterator[Spec]:
    """The k-th place exactly on a bin's border, and exactly k candidates."""

    def exact(length: int, equal: bool) -> Problem:
        scores = torch.full((2, length), 0.25, device=s.device) if equal else normal(2, length, s, 8)
        return wrap(scores, length, 2048, order="position")

    def border(count: int, high: int, low: int) -> Problem:
        place = permutations(s.pick(1, 4), 65536, s, count)
        return wrap(from_bits(torch.where(place < count, high, low)), 65536, 2048)

    for length in (2048, 2049):
        for equal in (False, True):
            yield Spec("B08", f"{'equal' if equal else 'random'}, k = 2048", length, partial(exact, length, equal))
    # The two values differ first in the sign, the exponent, and every later digit that a radix pass could take.
    pairs = [(0x40000000, 0x3F800000), (0x3F800000, 0xBF800000), (0x3F801000, 0x3F800000), (0x3F800100, 0x3F800000)]
    pairs += [(0x3F800010, 0x3F800000), (0x3F800001, 0x3F800000)]
    for high, low in pairs:
        for count in (2047, 2048, 2049):
            yield Spec("B08", f"{count} of {high:08X} over {low:08X}", 65536, partial(border, count, high, low))


def b10(s: Setting) -> Iterator[Spec]:
    """Rows that are flat but for rounding noise."""

    def make(kind: str, tie_break: str) -> Problem:
        bits = torch.randint(-1, 2, (s.pick(2, 16), 65536), generator=s.generator(10), device=s.device) + 0x40E80000
        if kind == "constant":
            bits = torch.full_like(bits, 0x40E80000)
        scores = from_bits(bits)
        if kind == "outlier":
            scores[:, 777] = 1e30
        return wrap(scores, 65536, 2048, tie_break=tie_break)

    for kind in ("noise", "constant", "outlier"):
        for tie_break in ("smallest", "largest"):
            yield Spec("B10", f"{kind}, {tie_break}", 65536, partial(make, kind, tie_break))


def b11(s: Setting) -> Iterator[Spec]:
    """Scores beyond the float16 range, lengths that end inside a vector."""

    def make(length: int, rows: int, kind: str) -> Problem:
        place = permutations(rows, length, s, length).float()
        if kind == "mixed":
            scores = torch.where(place < 2047, place, -(1e5 + place))
        else:
            scores = (1e5 + place) * (1 if kind == "positive" else -1)
        wide = torch.full((rows, length + 5), INF, device=s.device)
        wide[:, :length] = scores
        return wrap(wide[:, :length], length, 2048, repeats=2)

    for rows in s.pick((3,), (148, 149, 512)):
        for length in (4097, 8191, 8193):
            for kind in ("negative", "positive", "mixed"):
                yield Spec("B11", f"{kind}, {rows} rows", length, partial(make, length, rows, kind))


def b12(s: Setting) -> Iterator[Spec]:
    """Fewer than k finite scores: the k-th score is -inf, and it counts."""

    def make(length: int, finite: int, form: str) -> Problem:
        rows = s.pick(2, 8)
        place = permutations(rows, length + 11, s, finite)
        scores = torch.where(place < finite, normal(rows, length + 11, s, 1), -INF)
        return wrap(scores, length, 2048, form, starts=[3, 5] * (rows // 2), poison=True)

    for length in (8191, 131071):
        for finite in (0, 1, 2047):
            for form in s.pick(("positions",), FORMS):
                yield Spec("B12", f"{finite} finite, {form}", length, partial(make, length, finite, form))


def b14(s: Setting) -> Iterator[Spec]:
    """Infinities around the k-th place, and the largest finite number just below them."""

    def make(count: int, tie_break: str) -> Problem:
        rows = s.pick(2, 16)
        place = permutations(rows, 8320, s, count)
        rest = normal(rows, 8320, s, 14)
        if count < 0:
            rest = torch.where(place < 2500, torch.finfo(torch.float32).max, rest)
            count = 1000
            place = permutations(rows, 8320, s, 15)
        return wrap(torch.where(place < count, INF, rest), 8320, 2048, tie_break=tie_break, return_scores=True)

    for count in (3000, 2047, 1, -1):
        name = f"{count} of +inf" if count > 0 else "+inf beside FLT_MAX"
        for tie_break in ("smallest", "largest"):
            yield Spec("B14", f"{name}, {tie_break}", 8320, partial(make, count, tie_break))


def b15(s: Setting) -> Iterator[Spec]:
    """NaN of any share, at the edges of the window, in one row among clean ones."""

    def make(share: float, form: str) -> Problem:
        scores = normal(16, 5006, s, 15)
        bad = torch.rand(16, 5006, generator=s.generator(16), device=s.device) < share
        bad[3] = False
        bad[5, 1] = bad[5, 5000] = True  # first and last column of the window
        sign = torch.where(normal(16, 5006, s, 17) < 0, 0x80000000, 0)
        nan = from_bits(0x7F800001 + sign + permutations(16, 5006, s, 18))
        return wrap(torch.where(bad, nan, scores), 5000, 2048, form, starts=1, poison=True, return_scores=True)

    for share in (0.001, 0.5, 0.83, 1.0):
        for form in FORMS:
            yield Spec("B15", f"{share:.1%} NaN, {form}", 5000, partial(make, share, form))


def b17(s: Setting) -> Iterator[Spec]:
    """Short rows of NaN, alone and alternating, in both output orders."""

    def make(count: int, alternate: bool, order: str) -> Problem:
        scores = torch.full((4, max(count, 2)), NAN, device=s.device)
        if alternate:
            scores[:, ::2] = normal(4, scores[:, ::2].shape[1], s, 1)
        return wrap(scores, count, 2048 if count < 2048 else 1024, order=order, return_scores=True)

    for count in (1, 2, 31, 33, 1000, 2048):
        for alternate in (False, True):
            for order in ("position", "score"):
                name = f"{'alternating' if alternate else 'all NaN'}, order={order}"
                yield Spec("B17", name, count, partial(make, count, alternate, order))


def b18(s: Setting) -> Iterator[Spec]:
    """NaN is selectable: min(k, n) slots are filled whatever the scores are."""

    def make(count: int, half: bool) -> Problem:
        scores = torch.full((2, count), NAN, device=s.device)
        if half:
            scores[:, ::2] = 1.0
        return wrap(scores, count, 2048)

    yield Spec("B18", "3000 of NaN", 3000, partial(make, 3000, False))
    yield Spec("B18", "100 candidates, half NaN", 100, partial(make, 100, True))


CASES = (
    Case("B01", "a candidate buffer that fills up on long Gaussian rows", b01),
    Case("B03", "a tie buffer that fills up on a ReLU plateau; unwritten slots", b03),
    Case("B04", "distinct scores taken for ties because a coarse key is equal", b04),
    Case("B07", "scores that differ in their lowest bits; subnormals flushed", b07),
    Case("B08", "the k-th place exactly on a bin's border", b08),
    Case("B10", "flat rows: a degenerate range, noise of one ulp", b10),
    Case("B11", "scores beyond float16 in the bin of the filler lanes", b11),
    Case("B12", "legal -inf taken for filler", b12),
    Case("B14", "+inf at the k-th place", b14),
    Case("B15", "NaN that leads to invalid indices", b15),
    Case("B17", "comparisons with NaN in short rows and in the final sort", b17),
    Case("B18", "slots left empty because a NaN was discarded", b18),
)
