"""Shrinks a failing call while it keeps failing: one row, few columns, small k, plain layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from dsa_topk.testing import CallShape

from .problem import Problem


def minimise(problem: Problem, fails: Callable[[Problem], bool], budget: int = 80) -> Problem:
    """The smallest call found with ``fails(call)``; ``problem`` itself must fail.

    ``fails`` is asked at most ``budget`` times. Greedy: each accepted change starts the list of changes again.
    """
    best = problem
    tries = 0
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(best):
            if tries >= budget:
                return best
            tries += 1
            if fails(candidate):
                best, progress = candidate, True
                break
    return best


def _smaller(problem: Problem) -> Iterator[Problem]:
    """Simpler calls, the boldest first."""
    yield from _fewer_rows(problem)
    plain: dict[str, Any] = {
        "graph": False,
        "poison": False,
        "return_scores": False,
        "return_positions": False,
        "repeats": 1,
        "order": "position",
    }
    for flag, value in plain.items():
        if getattr(problem, flag) != value:
            yield replace(problem, **{flag: value})
    if problem.shape.rows == 1:
        yield from _narrower(problem)
    if problem.k > 1:
        for k in (problem.k // 2, problem.k - problem.k // 8, problem.k - 1):
            if 1 <= k < problem.k:
                yield replace(problem, shape=replace(problem.shape, k=k))
    scores = problem.scores
    if not scores.is_contiguous() or scores.storage_offset() % (16 // scores.element_size()):
        yield replace(problem, scores=scores.contiguous().clone())


def _fewer_rows(problem: Problem) -> Iterator[Problem]:
    rows = problem.shape.rows
    if rows < 2:
        return
    index = torch.arange(rows, device=problem.scores.device)
    half = rows // 2
    yield problem.take(index[:half])
    yield problem.take(index[half:])
    if rows <= 8:
        for row in range(rows):
            yield problem.take(torch.cat([index[:row], index[row + 1 :]]))
    else:
        quarter = rows // 4
        yield problem.take(torch.cat([index[:quarter], index[-quarter:]]))


def _narrower(problem: Problem) -> Iterator[Problem]:
    """A single row as plain positions over parts of its window."""
    start, count = (int(value[0]) for value in problem.windows())
    bare = problem.scores[:, start : start + count]
    if problem.form != "positions" or problem.row_starts is not None or problem.shape.width != count:
        yield _plain(problem, bare)
        return
    for parts in (2, 4, 8, 16):
        size = -(-count // parts)
        if size < count:
            for part in range(parts):
                left, right = part * size, min((part + 1) * size, count)
                yield _plain(problem, torch.cat([bare[:, :left], bare[:, right:]], dim=1))


def _plain(problem: Problem, scores: torch.Tensor) -> Problem:
    shape = CallShape("minimised", "positions", 1, scores.shape[1], problem.k)
    return replace(problem, shape=shape, scores=scores.contiguous(), return_positions=False, length=scores.shape[1])
