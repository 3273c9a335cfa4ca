"""What ``dsa-topk bench`` does, free of any command-line library: options in, exit code out."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import cases, floor, host, peers, report
from .cases import Case
from .record import Record, Row, make_header, resume
from .session import OURS, Session, WrongResult
from .timing import GraphTimer, HostTimer, Timer

# What a reader of --plot's silence would ask.
NO_FIGURE = "a line needs normal float32 scores, k = 2048 and two lengths of one mode and regime"
OK, FAILED, INCOMPLETE, INTERRUPTED = 0, 1, 3, 130


@dataclass
class Options:
    """The options of a run, as the command line names them."""

    suites: list[str] = field(default_factory=lambda: ["smoke"])
    peers: str = "auto"
    only: str = ""
    json: Path | None = None
    plot: Path | None = None
    device: str = "auto"
    reps: int = 7
    budget: float = float("inf")
    floor: bool = True
    variants: bool = False
    host_cost: bool = True
    command: list[str] = field(default_factory=lambda: ["dsa-topk", "bench", *sys.argv[1:]])


def run(options: Options, *, timer: Timer | None = None, progress: bool = True) -> int:
    """Run the suites, print the table, write what was asked for.

    Returns
    -------
    int
        0: all cases timed and right. 1: an output of ours was wrong. 3: the budget ran out before the last case.
        130: interrupted; what was timed is saved.

    Raises
    ------
    ValueError
        For options that make no sense.
    """
    if options.reps < 5:
        raise ValueError(f"reps: expected at least 5, got {options.reps}: medians of fewer say little")
    selected = cases.select(cases.suite(options.suites), options.only)
    if not selected:
        raise ValueError(f"only: no case of {', '.join(options.suites)} meets {options.only!r}")
    names = peers.resolve(options.peers)
    device = chosen_device(options.device)
    if device.type == "cpu":
        print("CPU: this times the reference, not the kernels")
    record, message = resume(options.json, make_header(device, options.command))
    if message:
        print(message)
    record.notes = {OURS: f"backend {_backend(device)}"}
    record.notes.update({name: text for name, text in peers.about().items() if name in names})
    reader, reason = _floor(device) if options.floor else (None, "not asked for")
    if reader is None:
        print(f"no floor: {reason}")
    if timer is None:
        timer = GraphTimer(device, reader.flush if reader else None) if device.type == "cuda" else HostTimer()
    # The kernel's variants are asked about in the suite that has a column for them.
    session = Session(
        device,
        timer,
        record,
        options.json,
        reader,
        names,
        options.reps,
        options.budget,
        options.variants or options.suites == ["packed"],
    )
    return _run(session, selected, options, progress)


def chosen_device(name: str) -> torch.device:
    """The device to time on.

    Raises
    ------
    ValueError
        When it is neither ``auto`` nor a CPU or CUDA device of this machine.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device: {name!r} is not there; torch sees {count} CUDA devices")
    return device


def _run(session: Session, selected: list[Case], options: Options, progress: bool) -> int:
    record = session.record
    wrong: str | None = None
    left: list[Case] = []
    interrupted = False
    with report.Progress(total=sum(case not in record.rows for case in selected), enabled=progress) as bar:
        session.say = bar.say
        try:
            left = session.run(selected, bar.step)
            if options.host_cost and not left:
                record.host_us = host.measure(session.device)
        except WrongResult as error:
            wrong = str(error)
        except KeyboardInterrupt:
            left = [case for case in selected if case not in record.rows]
            interrupted = True
    if options.json is not None:
        record.save(options.json)
    rows = [record.rows[case] for case in selected if case in record.rows]
    print(report.table(rows, record))
    for name, why in session.absent.items():
        print(f"peer {name} took no part: {why}")
    if options.plot is not None and rows:
        drawn = _plot(record, rows, options.plot)
        print("\n".join(f"wrote {path}" for path in drawn) or f"no figure: {NO_FIGURE}")
    if wrong:
        print(f"WRONG RESULT: {wrong}", file=sys.stderr)
        return FAILED
    if left:
        print(f"{len(left)} cases left: run the same command again with the same --json file to go on")
    return INTERRUPTED if interrupted else INCOMPLETE if left else OK


def _backend(device: torch.device) -> str:
    """The backend that ``auto`` gives the default call: a run that fell back on the reference must say so."""
    import dsa_topk

    chosen = dsa_topk.explain(form="paged", device=device, dtype=torch.float32, k=2048)
    if device.type == "cuda" and chosen.backend != "cuda":
        print(f"note: our calls run on the {chosen.backend} backend\n{chosen}")
    return str(chosen.backend)


def _floor(device: torch.device) -> tuple[floor.Floor | None, str]:
    if device.type != "cuda":
        return None, "a CPU run"
    try:
        return floor.Floor(device), ""
    except (floor.NoFloor, OSError) as error:
        return None, str(error)


def _plot(record: Record, rows: list[Row], folder: Path) -> list[Path]:
    from . import figures

    return figures.draw(rows, folder, record.header)


def compare_files(old: Path, new: Path, tolerance: float) -> int:
    """Print what changed from one result file to another; 1 when something is slower beyond noise.

    Raises
    ------
    ValueError
        When a file cannot be read, or no case is in both.
    """
    from . import compare

    comparison = compare.compare(_read(old), _read(new), tolerance)
    if not comparison.changes:
        raise ValueError(f"compare: no case is in both {old} and {new}")
    print(compare.text(comparison))
    return FAILED if comparison.regressions else OK


def _read(path: Path) -> Record:
    from .record import load

    try:
        return load(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def write_docs(root: Path) -> int:
    """Write docs/benchmarks.md and its pictures below ``root``."""
    from . import docs

    for path in docs.write(root):
        print(f"wrote {path}")
    return OK


def parse(arguments: list[str]) -> Options:
    """Options from ``python -m dsa_topk.bench`` arguments: the same as the command's, without typer."""
    import argparse

    parser = argparse.ArgumentParser("python -m dsa_topk.bench", description=__doc__)
    parser.add_argument("--suite", default="smoke", help=f"comma list of {', '.join(cases.SUITES)}")
    parser.add_argument("--peers", default="auto", help="auto, none or a comma list")
    parser.add_argument("--only", default="", help="conditions: 'rows=1,16 width>=65536 dist=normal'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--no-floor", dest="floor", action="store_false")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--no-host-cost", dest="host_cost", action="store_false")
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    suites = [name for name in values.pop("suite").split(",") if name]
    return Options(suites=suites, command=["python", "-m", "dsa_topk.bench", *arguments], **values)
