"""The contract in pure torch: what every canonical backend must return, on any device.

Each row's window is cut first (``windows``). Then every score becomes an integer that sorts like the contract ranks it
(``score_keys``), joined with its column into one 64-bit key, so that no two candidates compare equal and the k largest
keys *are* the answer, whatever order the sort underneath visits them in:

    bits 63..32  score key     NaN < -inf < ... < -0.0 == +0.0 < ... < +inf
    bits 31..0   tie key       larger for the column that wins a tie

Columns outside the window get a key below every candidate's. Rows go through in chunks that bound the temporaries.
Nothing here synchronises with the device or has a shape that depends on data, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_topk._call import Call

CHUNK_ELEMENTS = 1 << 22
"""Scores handled at once. One needs at most some 70 bytes of temporaries (its key, masks, and what a device's sort
allocates), so a chunk stays under 300 MiB; a single row longer than this is a chunk of its own."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_OUTSIDE = -(2**63)  # below every candidate's key, NaN ones included
_LOW32 = 0xFFFFFFFF
_PADDING = -1


def select(call: Call) -> None:
    """Fill ``call.out`` (``[R, k]`` int32) and, where present, ``call.out_positions`` and ``call.out_scores``.

    ``call`` must have passed the checks. Inputs are only read. Runs on the current stream of the tensors' device.
    """
    # Inference mode: no autograd bookkeeping for the temporaries, and outputs made in it may be written from outside.
    with torch.inference_mode():
        scores = call.scores.detach()
        rows, width = scores.shape
        start, count, table_row, table_start = windows(call)
        step = max(1, CHUNK_ELEMENTS // max(width, 1))
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            position, taken = _select_positions(call, scores[part], start[part], count[part])
            _store(call, part, position, taken, start[part], table_row[part], table_start[part])


def windows(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut each row's window to what exists.

    Returns
    -------
    start, count : Tensor
        ``[R]`` int64: first column of the window and number of candidates in it.
    table_row, table_start : Tensor
        ``[R]`` int64: page-table row and its first entry, clamped into the table (zeros in the other forms).
    """
    rows, width = call.scores.shape
    device = call.scores.device
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    start = zeros if call.row_starts is None else call.row_starts.to(torch.int64).clamp(0, width)
    limit = width - start
    table_row = table_start = zeros
    if call.page_table is not None:
        requests, entries = call.page_table.shape
        row = torch.arange(rows, device=device) if call.row_to_batch is None else call.row_to_batch.to(torch.int64)
        first = zeros if call.page_table_starts is None else call.page_table_starts.to(torch.int64)
        table_row = row.clamp(0, max(requests - 1, 0))
        table_start = first.clamp(0, entries)
        # More than `width` pages can't matter, and cutting there keeps the product far inside 64 bits.
        reach = (entries - table_start).clamp(max=width) * call.page_size
        exists = (row == table_row) & (first == table_start)
        limit = torch.minimum(limit, reach) * exists if requests > 0 else zeros
    if call.lengths is None:
        count = limit
    else:
        count = torch.minimum(call.lengths.to(torch.int64).clamp(min=0), limit)
    return start, count, table_row, table_start


def score_keys(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Map scores, given as signed integers of their own size, to int64 keys that order as the contract ranks them."""
    integer = torch.iinfo(bits.dtype)
    sign = bits >> (integer.bits - 1)  # 0 or -1
    magnitude = bits & integer.max  # zero for both zeros
    keys = (magnitude ^ sign).sub_(sign)  # the magnitude with its sign, as integers count
    keys.masked_fill_(magnitude > _INFINITY[dtype], -integer.max)  # NaN, below -inf
    return keys.to(torch.int64)


def _select_positions(call: Call, scores: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected positions of a chunk, ``[rows, min(k, N)]`` int64 in output order, and which are taken."""
    rows, width = scores.shape
    k = min(call.k, width)
    slot = torch.arange(k, device=scores.device)
    taken = slot < count[:, None]
    if rows == 0 or k == 0:
        return torch.empty(rows, k, dtype=torch.int64, device=scores.device), taken
    column = torch.arange(width, device=scores.device)
    keys = score_keys(scores.view(_BITS[scores.dtype]), scores.dtype)
    keys.mul_(2**32).add_(column if call.tie_break == "largest" else _LOW32 - column)
    keys.masked_fill_((column < start[:, None]) | (column >= (start + count)[:, None]), _OUTSIDE)
    # Sorted in either order: the first m_i must be the candidates, the rest comes from outside the window.
    best = torch.topk(keys, k, dim=1, largest=True, sorted=True).indices
    position = best - start[:, None]
    if call.order == "position":
        position = position.masked_fill_(~taken, width).sort(dim=1).values
    return position, taken


def _store(
    call: Call, part: slice, position: Tensor, taken: Tensor, start: Tensor, table_row: Tensor, table_start: Tensor
) -> None:
    """Write a chunk's positions, their mapped values and their scores, padded to k slots."""
    assert call.out is not None
    empty = ~taken
    position = position.masked_fill(empty, 0)
    value = position
    if call.out_offsets is not None:
        # Low halves are enough, since only the low half of the sum is stored, and they can't overflow.
        value = position + (call.out_offsets[part].to(torch.int64) & _LOW32)[:, None]
    elif call.page_table is not None and call.page_table.numel() > 0:
        entry = table_start[:, None] + position // call.page_size
        page = call.page_table[table_row[:, None], entry.clamp_(max=call.page_table.shape[1] - 1)]
        value = page.to(torch.int64) * call.page_size + position % call.page_size
    _write(call.out[part], _low_int32(value), empty, _PADDING)
    if call.out_positions is not None:
        _write(call.out_positions[part], position.to(torch.int32), empty, _PADDING)
    if call.out_scores is not None:
        dtype = call.out_scores.dtype
        bits = call.scores.detach()[part].view(_BITS[dtype])
        if position.shape[1] > 0:
            column = (position + start[:, None]).clamp_(max=bits.shape[1] - 1)
            bits = bits.gather(1, column)
        # As integers from end to end: a float copy may quieten a signalling NaN.
        minus_infinity = _INFINITY[dtype] - (2**31 if dtype == torch.float32 else 2**15)
        _write(call.out_scores[part].view(_BITS[dtype]), bits, empty, minus_infinity)


def _write(out: Tensor, values: Tensor, empty: Tensor, padding: int) -> None:
    found = values.shape[1]
    out[:, :found].copy_(values.masked_fill(empty, padding))
    out[:, found:].fill_(padding)


def _low_int32(values: Tensor) -> Tensor:
    """The low 32 bits of int64 values, as int32."""
    return (((values + 2**31) & _LOW32) - 2**31).to(torch.int32)
