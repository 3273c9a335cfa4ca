"""What a run prints: the progress bar and the result table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence

from . import host
from .cases import Case
from .record import Record, Row


class Progress:
    """A progress bar where rich and a terminal are there, else a line per case."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self._total, self._done, self._begin = total, 0, time.monotonic()
        self._enabled = enabled
        self._bar = None
        if enabled and sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar

                columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
                self._bar = Bar(*columns)
                self._task = self._bar.add_task("starting", total=total)
            except ImportError:
                pass  # lines will do

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, case: Case, row: Row | None) -> None:
        """One more case is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=summary(row) if row else case.label())
        elif self._enabled:
            seconds = time.monotonic() - self._begin
            print(f"[{self._done}/{self._total} {seconds:.0f}s] {summary(row) if row else case.label()}", flush=True)

    def say(self, text: str) -> None:
        """A line beside the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            print(text, flush=True)


def summary(row: Row) -> str:
    """One row in one line."""
    text = f"{row.case.label()}: {row.us:.2f} us"
    if row.floor_ratio is not None:
        text += f", {row.floor_ratio:.2f}x floor"
    if row.best_peer is not None and row.speedup is not None:
        text += f", {row.speedup:.2f}x as fast as {row.best_peer[0]}"
    return text


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def number(value: float | None, digits: int = 2) -> str:
    """A figure with as many digits as it deserves, or a dash."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Peers that took part in any of the rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.peers))


def table(rows: Sequence[Row], record: Record | None = None) -> str:
    """The rows as plain text, aligned, with geometric means of the speed-ups below."""
    names, variants = columns_of(rows), list(dict.fromkeys(name for row in rows for name in row.variants))
    head = ["mode", "rows", "width", "k", "dtype", "scores", "regime", "us", "+-", "GB/s", "floor", "x floor"]
    head += [*names, "x best peer", *variants]
    body = [head]
    for row in rows:
        case = row.case
        cells = [case.mode, str(case.rows), str(case.width), str(case.k), case.dtype, case.dist, case.regime]
        cells += [number(row.us), f"{100 * row.spread:.1f}%", f"{row.gigabytes_per_second:.0f}"]
        cells += [number(row.floor_us), number(row.floor_ratio)]
        cells += [number(row.peers.get(name)) + ("!" if name in row.peer_failures else "") for name in names]
        cells += [number(row.speedup), *(number(row.variants.get(name)) for name in variants)]
        body.append(cells)
    widths = [max(len(line[i]) for line in body) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in body]
    for regime in ("cold", "warm"):
        mean = geometric_mean(row.speedup for row in rows if row.case.regime == regime and row.speedup)
        if mean is not None:
            lines.append(f"geometric mean over the best peer, {regime}: {mean:.3f} (above 1: ours is faster)")
    if any(row.peer_failures for row in rows):
        lines.append("! the peer's result was not exact, or it failed (peer_failures in the file)")
    if record is not None and record.host_us:
        cost = ", ".join(f"{name} {us:.1f} us" for name, us in record.host_us.items())
        lines.append(f"host time of an eager call with preallocated output, {host.WHERE}: {cost}")
    return "\n".join(lines)
