"""What a selection is worth against dense attention: the mass it keeps and the error of the layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsa_topk.demo.batch import Request

_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Worth:
    """Means over the rows of one way of choosing tokens.

    Attributes
    ----------
    mass : float
        Share of the dense softmax's mass (mean over heads) on the chosen tokens, 0 to 1.
    error : float
        ``|o - o_dense| / |o_dense|`` of the attention output over all heads, with the softmax taken over the chosen
        tokens only.
    """

    mass: float
    error: float


@dataclass(frozen=True)
class Comparison:
    """The indexer's selection beside two yardsticks, at one k.

    Attributes
    ----------
    k : int
        How many tokens a row may keep.
    rows : int
        Rows with more than k candidates: the only ones where there is something to select, and the only ones in the
        means.
    indexer, best, latest : Worth or None
        The selection under test; the k tokens with most attention mass, which only dense attention can know; the k
        latest tokens. None when ``rows`` is 0.
    """

    k: int
    rows: int
    indexer: Worth | None
    best: Worth | None
    latest: Worth | None


def compare(requests: Sequence[Request], positions: torch.Tensor, k: int) -> Comparison:
    """Measure a selection of all rows of a batch.

    Parameters
    ----------
    requests : sequence of Request
        The batch's requests, in its order.
    positions : torch.Tensor
        ``[rows, k]`` selected positions in each row's own window, -1 padded.
    k : int
        Its second dimension.
    """
    sums: dict[str, list[float]] = {"indexer": [0.0, 0.0], "best": [0.0, 0.0], "latest": [0.0, 0.0]}
    rows, first = 0, 0
    for request in requests:
        for start in range(0, request.new, _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, request.new))
            lengths = request.lengths[part].long()
            selecting = lengths > k
            if not selecting.any():
                continue
            lengths, queries = lengths[selecting], request.queries[part][selecting]
            chosen = positions[first + part.start : first + part.stop][selecting].long()
            weights, output = dense(queries, request, lengths)
            mass = weights.mean(1)
            latest = (lengths - k)[:, None] + torch.arange(k)
            for name, pick in (("indexer", chosen), ("best", mass.topk(k).indices), ("latest", latest)):
                kept, error = restricted(weights, output, request.values, pick)
                sums[name][0] += kept.sum().item()
                sums[name][1] += error.sum().item()
            rows += len(lengths)
        first += request.new
    if rows == 0:
        return Comparison(k, 0, None, None, None)
    worth = {name: Worth(mass / rows, error / rows) for name, (mass, error) in sums.items()}
    return Comparison(k, rows, **worth)


def dense(queries: torch.Tensor, request: Request, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of some rows over their whole windows.

    Returns
    -------
    weights : torch.Tensor
        ``[rows, heads, tokens]``; zero outside the window.
    output : torch.Tensor
        ``[rows, heads, dim]``.
    """
    logits = torch.einsum("rhd,thd->rht", queries, request.keys) / queries.shape[-1] ** 0.5
    outside = torch.arange(request.tokens) >= lengths[:, None]
    weights = logits.masked_fill_(outside[:, None], float("-inf")).softmax(-1)
    return weights, torch.einsum("rht,thd->rhd", weights, request.values)


def restricted(
    weights: torch.Tensor, output: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the chosen tokens only.

    Softmax over a subset is the dense softmax divided by the subset's mass, head by head, so no exponential is taken
    again.

    Returns
    -------
    mass, error : torch.Tensor
        ``[rows]`` each, as in :class:`Worth`.
    """
    kept = torch.zeros_like(weights[:, 0]).scatter_(1, chosen, 1.0)
    part = weights * kept[:, None]
    mass = part.sum(-1)
    sparse = torch.einsum("rht,thd->rhd", part / mass.clamp_min(1e-30)[..., None], values)
    error = (sparse - output).flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1)
    return mass.mean(1), error


def decided_by_ties(scores: torch.Tensor, starts: torch.Tensor | None, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Say for each row whether the last place went to one of several equal scores, some of them left out.

    Parameters
    ----------
    scores : torch.Tensor
        ``[rows, columns]`` without NaN.
    starts, lengths : torch.Tensor
        ``[rows]``; the rows' windows.

    Returns
    -------
    torch.Tensor
        ``[rows]`` bool.
    """
    decided = torch.zeros(scores.shape[0], dtype=torch.bool)
    for row in range(scores.shape[0]):
        start, length = 0 if starts is None else int(starts[row]), int(lengths[row])
        if length > k:
            window = scores[row, start : start + length]
            top = window.topk(k + 1).values
            decided[row] = top[k - 1] == top[k]
    return decided


def zero_share(scores: torch.Tensor, starts: torch.Tensor | None, lengths: torch.Tensor) -> float:
    """Return the share of exact zeros among all scores inside the rows' windows."""
    zeros = candidates = 0
    for row in range(scores.shape[0]):
        start, length = 0 if starts is None else int(starts[row]), int(lengths[row])
        zeros += int((scores[row, start : start + length] == 0).sum())
        candidates += length
    return zeros / max(1, candidates)
