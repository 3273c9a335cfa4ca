"""SGLang's sparse-indexer top-k functions, with its signatures, over the kernels of dsa-topk.

>>> from dsa_topk.compat.sglang import topk_transform_paged_v2

Stricter than the originals: scores are never written, negative lengths are empty rows, any page size, k up to 8192,
float32, bfloat16 and float16 scores, any row stride; one canonical result whatever the batch or route.
"""

from __future__ import annotations

import torch

from dsa_topk.api import topk_paged, topk_positions, topk_ragged
from dsa_topk.engine.rows import requests_of_rows

__all__ = [
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "plan_topk_v2",
    "topk_transform_512_v2",
    "topk_transform_packed_v2",
    "topk_transform_paged",
    "topk_transform_paged_v2",
    "topk_transform_ragged_v2",
    "topk_v2_plan_is_written",
]

_INT32_MAX = 2**31 - 1


def plan_topk_v2(
    seq_lens: torch.Tensor, static_threshold: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a routing plan that routes nothing: our kernels need none.

    Parameters
    ----------
    seq_lens : Tensor [B]
        Lengths; only their number matters.
    static_threshold : int
        Accepted, without effect.
    out : Tensor [B + 1, 2] int32, optional
        Returned as it is, untouched.

    Returns
    -------
    Tensor [B + 1, 2] int32
        A valid plan: the first row says that no length is long enough for a cluster and that no row is listed.

    Raises
    ------
    ValueError
        ``out`` has another shape or type.
    """
    shape = (seq_lens.shape[0] + 1, 2)
    if out is None:
        plan = torch.zeros(shape, dtype=torch.int32, device=seq_lens.device)
        plan[0, 0].fill_(_INT32_MAX)
        return plan
    if tuple(out.shape) != shape or out.dtype != torch.int32:
        raise ValueError(f"out: expected an int32 tensor {list(shape)}, got {out.dtype} {list(out.shape)}")
    return out


def topk_v2_plan_is_written(seq_lens: torch.Tensor) -> bool:
    """Say that no plan has to be refreshed before a graph replay: there is none."""
    return False


def topk_transform_ragged_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out_offsets: torch.Tensor,
    out_indices: torch.Tensor,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Write ``position + out_offsets[i]`` of the best columns of each row's window.

    The window is ``[row_starts[i], row_starts[i] + seq_lens[i])``; positions count from its start.

    Parameters
    ----------
    scores : Tensor [R, N]
        Only read (SGLang's kernel writes into it).
    seq_lens, out_offsets : Tensor [R]
        Window lengths (negative means empty) and what is added to every selected position.
    out_indices : Tensor [R, k] int32
        Written in full, -1 padded; its width is k.
    row_starts : Tensor [R], optional
        First column of each window; None means 0.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_ragged`.
    """
    topk_ragged(scores, seq_lens, _width(out_indices), out_offsets=out_offsets, row_starts=row_starts, out=out_indices)


def topk_transform_paged_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """Write each row's best positions, through its page table where there is one.

    Parameters
    ----------
    scores : Tensor [R, N]
        Only read.
    seq_lens : Tensor [R]
        Valid scores of each row; negative means empty.
    page_tables : Tensor [B, T] int32 or None
        Table row i belongs to score row i (B >= R). None writes positions.
    out_page_indices : Tensor [R, k] int32
        Written in full, -1 padded; its width is k.
    page_size : int
        Positions per table entry; any positive number.
    metadata : Tensor, optional
        A plan of `plan_topk_v2` (ours or SGLang's); not read, and may be left out.
    out_raw_indices : Tensor [R, k] int32, optional
        Receives the positions, slot for slot.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_paged` and `dsa_topk.topk_positions`.
    """
    k = _width(out_page_indices)
    if page_tables is None:
        topk_positions(scores, seq_lens, k, out=out_page_indices)
        if out_raw_indices is not None:
            out_raw_indices.copy_(out_page_indices)
        return
    topk_paged(
        scores,
        seq_lens,
        k,
        page_table=page_tables,
        page_size=page_size,
        out=out_page_indices,
        out_positions=out_raw_indices,
    )


topk_transform_512_v2 = topk_transform_paged_v2
"""The name of `topk_transform_paged_v2` in SGLang before its ragged mode."""


def topk_transform_paged(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """`topk_transform_paged_v2` with the argument list of the first generation, which had no plan."""
    topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices=out_raw_indices)


def topk_transform_packed_v2(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    *,
    row_starts: torch.Tensor,
    row_to_batch: torch.Tensor | None = None,
) -> None:
    """Write slots for packed rows: windows begin at ``row_starts[i]`` in the scores and at entry 0 in the table.

    Parameters
    ----------
    scores : Tensor [R, N]
        Only read (SGLang's kernel writes into it).
    seq_lens, row_starts : Tensor [R]
        Length (negative means empty) and first column of each row's window.
    page_tables : Tensor [B, T] int32
        Page of each logical page of a request.
    out_page_indices : Tensor [R, k] int32
        Written in full, -1 padded; its width is k.
    page_size : int
        Positions per table entry; any positive number.
    row_to_batch : Tensor [R], optional
        Request of each row; None means its own number. Out of range means an empty row.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_paged`.
    """
    topk_paged(
        scores,
        seq_lens,
        _width(out_page_indices),
        page_table=page_tables,
        page_size=page_size,
        row_to_batch=row_to_batch,
        row_starts=row_starts,
        out=out_page_indices,
    )


def fast_topk_v2(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``[R, topk]`` int32 positions relative to each window's start, -1 padded.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_positions`.
    """
    return topk_positions(score, lengths, topk, row_starts=row_starts)


def fast_topk_transform_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[R, topk]`` int32 slots through a table with one token per entry, -1 padded.

    Parameters
    ----------
    score : Tensor [R, N]
        Indexer scores.
    lengths : Tensor [R]
        Valid scores of each row.
    page_table_size_1 : Tensor [B, T] int32
        Slot of each token of a request; windows begin at entry 0, also with ``row_starts``.
    cu_seqlens_q : Tensor [B + 1]
        Cumulative query lengths: which rows belong to which request.
    topk : int
        How many to select.
    row_starts : Tensor [R], optional
        First column of each row's window.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_paged`.
    """
    rows = score.shape[0]
    # As many requests as rows is decode: one row each, whatever the values say.
    one_each = row_starts is None and cu_seqlens_q.numel() == rows + 1
    return topk_paged(
        score,
        lengths,
        topk,
        page_table=page_table_size_1,
        page_size=1,
        row_to_batch=None if one_each else requests_of_rows(cu_seqlens_q, rows),
        row_starts=row_starts,
    )


def fast_topk_transform_ragged_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[R, topk]`` int32 positions plus ``topk_indices_offset[i]``, -1 padded.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_ragged`.
    """
    return topk_ragged(score, lengths, topk, out_offsets=topk_indices_offset, row_starts=row_starts)


def _width(out: torch.Tensor) -> int:
    if out.dim() != 2:
        raise ValueError(f"out_indices: expected a tensor [R, k], got {out.dim()} dimensions")
    return out.shape[1]
