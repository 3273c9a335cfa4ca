"""``dsa-topk fuzz``: random calls from a seed against the checker, for as long as asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .check import chosen_device, console, errors, fail


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("fuzz")(fuzz)


def fuzz(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed and device type: same calls in the same order.")] = 0,
    backend: Annotated[
        str | None, typer.Option(help="As for check. Default: cuda where there is a GPU, else torch.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N. Default: a GPU if there is one.")] = None,
    mode: Annotated[str | None, typer.Option(help="canonical or set. Default: what the backend promises.")] = None,
    max_elements: Annotated[
        int | None, typer.Option(min=1, help="Scores per call at most. Default: 2^24 on a GPU, 2^17 on a CPU.")
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="Stop after so many calls.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the result to this file; replaces only an earlier one.")
    ] = None,
    save: Annotated[Path, typer.Option(help="Folder for replay files of failures.")] = Path("dsa-topk-failures"),
    timeout: Annotated[float, typer.Option(help="Seconds without an answer that count as a hang.")] = 120,
) -> None:
    """Fuzz a backend with random calls. Exit code 1: failures (stored as replay files), 2: could not run."""
    from dsa_topk.conformance import adapters, report
    from dsa_topk.conformance.isolate import WorkerError

    if mode not in (None, "canonical", "set"):
        raise fail(f"--mode: expected canonical or set, got {mode!r}")
    where = chosen_device(device)
    try:
        adapter = adapters.get(backend or ("cuda" if where.type == "cuda" else "torch"))
        if json is not None:
            report.require_replaceable(json)
    except ValueError as problem:
        raise fail(str(problem)) from None
    note = adapter.unavailable()
    if note is None and adapter.device_type not in (None, where.type):
        note = f"runs on {adapter.device_type} devices, not on {where}"
    if note:
        raise fail(f"{adapter.name}: {note}")

    limits = {"max_elements": max_elements or (1 << 24 if where.type == "cuda" else 1 << 17)}
    config: dict[str, Any] = {
        "backend": adapter.name,
        "device": str(where),
        "judge": mode,
        "seed": seed,
        "limits": limits,
        "save": str(save),
        "until": time.time() + 60 * minutes,
    }
    if calls is not None:
        config["limit"] = calls
    started = time.monotonic()
    try:
        counts, rows, failures = _run(config, minutes, timeout)
    except WorkerError as problem:
        raise fail(f"{adapter.name}: the worker could not start: {problem}") from None
    seconds = time.monotonic() - started

    for failure in failures[:20]:
        outcome = failure["outcome"]
        where_to = f" (replay: {failure['file']})" if failure["file"] else ""
        console.print(f"call {failure['index']}: {outcome['status']}: {outcome['reason']}{where_to}", markup=False)
    total = sum(counts.values())
    parts = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    console.print(f"{adapter.name}, seed {seed}: {total} calls, {rows} rows in {seconds:.0f} s: {parts}", markup=False)
    if json is not None:
        content = {
            "kind": "dsa-topk fuzz",
            **report.environment(where),
            "backend": adapter.name,
            "mode": mode or adapter.mode,
            "seed": seed,
            "limits": limits,
            "seconds": round(seconds, 1),
            "calls": total,
            "rows": rows,
            "counts": counts,
            "failures": failures,
        }
        try:
            report.write_json(json, content)
        except OSError as problem:
            raise fail(f"--json {json}: {problem.strerror}") from None
    if not report.all_good(counts):
        raise typer.Exit(1)


def _run(config: dict[str, Any], minutes: float, timeout: float) -> tuple[dict[str, int], int, list[dict[str, Any]]]:
    """Calls by status, rows checked, failures."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dsa_topk.conformance.isolate import run_random

    counts: dict[str, int] = {}
    rows = 0
    failures: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    started = time.monotonic()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(config["backend"], total=60 * minutes)
        for message in run_random(config, timeout):
            if message["event"] == "tick":
                for status, number in message["counts"].items():
                    counts[status] = counts.get(status, 0) + number
                rows += message["rows"]
            else:
                failures.append({key: message[key] for key in ("index", "outcome", "file", "problem")})
            text = f"{config['backend']}: {sum(counts.values())} calls, {rows} rows, {len(failures)} failures"
            progress.update(task, completed=time.monotonic() - started, description=text)
    return counts, rows, failures
