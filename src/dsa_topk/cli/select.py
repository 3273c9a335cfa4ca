"""``dsa-topk select``: the selection for a batch that lies in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from dsa_topk.io import Batch, Form

_CHUNK_BYTES = 64 << 20  # of scores per step: bounds the reference's temporaries and gives the progress bar its steps
_BAR_FROM_BYTES = 256 << 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("select")(select)


def select(
    batch: Annotated[
        Path, typer.Argument(help="A .safetensors or .npz file with the tensors of docs/contract.md, 'Batch files'.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write: .safetensors or .npz.")],
    k: Annotated[int, typer.Option("--k", help="How many to select per row, 1 to 8192.")] = 2048,
    form: Annotated[
        str, typer.Option("--form", help="positions, ragged, paged; auto: the fullest that the file has tensors for.")
    ] = "auto",
    order: Annotated[str, typer.Option("--order", help="position or score.")] = "position",
    tie_break: Annotated[str, typer.Option("--tie-break", help="smallest or largest.")] = "smallest",
    backend: Annotated[str, typer.Option("--backend", help="auto, cuda, flashinfer, sgl-kernel or torch.")] = "auto",
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one and cuda can serve.")
    ] = "auto",
    return_scores: Annotated[bool, typer.Option("--return-scores", help="Also write the selected scores.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Refuse lengths, starts and page tables that the contract would clamp.")
    ] = False,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Accept rows in which every score is NaN.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
) -> None:
    """Select for every row of a batch file and write the indices."""
    from dsa_topk._call import MAX_K
    from dsa_topk.cli import CliError
    from dsa_topk.io import read_batch, require_writable, write_tensors

    if not 1 <= k <= MAX_K:
        raise CliError(f"--k: expected 1 <= k <= {MAX_K}, got {k}")
    require_backend(backend)
    require_writable(output, force=force)
    source = read_batch(batch)
    if output.exists() and os.path.samefile(batch, output):
        raise CliError(f"{output}: is the input; it cannot be the output too")
    chosen = resolve_form(form, source)
    require_device(device, "auto")
    where = best_device(chosen, source, k, backend) if device == "auto" else device
    options = {
        "order": order,
        "tie_break": tie_break,
        "backend": backend,
        "return_scores": return_scores,
        "validate": validate,
    }
    try:
        if not allow_nan:
            refuse_all_nan(batch, source)
        results = select_batch(source, chosen, k, device=where, options=options)
    except (TypeError, ValueError, RuntimeError) as error:  # their texts name the argument or tensor and what came
        raise CliError(f"{batch}: {error}") from error
    note = {"form": chosen, "k": str(k), "order": order, "tie_break": tie_break, "backend": backend}
    write_tensors(output, results, force=force, metadata=note)
    rows = source.scores.shape[0]
    typer.echo(f"{output}: {rows} rows, k = {k}, form {chosen}, on {where}")


def require_backend(name: str) -> None:
    """Raise CliError unless the backend is known."""
    from dsa_topk.backends import NAMES
    from dsa_topk.cli import CliError

    if name not in ("auto", *NAMES):
        raise CliError(f"--backend: expected one of auto, {', '.join(NAMES)}, got {name!r}")


def require_device(name: str, *also: str) -> None:
    """Raise CliError unless torch can use the device."""
    import torch

    from dsa_topk.cli import CliError

    if name in also:
        return
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CliError(f"--device: expected {', '.join((*also, 'cpu', 'cuda'))} or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise CliError(f"--device: expected {', '.join((*also, 'cpu', 'cuda'))} or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CliError(f"--device: {name!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices")


def resolve_form(form: str, source: Batch) -> Form:
    """Return the form to use, or raise CliError."""
    from dsa_topk._call import FORMS
    from dsa_topk.cli import CliError

    if form == "auto":
        return source.form()
    for known in FORMS:
        if form == known:
            return known
    raise CliError(f"--form: expected one of auto, {', '.join(FORMS)}, got {form!r}")


def best_device(form: Form, source: Batch, k: int, backend: str) -> str:
    """Return ``cuda`` where there is a GPU whose kernels would serve the batch, else ``cpu``."""
    import torch

    from dsa_topk import explain

    if backend == "torch" or not torch.cuda.is_available():
        return "cpu"
    found = explain(form=form, device="cuda", dtype=source.scores.dtype, k=k, backend=backend)
    return "cpu" if found.backend in (None, "torch") else "cuda"


def refuse_all_nan(path: Path, source: Batch) -> None:
    """Raise CliError for a row whose whole window is NaN: legal for the library, a broken producer in a file."""
    import torch

    from dsa_topk.cli import CliError

    rows, width = source.scores.shape
    columns = torch.arange(width)
    starts = torch.zeros(rows, dtype=torch.int64) if source.row_starts is None else source.row_starts.long()
    lengths = torch.full((rows,), width) if source.lengths is None else source.lengths.long()
    if starts.shape != (rows,) or lengths.shape != (rows,):
        return  # the library's own check has the better words
    starts = starts.clamp(0, width)
    ends = starts + torch.minimum(lengths.clamp(min=0), width - starts)
    for part in chunks(source.scores):
        outside = (columns < starts[part, None]) | (columns >= ends[part, None])
        empty = ends[part] <= starts[part]
        bad = (source.scores[part].isnan() | outside).all(1) & ~empty
        if bad.any():
            row = part.start + int(bad.int().argmax())
            raise CliError(f"{path}: tensor 'scores': every score of row {row} is NaN (--allow-nan selects anyway)")


def chunks(scores: torch.Tensor) -> list[slice]:
    """Cut the rows into parts of about ``_CHUNK_BYTES``."""
    rows = scores.shape[0]
    step = max(1, _CHUNK_BYTES // max(1, scores.shape[1] * scores.element_size()))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def select_batch(source: Batch, form: Form, k: int, *, device: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Call the form's public function for chunks of rows, behind a progress bar when the input is large.

    Rows do not depend on each other, so chunks change nothing in the result.

    Returns
    -------
    dict of str to torch.Tensor
        ``indices`` ``[R, k]`` int32, ``positions`` ``[R, k]`` int32 unless the form is positions, and ``scores``
        ``[R, k]`` when asked for.
    """
    import torch

    import dsa_topk

    rows = source.scores.shape[0]
    results = {"indices": torch.empty(rows, k, dtype=torch.int32)}
    if form != "positions":
        results["positions"] = torch.empty(rows, k, dtype=torch.int32)
    if options["return_scores"]:
        results["scores"] = torch.empty(rows, k, dtype=source.scores.dtype)
    kwargs = source.kwargs(form)
    if form == "paged" and kwargs["row_to_batch"] is None and kwargs["page_table"].shape[0] >= rows:
        kwargs["row_to_batch"] = torch.arange(rows, dtype=torch.int32)  # a chunk's first row is not table row 0
    if form == "paged":
        kwargs["page_table"] = kwargs["page_table"].to(device)
    by_row = [name for name in ("row_starts", "out_offsets", "row_to_batch", "page_table_starts") if name in kwargs]
    function: Any = getattr(dsa_topk, f"topk_{form}")
    with progress_bar(source.scores) as advance:
        for part in parts(source, whole=options["validate"]):
            arguments = kwargs | options
            for name in by_row:
                arguments[name] = share(arguments[name], part, device)
            scores, lengths = source.scores[part].to(device), share(source.lengths, part, device)
            if form != "positions":
                arguments["out_positions"] = torch.empty(scores.shape[0], k, dtype=torch.int32, device=device)
            found = function(scores, lengths, k, **arguments)
            if options["return_scores"]:
                found, selected = found
                results["scores"][part] = selected.cpu()
            results["indices"][part] = found.cpu()
            if form != "positions":
                results["positions"][part] = arguments["out_positions"].cpu()
            advance(scores.shape[0])
    return results


def share(tensor: torch.Tensor | None, part: slice, device: str) -> torch.Tensor | None:
    """Return the chunk's part of a per-row tensor, on the device."""
    return None if tensor is None else tensor[part].to(device)


def parts(source: Batch, *, whole: bool) -> list[slice]:
    """Return the chunks to work in.

    One chunk of everything where the library must see it whole: for its checks of values (they name a row), for
    tensors that do not fit together (slicing a longer one would hide that it does not fit), and for an empty batch.
    """
    rows = source.scores.shape[0]
    per_row = (source.lengths, source.row_starts, source.out_offsets, source.row_to_batch, source.page_table_starts)
    fit = all(tensor is None or tensor.shape == (rows,) for tensor in per_row)
    return chunks(source.scores) if rows and fit and not whole else [slice(None)]


@contextmanager
def progress_bar(scores: torch.Tensor) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the number of rows done; a bar is drawn for large input only."""
    from rich.console import Console
    from rich.progress import Progress

    large = scores.numel() * scores.element_size() >= _BAR_FROM_BYTES
    with Progress(console=Console(stderr=True), transient=True, disable=not large) as progress:
        task = progress.add_task("select", total=scores.shape[0])
        yield lambda rows: progress.advance(task, rows)
