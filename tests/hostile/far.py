"""Calls with a tensor that reaches beyond 2**31 elements from its start."""

from __future__ import annotations

import torch

from gpu_helpers import bits

from .legal import make
from .memory import _INTEGER, INT32, OUTPUTS, POISON, Placed, judge

FAR = ("scores", "page_table", "lengths", "row_to_batch", "out_offsets", "out", "out_positions")


def far(tensor: torch.Tensor, stride: int, device: str, pad: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``tensor`` with rows (or elements) ``stride`` apart, and a view that has ``pad`` guards beside each."""
    columns = tensor[:, None] if tensor.dim() == 1 else tensor
    rows, width = columns.shape
    span = (rows - 1) * stride + width + 2 * pad
    storage = torch.empty(span, dtype=tensor.dtype, device=device)
    whole = storage.as_strided((rows, width + 2 * pad), (stride, 1))
    whole.view(_INTEGER[tensor.element_size()]).fill_(POISON[tensor.element_size()])
    inside = storage.as_strided((rows, width), (stride, 1), pad)
    inside.copy_(columns)
    return (inside[:, 0] if tensor.dim() == 1 else inside), whole


def attempt_far(name: str, backend: str, device: str) -> str | None:
    """One tensor of a call reaches beyond 2**31 elements from its start; what goes wrong, or None."""
    form = "ragged" if name == "out_offsets" else "paged"
    extra = {} if form == "ragged" else {"row_to_batch": torch.tensor([1, 0], dtype=INT32)}
    call = make(form, 2, rows=2, lengths=torch.tensor([40, 300], dtype=INT32), **extra)  # 2: float16, both outputs
    placed = Placed(call, device)
    tensor = getattr(call, name)
    moved, whole = far(tensor, 2**31 + 5, device)
    before = whole.clone()
    setattr(placed.call, name, moved)
    placed.run(backend)
    pad = (whole.shape[1] - (1 if tensor.dim() == 1 else tensor.shape[1])) // 2
    now = whole.clone()
    if name in OUTPUTS:
        for copy in (now, before):
            copy[:, pad:-pad] = 0
    if not torch.equal(bits(now), bits(before)):
        return f"{name}: memory was changed"
    assert placed.call.out is not None
    return judge(call, placed.call.out, placed.call.out_positions, None) or placed.damage(ran=True)
