"""``dsa-topk demo``: the main job on real input, told step by step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsa_topk.demo.batch import EngineBatch
    from dsa_topk.demo.run import Result


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            help="UTF-8 text file; may be repeated. Default: Jane Austen's Persuasion, which ships with the package.",
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", help="How many tokens to select per row, comma-separated.")] = "64,256,512",
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder for batch, indices and pictures; replaces only an earlier demo's files."),
    ] = Path("demo-out"),
    force: Annotated[
        bool, typer.Option("--force", help="Also replace files of these names that the demo has not made.")
    ] = False,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Use the small recorded scores; needs no model package.")
    ] = False,
    backend: Annotated[str, typer.Option("--backend", help="auto, cuda, flashinfer, sgl-kernel or torch.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="Where to select: cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Select on a trained model's attention over real text, check the results, show what they are worth."""
    from rich.console import Console

    from dsa_topk.cli import CliError
    from dsa_topk.cli.select import require_backend, require_device
    from dsa_topk.demo.run import CheckFailed, require_folder, run, write

    begun = time.perf_counter()
    console = Console()
    ks = parse_ks(k)
    require_backend(backend)
    require_device(device)
    if recorded and text:
        raise CliError("--recorded uses its own scores; it cannot be combined with --text")
    if out.exists() and not out.is_dir():
        raise CliError(f"{out}: cannot be the output folder: it is a file")
    require_folder(out, force=force)
    require_served(backend, device, ks)
    batch, title = recorded_source() if recorded else model_source(text or [], console)
    describe(batch, title, console)
    try:
        with console.status("") as status:
            result = run(batch, ks, backend=backend, device=device, progress=status.update)
    except CheckFailed as error:
        raise CliError(f"the checker refused a result: {error}", code=1) from error
    except (TypeError, ValueError, RuntimeError) as error:  # a backend that refuses says why
        raise CliError(str(error)) from error
    report(result, console)
    for path in write(result, out, title=title, force=force):
        say(console, "wrote", str(path))
    say(console, "time", f"{time.perf_counter() - begun:.1f} s")


def require_served(backend: str, device: str, ks: list[int]) -> None:
    """Raise CliError when the backend will refuse the demo's calls: said before the model runs, not after."""
    from dsa_topk import explain
    from dsa_topk.cli import CliError
    from dsa_topk.demo.run import LAYOUTS

    for form in dict.fromkeys(form for _, form, _ in LAYOUTS):
        for k in ks:
            found = explain(form=form, device=device, k=k, backend=backend)
            if found.backend is None:
                raise CliError(f"--backend {backend}: {found.reasons.get(backend, found.call)}")


def parse_ks(text: str) -> list[int]:
    """Read ``64,256,512``, or raise CliError."""
    from dsa_topk._call import MAX_K
    from dsa_topk.cli import CliError

    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1 or ks[-1] > MAX_K:
        raise CliError(f"--k: expected numbers from 1 to {MAX_K}, comma-separated, got {text!r}")
    return ks


def recorded_source() -> tuple[EngineBatch, str]:
    """Return the recorded requests and their title."""
    from dsa_topk.demo.record import recorded_batch

    return recorded_batch(), "recorded scores (all-MiniLM-L6-v2 over Persuasion)"


def model_source(paths: list[Path], console: Console) -> tuple[EngineBatch, str]:
    """Run the model over the texts; return the packed requests and their title."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dsa_topk.demo.batch import pack, requests_from_texts
    from dsa_topk.demo.model import Model
    from dsa_topk.demo.text import load_texts

    texts = load_texts(paths)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"))
    with console.status("loading all-MiniLM-L6-v2"):
        model = Model()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("model", total=None)
        requests = requests_from_texts(
            texts, model, lambda done, total: progress.update(task, completed=done, total=total)
        )
    return pack(requests), ", ".join(text.name for text in texts)


def say(console: Console, topic: str, text: str) -> None:
    """Print one line. The text is data (file names hold any character), so it is no markup."""
    from rich.text import Text

    console.print(Text.assemble((f"{topic:<9}", "bold"), text), soft_wrap=True)


def describe(batch: EngineBatch, title: str, console: Console) -> None:
    """Say what the batch is made of."""
    rows, width = batch.extend.scores.shape
    steps, widest = batch.decode.scores.shape
    sizes = ", ".join(f"{request.tokens} ({request.new})" for request in batch.requests)
    say(console, "text", title)
    say(console, "requests", f"{len(batch.requests)}; tokens (of which new): {sizes}")
    say(console, "scores", f"extend {rows} x {width}, decode {steps} x {widest}; page size {batch.extend.page_size}")


def report(result: Result, console: Console) -> None:
    """Print what was found, and the table."""
    rows = result.batch.extend.scores.shape[0]
    ties = ", ".join(f"{item.ties} at k = {item.k}" for item in result.selections)
    say(
        console,
        "checked",
        f"{result.checked} rows (ragged, packed paged and decode, at each k): all as the contract says",
    )
    say(console, "zeros", f"{result.zeros:.1%} of the scores in the rows' windows are exact zeros")
    say(console, "ties", f"of {rows} extend rows the last place went to one of several equal scores in: {ties}")
    console.print(worth_table(result))
    console.print(
        "mass: share of the dense softmax on the chosen tokens. error: |o - o_dense| / |o_dense| of the attention "
        "output. Means over the rows with more than k candidates. 'top mass' is chosen with knowledge of the dense "
        "attention, 'latest' is a sliding window. No indexer was trained here: the head weights are the best of "
        "1000 random draws, and the model is an encoder that read the text in windows of 254 tokens, trained for dense "
        "attention: its mass is spread wide. So the mass is what to look at. The error can exceed 1, and be least for "
        "'latest': the dense output averages many tokens and is short; an average of few is longer, most so of those "
        "with much mass, whose values are alike.",
        highlight=False,
    )


def worth_table(result: Result) -> Table:
    """Return the table of what the selection is worth, one line per k."""
    from rich.table import Table

    names = {"indexer": "indexer", "best": "top mass", "latest": "latest"}
    table = Table(title="attention on the selected tokens against dense attention", title_justify="left")
    for header in ("k", "rows", *(f"{label}\n{field}" for field in ("mass", "error") for label in names.values())):
        table.add_column(header, justify="right")
    for item in result.selections:
        compared = item.comparison
        if compared.rows == 0:
            table.add_row(str(item.k), "0", *["-"] * 6)
            continue
        worths = [getattr(compared, name) for name in names]
        masses, errors = [f"{worth.mass:.1%}" for worth in worths], [f"{worth.error:.3f}" for worth in worths]
        table.add_row(str(item.k), str(compared.rows), *masses, *errors)
    return table
