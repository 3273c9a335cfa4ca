"""Batches that an engine would hand over, and what must come back, computed row by row without dsa_topk's own code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

OUTSIDE = 1e3  # above every score in a window: a leak of one column is a wrong selection, never a silent tie

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BACKENDS = [pytest.param(("torch", "cpu"), id="torch-cpu"), pytest.param(("cuda", "cuda"), id="cuda", marks=NEEDS_GPU)]


def best(window: torch.Tensor, k: int, tie_break: str = "smallest") -> list[int]:
    """Positions of the k best scores of one window (no NaN in it), ascending: a stable sort says it all."""
    values = window.double()
    if tie_break == "largest":
        order = (len(values) - 1 - torch.sort(values.flip(0), descending=True, stable=True).indices)[:k]
    else:
        order = torch.sort(values, descending=True, stable=True).indices[:k]
    return sorted(order.tolist())


def expect(
    scores: torch.Tensor,
    lengths: list[int],
    k: int,
    starts: list[int] | None = None,
    stored: Callable[[int, int], int] = lambda row, position: position,
    tie_break: str = "smallest",
) -> torch.Tensor:
    """Build the whole output: row by row, ``stored(row, position)`` for the selected positions and then -1."""
    rows = []
    for row, (line, length) in enumerate(zip(scores.cpu(), lengths, strict=True)):
        start = starts[row] if starts is not None else 0
        window = line[start : start + max(length, 0)]
        picked = [stored(row, position) for position in best(window, k, tie_break)]
        rows.append(picked + [-1] * (k - len(picked)))
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), k)


def slot(table: torch.Tensor, request: int, token: int, page_size: int) -> int:
    """Physical slot of a request's token."""
    return int(table[request, token // page_size]) * page_size + token % page_size


def ints(values: list[int] | torch.Tensor, device: str) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=device)


@dataclass
class Extend:
    """Requests with a cached prefix, extended together: scores packed over the flattened keys of the batch."""

    scores: torch.Tensor  # [R, N]
    requests: list[int]  # request of each row
    lengths: list[int]  # causal length of each row
    starts: list[int]  # first key of each row's request, in columns
    cu_q: list[int]
    cu_k: list[int]
    compact: torch.Tensor  # [B, pages]
    wide: torch.Tensor  # [B, tokens]
    page_size: int


def extend(queries: list[int], keys: list[int], *, page_size: int = 16, seed: int = 0, device: str = "cpu") -> Extend:
    """Build an `Extend` batch: ``queries[b]`` new tokens at the end of ``keys[b]``; all other columns score higher."""
    generator = torch.Generator().manual_seed(seed)
    cu_q = [0, *torch.tensor(queries).cumsum(0).tolist()]
    cu_k = [0, *torch.tensor(keys).cumsum(0).tolist()]
    requests = [b for b, count in enumerate(queries) for _ in range(count)]
    lengths = [keys[b] - queries[b] + 1 + t for b in range(len(queries)) for t in range(queries[b])]
    starts = [cu_k[b] for b in requests]
    # Distinct values per row, so that every rule about ties agrees; a permutation of integers is exact in float32.
    scores = torch.full((len(requests), cu_k[-1]), OUTSIDE)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, start : start + length] = (torch.randperm(length, generator=generator) - length // 2).float() / 64
    pages = -(-max(keys) // page_size)
    compact = torch.randperm(len(queries) * pages, generator=generator).reshape(len(queries), pages)
    tokens = torch.arange(pages * page_size)
    wide = compact[:, tokens // page_size] * page_size + tokens % page_size
    return Extend(
        scores.to(device),
        requests,
        lengths,
        starts,
        cu_q,
        cu_k,
        ints(compact, device),
        ints(wide, device),
        page_size,
    )


def snippet(page: str) -> str:
    """Return the first Python block of a page under docs/, so that what users copy is what is tested."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]


def stand_in(monkeypatch: pytest.MonkeyPatch, dotted: str, **contents: object) -> ModuleType:
    """Put a module of that name, and its parents, into ``sys.modules`` until the test ends."""
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules or depth == len(parts):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if depth > 1:
            monkeypatch.setattr(
                sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[name], raising=False
            )
    module = sys.modules[dotted]
    for key, value in contents.items():
        setattr(module, key, value)
    return module
