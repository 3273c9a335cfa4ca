"""``dsa-topk bench``: time the kernels here, compare two runs, draw, and write the benchmark page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    suite: Annotated[
        str, typer.Option("--suite", help="One or more of decode, prefill, k, dist, mtp, packed, smoke, with commas.")
    ] = "smoke",
    peers: Annotated[
        str, typer.Option("--peers", help="auto: all that are found here; none; names or module:function, with commas.")
    ] = "auto",
    only: Annotated[
        str, typer.Option("--only", help="Conditions that cases must meet: 'rows=1,16 width>=65536 dist=normal'.")
    ] = "",
    json: Annotated[
        Path | None, typer.Option("--json", help="Result file, saved after every case; an unfinished one is taken up.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for figures (SVG and PNG).")] = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Start no case after this many seconds.")] = math.inf,
    reps: Annotated[int, typer.Option("--reps", help="Interleaved repetitions, at least 5.")] = 7,
    device: Annotated[str, typer.Option("--device", help="auto, cuda, cuda:1, ..., cpu.")] = "auto",
    floor: Annotated[bool, typer.Option("--floor/--no-floor", help="Also time a bare read of the same scores.")] = True,
    variants: Annotated[bool, typer.Option("--variants", help="Also time tie_break=largest and order=score.")] = False,
    host_cost: Annotated[
        bool, typer.Option("--host-cost/--no-host-cost", help="Also measure the host time of an eager call.")
    ] = True,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="OLD.json NEW.json: what changed; exit 1 on a regression beyond noise."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="With --compare: the least difference that counts.")
    ] = 0.03,
    docs: Annotated[
        bool, typer.Option("--docs", help="Write docs/benchmarks.md and its pictures from benchmarks/results.")
    ] = False,
) -> None:
    """Time top-k calls beside a read floor and other projects' kernels; every timed output is checked."""
    from dsa_topk.bench import app
    from dsa_topk.cli import CliError

    try:
        if compare is not None:
            code = app.compare_files(*compare, tolerance=tolerance)
        elif docs:
            code = app.write_docs(Path.cwd())
        else:
            code = app.run(
                app.Options(
                    suites=[name for name in suite.split(",") if name],
                    peers=peers,
                    only=only,
                    json=json,
                    plot=plot,
                    device=device,
                    reps=reps,
                    budget=budget,
                    floor=floor,
                    variants=variants,
                    host_cost=host_cost,
                )
            )
    except ValueError as error:
        raise CliError(str(error)) from None
    if code:
        raise typer.Exit(code)
