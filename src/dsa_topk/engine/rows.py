"""Row maps on the device: which request a score row belongs to, and where its window starts in that request's table.

Nothing here reads device data on the host, so every function may run inside a CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def requests_of_rows(cu_seqlens_q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the request of each row, ``[num_rows]`` int32, for rows packed request by request.

    ``cu_seqlens_q`` is ``[B + 1]``, cumulative query lengths. Rows behind the last request (padding of a data-parallel
    batch or of a graph) get ``B``: out of range, which the contract answers with an empty row.
    """
    ends = cu_seqlens_q[1:].contiguous()
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    # Not repeat_interleave: its row count is read back from the device unless output_size is given, and a given
    # output_size must equal the device data exactly, which padding rows break. Empty requests are stepped over.
    return torch.searchsorted(ends, rows, right=True, out_int32=True)


def take(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``values[index]`` with the index clamped into range (rows with a bad index are empty rows anyway)."""
    if values.numel() == 0:
        return torch.full_like(index, -1)
    return values.index_select(0, index.clamp(0, values.numel() - 1))


def requests_of_shards(requests: torch.Tensor, cu_seqlens_q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the request of each row for rows packed shard by shard, ``requests[s]`` being that of shard ``s``.

    Rows behind the last shard get -1: out of range, so empty rows.
    """
    shards = requests_of_rows(cu_seqlens_q, num_rows)
    return torch.where(shards < requests.numel(), take(requests, shards), -1)


def list_on_device(values: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return request numbers as a 1-D integer tensor on ``device`` without waiting for it.

    A host list goes through pinned memory. During capture it is written by fills instead, because a captured copy would
    read the pinned block again at every replay, long after its reuse.
    """
    if isinstance(values, torch.Tensor):
        return values.reshape(-1) if values.device == device else values.reshape(-1).to(device, non_blocking=True)
    numbers = [int(value) for value in values]
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        result = torch.empty(len(numbers), dtype=torch.int32, device=device)
        start = 0
        for stop in range(1, len(numbers) + 1):
            if stop == len(numbers) or numbers[stop] != numbers[start]:
                result[start:stop].fill_(numbers[start])
                start = stop
        return result
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[n + 1]`` int32 cumulative sums that start at 0."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))


def window_starts(row_starts: torch.Tensor, cu_seqlens_k: torch.Tensor, row_to_batch: torch.Tensor) -> torch.Tensor:
    """Return how many tokens into its request each row's window starts: ``row_starts - cu_seqlens_k[row_to_batch]``.

    Score columns count over the whole flattened batch, page tables count from each request's first token.
    """
    return row_starts - take(cu_seqlens_k[:-1], row_to_batch)


def page_entries(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return token starts as page-table entries.

    A start inside a page has no entry of its own: it becomes -1, so that the row comes out empty (and ``validate=True``
    names it) instead of pointing at its neighbours' tokens.
    """
    if page_size == 1:
        return tokens
    entries = torch.div(tokens, page_size, rounding_mode="floor")
    return torch.where(entries * page_size == tokens, entries, -1)
