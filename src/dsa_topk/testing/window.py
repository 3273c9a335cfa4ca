"""The contract's arithmetic for the checker: each row's window, and what is stored for a selected position."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """Windows of some rows: first column, number of candidates, number of slots to fill (all int64 [R]).

    ``offsets`` (ragged) and ``table_row`` / ``table_start`` (paged) say how a position is stored.
    """

    start: torch.Tensor
    count: torch.Tensor
    filled: torch.Tensor
    offsets: torch.Tensor | None = None
    table_row: torch.Tensor | None = None
    table_start: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int = 1

    def rows(self, lo: int, hi: int) -> Window:
        """The windows of rows ``lo .. hi - 1``."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[lo:hi]

        return Window(
            self.start[lo:hi],
            self.count[lo:hi],
            self.filled[lo:hi],
            cut(self.offsets),
            cut(self.table_row),
            cut(self.table_start),
            self.page_table,
            self.page_size,
        )

    def stored(self, positions: torch.Tensor) -> torch.Tensor:
        """The int64 value (in int32 range) that the form stores for in-window ``positions`` [R, *].

        Positions that are not candidates give an unspecified value, never an out-of-bounds read.
        """
        if self.offsets is not None:
            return low32(positions + self.offsets[:, None])  # int64 overflow keeps the low 32 bits exact
        if self.page_table is not None:
            assert self.table_row is not None
            assert self.table_start is not None
            if self.page_table.numel() == 0:
                return torch.full_like(positions, -1)
            safe = positions.clamp(min=0)
            entry = (self.table_start[:, None] + safe // self.page_size).clamp(max=self.page_table.shape[1] - 1)
            page = self.page_table[self.table_row[:, None], entry].to(torch.int64)
            return low32(page * self.page_size + safe % self.page_size)
        return positions


def low32(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 ``values`` as a signed number."""
    return ((values + 2**31) & 0xFFFFFFFF) - 2**31


def windows(
    rows: int,
    width: int,
    k: int,
    device: torch.device,
    *,
    form: str,
    lengths: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    out_offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_batch: torch.Tensor | None = None,
    page_table_starts: torch.Tensor | None = None,
) -> Window:
    """Windows of all rows, with the clamps of the contract (section C1) taken on exact 64-bit values."""

    def column(tensor: torch.Tensor | None, default: int) -> torch.Tensor:
        if tensor is None:
            return torch.full((rows,), default, dtype=torch.int64, device=device)
        return tensor.to(torch.int64)

    start = column(row_starts, 0).clamp(0, width)
    count = torch.minimum(column(lengths, width).clamp(min=0), width - start)
    if form == "paged":
        if page_table is None:
            raise ValueError("page_table: expected an int32 tensor [B, T] for form='paged', got None")
        batches, entries = page_table.shape
        wanted = torch.arange(rows, device=device) if row_to_batch is None else row_to_batch.to(torch.int64)
        first = column(page_table_starts, 0)
        legal = (wanted >= 0) & (wanted < batches) & (first >= 0) & (first <= entries)
        first = torch.where(legal, first, entries)  # no entry left: an empty row
        count = torch.minimum(count, (entries - first) * page_size)
        return Window(
            start,
            count,
            count.clamp(max=k),
            table_row=torch.where(legal, wanted, 0),
            table_start=first,
            page_table=page_table,
            page_size=page_size,
        )
    if form == "ragged":
        if out_offsets is None:
            raise ValueError("out_offsets: expected an integer tensor [R] for form='ragged', got None")
        return Window(start, count, count.clamp(max=k), offsets=column(out_offsets, 0))
    if form != "positions":
        raise ValueError(f"form: expected 'positions', 'ragged' or 'paged', got {form!r}")
    return Window(start, count, count.clamp(max=k))
