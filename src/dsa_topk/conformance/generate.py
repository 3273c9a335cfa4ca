"""Random calls from a seed: the same source for ``dsa-topk fuzz`` and for hypothesis on the CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import torch

from dsa_topk.testing import CallShape, distributions

from .problem import Problem

_KS = (1, 2, 3, 31, 32, 33, 64, 192, 511, 512, 513, 1000, 1024, 1025, 2047, 2048, 2049, 2051, 4095, 4096, 4097, 8192)
_WIDTHS = (
    1,
    2,
    3,
    4,
    5,
    63,
    64,
    65,
    2047,
    2048,
    2049,
    4096,
    8191,
    8192,
    8193,
    16384,
    16385,
    32768,
    65536,
    65537,
    131072,
)
_PAGES = (1, 2, 3, 7, 16, 64, 64, 64, 100, 128, 256, 4096, 2**30, 2**31 - 1)
_MAX_ENTRIES = 1 << 20  # entries of a page table: drawn on the CPU, so larger ones would only cost time
_EXTREMES = (-(2**63), 2**63 - 1, 2**31, -(2**31), 2**32 + 7, -(2**32) + 7, 2**31 - 1, -1)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a random call may be."""

    max_elements: int = 1 << 24
    max_width: int = 1 << 20
    max_rows: int = 4096
    max_k: int = 8192


SMALL = Limits(max_elements=1 << 13, max_width=1 << 11, max_rows=40, max_k=600)


class _Draw:
    """One seeded call in the making: Python numbers for sizes, device numbers for data."""

    def __init__(self, seed: int, device: torch.device, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.limits = limits
        self.seed = self.random.getrandbits(62)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.width = self.size(_WIDTHS, limits.max_width)
        budget = max(1, min(limits.max_rows, limits.max_elements // self.width))
        self.rows = 1 if self.chance(0.15) else max(1, min(budget, round(2 ** self.random.uniform(0, 12.1))))
        if self.chance(0.01):
            self.rows = 0
        self.k = self.size((*_KS, self.width - 1, self.width, self.width + 1), limits.max_k)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def size(self, favourites: tuple[int, ...], top: int) -> int:
        """A size from 1 to ``top``: a favourite, or anything, small ones as likely as large ones."""
        legal = [value for value in favourites if 1 <= value <= top]
        if self.chance(0.5):
            return self.random.choice(legal)
        return max(1, min(top, int(top ** self.random.random())))

    # ---- integer tensors

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """int64 CPU values as an int32 or int64 device tensor of some stride."""
        wide = bool(((values > 2**31 - 1) | (values < -(2**31))).any()) or self.chance(0.4)
        values = values.to(device=self.device, dtype=torch.int64 if wide else torch.int32)
        step = self.random.choice((1, 1, 1, 2, 3))
        if step == 1:
            return values
        buffer = torch.full((values.numel() * step + 1,), 0x5A5A5A5A, dtype=values.dtype, device=self.device)
        strided = buffer[1::step][: values.numel()]
        strided.copy_(values)
        return strided

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        """int64 on the CPU, ``low <= x <= high``."""
        return torch.randint(low, max(low, high) + 1, size or (self.rows,), generator=self.generator)

    def sprinkle(self, values: torch.Tensor, share: float, among: tuple[int, ...]) -> torch.Tensor:
        """Replace a share of ``values`` by favourites."""
        pick = torch.tensor(among)[self.integers(0, len(among) - 1, values.numel())]
        return torch.where(torch.rand(values.numel(), generator=self.generator) < share, pick, values)

    def lengths(self) -> torch.Tensor | None:
        """None, equal, spread, edges, negatives, overshoot."""
        kind = self.random.choice(("none", "full", "spread", "spread", "short", "edges", "hostile"))
        width, k = self.width, self.k
        if kind == "none":
            return None
        if kind == "full":
            values = torch.full((self.rows,), width)
        elif kind == "short":
            values = self.integers(0, min(width, k))
        else:
            values = self.integers(0, width)
        if kind in ("edges", "hostile"):
            values = self.sprinkle(values, 0.6, (0, 1, k - 1, k, k + 1, width - 1, width, 2 * k, 8192, 8193))
        if kind == "hostile":
            values = self.sprinkle(values, 0.3, (*_EXTREMES, width + 1, width + 5, -4, -3))
        return self.column(values)

    def starts(self) -> torch.Tensor | None:
        """None, small and unaligned, packed, anywhere, extremes."""
        kind = self.random.choice(("none", "none", "small", "packed", "any", "hostile"))
        if kind == "none":
            return None
        if kind == "small":
            values = self.integers(0, min(9, self.width))
        elif kind == "packed":
            values = self.integers(0, 4) * (self.width // 5) + self.integers(0, 3)
        else:
            values = self.integers(0, self.width)
        if kind == "hostile":
            values = self.sprinkle(values, 0.3, (*_EXTREMES, self.width, self.width + 1))
        return self.column(values)

    def page_table(self, shape: CallShape) -> None:
        """Tables that fit, end early, or start late; entries of any value; batch numbers that may not exist."""
        size = shape.page_size = self.random.choice(_PAGES)
        fitting = -(-self.width // size)
        entries = max(
            0, self.random.choice((fitting, fitting, fitting + 3, fitting // 2, 1, 0 if self.chance(0.1) else 2))
        )
        shared = self.chance(0.5)
        batches = (
            self.random.randint(0 if self.chance(0.05) else 1, max(1, min(self.rows, 64))) if shared else self.rows
        )
        if batches * entries > _MAX_ENTRIES:
            batches, shared = max(1, _MAX_ENTRIES // entries), True
        highest = (2**31 - 1) // size if self.chance(0.7) else 2**31 - 1
        pages = self.integers(0, highest, batches, entries)
        if self.chance(0.3):
            pages = torch.where(torch.rand(batches, entries, generator=self.generator) < 0.1, -pages - 1, pages)
        if self.chance(0.2):
            pages = pages % 5  # pages that repeat
        frame = torch.full((batches, entries + 7), 0x7EADBEEF, dtype=torch.int32, device=self.device)
        lead = self.random.randint(0, 3)
        frame[:, lead : lead + entries] = pages.to(device=self.device, dtype=torch.int32)
        shape.page_table = (
            frame[:, lead : lead + entries] if self.chance(0.6) else frame[:, lead : lead + entries].clone()
        )
        if shared or self.chance(0.2):
            owner = self.integers(0, max(0, batches - 1))
            if self.chance(0.3):
                owner = self.sprinkle(owner, 0.2, (*_EXTREMES, batches, batches + 1))
            shape.row_to_batch = self.column(owner)
        if self.chance(0.5):
            first = self.integers(0, entries if self.chance(0.3) else max(0, entries - fitting))
            if self.chance(0.2):
                first = self.sprinkle(first, 0.2, (*_EXTREMES, entries, entries + 1))
            shape.page_table_starts = self.column(first)

    # ---- scores

    def scores(self) -> torch.Tensor:
        """Up to four distributions side by side, at any alignment and row stride."""
        dtype = self.random.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16))
        rows, width = self.rows, self.width
        lead, gap = self.random.choice((0, 0, 1, 2, 3, 7)), self.random.choice((0, 0, 1, 2, 3, 4, 12))
        if self.chance(0.06) and rows:  # rows that share memory
            stride = self.random.choice((0, 1, 5))
            buffer = self.segment(dtype, 1, width + stride * rows + lead)[0]
            return buffer.as_strided((rows, width), (stride, 1), lead)
        buffer = torch.full((rows * (width + gap) + lead + 1,), float("nan"), dtype=dtype, device=self.device)
        scores = buffer.as_strided((rows, width), (width + gap, 1), lead)
        cuts = sorted({0, width, *(self.random.randint(0, width) for _ in range(self.random.choice((0, 0, 1, 3))))})
        for left, right in pairwise(cuts):
            scores[:, left:right] = self.segment(dtype, rows, right - left)
        return scores

    def segment(self, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
        name = self.random.choice(distributions.NAMES)
        seed = self.random.getrandbits(31)
        return distributions.make(name, rows, width, dtype=dtype, device=self.device, seed=seed, k=self.k)


def random_problem(seed: int, device: torch.device | str = "cpu", limits: Limits | None = None) -> Problem:
    """The random call number ``seed`` of a device.

    Parameters
    ----------
    seed : int
        Same seed, device type and limits: same call.
    device : torch.device or str
        Where its tensors live.
    limits : Limits, optional
        How large it may be.
    """
    draw = _Draw(seed, torch.device(device), limits or Limits())
    form = draw.random.choice(("positions", "ragged", "paged", "paged"))
    shape = CallShape("random", form, draw.rows, draw.width, draw.k)
    shape.lengths, shape.row_starts = draw.lengths(), draw.starts()
    if form == "ragged":
        offsets = draw.integers(-(10**6), 10**6)
        if draw.chance(0.2):
            offsets = draw.sprinkle(offsets, 0.3, _EXTREMES)
        shape.out_offsets = (
            shape.row_starts if draw.chance(0.3) and shape.row_starts is not None else draw.column(offsets)
        )
    if form == "paged":
        draw.page_table(shape)
        if shape.row_to_batch is None and shape.page_table is not None and shape.page_table.shape[0] < draw.rows:
            shape.row_to_batch = draw.column(draw.integers(0, max(0, shape.page_table.shape[0] - 1)))
    return Problem(
        f"random {seed}",
        shape,
        draw.scores(),
        order="score" if draw.chance(0.15) else "position",
        tie_break="largest" if draw.chance(0.3) else "smallest",
        return_scores=draw.chance(0.25),
        return_positions=draw.chance(0.4),
        poison=draw.chance(0.1),
        graph=draw.chance(0.1),
        repeats=2 if draw.chance(0.1) else 1,
        length=draw.width,
    )
