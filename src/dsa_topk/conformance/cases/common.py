"""What the case files share: lazily built problems, and one way to put the same rows into any form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsa_topk.testing import CallShape

from ..problem import Problem

FORMS = ("positions", "ragged", "paged")
Integers = int | Sequence[int] | torch.Tensor


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the suite runs. ``small``: a CPU that must be done in seconds; sizes shrink, kinds do not."""

    device: torch.device
    small: bool = False

    def pick(self, small: Any, large: Any) -> Any:
        """One of two sizes."""
        return small if self.small else large

    def generator(self, seed: int) -> torch.Generator:
        """Random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Spec:
    """A problem that is not built yet."""

    case: str
    name: str
    length: int
    make: Callable[[], Problem]

    def build(self) -> Problem:
        """Build it; the same numbers each time."""
        problem = self.make()
        problem.name = f"{self.case} {self.name}"
        problem.length = self.length
        return problem


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of fault, or of input, and the problems that stand for it."""

    id: str
    guards: str
    build: Callable[[Setting], Iterator[Spec]]
    quick: bool = True


def integers(values: Integers, rows: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A [rows] tensor: one value for all rows, or one each."""
    if isinstance(values, int):
        values = [values] * rows
    return torch.as_tensor(values, dtype=torch.int64).to(device=device, dtype=dtype)


def wrap(
    scores: torch.Tensor,
    lengths: Integers | None,
    k: int,
    form: str = "positions",
    *,
    starts: Integers | None = None,
    page_size: int = 64,
    index_dtype: torch.dtype = torch.int32,
    **flags: Any,
) -> Problem:
    """A problem of any form around the same rows: shuffled pages that differ per row, offsets of both signs."""
    rows, width = scores.shape
    device = scores.device
    shape = CallShape("case", form, rows, width, k, page_size=page_size)
    if lengths is not None:
        shape.lengths = integers(lengths, rows, device, index_dtype)
    if starts is not None:
        shape.row_starts = integers(starts, rows, device, index_dtype)
    if form == "ragged":
        shape.out_offsets = (torch.arange(rows, device=device) * 1009 - 3).to(index_dtype)
    if form == "paged":
        shape.page_table = table(rows, -(-width // page_size), device)
    return Problem("", shape, scores, **flags)


def table(batches: int, entries: int, device: torch.device, seed: int = 11) -> torch.Tensor:
    """int32 [batches, entries]: distinct shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(max(1, batches * entries), generator=generator)[: batches * entries]
    return pages.view(batches, entries).to(device=device, dtype=torch.int32)


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 with these bits (int64)."""
    return (((bits + 2**31) & 0xFFFFFFFF) - 2**31).to(torch.int32).view(torch.float32)


def permutations(rows: int, width: int, s: Setting, seed: int) -> torch.Tensor:
    """int64 [rows, width]: a permutation in every row."""
    return torch.rand(rows, width, generator=s.generator(seed), device=s.device).argsort(1)


def ladder(rows: int, width: int, s: Setting, seed: int, base: int = 0x3F800000, step: int = 1) -> torch.Tensor:
    """Neighbouring bit patterns from ``base``, shuffled: all distinct."""
    return from_bits(base + step * permutations(rows, width, s, seed))


def plateau(rows: int, width: int, winners: int, s: Setting, seed: int, tie: float = 0.0) -> torch.Tensor:
    """``winners`` distinct scores above a plateau of exactly equal ones, anywhere in the row."""
    place = permutations(rows, width, s, seed)
    return torch.where(place < winners, tie + 1.0 + place, tie).float()


def normal(rows: int, width: int, s: Setting, seed: int) -> torch.Tensor:
    """Standard normal float32."""
    return torch.randn(rows, width, generator=s.generator(seed), device=s.device)
