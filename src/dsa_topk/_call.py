"""The normalised call: what the public functions hand to a backend, and the only thing a backend sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Form = Literal["positions", "ragged", "paged"]
Order = Literal["position", "score"]
TieBreak = Literal["smallest", "largest"]

FORMS: tuple[Form, ...] = ("positions", "ragged", "paged")
ORDERS: tuple[Order, ...] = ("position", "score")
TIE_BREAKS: tuple[TieBreak, ...] = ("smallest", "largest")
MAX_K = 8192


@dataclass(slots=True)
class Call:
    """One checked call. Tensors are the caller's own (never copied); outputs are filled by the backend.

    ``out``, ``out_positions`` and ``out_scores`` are None only before the outputs are allocated; the latter two stay
    None when the caller does not ask for them.
    """

    form: Form
    scores: torch.Tensor  # [R, N] float32 / bfloat16 / float16, unit last stride, any row stride
    lengths: torch.Tensor | None  # [R] int32 / int64; None = N
    k: int
    row_starts: torch.Tensor | None = None  # [R]; None = 0
    out_offsets: torch.Tensor | None = None  # [R]; ragged only
    page_table: torch.Tensor | None = None  # [B, T] int32; paged only
    page_size: int = 1
    row_to_batch: torch.Tensor | None = None  # [R]; None = row i uses table row i
    page_table_starts: torch.Tensor | None = None  # [R]; None = 0
    order: Order = "position"
    tie_break: TieBreak = "smallest"
    return_scores: bool = False
    out: torch.Tensor | None = None  # [R, k] int32
    out_positions: torch.Tensor | None = None  # [R, k] int32
    out_scores: torch.Tensor | None = None  # [R, k], the scores' dtype
