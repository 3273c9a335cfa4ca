"""FlashInfer's top-k functions, with its signatures and defaults, over the kernels of dsa-topk.

>>> from dsa_topk.compat.flashinfer import top_k_page_table_transform

Where FlashInfer leaves a result open, ours is one result: ascending position (descending score for
``top_k(sorted=True)``), ties by smallest index, NaN below everything, -0.0 equal to +0.0, lengths and starts clamped to
what exists. So ``deterministic`` and ``dsa_graph_safe`` are accepted and always in force. No argument is ever modified.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from dsa_topk._call import MAX_K, TieBreak
from dsa_topk.api import topk_paged, topk_positions, topk_ragged

__all__ = ["TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform"]


class TopKTieBreak(IntEnum):
    """Which of several equal scores wins at the boundary. ``NONE``, any in FlashInfer, is ``SMALL`` here."""

    NONE = 0
    SMALL = 1
    LARGE = 2

    def __str__(self) -> str:
        # FlashInfer's text, as callers may log it or build names from it; the enum's own would be a number.
        return self.name.lower()

    def __repr__(self) -> str:
        return f"TopKTieBreak.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``k`` largest values of each row **and then** their indices: ``(values, indices)``, like FlashInfer.

    Parameters
    ----------
    input : Tensor [R, N]
        float32, bfloat16 or float16.
    k : int
        How many, at most N and at most 8192.
    sorted : bool
        True: descending value. False: ascending index (FlashInfer: any order).
    deterministic, dsa_graph_safe : bool
        Accepted; every call is both.
    tie_break : int or TopKTieBreak
        0 or 1 prefers smaller indices, 2 larger ones.

    Returns
    -------
    values : Tensor [R, k]
        In the type of ``input``, bit for bit.
    indices : Tensor [R, k] int64
        Column of each value.

    Raises
    ------
    ValueError
        ``k`` is not in ``1 .. min(N, 8192)``, or ``tie_break`` is not 0, 1 or 2.
    TypeError
        A tensor has a type that the library does not take.
    """
    if input.dim() == 2 and not 1 <= k <= min(input.shape[1], MAX_K):
        raise ValueError(f"k: expected 1 <= k <= {min(input.shape[1], MAX_K)}, got {k}")
    indices, values = topk_positions(
        _dense(input),
        None,
        k,
        order="score" if sorted else "position",
        tie_break=_tie_break(tie_break),
        return_scores=True,
    )
    return values, indices.to(torch.int64)


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the ``k`` best of each row's window and write their slots in the page table.

    Parameters
    ----------
    input : Tensor [R, N]
        float32, bfloat16 or float16; any row stride.
    src_page_table : Tensor [B, T] int32
        Page of each logical page.
    lengths : Tensor [R]
        Valid scores of each row, int32 (or int64).
    k : int
        How many to select, at most 8192; may exceed N.
    row_to_batch : Tensor [R], optional
        Table row of each score row; None means its own number.
    deterministic, dsa_graph_safe : bool
        Accepted; every call is both.
    tie_break : int or TopKTieBreak
        0 or 1 prefers smaller positions, 2 larger ones.
    row_starts : Tensor [R], optional
        First column of each row's window.
    page_table_row_starts : Tensor [R], optional
        First table entry of each row's window. **None means row_starts**, as in FlashInfer (`topk_paged`: 0).
    page_size : int
        Score positions per table entry; any positive number, not only powers of two.
    out, out_raw_indices : Tensor [R, k] int32, optional
        Where to write slots and window-relative positions.

    Returns
    -------
    Tensor [R, k] int32
        Slots, -1 padded; ``out`` itself when given.

    Raises
    ------
    ValueError
        ``page_size > 1`` with ``row_starts`` but without ``page_table_row_starts``, or as `dsa_topk.topk_paged`.
    TypeError
        As `dsa_topk.topk_paged`.
    """
    if page_table_row_starts is None and row_starts is not None:
        if page_size != 1:
            raise ValueError(
                "page_table_row_starts: expected a tensor [R] beside row_starts with page_size > 1 (entries and "
                f"columns are different units), got None with page_size={page_size}"
            )
        page_table_row_starts = row_starts
    return topk_paged(
        _dense(input),
        lengths,
        k,
        page_table=_dense(src_page_table),
        page_size=page_size,
        row_to_batch=row_to_batch,
        row_starts=row_starts,
        page_table_starts=page_table_row_starts,
        tie_break=_tie_break(tie_break),
        out=out,
        out_positions=out_raw_indices,
    )


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the ``k`` best of each row's window and add the row's offset to their positions.

    Parameters
    ----------
    input : Tensor [R, N]
        float32, bfloat16 or float16; any row stride.
    offsets : Tensor [R]
        Added to every selected position, never to the padding; int32 (or int64).
    lengths : Tensor [R]
        Valid scores of each row, int32 (or int64).
    k : int
        How many to select, at most 8192; may exceed N.
    deterministic, dsa_graph_safe : bool
        Accepted; every call is both.
    tie_break : int or TopKTieBreak
        0 or 1 prefers smaller positions, 2 larger ones.
    row_starts : Tensor [R], optional
        First column of each row's window; positions count from it.

    Returns
    -------
    Tensor [R, k] int32
        Positions plus offset, -1 padded.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_ragged`.
    """
    return topk_ragged(
        _dense(input), lengths, k, out_offsets=offsets, row_starts=row_starts, tie_break=_tie_break(tie_break)
    )


def _tie_break(value: int) -> TieBreak:
    if value not in (0, 1, 2):
        raise ValueError(f"tie_break: expected 0, 1 or 2 (TopKTieBreak), got {value!r}")
    return "largest" if value == TopKTieBreak.LARGE else "smallest"


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix whose last dimension is strided: FlashInfer's callers may pass one, our kernels do not take it."""
    return matrix.contiguous() if matrix.dim() == 2 and matrix.stride(1) != 1 and matrix.shape[1] > 1 else matrix
