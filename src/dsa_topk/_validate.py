"""``validate=True``: checks of the *values* in a call's integer tensors, naming the first bad row.

The contract gives every value a meaning (a negative length is an empty row, an over-long one is cut), so nothing here
is needed for safety. It finds the caller's mistakes: metadata that an engine did not mean. It reads device data on the
host, so it synchronises and can't run while a CUDA graph is being captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_topk._call import Call

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_CHUNK_ENTRIES = 1 << 22  # page-table entries looked at in one go: bounds the temporaries to some 100 MB

VARIABLE = "DSA_TOPK_VALIDATE"
# os.environ.get encodes the key and raises inside when it is unset: 0.7 us in each call. The dictionary under it is the
# same live object and answers in 25 ns; where an interpreter has none, the public way serves.
ENVIRON: Any = getattr(os.environ, "_data", os.environ)
KEY: Any = os.fsencode(VARIABLE) if isinstance(ENVIRON, dict) and os.name == "posix" else VARIABLE

_Finding = tuple[int, str]  # row and text


def check_values(call: Call) -> None:
    """Raise for the first row whose integers are not what a correct caller would pass.

    Raises
    ------
    ValueError
        A negative or over-long length, a start outside the row, ``row_to_batch`` or ``page_table_starts`` out of range,
        a used page-table entry below 0, or a result beyond int32.
    RuntimeError
        The current stream is capturing a CUDA graph.
    """
    if call.scores.is_cuda:
        with torch.cuda.device(call.scores.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "validate: expected no CUDA graph capture (validation reads device data on the host), "
                    "got a capturing stream; validate an eager call instead"
                )
    with torch.inference_mode():
        found = _check_vectors(call)
        # What positions map to is only defined for rows with valid vectors: those before the first finding.
        sound = call.scores.shape[0] if found is None else found[0]
        if call.form == "ragged":
            found = _check_ragged_results(call, sound) or found
        elif call.form == "paged":
            found = _check_table(call, sound) or found
    if found is not None:
        row, text = found
        raise ValueError(f"{text} (first bad row: {row})")


def _long(tensor: Tensor | None, default: Tensor) -> Tensor:
    return default if tensor is None else tensor.to(torch.int64)


def _first(bad: Tensor, describe: Callable[[int], str]) -> _Finding | None:
    """The first row marked in ``bad`` (``[rows]`` bool), described; None when no row is."""
    rows = bad.nonzero()
    if rows.numel() == 0:
        return None
    row = int(rows[0, 0])
    return row, describe(row)


def _earliest(findings: list[_Finding | None]) -> _Finding | None:
    return min((finding for finding in findings if finding is not None), key=lambda finding: finding[0], default=None)


def _check_vectors(call: Call) -> _Finding | None:
    """Each 1-D tensor against its own range, lengths against what window and table leave them."""
    rows, width = call.scores.shape
    zeros = torch.zeros(rows, dtype=torch.int64, device=call.scores.device)
    findings: list[_Finding | None] = []

    def in_range(name: str, tensor: Tensor | None, limit: int, meaning: str) -> None:
        if tensor is not None:
            values = tensor.to(torch.int64)
            findings.append(
                _first(
                    (values < 0) | (values > limit),
                    lambda row: f"{name}[{row}]: expected 0 <= value <= {limit} ({meaning}), got {int(values[row])}",
                )
            )

    in_range("row_starts", call.row_starts, width, "N")
    room = width - _long(call.row_starts, zeros).clamp(0, width)
    limited_by = "N - row_starts"
    if call.page_table is not None:
        requests, entries = call.page_table.shape
        in_range("row_to_batch", call.row_to_batch, requests - 1, "B - 1")
        in_range("page_table_starts", call.page_table_starts, entries, "T")
        pages = entries - _long(call.page_table_starts, zeros).clamp(0, entries)
        room = torch.minimum(room, pages.clamp(max=width) * call.page_size)
        limited_by = "what row and page table hold"
    if call.lengths is not None:
        lengths = call.lengths.to(torch.int64)
        findings.append(
            _first(
                (lengths < 0) | (lengths > room),
                lambda row: (
                    f"lengths[{row}]: expected 0 <= length <= {int(room[row])} ({limited_by}), got {int(lengths[row])}"
                ),
            )
        )
    elif call.page_table is not None:
        findings.append(
            _first(
                room < width - _long(call.row_starts, zeros),
                lambda row: (
                    f"lengths: expected (being None) a page table that covers N - row_starts positions of row {row}, "
                    f"got {int(room[row])} covered"
                ),
            )
        )
    return _earliest(findings)


def _check_ragged_results(call: Call, rows: int) -> _Finding | None:
    """Position plus offset must fit in int32, for every candidate of the row (any of them may be selected)."""
    assert call.out_offsets is not None
    offsets = call.out_offsets[:rows].to(torch.int64)
    count = _count(call)[:rows]
    # Compared on the offset's side: the sum itself may leave 64 bits.
    bad = (count > 0) & ((offsets < _INT32_MIN) | (offsets > _INT32_MAX - (count - 1)))
    return _first(
        bad,
        lambda row: (
            f"out_offsets[{row}]: expected offset + position within int32 for positions 0 .. {int(count[row]) - 1}, "
            f"got offset {int(offsets[row])}"
        ),
    )


def _check_table(call: Call, rows: int) -> _Finding | None:
    """Entries that the row's candidates lie in must be at least 0, and the slots they give must fit in int32."""
    assert call.page_table is not None
    requests, entries = call.page_table.shape
    if requests == 0 or entries == 0:
        return None
    total, device = call.scores.shape[0], call.scores.device
    zeros = torch.zeros(total, dtype=torch.int64, device=device)
    table_row = _long(call.row_to_batch, torch.arange(total, device=device))
    first = _long(call.page_table_starts, zeros)
    count = _count(call)
    entry = torch.arange(entries, device=device)
    step = max(1, _CHUNK_ENTRIES // entries)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        pages = call.page_table[table_row[part]].to(torch.int64)
        behind = (entry - first[part, None]) * call.page_size  # first position in this page
        used = (behind >= 0) & (behind < count[part, None])
        last = torch.minimum(count[part, None] - behind, torch.full_like(behind, call.page_size)) - 1
        negative = used & (pages < 0)
        beyond = used & (pages * call.page_size > _INT32_MAX - last)
        bad = negative | beyond
        found = _first(bad.any(dim=1), lambda row: "")
        if found is None:
            continue
        row = found[0]
        column = int(bad[row].nonzero()[0, 0])
        text = f"page_table[{int(table_row[begin + row])}, {column}]"
        page = int(pages[row, column])
        if bool(negative[row, column]):
            text += f": expected an entry >= 0 where row {begin + row} uses it, got {page}"
        else:
            text += (
                f": expected page * page_size + position within int32, got page {page} with page_size {call.page_size}"
            )
        return begin + row, text
    return None


def _count(call: Call) -> Tensor:
    """Candidates of each row whose vectors are in range."""
    rows, width = call.scores.shape
    room = torch.full((rows,), width, dtype=torch.int64, device=call.scores.device)
    if call.row_starts is not None:
        room = room - call.row_starts.to(torch.int64)
    return _long(call.lengths, room)
