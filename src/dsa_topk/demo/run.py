"""One demo from requests to files: select in every layout, check every result, weigh it, write it down."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsa_topk.demo.batch import EngineBatch
from dsa_topk.demo.worth import Comparison, compare, decided_by_ties, zero_share
from dsa_topk.io import Batch, Form, InputError, write_tensors

KS = (64, 256, 512)

#: Every layout that is run: its name in the results, the form, and whether it is the decode step.
LAYOUTS: tuple[tuple[str, Form, bool], ...] = (
    ("ragged", "ragged", False),
    ("paged", "paged", False),
    ("decode", "paged", True),
)

FILES = ("batch.safetensors", "decode.safetensors", "indices.safetensors", "coverage.png", "selection.png")

_HEADER_BYTES = 1 << 16  # where both formats keep their notes


class CheckFailed(RuntimeError):
    """The checker found a result that breaks the contract."""


@dataclass(frozen=True)
class Selection:
    """What was selected at one k.

    Attributes
    ----------
    k : int
        Tokens per row.
    indices : mapping of str to torch.Tensor
        ``[rows, k]`` int32 for each layout name.
    positions : torch.Tensor
        ``[rows, k]`` int32: the extend rows' selected positions in their own request.
    ties : int
        Extend rows whose last place was decided among equal scores.
    comparison : Comparison
        What the extend rows' selection is worth.
    """

    k: int
    indices: Mapping[str, torch.Tensor]
    positions: torch.Tensor
    ties: int
    comparison: Comparison


@dataclass(frozen=True)
class Result:
    """All of a demo's results; ``checked`` counts the rows that the checker has seen, over all layouts and k."""

    batch: EngineBatch
    zeros: float
    checked: int
    selections: Sequence[Selection]


def run(
    batch: EngineBatch,
    ks: Sequence[int] = KS,
    *,
    backend: str = "auto",
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Select, check and weigh.

    Parameters
    ----------
    batch : EngineBatch
        The requests and their two packed steps.
    ks : sequence of int
        How many tokens to select.
    backend, device : str
        What selects, and where; everything else runs on the CPU.
    progress : callable, optional
        Told what is done next.

    Raises
    ------
    CheckFailed
        If a result breaks the contract.
    """
    extend = batch.extend
    assert extend.lengths is not None
    zeros = zero_share(extend.scores, extend.row_starts, extend.lengths)
    selections, checked = [], 0
    for k in ks:
        if progress is not None:
            progress(f"k = {k}: select and check, then dense attention for comparison")
        indices: dict[str, torch.Tensor] = {}
        positions = torch.empty(0)
        for name, form, decode in LAYOUTS:
            source = batch.decode if decode else extend
            indices[name], chosen = select_checked(source, form, k, name, backend=backend, device=device)
            checked += source.scores.shape[0]
            if not decode:
                if name == "paged" and not torch.equal(chosen, positions):
                    raise CheckFailed(f"k = {k}: the ragged and the paged form selected different positions")
                positions = chosen
        ties = int(decided_by_ties(extend.scores, extend.row_starts, extend.lengths, k).sum())
        selections.append(Selection(k, indices, positions, ties, compare(batch.requests, positions, k)))
    return Result(batch, zeros, checked, selections)


def select_checked(
    source: Batch, form: Form, k: int, name: str, *, backend: str, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select by one public function and have the checker look at the indices and at the positions.

    Returns
    -------
    indices, positions : torch.Tensor
        ``[rows, k]`` int32 each, on the CPU.
    """
    import dsa_topk
    from dsa_topk.testing import check_selection

    kwargs = source.kwargs(form)
    arguments: dict[str, Any] = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()
    }
    scores = source.scores.to(device)
    lengths = None if source.lengths is None else source.lengths.to(device)
    positions = torch.empty(scores.shape[0], k, dtype=torch.int32, device=device)
    if form == "ragged":
        indices = dsa_topk.topk_ragged(scores, lengths, k, out_positions=positions, backend=backend, **arguments)
    else:
        indices = dsa_topk.topk_paged(scores, lengths, k, out_positions=positions, backend=backend, **arguments)
    verdict = check_selection(scores, lengths, k, indices, form=form, positions=positions, **arguments)
    if not verdict:
        raise CheckFailed(f"{name}, k = {k}: row {verdict.row}, slot {verdict.slot}: {verdict.reason}")
    return indices.cpu(), positions.cpu()


def require_folder(folder: Path, *, force: bool = False) -> None:
    """Refuse a folder that cannot take the files: asked before long work, and again when they are written.

    Raises
    ------
    InputError
        If nothing can be written there, or one of the names is taken by a file that the demo has not made and
        ``force`` is not given.
    """
    there = folder
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise InputError(f"{folder}: cannot be the output folder: {there} is a file")
        os.rmdir(tempfile.mkdtemp(prefix=".writing-", dir=there))
        for name in FILES:
            if not force and os.path.lexists(folder / name) and not made_here(folder / name):
                raise InputError(f"{folder / name}: exists and is not from an earlier demo (--force replaces it)")
    except OSError as error:
        raise InputError(f"{folder}: cannot be the output folder: {error.strerror or error}") from error


def made_here(path: Path) -> bool:
    """Whether the file says in its header that the demo wrote it."""
    from dsa_topk.demo.pictures import MADE_BY

    if not path.is_file():
        return False
    mark = f"Software\0{MADE_BY}" if path.suffix == ".png" else f'"made_by":"{MADE_BY}"'
    with path.open("rb") as file:
        return mark.encode() in file.read(_HEADER_BYTES)


def write(result: Result, folder: Path, *, title: str, force: bool = False) -> list[Path]:
    """Write both batches, all indices and both pictures, replacing those of an earlier run: all five, or none.

    ``force`` also replaces files of these names that the demo has not made.

    Returns
    -------
    list of Path
        The five files.

    Raises
    ------
    InputError
        If the folder or a file in it cannot be written, or holds somebody else's file of one of the names.
    """
    from dsa_topk.demo import pictures

    require_folder(folder, force=force)
    note = {"made_by": pictures.MADE_BY, "source": title}
    indices = {f"{name}_k{item.k}": tensor for item in result.selections for name, tensor in item.indices.items()}
    with staged(folder) as stage:
        write_tensors(stage / "batch.safetensors", result.batch.extend.tensors(), metadata=note)
        write_tensors(stage / "decode.safetensors", result.batch.decode.tensors(), metadata=note)
        write_tensors(stage / "indices.safetensors", indices, metadata=note)
        pictures.coverage(result, stage / "coverage.png", title)
        pictures.selection(result, stage / "selection.png", title)
    return [folder / name for name in FILES]


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside ``folder``; move its files there when the block ends, remove it when it fails."""
    stage: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        yield stage
        for file in stage.iterdir():
            file.replace(folder / file.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be the output folder: {error.strerror or error}") from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        with suppress(OSError):  # a folder that holds nothing was made here for nothing
            folder.rmdir()
