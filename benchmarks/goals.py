"""Which speed goals of issues 4 (prefill) and 5 (decode) the recorded results reach, cell by cell.

usage: python benchmarks/goals.py [FOLDER] [--all]      FOLDER: default benchmarks/results/nvidia-h200

Reads FOLDER/prefill.json and FOLDER/decode.json. Prints each goal with its counts and worst figure, below it the cells
that miss it or have no figure (with --all every cell), and at the end a line per issue, counted in cells. "no figure"
counts as not met. Peers are all that were timed, inexact ones too. Exit code 0: every must is met; 1: not; 2: a file
cannot be read.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from dsa_topk.bench import cases, record
from dsa_topk.bench.cases import Case
from dsa_topk.bench.record import Record, Row
from dsa_topk.bench.report import geometric_mean

FOLDER = Path(__file__).resolve().parent / "results" / "nvidia-h200"
RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}

# Issue 4: at most this many times the floor, by window: must, aim.
PREFILL_FLOOR = {8192: (2.9, 2.0), 16384: (2.35, 1.6), 32768: (1.95, 1.3), 65536: (1.7, 1.25), 131072: (1.6, 1.2)}
HARD = ("half_zeros", "ascending", "descending", "all_equal", "half_minus_inf", "mask_1e9")
# Issue 5: a ratio to the best peer counts as reached within 3%. "No slower" takes the same 3%, here and in issue 4:
# two runs of the same code differ by up to about that.
WITHIN = 0.03
DECODE_FLOOR_AIM = 1.35  # 256 rows from 65536 up: their aim speaks of the floor


@dataclass(frozen=True)
class Cell:
    """One figure held against one bound."""

    issue: int
    kind: str  # must or aim
    goal: str
    name: str
    figure: float | None
    relation: str
    bound: float

    @property
    def met(self) -> bool:
        """Whether there is a figure and it is within the bound."""
        return self.figure is not None and RELATIONS[self.relation](self.figure, self.bound)

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``no figure``."""
        return "met" if self.met else "no figure" if self.figure is None else "missed"

    @property
    def distance(self) -> float:
        """How far beyond the bound, as a factor: the worst cell of a goal has the largest."""
        if self.figure is None:
            return 0.0
        return self.figure / self.bound if self.relation in ("<", "<=") else self.bound / max(self.figure, 1e-9)


def _ratio(data: Record, case: Case, twin: Case) -> float | None:
    """Our time of a case over that of another one."""
    ours, other = data.rows.get(case), data.rows.get(twin)
    return ours.us / other.us if ours and other else None


def _of(data: Record, case: Case, figure: Callable[[Row], float | None]) -> float | None:
    row = data.rows.get(case)
    return figure(row) if row else None


def _times_normal(
    data: Record, issue: int, some: Iterable[Case], dists: Sequence[str], bound: float, goal: str
) -> Iterator[Cell]:
    """Other distributions beside the normal one."""
    for case in some:
        if case.dist in dists:
            figure = _ratio(data, case, replace(case, dist="normal"))
            yield Cell(issue, "must", goal, case.label(), figure, "<=", bound)


def _no_slower(data: Record, issue: int, some: Iterable[Case]) -> Iterator[Cell]:
    for case in some:
        if case.k < 2048:
            figure = _ratio(data, case, replace(case, k=2048))
            yield Cell(issue, "must", "k = 512, 1024 over k = 2048", case.label(), figure, "<=", 1 + WITHIN)


def prefill(data: Record) -> Iterator[Cell]:
    """The goals of issue 4; its 64 MiB of workspace is no figure of a result file (there is none: docs/contract.md)."""
    ragged = [Case("ragged", rows, width) for width in PREFILL_FLOOR for rows, w in cases.PREFILL_SHAPES if w == width]
    for number, kind in enumerate(("must", "aim")):
        for case in ragged:
            bound = PREFILL_FLOOR[case.width][number]
            figure = _of(data, case, lambda row: row.floor_ratio)
            yield Cell(4, kind, "times the floor", case.label(), figure, "<=", bound)
    for case in ragged:
        yield Cell(4, "must", "best peer over ours", case.label(), _of(data, case, lambda row: row.speedup), ">", 1.0)
    for case in ragged:
        figure = _ratio(data, replace(case, mode="packed"), case)
        yield Cell(4, "must", "packed over ragged", case.label(), figure, "<=", 1.08)
    dist = cases.select(cases.suite(["dist"]), "mode=ragged")
    yield from _times_normal(data, 4, dist, ("indexer", "narrow"), 1.10, "indexer-like, narrow over normal")
    yield from _times_normal(data, 4, dist, HARD, 1.7, "hard distributions over normal")
    yield from _times_normal(data, 4, dist, ("recorded",), 1.15, "recorded over normal")
    yield from _no_slower(data, 4, cases.select(cases.suite(["k"]), "mode=ragged"))
    for case in ragged:
        if case.width >= 32768:
            narrow = replace(case, dtype="bfloat16")
            yield Cell(4, "must", "bfloat16 over float32", narrow.label(), _ratio(data, narrow, case), "<=", 0.75)


def decode_bounds(rows: int, width: int) -> tuple[float, float | None]:
    """Issue 5's must and aim of best peer over ours; no aim where it speaks of the floor."""
    if width <= 8192:
        return 0.8, 1.05
    if width == 16384:
        return 1.0, 1.3
    if width == 32768:
        return 1.25, 1.6
    if width == 1048576:
        return 1.15, 2.0
    if rows <= 16:
        return 1.0, 1.4
    return 1.25, 1.6 if rows <= 128 else None


def decode(data: Record) -> Iterator[Cell]:
    """The goals of issue 5."""
    shapes = sorted(cases.suite(["decode"]), key=lambda case: (case.regime, case.width, case.rows))
    for number, kind in enumerate(("must", "aim")):
        for case in shapes:
            bound = decode_bounds(case.rows, case.width)[number]
            if bound is not None:
                figure = _of(data, case, lambda row: row.speedup)
                yield Cell(
                    5, kind, f"best peer over ours, {case.regime}", case.label(), figure, ">=", bound * (1 - WITHIN)
                )
    for case in shapes:
        if decode_bounds(case.rows, case.width)[1] is None:
            figure = _of(data, case, lambda row: row.floor_ratio)
            yield Cell(5, "aim", "times the floor", case.label(), figure, "<=", DECODE_FLOOR_AIM)
    cold = [_of(data, case, lambda row: row.speedup) for case in shapes if case.regime == "cold"]
    # A mean over some of the shapes is not the mean that the goal speaks of.
    mean = geometric_mean(value for value in cold if value) if all(cold) else None
    for kind, bound in (("must", 1.15), ("aim", 1.4)):
        yield Cell(5, kind, "geometric mean of best peer over ours", f"all {len(cold)} shapes, cold", mean, ">=", bound)
    for case in shapes:
        figure = _of(data, case, lambda row: row.peers["fi_det"] / row.us if "fi_det" in row.peers else None)
        yield Cell(5, "must", "FlashInfer deterministic over ours", case.label(), figure, ">", 1.0)
    for case in cases.suite(["mtp"]):
        if case.mode == "mtp" or case.rows == 64:
            figure = _of(data, case, lambda row: row.speedup)
            yield Cell(5, "must", f"best peer over ours, {case.mode}", case.label(), figure, ">", 1.0)
    dist = cases.select(cases.suite(["dist"]), "mode=decode")
    easy = ("recorded", "indexer", "narrow", "half_zeros")
    yield from _times_normal(data, 5, dist, easy, 1.4, "recorded, indexer-like, narrow, half zeros over normal")
    yield from _no_slower(data, 5, cases.select(cases.suite(["k"]), "mode=decode"))
    for form in ("topk_paged", "topk_ragged"):
        yield Cell(5, "must", "host time of an eager call (us)", form, data.host_us.get(form), "<", 15.0)


def report(cells: Sequence[Cell], *, everything: bool = False) -> str:
    """The goals as text."""
    lines: list[str] = []
    for (issue, kind, goal), group in groupby(cells, key=lambda cell: (cell.issue, cell.kind, cell.goal)):
        some = list(group)
        worst = max(some, key=lambda cell: cell.distance)
        verdict = "met" if all(cell.met for cell in some) else "NOT MET"
        text = f"issue {issue} {kind}: {goal}: {verdict}, {sum(cell.met for cell in some)} of {len(some)} cells"
        if worst.figure is not None:
            text += f", worst {worst.figure:.3f} ({worst.name}; {worst.relation} {worst.bound:.3g})"
        lines.append(text)
        for cell in some:
            if everything or not cell.met:
                figure = "-" if cell.figure is None else f"{cell.figure:.3f}"
                lines.append(f"    {cell.verdict:<9}  {figure:>7} {cell.relation} {cell.bound:<6.3g} {cell.name}")
    lines.append("")
    for issue in sorted({cell.issue for cell in cells}):
        parts = []
        for kind in ("must", "aim"):
            some = [cell for cell in cells if (cell.issue, cell.kind) == (issue, kind)]
            parts.append(f"{sum(cell.met for cell in some)} of {len(some)} {kind}s")
        lines.append(f"issue {issue}: {', '.join(parts)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--all", action="store_true", help="also the cells that meet their goal")
    options = parser.parse_args(arguments)
    try:
        cells = [
            *prefill(record.load(options.folder / "prefill.json")),
            *decode(record.load(options.folder / "decode.json")),
        ]
    except (OSError, ValueError) as error:
        print(f"goals: {error}", file=sys.stderr)
        return 2
    print(report(cells, everything=options.all))
    return 0 if all(cell.met for cell in cells if cell.kind == "must") else 1


if __name__ == "__main__":
    sys.exit(main())
