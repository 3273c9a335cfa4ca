"""Hostile calls that must be refused, and what the error has to say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .legal import make
from .memory import INPUTS, INT32, INT64, OUTPUTS, Placed

Refusal = tuple[str, dict[str, Any], type[Exception], str]  # name, arguments to replace, error, what its text says


def refusable(form: str, device: str) -> Placed:
    """An ordinary call of 4 rows, 40 columns and k = 5 with all its tensors given, to spoil by one argument."""
    rows, width, k = 4, 40, 5
    count = torch.arange(rows, dtype=INT32)
    extra: dict[str, Any] = {"lengths": torch.full((rows,), 30, dtype=INT32), "row_starts": count}
    if form == "paged":
        extra |= {"row_to_batch": count, "page_table_starts": count}
    call = make(form, 0, rows=rows, width=width, k=k, **extra)
    return Placed(call, device)


def names_of(form: str) -> list[str]:
    """The tensor arguments of a form."""
    rest = {"positions": [], "ragged": ["out_offsets"], "paged": ["page_table", "row_to_batch", "page_table_starts"]}
    return ["scores", "lengths", "row_starts", *rest[form], "out", *(["out_positions"] if form != "positions" else [])]


# of a tensor with 4 rows (and 5 columns), by its number of dimensions
WRONG_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((), (0,), (3,), (5,), (4, 1), (1, 4)),
    2: ((), (4,), (3, 5), (5, 5), (4, 4), (4, 6), (4, 5, 1)),
}


def wrong_tensors(form: str, placed: Placed) -> Iterator[Refusal]:
    """Each tensor argument by something else: another device, type, shape, layout, sign."""
    for name in names_of(form):
        tensor: torch.Tensor = getattr(placed.call, name)
        integer = name in INPUTS
        flat = tensor.dim() == 1
        kinds = [torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]
        kinds += [] if integer else [INT64]
        for dtype in kinds:
            replaced = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            yield f"{name} as {dtype}", {name: replaced}, TypeError, name
        for value in (3, [1, 2, 3, 4], "tensor", object()):
            yield f"{name} as {type(value).__name__}", {name: value}, TypeError, name
        for shape in WRONG_SHAPES[tensor.dim()]:
            if name in ("scores", "page_table") and len(shape) == 2:
                continue  # any such shape is legal, or wrong for another argument's sake
            replaced = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
            yield f"{name} of shape {shape}", {name: replaced}, ValueError, f"{name}: expected shape"
        for elsewhere in {torch.device("meta"), torch.device("cpu")} - {tensor.device}:
            # Where the scores lie is where the others are expected: an error about scores names the first of these.
            text = f"{'lengths' if name == 'scores' else name}: expected a tensor on"
            yield f"{name} on {elsewhere}", {name: tensor.to(elsewhere)}, ValueError, text
        sparse = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device).to_sparse()
        yield f"sparse {name}", {name: sparse}, ValueError, f"{name}: expected a dense"
        if not flat:
            apart = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)[..., 0]
            yield f"{name} with gaps", {name: apart}, ValueError, f"{name}: expected a contiguous last dimension"
            turned = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype, device=tensor.device).t()
            yield f"{name} transposed", {name: turned}, ValueError, f"{name}: expected a contiguous last dimension"
        if name in OUTPUTS:
            for stride in (0, 1, 4):
                close = torch.zeros(40, dtype=INT32, device=tensor.device).as_strided((4, 5), (stride, 1))
                yield f"{name} with row stride {stride}", {name: close}, ValueError, f"{name}: expected rows apart"
        if name == "scores":
            yield "negative view", {name: torch._neg_view(tensor)}, ValueError, "scores: expected .*resolve_neg"
            conjugate = torch.zeros(tensor.shape, dtype=torch.complex64, device=tensor.device).conj()
            yield "conjugate view", {name: conjugate}, TypeError, "scores: expected dtype"


def wrong_values(form: str, placed: Placed) -> Iterator[Refusal]:
    """Numbers and names out of range or of another type; more rows or columns than can be counted."""
    for k in (0, -1, 8193, 2**31, 2**32 + 5, 2**63, -(2**63), 2**70):
        yield f"k = {k}", {"k": k}, ValueError, "k: expected 1 <= k <= 8192"
    for value in (True, 5.0, "5", None, torch.tensor(5)):
        yield f"k = {value!r}", {"k": value}, TypeError, "k: expected an int"
    if form == "paged":
        for size in (0, -1, 2**31, 2**32 + 8, 2**63, -(2**63)):
            yield f"page_size = {size}", {"page_size": size}, ValueError, "page_size: expected 1 <= page_size"
        for value in (True, 8.0, None, torch.tensor(8)):
            yield f"page_size = {value!r}", {"page_size": value}, TypeError, "page_size: expected an int"
        short = {"page_table": torch.zeros(3, 40, dtype=INT32, device=placed.call.scores.device), "row_to_batch": None}
        yield "a table of too few rows", short, ValueError, "page_table: expected at least R = 4 rows"
    for name in ("order", "tie_break", "backend"):
        yield f"{name} unknown", {name: "sideways"}, ValueError, name
    for name in ("return_scores", "validate"):
        yield f"{name} no bool", {name: 1}, TypeError, f"{name}: expected a bool"
    device = placed.call.scores.device
    rest = dict.fromkeys(name for name in names_of(form) if name not in ("scores", "out_offsets", "page_table"))
    for rows in (2**31, 2**33):
        many: dict[str, Any] = {"scores": torch.zeros(1, 8, device=device).expand(rows, 8), **rest}
        if form == "ragged":
            many["out_offsets"] = torch.zeros(1, dtype=INT32, device=device).expand(rows)
        elif form == "paged":
            many["page_table"] = torch.zeros(1, 8, dtype=INT32, device=device).expand(rows, 8)
        yield f"{rows} rows", many, ValueError, r"scores: expected fewer than 2\*\*31 rows"
    wide = torch.zeros(4, 1, device=device).expand(4, 2**31)
    yield "2**31 columns", {"scores": wide}, ValueError, r"scores: expected fewer than 2\*\*31 columns"


REFUSED: dict[str, Callable[[str, Placed], Iterator[Refusal]]] = {f.__name__: f for f in (wrong_tensors, wrong_values)}


def refuse(placed: Placed, refusal: Refusal, backend: str) -> str | None:
    """Make a call that must be refused; None when it was, with the right error and not one byte written."""
    name, changes, kind, text = refusal
    try:
        placed.run(**{"backend": backend, **changes})
    except kind as error:
        if not re.search(text, str(error)):
            return f"{name}: {type(error).__name__} without {text!r}: {error}"
    except Exception as error:
        return f"{name}: {type(error).__name__} instead of {kind.__name__}: {error}"
    else:
        return f"{name}: not refused"
    damage = placed.damage(ran=False)
    return f"{name}: {damage}" if damage else None
