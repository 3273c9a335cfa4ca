"""``dsa-topk check``: try every known fault on any backend, and show what came out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

    from dsa_topk.conformance.report import Report

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("check")(check)


def fail(text: str) -> typer.Exit:
    """One line for the user, and exit code 2."""
    errors.print(f"dsa-topk: {text}", markup=False)
    return typer.Exit(2)


def chosen_device(name: str | None) -> torch.device:
    """The device asked for, or the best there is."""
    import torch

    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise fail(f"--device: expected cpu or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise fail(f"--device: expected cpu or cuda:N, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise fail(f"--device {name}: this machine has {count} CUDA devices")
    # Without an index it is the current device, said once here for everybody behind.
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def check(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="torch, cuda, flashinfer, sgl-kernel, torch.topk, an adapter, or module:function. May be repeated. "
            "Default: cuda where there is a GPU, else torch.",
        ),
    ] = None,
    suite: Annotated[str, typer.Option(help="quick, full, or fault:ID (several with commas).")] = "quick",
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N. Default: a GPU if there is one.")] = None,
    mode: Annotated[str | None, typer.Option(help="canonical or set. Default: what the backend promises.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all results to this file; replaces only an earlier one.")
    ] = None,
    save: Annotated[Path, typer.Option(help="Folder for replay files of failures.")] = Path("dsa-topk-failures"),
    timeout: Annotated[float, typer.Option(help="Seconds that one problem may take before it counts as a hang.")] = 180,
    replay: Annotated[Path | None, typer.Option(help="Run this replay file instead of a suite.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and the backends, then stop.")] = False,
) -> None:
    """Check backends against the contract on every known fault. Exit code 1: failures, 2: could not run."""
    import torch

    from dsa_topk.conformance import adapters, report
    from dsa_topk.conformance import suite as suites
    from dsa_topk.conformance.isolate import WorkerError

    if list_cases:
        _list()
        return
    if mode not in (None, "canonical", "set"):
        raise fail(f"--mode: expected canonical or set, got {mode!r}")
    where = chosen_device(device)
    try:
        selected = suites.select(suite)
        wanted = [adapters.get(name) for name in backend or ["cuda" if where.type == "cuda" else "torch"]]
        if json is not None:
            report.require_replaceable(json)
    except ValueError as problem:
        raise fail(str(problem)) from None
    if replay is not None:
        raise typer.Exit(_replay(replay, wanted, where, mode, timeout))

    reports = []
    for adapter in wanted:
        found = report.Report(adapter.name, mode or adapter.mode)
        found.note = adapter.unavailable() or ""
        if not found.note and adapter.device_type not in (None, where.type):
            found.note = f"runs on {adapter.device_type} devices, the suite was asked to run on {where}"
        reports.append(found)
        if found.note:
            errors.print(f"dsa-topk: {adapter.name}: {found.note}", markup=False)
            continue
        config: dict[str, Any] = {
            "backend": adapter.name,
            "suite": suite,
            "device": str(where),
            "judge": mode,
            "save": str(save),
        }
        try:
            _run(config, found, len(suites.specs(suite, where)), timeout)
        except WorkerError as problem:
            raise fail(f"{adapter.name}: the worker could not start: {problem}") from None
        _show(found, {case.id: case.guards for case in selected})

    if json is not None:
        content = {
            "kind": "dsa-topk check",
            "suite": suite,
            **report.environment(torch.device(where)),
            "reports": [found.to_dict() for found in reports],
        }
        try:
            report.write_json(json, content)
        except OSError as problem:
            raise fail(f"--json {json}: {problem.strerror}") from None
    if any(found.failed for found in reports):
        raise typer.Exit(1)
    if any(found.note for found in reports):
        raise typer.Exit(2)


def _list() -> None:
    from dsa_topk.conformance import adapters
    from dsa_topk.conformance.cases import CASES

    for case in CASES.values():
        console.print(f"{case.id:18} {case.guards}{'' if case.quick else '  (full only)'}", markup=False)
    console.print("backends: " + ", ".join(adapters.names()) + ", module:function", markup=False)


def _run(config: dict[str, Any], found: Report, total: int, timeout: float) -> None:
    """All problems of one backend, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsa_topk.conformance.isolate import run_suite
    from dsa_topk.conformance.report import Record
    from dsa_topk.conformance.runner import Outcome

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(found.backend, total=total)
        begun: dict[str, Any] = {}
        for message in run_suite(config, timeout):
            if message["event"] == "begin":
                begun = message
                progress.update(task, description=f"{found.backend} {begun['case']}")
            else:
                outcome = Outcome(**message["outcome"])
                record = Record(begun["case"], begun["name"], begun["length"], outcome, message.get("file"))
                found.records.append(record)
                progress.advance(task)


def _show(found: Report, guards: dict[str, str]) -> None:
    """Table of case x length, then the failures in words."""
    from rich.table import Table

    from dsa_topk.conformance.report import BAND_NAMES

    cells = found.cells()
    used = [index for index in range(len(BAND_NAMES)) if any(row[index] for row in cells.values())]
    table = Table(title=f"{found.backend}, {found.mode} mode")
    # The results come first: their columns never shrink, and what each case guards against is shown where it fits.
    table.add_column("case", no_wrap=True, min_width=max(map(len, cells), default=4))
    for index in used:
        table.add_column(BAND_NAMES[index], no_wrap=True, min_width=max(len(row[index]) for row in cells.values()))
    wide = not console.is_terminal or console.width >= 120
    if wide:
        table.add_column("guards against", no_wrap=True)
    for case, row in cells.items():
        table.add_row(case, *(row[index] for index in used), *([guards[case]] if wide else []))
    # Into a file or a pipe there is no edge to wrap at.
    Console(highlight=False, width=None if console.is_terminal else 200).print(table)
    shown = [record for record in found.records if not record.outcome.good]
    for record in shown[:20]:
        where = f" (replay: {record.file})" if record.file else ""
        text = f"{record.case} {record.name}: {record.outcome.status}: {record.outcome.reason}{where}"
        console.print(text, markup=False)
    if len(shown) > 20:
        console.print(f"... and {len(shown) - 20} more failures (--json has all)")
    counts = ", ".join(f"{number} {status}" for status, number in found.counts().items())
    console.print(f"{found.backend}: {len(found.records)} problems, {found.rows} rows: {counts}", markup=False)


def _replay(file: Path, wanted: list[Any], device: torch.device, mode: str | None, timeout: float) -> int:
    from dsa_topk.conformance.isolate import WorkerError, replay
    from dsa_topk.conformance.problem import Problem

    try:
        facts = Problem.load(file).describe()
    except OSError as problem:
        raise fail(f"--replay {file}: {problem.strerror}") from None
    except ValueError as problem:
        raise fail(str(problem)) from None
    size = f"{facts['rows']} x {facts['width']} {facts['dtype']}, k = {facts['k']}, {facts['form']}"
    console.print(f"{facts['name']}: {size}", markup=False)
    worst = 0
    for adapter in wanted:
        note = adapter.unavailable()
        if note:
            errors.print(f"dsa-topk: {adapter.name}: {note}", markup=False)
            worst = max(worst, 2)
            continue
        config = {"backend": adapter.name, "device": str(device), "judge": mode}
        try:
            outcome = replay(config, file, timeout)
        except WorkerError as problem:
            raise fail(f"{adapter.name}: {problem}") from None
        console.print(f"{adapter.name}: {outcome.status}{': ' if outcome.reason else ''}{outcome.reason}", markup=False)
        worst = max(worst, 0 if outcome.good else 1)
    return worst
