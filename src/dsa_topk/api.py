"""The three public functions: signatures and documentation; the work is behind ``check`` and ``execute``."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from dsa_topk._call import Order, TieBreak
from dsa_topk._checks import check
from dsa_topk._direct import launched
from dsa_topk._ops import execute, execute_operator, needs_operator


@overload
def topk_positions(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    row_starts: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[False] = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def topk_positions(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    row_starts: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[True],
    validate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def topk_positions(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    row_starts: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def topk_positions(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    row_starts: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Select the exact top-k of each row and return their positions. **Indices come first**, scores second.

    (``torch.topk`` and FlashInfer's ``top_k`` return values first. This returns the index tensor alone, or
    ``(indices, scores)`` with ``return_scores=True``.)

    Row ``i`` selects among the ``n`` scores ``scores[i, s : s + n]`` with ``s = clamp(row_starts[i], 0, N)`` and
    ``n = clamp(lengths[i], 0, N - s)``; nothing outside is ever a candidate. It takes the ``min(k, n)`` highest,
    exactly, in the type given. Equal scores go by `tie_break`, ``-0.0 == +0.0``, infinities are ordinary scores, and
    NaN ranks below ``-inf``. The result of a row depends on nothing but its window, ``n``, ``k``, `tie_break` and
    `order`: it is the same in any batch, on any device, every time.

    CUDA tensors are served on their device's current stream without host synchronisation, also while a graph is
    captured. Inputs are never modified. There is no gradient.

    Parameters
    ----------
    scores : Tensor
        ``[R, N]`` float32, bfloat16 or float16, ``R, N < 2**31``; last dimension contiguous, any row stride.
    lengths : Tensor or None
        ``[R]`` int32 or int64: valid scores of each row, from its start; None means to the end of the row.
    k : int
        How many to select, ``1 <= k <= 8192``; may exceed ``N``.
    row_starts : Tensor, optional
        ``[R]`` int32 or int64: first column of each row's window; default 0.
    order : {"position", "score"}
        ``"position"``: ascending position. ``"score"``: best first, ties by the tie rule.
    tie_break : {"smallest", "largest"}
        Which position wins among equal scores.
    out : Tensor, optional
        ``[R, k]`` int32 to write to: last dimension contiguous, any row stride, no overlap with an input.
    return_scores : bool
        Also return the selected scores, bit for bit, padded with ``-inf``.
    validate : bool
        Also check the values of the integer tensors (``DSA_TOPK_VALIDATE=1`` does it for all calls). Synchronises, so
        it raises during graph capture.
    backend : str
        ``"auto"``, ``"cuda"``, ``"flashinfer"``, ``"sgl-kernel"`` or ``"torch"``; see `dsa_topk.explain`.

    Returns
    -------
    indices : Tensor
        ``[R, k]`` int32 (`out` itself when given): positions relative to the row's start;
        -1 in slots that a row does not fill.
    scores : Tensor
        ``[R, k]`` in the scores' type, only with ``return_scores=True``: **second**, after the indices.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or value (found before anything is allocated), the named backend does not serve
        such a call, or `validate` found a bad value.
    RuntimeError
        The named backend can't run on this machine, or `validate` was asked for while a CUDA graph is captured.

    Examples
    --------
    >>> import torch, dsa_topk
    >>> scores = torch.tensor([[0.5, 2.0, -1.0, 2.0, 7.0]])
    >>> dsa_topk.topk_positions(scores, torch.tensor([4]), 3)
    tensor([[0, 1, 3]], dtype=torch.int32)
    >>> indices, best = dsa_topk.topk_positions(scores, None, 2, order="score", return_scores=True)
    >>> indices, best
    (tensor([[4, 1]], dtype=torch.int32), tensor([[7., 2.]]))
    """
    if needs_operator(scores):
        return execute_operator(
            "positions",
            scores,
            lengths,
            k,
            row_starts=row_starts,
            order=order,
            tie_break=tie_break,
            return_scores=return_scores,
            out=out,
            out_positions=None,
            validate=validate,
            backend=backend,
        )
    if out is not None and launched(
        "positions",
        scores,
        lengths,
        k,
        row_starts,
        order,
        tie_break,
        out,
        return_scores,
        validate,
        backend,
    ):
        return out
    call = check(
        "positions",
        scores,
        lengths,
        k,
        row_starts=row_starts,
        order=order,
        tie_break=tie_break,
        return_scores=return_scores,
        out=out,
    )
    return execute(call, backend, validate)


@overload
def topk_ragged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out_offsets: Tensor,
    row_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[False] = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def topk_ragged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out_offsets: Tensor,
    row_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[True],
    validate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def topk_ragged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out_offsets: Tensor,
    row_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def topk_ragged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out_offsets: Tensor,
    row_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Select as `topk_positions` does and return ``position + out_offsets[i]``. **Indices come first**, scores second.

    For key/value caches that are flattened over the batch: with ``out_offsets`` equal to ``row_starts`` the result is
    the column of `scores` itself. The offset is never added to a padding -1. The stored value is the low 32 bits of the
    exact sum. Window, ranking, ties, orders and streams: see `topk_positions`.

    Parameters
    ----------
    scores : Tensor
        ``[R, N]`` float32, bfloat16 or float16, ``R, N < 2**31``; last dimension contiguous, any row stride.
    lengths : Tensor or None
        ``[R]`` int32 or int64: valid scores of each row, from its start; None means to the end of the row.
    k : int
        How many to select, ``1 <= k <= 8192``; may exceed ``N``.
    out_offsets : Tensor
        ``[R]`` int32 or int64: added to every selected position of the row.
    row_starts : Tensor, optional
        ``[R]`` int32 or int64: first column of each row's window; default 0.
    out_positions : Tensor, optional
        ``[R, k]`` int32, laid out as `out`: also receives the positions in the window, slot for slot.
    order, tie_break, out, return_scores, validate, backend
        As in `topk_positions`.

    Returns
    -------
    indices : Tensor
        ``[R, k]`` int32 (`out` itself when given): selected positions plus the row's offset;
        -1 in slots that a row does not fill.
    scores : Tensor
        ``[R, k]`` in the scores' type, only with ``return_scores=True``: **second**, after the indices.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `topk_positions`.

    Examples
    --------
    >>> import torch, dsa_topk
    >>> scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 5.0, 4.0]])
    >>> starts = torch.tensor([0, 2])
    >>> dsa_topk.topk_ragged(scores, torch.tensor([2, 2]), 2, out_offsets=starts, row_starts=starts)
    tensor([[0, 1],
            [2, 3]], dtype=torch.int32)
    """
    if needs_operator(scores):
        return execute_operator(
            "ragged",
            scores,
            lengths,
            k,
            out_offsets=out_offsets,
            row_starts=row_starts,
            order=order,
            tie_break=tie_break,
            return_scores=return_scores,
            out=out,
            out_positions=out_positions,
            validate=validate,
            backend=backend,
        )
    if out is not None and launched(
        "ragged",
        scores,
        lengths,
        k,
        row_starts,
        order,
        tie_break,
        out,
        return_scores,
        validate,
        backend,
        out_offsets=out_offsets,
        out_positions=out_positions,
    ):
        return out
    call = check(
        "ragged",
        scores,
        lengths,
        k,
        out_offsets=out_offsets,
        row_starts=row_starts,
        order=order,
        tie_break=tie_break,
        return_scores=return_scores,
        out=out,
        out_positions=out_positions,
    )
    return execute(call, backend, validate)


@overload
def topk_paged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    page_table: Tensor,
    page_size: int,
    row_to_batch: Tensor | None = None,
    row_starts: Tensor | None = None,
    page_table_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[False] = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def topk_paged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    page_table: Tensor,
    page_size: int,
    row_to_batch: Tensor | None = None,
    row_starts: Tensor | None = None,
    page_table_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: Literal[True],
    validate: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def topk_paged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    page_table: Tensor,
    page_size: int,
    row_to_batch: Tensor | None = None,
    row_starts: Tensor | None = None,
    page_table_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def topk_paged(
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    page_table: Tensor,
    page_size: int,
    row_to_batch: Tensor | None = None,
    row_starts: Tensor | None = None,
    page_table_starts: Tensor | None = None,
    out_positions: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    out: Tensor | None = None,
    return_scores: bool = False,
    validate: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Select as `topk_positions` does and return slots of a paged cache. **Indices come first**, scores second.

    Position ``p`` of row ``i`` becomes ``page_table[b, q + p // page_size] * page_size + p % page_size`` with
    ``b = row_to_batch[i]`` and ``q = page_table_starts[i]`` (the low 32 bits of it). A window also ends where its table
    row does, and a row whose ``b`` or ``q`` lies outside the table is empty. Ranking, ties, orders and streams: see
    `topk_positions`.

    Parameters
    ----------
    scores : Tensor
        ``[R, N]`` float32, bfloat16 or float16, ``R, N < 2**31``; last dimension contiguous, any row stride.
    lengths : Tensor or None
        ``[R]`` int32 or int64: valid scores of each row, from its start; None means to the end of the row.
    k : int
        How many to select, ``1 <= k <= 8192``; may exceed ``N``.
    page_table : Tensor
        ``[B, T]`` int32, last dimension contiguous, any row stride: physical page of each logical page of a request.
    page_size : int
        Score positions per page, ``1 <= page_size < 2**31``; need not be a power of two.
    row_to_batch : Tensor, optional
        ``[R]`` int32 or int64: table row of each score row; default is row ``i`` for row ``i``, which needs ``B >= R``.
    row_starts : Tensor, optional
        ``[R]`` int32 or int64: first column of each row's window; default 0.
    page_table_starts : Tensor, optional
        ``[R]`` int32 or int64: first table *entry* (not token) of each row's window; default 0.
    out_positions : Tensor, optional
        ``[R, k]`` int32, laid out as `out`: also receives the positions in the window, slot for slot.
    order, tie_break, out, return_scores, validate, backend
        As in `topk_positions`.

    Returns
    -------
    indices : Tensor
        ``[R, k]`` int32 (`out` itself when given): cache slots of the selected positions;
        -1 in slots that a row does not fill.
    scores : Tensor
        ``[R, k]`` in the scores' type, only with ``return_scores=True``: **second**, after the indices.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `topk_positions`.

    Examples
    --------
    >>> import torch, dsa_topk
    >>> scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    >>> table = torch.tensor([[7, 4]], dtype=torch.int32)
    >>> dsa_topk.topk_paged(scores, torch.tensor([4]), 2, page_table=table, page_size=2)
    tensor([[14,  8]], dtype=torch.int32)
    """
    if needs_operator(scores):
        return execute_operator(
            "paged",
            scores,
            lengths,
            k,
            page_table=page_table,
            page_size=page_size,
            row_to_batch=row_to_batch,
            row_starts=row_starts,
            page_table_starts=page_table_starts,
            order=order,
            tie_break=tie_break,
            return_scores=return_scores,
            out=out,
            out_positions=out_positions,
            validate=validate,
            backend=backend,
        )
    if out is not None and launched(
        "paged",
        scores,
        lengths,
        k,
        row_starts,
        order,
        tie_break,
        out,
        return_scores,
        validate,
        backend,
        page_table=page_table,
        page_size=page_size,
        row_to_batch=row_to_batch,
        page_table_starts=page_table_starts,
        out_positions=out_positions,
    ):
        return out
    call = check(
        "paged",
        scores,
        lengths,
        k,
        page_table=page_table,
        page_size=page_size,
        row_to_batch=row_to_batch,
        row_starts=row_starts,
        page_table_starts=page_table_starts,
        order=order,
        tie_break=tie_break,
        return_scores=return_scores,
        out=out,
        out_positions=out_positions,
    )
    return execute(call, backend, validate)
