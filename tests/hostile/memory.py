"""Memory of hostile calls: a call's tensors amid poison, so that every byte around them can be compared afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import dsa_topk
from dsa_topk._call import Call
from dsa_topk.testing import check_selection

INT32, INT64 = torch.int32, torch.int64
INPUTS = ("lengths", "row_starts", "out_offsets", "row_to_batch", "page_table_starts")
TENSORS = ("scores", "page_table", *INPUTS)
OUTPUTS = ("out", "out_positions")
POISON = {2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A5A5A5A5A}
UNWRITTEN = -0x3C3C3C3C  # what an output holds before the call: no slot of an answer
_INTEGER = {2: torch.int16, 4: INT32, 8: INT64}


class Guarded:
    """A copy of a tensor, strides kept, amid poison: ``pad`` elements before and behind it, and all its gaps.

    With ``pad`` = 0 the allocation ends where the tensor does, for a tool that watches the ends of allocations.
    """

    def __init__(self, tensor: torch.Tensor, device: str, pad: int) -> None:
        shape, stride, size = tensor.shape, tensor.stride(), tensor.element_size()
        span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if n > 1) if tensor.numel() else 0
        steps = [step if n > 1 else min(step, span) for n, step in zip(shape, stride, strict=True)]
        self._whole = torch.full((pad + span + pad,), POISON[size], dtype=_INTEGER[size], device=device)
        if span:
            inside = tensor.view(_INTEGER[size]).as_strided((span,), (1,), tensor.storage_offset())
            self._whole[pad : pad + span] = inside.to(device)
        self._place = (shape, steps, pad)
        # Strides that have no meaning (of a single row) stay as extreme as they were.
        self.tensor = self._whole.as_strided(shape, stride, pad).view(tensor.dtype)
        self._before = self._whole.clone()

    def unchanged(self) -> bool:
        """Whether not one bit of tensor and guards differs from what was placed."""
        return torch.equal(self._whole, self._before)

    def guards_intact(self) -> bool:
        """Whether all bits beside the tensor are as they were."""
        now, before = self._whole.clone(), self._before.clone()
        for copy in (now, before):
            copy.as_strided(*self._place).fill_(0)
        return torch.equal(now, before)


class Placed:
    """A call with every tensor guarded on ``device``."""

    def __init__(self, call: Call, device: str, pad: int = 33) -> None:
        self.frames = {
            name: Guarded(tensor, device, pad)
            for name in (*TENSORS, *OUTPUTS)
            if (tensor := getattr(call, name)) is not None
        }
        tensors: dict[str, Any] = {name: frame.tensor for name, frame in self.frames.items()}
        self.call = dataclasses.replace(call, **tensors)

    def run(self, backend: str, **changes: Any) -> Any:
        """Make the call through its public function, arguments replaced by ``changes``."""
        return call_public(self.call, backend, **changes)

    def damage(self, *, ran: bool) -> str | None:
        """What was written that should not have been, or None; before a call ``ran``, outputs are untouched too."""
        for name, frame in self.frames.items():
            if not (frame.guards_intact() if ran and name in OUTPUTS else frame.unchanged()):
                return f"{name}: memory was changed" + (" beside it" if name in OUTPUTS and ran else "")
        return None


def call_public(call: Call, backend: str, **changes: Any) -> Any:
    """Call the public function of the call's form with its arguments, some replaced by ``changes``."""
    names = ["order", "tie_break", "return_scores", "out", "row_starts"]
    if call.form == "ragged":
        names += ["out_offsets", "out_positions"]
    elif call.form == "paged":
        names += ["page_table", "page_size", "row_to_batch", "page_table_starts", "out_positions"]
    given = {name: getattr(call, name) for name in ("scores", "lengths", "k", *names)}
    return getattr(dsa_topk, f"topk_{call.form}")(**{**given, "backend": backend, **changes})


def judge(call: Call, out: torch.Tensor, positions: torch.Tensor | None, returned: torch.Tensor | None) -> str | None:
    """What is wrong with the results of a call, or None. ``call`` has the CPU tensors."""
    given = {name: getattr(call, name) for name in (*INPUTS[1:], "page_table", "page_size", "order", "tie_break")}
    verdict = check_selection(
        call.scores,
        call.lengths,
        call.k,
        out.cpu(),
        form=call.form,
        positions=None if positions is None else positions.cpu(),
        returned_scores=None if returned is None else returned.cpu(),
        **given,
    )
    return None if verdict.ok else verdict.reason


def attempt(call: Call, backend: str, device: str, pad: int = 33) -> str | None:
    """Make a legal call in guarded memory; what is wrong with its answer or with memory afterwards, or None."""
    placed = Placed(call, device, pad)
    result = placed.run(backend)
    out, returned = result if call.return_scores else (result, None)
    if call.out is not None and out is not placed.call.out:
        return "another tensor than out was returned"
    return judge(call, out, placed.call.out_positions, returned) or placed.damage(ran=True)
