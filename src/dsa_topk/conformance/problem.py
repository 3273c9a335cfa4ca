"""One call to be tried on a backend, with everything needed to run it again: from memory or from a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsa_topk._files import staged
from dsa_topk.testing import CallShape

_FORMAT = 1
_TENSORS = ("lengths", "row_starts", "out_offsets", "page_table", "row_to_batch", "page_table_starts")
_FLAGS = ("name", "order", "tie_break", "return_scores", "return_positions", "poison", "graph", "repeats", "length")
# A replay file keeps strides and alignment as they were, unless the memory between the rows would make it larger.
_MAX_LAYOUT_BYTES = 1 << 28


@dataclass(slots=True)
class Problem:
    """A call: scores, shape and flags.

    Attributes
    ----------
    name : str
        What it is, in a few words.
    shape : CallShape
        Every argument but the scores and the flags.
    scores : Tensor [R, N]
    order, tie_break, return_scores : as in the public functions
    return_positions : bool
        Ask for ``out_positions`` too (ragged and paged).
    poison : bool
        Run again with ``+inf``, NaN and 3e38 outside the windows; nothing may change.
    graph : bool
        On CUDA, also capture the call and replay it with changed inputs.
    repeats : int
        How often to call in all; a canonical backend must give the same bits each time.
    length : int
        Longest window: the column of the report.
    """

    name: str
    shape: CallShape
    scores: torch.Tensor
    order: str = "position"
    tie_break: str = "smallest"
    return_scores: bool = False
    return_positions: bool = False
    poison: bool = False
    graph: bool = False
    repeats: int = 1
    length: int = 0

    # What adapters read most, without the way through the shape.

    @property
    def form(self) -> str:
        """positions, ragged or paged."""
        return self.shape.form

    @property
    def k(self) -> int:
        """How many to select."""
        return self.shape.k

    @property
    def lengths(self) -> torch.Tensor | None:
        """[R] or None."""
        return self.shape.lengths

    @property
    def row_starts(self) -> torch.Tensor | None:
        """[R] or None."""
        return self.shape.row_starts

    def tensors(self) -> dict[str, torch.Tensor]:
        """All input tensors by name."""
        found = {"scores": self.scores}
        for name in _TENSORS:
            tensor = getattr(self.shape, name)
            if tensor is not None:
                found[name] = tensor
        return found

    def windows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First column and number of candidates of each row (int64 [R])."""
        from dsa_topk.testing.window import windows

        shape = self.shape
        window = windows(
            shape.rows,
            shape.width,
            shape.k,
            self.scores.device,
            form=shape.form,
            lengths=shape.lengths,
            **shape.kwargs(),
        )
        return window.start, window.count

    def take(self, rows: torch.Tensor) -> Problem:
        """The same call on some rows only (int64 indices)."""
        changes: dict[str, Any] = {"rows": rows.numel()}
        for name in _TENSORS:
            tensor = getattr(self.shape, name)
            if tensor is not None and name != "page_table":
                changes[name] = tensor[rows]
        if self.form == "paged" and self.shape.row_to_batch is None:
            changes["row_to_batch"] = rows.to(torch.int32)
        return replace(self, shape=replace(self.shape, **changes), scores=self.scores[rows])

    def describe(self) -> dict[str, Any]:
        """Facts for a report, without the data."""
        scores = self.scores
        return {
            "name": self.name,
            "form": self.form,
            "rows": self.shape.rows,
            "width": self.shape.width,
            "k": self.k,
            "dtype": str(scores.dtype).removeprefix("torch."),
            "stride": list(scores.stride()),
            "storage_offset": scores.storage_offset(),
            "page_size": self.shape.page_size,
            "flags": {flag: getattr(self, flag) for flag in _FLAGS if flag != "name"},
        }

    def save(self, path: Path) -> None:
        """Write a replay file: whole or not at all."""
        content = {
            "format": _FORMAT,
            "flags": {flag: getattr(self, flag) for flag in _FLAGS},
            "shape": {key: value for key, value in _plain(self.shape).items() if key not in _TENSORS},
            "tensors": {name: _pack(tensor) for name, tensor in self.tensors().items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path) as temporary:
            torch.save(content, temporary)

    @staticmethod
    def load(path: Path, device: torch.device | str = "cpu") -> Problem:
        """Read a replay file.

        Raises
        ------
        ValueError
            When the file is not a replay file.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}, this version reads {_FORMAT}")
            tensors = {name: _unpack(packed, device) for name, packed in content["tensors"].items()}
            scores = tensors.pop("scores")
            fields: dict[str, Any] = {**content["shape"], **tensors}
            return Problem(shape=CallShape(**fields), scores=scores, **content["flags"])
        except OSError:
            raise
        except Exception as error:  # whatever a damaged pickle or a wrong field raises
            first = str(error).partition("\n")[0].partition(". ")[0]
            raise ValueError(f"{path}: not a replay file of dsa-topk ({first})") from error


def _plain(shape: CallShape) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(_TENSORS)
    return asdict(replace(shape, **nothing))


def _pack(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor with its strides and its place within 64 bytes of alignment, as one flat CPU tensor."""
    size, stride, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
    span = 1 + sum((n - 1) * abs(step) for n, step in zip(size, stride, strict=True)) if tensor.numel() else 0
    lead = offset % (64 // tensor.element_size())
    if (span + lead) * tensor.element_size() > _MAX_LAYOUT_BYTES or span == 0:
        flat = tensor.contiguous().cpu()
        return {"flat": flat.reshape(-1).clone(), "size": size, "stride": list(flat.stride()), "offset": 0}
    flat = torch.as_strided(tensor, (span + lead,), (1,), offset - lead).cpu().clone()
    return {"flat": flat, "size": size, "stride": stride, "offset": lead}


def _unpack(packed: dict[str, Any], device: torch.device | str) -> torch.Tensor:
    flat = packed["flat"].to(device)
    return torch.as_strided(flat, packed["size"], packed["stride"], packed["offset"])
