"""The k-th best key of each row by bisection and counting, and the canonical row that follows from it."""

from __future__ import annotations

import torch

from .keys import INT32_MIN
from .window import Window


def kth_keys(keys: torch.Tensor, inside: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Key of the ``filled[i]``-th best candidate of each row (int32 [r]); unspecified where ``filled[i]`` is 0.

    The greatest ``t`` such that at least ``filled[i]`` candidates have a key of ``t`` or more, built from its top bit
    down.
    """
    masked = keys.masked_fill(~inside, INT32_MIN)  # never counted: every trial key is above the smallest
    found = torch.full((keys.shape[0],), INT32_MIN, dtype=torch.int64, device=keys.device)
    for bit in range(31, -1, -1):
        trial = found + (1 << bit)
        enough = (masked >= trial.to(torch.int32)[:, None]).sum(1) >= filled
        found = torch.where(enough, trial, found)
    return found.to(torch.int32)


def expected_positions(
    keys: torch.Tensor, inside: torch.Tensor, window: Window, live: torch.Tensor, order: str, tie_break: str
) -> torch.Tensor:
    """The canonical selection (int64 [r, k], -1 padded) of each row."""
    expected = torch.full(live.shape, -1, dtype=torch.int64, device=live.device)
    if keys.numel() == 0:
        return expected
    threshold = kth_keys(keys, inside, window.filled)[:, None]
    above = (keys > threshold) & inside
    tied = (keys == threshold) & inside
    wanted = (window.filled - above.sum(1))[:, None]
    upto = tied.cumsum(1, dtype=torch.int32)
    if tie_break == "smallest":
        chosen = above | (tied & (upto <= wanted))
    else:
        chosen = above | (tied & (upto > tied.sum(1, keepdim=True) - wanted))
    chosen &= (window.filled > 0)[:, None]
    # nonzero walks row by row in column order, so the chosen ones fill the live slots of the rows in the same order.
    row, column = chosen.nonzero(as_tuple=True)
    expected[live] = column - window.start[row]
    if order == "score":
        expected = _by_score(expected, keys, window, live, tie_break)
    return expected


def _by_score(
    positions: torch.Tensor, keys: torch.Tensor, window: Window, live: torch.Tensor, tie_break: str
) -> torch.Tensor:
    """Rank order of ascending ``positions``: best key first, equal keys by the tie rule, padding last."""
    columns = (window.start[:, None] + positions).clamp(0, keys.shape[1] - 1)
    rank = keys.gather(1, columns).to(torch.int64).neg().masked_fill(~live, 2**40)
    if tie_break == "smallest":
        return positions.gather(1, rank.sort(dim=1, stable=True)[1])
    # Largest first among equals: stable sort of the reversed row; the padding in front of it still sorts to the end.
    backwards = positions.flip(1)
    return backwards.gather(1, rank.flip(1).sort(dim=1, stable=True)[1])
