"""Compares two result files cell by cell, with noise bounds: what changed, and whether that is more than noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .cases import Case
from .record import IDENTITY, Record, Row
from .report import geometric_mean, number

TOLERANCE = 0.03  # two runs of the same code on the same GPU differ by up to about this


@dataclass(frozen=True)
class Change:
    """One case in both files."""

    old: Row
    new: Row
    tolerance: float

    @property
    def ratio(self) -> float:
        """New time over old: above 1 is slower."""
        return self.new.us / self.old.us

    @property
    def noise(self) -> float:
        """How far from 1 the ratio may be without meaning anything: the runs' own spreads, at least the tolerance."""
        return max(self.tolerance, self.old.spread + self.new.spread)

    @property
    def verdict(self) -> str:
        """``slower``, ``faster`` or ``same``."""
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else "same"


@dataclass(frozen=True)
class Comparison:
    """All cases of two files."""

    changes: list[Change]
    only_old: list[Case]
    only_new: list[Case]
    different: dict[str, tuple[str, str]]  # header entries that are not equal

    @property
    def regressions(self) -> list[Change]:
        """Cases slower beyond noise."""
        return [change for change in self.changes if change.verdict == "slower"]

    @property
    def other_machine(self) -> bool:
        """Whether the files are of different GPUs, so that the comparison is of machines rather than of code."""
        return "gpu" in self.different


def compare(old: Record, new: Record, tolerance: float = TOLERANCE) -> Comparison:
    """Match the rows of two records."""
    changes = [Change(row, new.rows[case], tolerance) for case, row in old.rows.items() if case in new.rows]
    return Comparison(
        changes,
        [case for case in old.rows if case not in new.rows],
        [case for case in new.rows if case not in old.rows],
        _differences(old.header, new.header),
    )


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    keys = [key for key in (*IDENTITY, "commit") if old.get(key) != new.get(key)]
    return {key: (old.get(key, "?"), new.get(key, "?")) for key in keys}


def text(comparison: Comparison) -> str:
    """The comparison as plain text, largest slow-down first."""
    head = ["case", "old us", "new us", "new/old", "noise", "floor new/old", ""]
    body = [head]
    for change in sorted(comparison.changes, key=lambda change: -change.ratio):
        floors = change.old.floor_us, change.new.floor_us
        floor_ratio = floors[1] / floors[0] if floors[0] and floors[1] else None
        mark = "" if change.verdict == "same" else change.verdict
        cells = [change.old.case.label(), number(change.old.us), number(change.new.us), f"{change.ratio:.3f}"]
        body.append([*cells, f"{change.noise:.3f}", number(floor_ratio, 3), mark])
    widths = [max(len(line[i]) for line in body) for i in range(len(head))]
    lines = []
    for line in body:
        label, *rest = line
        cells = [label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    mean = geometric_mean(change.ratio for change in comparison.changes)
    if mean is not None:
        faster = sum(change.verdict == "faster" for change in comparison.changes)
        lines.append(
            f"{len(comparison.changes)} cases: geometric mean new/old {mean:.3f}, "
            f"{len(comparison.regressions)} slower and {faster} faster beyond noise"
        )
    for title, cases in (("only in the old file", comparison.only_old), ("only in the new file", comparison.only_new)):
        if cases:
            lines.append(f"{title}: {len(cases)} cases ({cases[0].label()}{', ...' if len(cases) > 1 else ''})")
    for key, (before, after) in comparison.different.items():
        lines.append(f"{key}: {before} -> {after}")
    if comparison.other_machine:
        lines.append("different GPUs: the ratios compare machines, not code")
    return "\n".join(lines)
