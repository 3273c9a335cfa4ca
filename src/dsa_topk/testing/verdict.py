"""What the checker answers: right, or the first bad row and slot and why."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds of faults in the order in which a row is examined; a row is reported under the first that applies.
KINDS = (
    "ok",
    "padding",  # a slot beyond min(k, n) does not hold -1
    "range",  # a slot below min(k, n) does not name a candidate of the row
    "duplicate",  # a candidate is selected twice
    "selection",  # a candidate with a better score was left out
    "tie",  # the set is exact, but equal scores were not chosen by the tie rule
    "order",  # the right set in the wrong order
    "value",  # the stored value is not the one that the selected position maps to
    "scores",  # a returned score is not the selected element bit for bit
    "shape",  # an output has the wrong shape or type: nothing else was looked at
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The checker's answer; true when the output meets the contract.

    Attributes
    ----------
    ok : bool
        Whether every row is right.
    row, slot : int or None
        First bad row and its first bad slot.
    reason : str
        Why, in words, with the numbers. Empty when ``ok``.
    kind : str
        One of :data:`KINDS`.
    bad_rows : int
        How many rows are wrong.
    wrong : int
        How many entries are wrong over all rows (at least one in each bad row).
    rows : int
        How many rows were checked.
    """

    ok: bool
    row: int | None = None
    slot: int | None = None
    reason: str = ""
    kind: str = "ok"
    bad_rows: int = 0
    wrong: int = 0
    rows: int = 0

    def __bool__(self) -> bool:
        return self.ok

    @property
    def invalid(self) -> bool:
        """Whether following the output could read memory that is not the row's: worse than a wrong choice."""
        return self.kind in ("padding", "range", "duplicate", "value", "shape")

    def raise_if_bad(self) -> None:
        """Raise AssertionError with the reason unless the output is right."""
        if not self.ok:
            raise AssertionError(f"{self.reason} [{self.bad_rows} of {self.rows} rows are wrong]")
