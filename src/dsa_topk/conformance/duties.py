"""What peers leave to their callers: not sent to them, so that a fault found is one on a peer's own terms.

With PEERS_BEYOND_DOCS=1 in the environment they are sent too; they may crash or hang.
"""

from __future__ import annotations

import os

import torch

from dsa_topk.testing.window import Window, windows

from .problem import Problem


class Unsupported(Exception):
    """Raised by an adapter that does not serve a call; the text says why."""


def documented(condition: bool, reason: str) -> None:
    """Refuse a call that the peer's documentation leaves to its callers, unless asked not to.

    Raises
    ------
    Unsupported
        When ``condition`` does not hold and PEERS_BEYOND_DOCS is not 1.
    """
    if not condition and os.environ.get("PEERS_BEYOND_DOCS") != "1":
        raise Unsupported(f"{reason} (its callers' duty)")


def int32(problem: Problem, *wanted: str) -> list[torch.Tensor | None]:
    """Integer arguments for peers that take contiguous int32; None for those that the call does not have."""
    found: list[torch.Tensor | None] = []
    for name in wanted:
        tensor = getattr(problem.shape, name)
        if tensor is not None:
            narrow = tensor.to(torch.int32)
            if not torch.equal(narrow.to(torch.int64), tensor.to(torch.int64)):
                raise Unsupported(f"{name} beyond int32")
            tensor = narrow.contiguous()
        found.append(tensor)
    return found


def zeros(problem: Problem) -> torch.Tensor:
    """int32 zeros [R], for an argument that a peer demands and the call does not have."""
    return torch.zeros(problem.shape.rows, dtype=torch.int32, device=problem.scores.device)


def window_of(problem: Problem) -> Window:
    """The call's windows by the contract."""
    shape = problem.shape
    device = problem.scores.device
    return windows(shape.rows, shape.width, shape.k, device, form=shape.form, lengths=shape.lengths, **shape.kwargs())


def int32_windows(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Lengths and starts for peers that do not clamp them: int32 [R], and None for starts that the call does not have.

    Raises
    ------
    Unsupported
        When a window leaves the scores or the page table.
    """
    window = window_of(problem)
    lengths, starts = int32(problem, "lengths", "row_starts")
    if lengths is None:
        lengths = window.count.to(torch.int32)
    given = zeros(problem) if starts is None else starts
    inside = bool((lengths == window.count).all() and (given == window.start).all())
    documented(inside, "windows that leave the scores or the page table")
    return lengths, starts


def pages_fit(problem: Problem) -> bool:
    """Whether every table entry that a window reaches is at least 0 and its tokens are int32."""
    size, window = problem.shape.page_size, window_of(problem)
    assert window.page_table is not None
    assert window.table_row is not None
    assert window.table_start is not None
    if not window.page_table.numel():
        return True
    pages = window.page_table[window.table_row].to(torch.int64)
    entry = torch.arange(pages.shape[1], device=pages.device) - window.table_start[:, None]
    used = (entry >= 0) & (entry * size < window.count[:, None])
    legal = (pages >= 0) & ((pages + 1) * size <= 2**31)
    return bool((legal | ~used).all())
