"""Words for a bad row: what the slot holds, what was expected, and the numbers that prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._ranks import expected_positions, kth_keys
from .keys import minus_infinity_bits, raw_bits

if TYPE_CHECKING:
    from .checker import Rows


def reason(kind: str, slot: int, rows: Rows) -> str:
    """Explain the fault of a single-row chunk at ``slot``."""
    count, filled = int(rows.window.count), int(rows.window.filled)
    held = int(rows.stored[0, slot])
    known = rows.positions is not None
    at = int(rows.positions[0, slot]) if rows.positions is not None else held
    what = f"holds {held} (position {at})" if at != held and 0 <= at < count else f"holds {held}"
    if kind == "padding":
        return f"{what}, expected -1: the row has {count} candidates, so only slots below {filled} are filled"
    if kind == "range":
        if not known:
            return f"{what}, which no candidate of the row stores (it has {count} candidates)"
        return f"{what}, which is not one of the row's {count} candidates (positions 0 to {count - 1})"
    if kind == "duplicate":
        if not known:
            return f"{what}, more often than candidates store that value"
        first = int((rows.positions[0] == at).to(torch.int8).argmax())  # type: ignore[index]
        return f"{what} again, already selected in slot {first}"
    if kind == "selection":
        return _selection(what, at, rows)
    if kind == "tie":
        return _tie(what, at, rows)
    if kind == "order":
        return _order(what, slot, rows)
    if kind == "scores":
        bits = int(raw_bits(rows.returned)[0, slot])  # type: ignore[arg-type]
        if slot >= filled:
            return f"returned score has bits {_hex(bits, rows)}, expected the padding -inf"
        if not known:
            return f"{what} with returned score bits {_hex(bits, rows)}, not the bits of the selected element"
        element = int(raw_bits(rows.scores)[0, int(rows.window.start) + at])
        return f"{what} with returned score bits {_hex(bits, rows)}, the element has {_hex(element, rows)}"
    if slot >= filled:
        return f"{what}, expected -1: the row has {count} candidates, so only slots below {filled} are filled"
    if known:
        expected = int(rows.window.stored(rows.positions)[0, slot])  # type: ignore[arg-type]
        return f"holds {held}, expected {expected} for position {at}"
    expected_row = expected_positions(rows.keys, rows.inside, rows.window, rows.live, rows.order, rows.tie_break)
    expected = int(rows.window.stored(expected_row)[0, slot])
    where = int(expected_row[0, slot])
    return f"holds {held}, expected {expected} (position {where}, score {_score(rows, where)})"


def _score(rows: Rows, position: int) -> float:
    return float(rows.scores[0, int(rows.window.start) + position])


def _hex(bits: int, rows: Rows) -> str:
    size = rows.scores.element_size()
    name = " (-inf)" if bits == minus_infinity_bits(rows.scores.dtype) else ""
    return f"0x{bits & (256**size - 1):0{2 * size}X}{name}"


def _selected(rows: Rows) -> torch.Tensor:
    """Mask [N] of the columns that a row with known positions selected."""
    assert rows.positions is not None
    mask = torch.zeros(rows.keys.shape[1], dtype=torch.bool, device=rows.keys.device)
    mask[(rows.positions[0][rows.live[0]] + rows.window.start).clamp(0, mask.numel() - 1)] = True
    return mask


def _selection(what: str, at: int, rows: Rows) -> str:
    if rows.positions is None:
        threshold = int(kth_keys(rows.keys, rows.inside, rows.window.filled))
        above = int(((rows.keys[0] > threshold) & rows.inside[0]).sum())
        return f"{what}, but the values of the {above} candidates above the k-th score are not all selected"
    start = int(rows.window.start)
    worst = rows.keys[0, start + at]
    missing = (rows.keys[0] > worst) & rows.inside[0] & ~_selected(rows)
    first = int(missing.to(torch.int8).argmax()) - start
    return (
        f"{what} with score {_score(rows, at)}, but position {first} with score {_score(rows, first)} ranks higher "
        f"and is missing ({int(missing.sum())} such candidates are missing)"
    )


def _tie(what: str, at: int, rows: Rows) -> str:
    start = int(rows.window.start)
    missing = (rows.keys[0] == rows.keys[0, start + at]) & rows.inside[0] & ~_selected(rows)
    index = missing.nonzero()[:, 0] - start
    first = int(index[0] if rows.tie_break == "smallest" else index[-1])
    return (
        f"{what} with score {_score(rows, at)}, but position {first} with the same score comes first under "
        f"tie_break={rows.tie_break!r} and is missing"
    )


def _order(what: str, slot: int, rows: Rows) -> str:
    assert rows.positions is not None
    before, here = int(rows.positions[0, slot - 1]), int(rows.positions[0, slot])
    if rows.order == "position":
        return f"{what} after position {before}: positions must ascend"
    return (
        f"{what} with score {_score(rows, here)} after position {before} with score {_score(rows, before)}: "
        f"order='score' wants the best first, ties by tie_break={rows.tie_break!r}"
    )
