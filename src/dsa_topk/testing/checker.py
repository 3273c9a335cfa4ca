"""Says whether an output meets the contract, and if not where and why, by counting ranks: nothing is sorted to select.

Two ways, both independent of how a backend selects:

- the selected *positions* are known (``topk_positions``, ``out_positions`` given, or ragged, where the offset can be
  taken away): a row is exact when its selected positions are distinct candidates and as many scores lie strictly above
  its worst selected one in the window as in the selection; the tie rule holds when the tied candidates up to the last
  tied selected position are as many as the tied selected ones;
- only *stored paged values* are known. A page table may repeat pages, so a value need not name one position. The k-th
  score is found by bisection over the key space (count candidates at or above a trial key), which fixes the whole
  expected row; in ``set`` mode the stored values must be a multiset that some exact choice would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from . import _explain
from ._ranks import expected_positions, kth_keys
from .keys import minus_infinity_bits, order_keys, raw_bits
from .verdict import KINDS, Verdict
from .window import Window, windows

Mode = Literal["canonical", "set"]

_CODE = {name: number for number, name in enumerate(KINDS)}
# Elements of score work per chunk of rows: bounds the temporaries (about 12 bytes per element).
_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
# Matching stored values as multisets lists every candidate (about 100 bytes each).
_MULTISET_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Rows:
    """One chunk of rows as the judges see it. ``stored`` and ``positions`` are int64 [r, k]."""

    scores: torch.Tensor
    keys: torch.Tensor
    inside: torch.Tensor
    window: Window
    live: torch.Tensor
    stored: torch.Tensor
    positions: torch.Tensor | None
    returned: torch.Tensor | None
    order: str
    tie_break: str
    canonical: bool


@dataclass(slots=True)
class Findings:
    """Per row of a chunk: the fault's code, its first slot, how many entries are wrong."""

    code: torch.Tensor
    slot: torch.Tensor
    wrong: torch.Tensor

    @staticmethod
    def none(rows: int, device: torch.device) -> Findings:
        """No fault in any row."""
        return Findings(*(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)))

    def add(self, kind: str, bad: torch.Tensor) -> None:
        """Record ``bad`` slots [r, k] under ``kind`` in the rows that have no fault yet."""
        count = bad.sum(1)
        new = (self.code == 0) & (count > 0)
        self.code = torch.where(new, _CODE[kind], self.code)
        self.slot = torch.where(new, bad.to(torch.int8).argmax(1), self.slot)
        self.wrong = torch.where(new, count, self.wrong)

    def add_rows(self, kind: str, bad: torch.Tensor, slot: torch.Tensor, wrong: torch.Tensor) -> None:
        """Record faults of whole rows [r] under ``kind``."""
        new = (self.code == 0) & bad
        self.code = torch.where(new, _CODE[kind], self.code)
        self.slot = torch.where(new, slot, self.slot)
        self.wrong = torch.where(new, wrong.clamp(min=1), self.wrong)


def check_selection(
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    k: int,
    result: torch.Tensor,
    *,
    form: str = "positions",
    row_starts: torch.Tensor | None = None,
    out_offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    row_to_batch: torch.Tensor | None = None,
    page_table_starts: torch.Tensor | None = None,
    order: str = "position",
    tie_break: str = "smallest",
    positions: torch.Tensor | None = None,
    returned_scores: torch.Tensor | None = None,
    mode: Mode = "canonical",
) -> Verdict:
    """Check the output of one top-k call against the contract.

    Parameters
    ----------
    scores : Tensor [R, N], float32, bfloat16 or float16
        The scores as the call saw them.
    lengths : Tensor [R] or None
        As in the call; so are ``k``, ``row_starts``, ``out_offsets``, ``page_table``, ``page_size``, ``row_to_batch``,
        ``page_table_starts``, ``order`` and ``tie_break``.
    result : Tensor [R, k], int32
        The indices that the call returned.
    form : {"positions", "ragged", "paged"}
        Which of the public functions was called.
    positions : Tensor [R, k], int32, optional
        What the call wrote to ``out_positions``. Without it the positions follow from the stored values.
    returned_scores : Tensor [R, k], the scores' dtype, optional
        The scores that the call returned.
    mode : {"canonical", "set"}
        ``canonical`` demands the contract; ``set`` accepts any exact set of selected scores in any order, ties broken
        at will, for backends that promise no more. Padding, ranges and distinctness are demanded in both.

    Returns
    -------
    Verdict
        True when all rows are right.

    Raises
    ------
    ValueError
        When the description of the call itself is impossible (unknown form, order, tie rule or mode; table missing).
    """
    for name, value, legal in (
        ("order", order, ("position", "score")),
        ("tie_break", tie_break, ("smallest", "largest")),
        ("mode", mode, ("canonical", "set")),
    ):
        if value not in legal:
            raise ValueError(f"{name}: expected one of {legal}, got {value!r}")
    rows, width = scores.shape
    device = scores.device
    window = windows(
        rows,
        width,
        k,
        device,
        form=form,
        lengths=lengths,
        row_starts=row_starts,
        out_offsets=out_offsets,
        page_table=page_table,
        page_size=page_size,
        row_to_batch=row_to_batch,
        page_table_starts=page_table_starts,
    )
    for name, tensor, dtype in (
        ("result", result, torch.int32),
        ("positions", positions, torch.int32),
        ("returned scores", returned_scores, scores.dtype),
    ):
        if tensor is not None and (
            tuple(tensor.shape) != (rows, k) or tensor.dtype != dtype or tensor.device != device
        ):
            got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            reason = f"{name}: expected ({rows}, {k}) {dtype} on {device}, got {got}"
            return Verdict(False, reason=reason, kind="shape", bad_rows=rows, wrong=rows * k, rows=rows)

    codes, slots, wrongs = [], [], []
    budget = _CHUNK_ELEMENTS.get(device.type, 1 << 22)
    if mode == "set" and form == "paged" and positions is None:
        budget = _MULTISET_ELEMENTS
    step = max(1, budget // max(width, k, 1))
    for lo in range(0, rows, step):
        chunk = _chunk(
            scores, result, positions, returned_scores, window, lo, min(lo + step, rows), order, tie_break, mode
        )
        found = _judge(chunk)
        codes.append(found.code)
        slots.append(found.slot)
        wrongs.append(found.wrong)
    if not codes:
        return Verdict(True)
    code = torch.cat(codes)
    bad = code != 0
    bad_rows = int(bad.sum())  # the only synchronisation when all is well
    if bad_rows == 0:
        return Verdict(True, rows=rows)
    row = int(bad.to(torch.int8).argmax())
    slot = int(torch.cat(slots)[row])
    kind = KINDS[int(code[row])]
    chunk = _chunk(scores, result, positions, returned_scores, window, row, row + 1, order, tie_break, mode)
    reason = f"row {row} slot {slot}: {_explain.reason(kind, slot, chunk)}"
    return Verdict(False, row, slot, reason, kind, bad_rows, int(torch.cat(wrongs).sum()), rows)


def _chunk(
    scores: torch.Tensor,
    result: torch.Tensor,
    positions: torch.Tensor | None,
    returned_scores: torch.Tensor | None,
    window: Window,
    lo: int,
    hi: int,
    order: str,
    tie_break: str,
    mode: str,
) -> Rows:
    """Rows ``lo .. hi - 1`` of a call, with keys, window mask and the positions where they can be known."""
    part = scores[lo:hi]
    cut = window.rows(lo, hi)
    column = torch.arange(scores.shape[1], device=scores.device)
    inside = (column >= cut.start[:, None]) & (column < (cut.start + cut.count)[:, None])
    live = torch.arange(result.shape[1], device=scores.device) < cut.filled[:, None]
    stored = result[lo:hi].to(torch.int64)
    known: torch.Tensor | None
    if positions is not None:
        known = positions[lo:hi].to(torch.int64)
    elif cut.page_table is not None:
        known = None
    elif cut.offsets is not None:
        # Below slot m_i any value can be right (an offset may even make it -1), above it only -1 is. The difference is
        # taken modulo 2^32, as the stored value is, and can name one candidate at most (n < 2^31).
        known = torch.where(live, (stored - cut.offsets[:, None]) & 0xFFFFFFFF, stored)
    else:
        known = stored
    returned = None if returned_scores is None else returned_scores[lo:hi]
    canonical = mode == "canonical"
    return Rows(part, order_keys(part), inside, cut, live, stored, known, returned, order, tie_break, canonical)


def _judge(rows: Rows) -> Findings:
    """Examine a chunk; faults in the order of KINDS."""
    found = Findings.none(rows.stored.shape[0], rows.stored.device)
    found.add("padding", ~rows.live & (rows.stored != -1))
    if rows.positions is None:
        if rows.canonical:
            _judge_expected(rows, found)
        else:
            _judge_multiset(rows, found)
        return found
    _judge_positions(rows, rows.positions, found)
    if rows.positions is not rows.stored:
        expected = torch.where(rows.live, rows.window.stored(rows.positions), -1)
        found.add("value", expected != rows.stored)
    if rows.returned is not None:
        found.add("scores", _wrong_scores(rows, rows.positions))
    return found


def _judge_positions(rows: Rows, positions: torch.Tensor, found: Findings) -> None:
    """Range, distinctness, exactness, tie rule and order of known positions."""
    keys, window, live = rows.keys, rows.window, rows.live
    found.add("padding", ~live & (positions != -1))
    found.add("range", live & ((positions < 0) | (positions >= window.count[:, None])))
    if keys.shape[1] == 0 or keys.shape[0] == 0:
        return

    # Duplicates: equal neighbours once the positions are in order; padding gets distinct values of its own.
    filler = -1 - torch.arange(positions.shape[1], device=positions.device)
    ordered, origin = torch.where(live, positions, filler).sort(dim=1, stable=True)
    again = torch.zeros_like(live)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    found.add("duplicate", torch.zeros_like(live).scatter_(1, origin, again))

    columns = (window.start[:, None] + positions).clamp(0, keys.shape[1] - 1)
    chosen = keys.gather(1, columns)
    worst = chosen.masked_fill(~live, 2**31 - 1).amin(1, keepdim=True)
    above = ((keys > worst) & rows.inside).sum(1)
    above_chosen = ((chosen > worst) & live).sum(1)
    worst_slot = ((chosen == worst) & live).to(torch.int8).argmax(1)
    found.add_rows("selection", (window.filled > 0) & (above != above_chosen), worst_slot, above - above_chosen)
    if not rows.canonical:
        return

    # Tie rule: the tied selected ones must be the first (or last) of the tied candidates.
    tied = (chosen == worst) & live
    at_worst = (keys == worst) & rows.inside
    index = torch.arange(keys.shape[1], device=keys.device)
    if rows.tie_break == "smallest":
        edge = columns.masked_fill(~tied, -1).amax(1, keepdim=True)
        within = (at_worst & (index <= edge)).sum(1)
    else:
        edge = columns.masked_fill(~tied, keys.shape[1]).amin(1, keepdim=True)
        within = (at_worst & (index >= edge)).sum(1)
    edge_slot = (tied & (columns == edge)).to(torch.int8).argmax(1)
    found.add_rows("tie", (window.filled > 0) & (within != tied.sum(1)), edge_slot, within - tied.sum(1))

    later, earlier = positions[:, 1:], positions[:, :-1]
    if rows.order == "position":
        falls = later <= earlier
    else:
        wrong_way = later <= earlier if rows.tie_break == "smallest" else later >= earlier
        falls = (chosen[:, 1:] > chosen[:, :-1]) | ((chosen[:, 1:] == chosen[:, :-1]) & wrong_way)
    disorder = torch.zeros_like(live)
    disorder[:, 1:] = falls & live[:, 1:]
    found.add("order", disorder)


def _judge_expected(rows: Rows, found: Findings) -> None:
    """Canonical paged values without positions: compare with the one expected row."""
    expected = expected_positions(rows.keys, rows.inside, rows.window, rows.live, rows.order, rows.tie_break)
    values = torch.where(rows.live, rows.window.stored(expected), -1)
    found.add("value", values != rows.stored)
    if rows.returned is not None:
        found.add("scores", _wrong_scores(rows, expected))


def _judge_multiset(rows: Rows, found: Findings) -> None:
    """Set mode, paged values without positions: is there an exact choice whose stored values are these?

    Needed: every value of a candidate strictly above the k-th score, as often as they store it; allowed: values of
    candidates tied with it. Returned scores are then matched together with their values.
    """
    if rows.keys.numel() == 0:
        return
    threshold = kth_keys(rows.keys, rows.inside, rows.window.filled)[:, None]
    above = (rows.keys > threshold) & rows.inside
    tied = (rows.keys == threshold) & rows.inside & (rows.window.filled > 0)[:, None]
    surplus, foreign, lack = _match(rows, above, tied, with_scores=False)
    # A value that no candidate of the row stores may lead anywhere; one stored too often is a duplicate.
    other = foreign & _stored_by_candidate(rows)
    found.add("range", foreign & ~other)
    found.add("selection", other)
    found.add("duplicate", surplus)
    found.add_rows("selection", lack > 0, torch.zeros_like(lack), lack)
    if rows.returned is not None:
        padding = minus_infinity_bits(rows.scores.dtype)
        surplus, foreign, _ = _match(rows, above, tied, with_scores=True)
        found.add("scores", surplus | foreign | (~rows.live & (raw_bits(rows.returned) != padding)))


def _match(
    rows: Rows, above: torch.Tensor, tied: torch.Tensor, *, with_scores: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare stored values (with the scores' bits on request) as multisets.

    Returns the slots [r, k] whose value occurs more often than the candidates ``above`` and ``tied`` store it, the
    slots whose value none of them stores, and how many values of ``above`` are missing in each row [r].
    """
    values, bits, owners = [], [], []
    for mask in (above, tied):
        row, column = mask.nonzero(as_tuple=True)
        owners.append(row)
        values.append(_single(rows.window, row).stored((column - rows.window.start[row])[:, None])[:, 0])
        bits.append(raw_bits(rows.scores)[row, column])
    row, slot = rows.live.nonzero(as_tuple=True)
    owners.append(row)
    values.append(rows.stored[row, slot])
    if rows.returned is not None:
        bits.append(raw_bits(rows.returned)[row, slot])
    label = (torch.cat(owners) << 32) | (torch.cat(values) & 0xFFFFFFFF)
    name = torch.unique(label, return_inverse=True)[1]
    if with_scores:
        name = torch.unique((name << 32) | (torch.cat(bits).to(torch.int64) & 0xFFFFFFFF), return_inverse=True)[1]
    kinds = name.numel()  # an upper bound that needs no synchronisation
    must_name, may_name, got_name = name.split([owner.numel() for owner in owners])
    must, may, got = (torch.bincount(part, minlength=kinds) for part in (must_name, may_name, got_name))
    surplus, foreign = torch.zeros_like(rows.live), torch.zeros_like(rows.live)
    surplus[row, slot] = (got > must + may)[got_name]
    foreign[row, slot] = (must + may == 0)[got_name]
    lack = torch.zeros(rows.live.shape[0], dtype=torch.int64, device=name.device)
    lack.index_add_(0, owners[0], (must > got)[must_name].to(torch.int64))
    return surplus, foreign, lack


def _stored_by_candidate(rows: Rows) -> torch.Tensor:
    """Which stored values [r, k] some candidate of their row stores (whatever its score)."""
    row, column = rows.inside.nonzero(as_tuple=True)
    values = _single(rows.window, row).stored((column - rows.window.start[row])[:, None])[:, 0]
    legal = (row << 32) | (values & 0xFFFFFFFF)
    mine = torch.arange(rows.stored.shape[0], device=row.device)[:, None] << 32
    return torch.isin(mine | (rows.stored & 0xFFFFFFFF), legal)


def _single(window: Window, row: torch.Tensor) -> Window:
    """The windows of ``row``, one for each element of that index tensor."""
    assert window.table_row is not None
    assert window.table_start is not None
    return Window(
        window.start[row],
        window.count[row],
        window.filled[row],
        table_row=window.table_row[row],
        table_start=window.table_start[row],
        page_table=window.page_table,
        page_size=window.page_size,
    )


def _wrong_scores(rows: Rows, positions: torch.Tensor) -> torch.Tensor:
    """Slots whose returned score is not the element at ``positions``, bit for bit, or not ``-inf`` in the padding."""
    assert rows.returned is not None
    got = raw_bits(rows.returned)
    padding = minus_infinity_bits(rows.scores.dtype)
    if rows.scores.shape[1] == 0:
        return got != padding
    columns = (rows.window.start[:, None] + positions).clamp(0, rows.scores.shape[1] - 1)
    expected = raw_bits(rows.scores).gather(1, columns).masked_fill(~rows.live, padding)
    return got != expected
