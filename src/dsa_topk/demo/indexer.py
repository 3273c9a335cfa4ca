"""Lightning-indexer scores from the model's queries and keys: ``score(t, s) = sum_h w_h * relu(q_h(t) . k_h(s))``."""

from __future__ import annotations

import torch

#: The seed of :data:`WEIGHTS`. A trained indexer has learned its weights; here the nearest thing to training was a
#: choice among the first 1000 seeds (those with at least three negative entries) by the attention mass that 256
#: selected tokens hold, on 16 windows at the end of the novel, which the demo's default batch does not read.
SEED = 258

#: The head weights w: ``torch.randn(12, generator=torch.Generator().manual_seed(SEED))`` to two decimals. Both signs
#: occur, as in trained indexers.
WEIGHTS = (-0.44, 1.0, -0.58, 1.05, 1.26, 1.32, -0.58, 0.8, 1.2, -0.57, 0.79, 1.66)

_ELEMENTS_AT_ONCE = 1 << 24  # 64 MiB of per-head products


def indexer_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Score every key for every query.

    A score is an exact zero where no head's product is positive, so the rows have plateaus of equal scores: the case
    in which a selection without a tie rule is arbitrary.

    Parameters
    ----------
    queries : torch.Tensor
        ``[rows, heads, dim]`` float32.
    keys : torch.Tensor
        ``[tokens, heads, dim]`` float32.

    Returns
    -------
    torch.Tensor
        ``[rows, tokens]`` float32.
    """
    weights = torch.tensor(WEIGHTS, dtype=torch.float32)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, keys.shape[0] * keys.shape[1]))
    scores = torch.empty(queries.shape[0], keys.shape[0])
    by_head = keys.permute(1, 2, 0).contiguous()
    for start in range(0, queries.shape[0], rows):
        products = torch.matmul(queries[start : start + rows].transpose(0, 1), by_head).relu_()
        scores[start : start + rows] = torch.tensordot(weights, products, dims=1)
    return scores
