"""Host cost of an eager call: the time the caller's thread spends in a public call with preallocated output."""

from __future__ import annotations

import statistics
import time

import torch

from . import inputs
from .cases import Case

CALLS = 50  # far fewer than a stream's launch queue holds: the host must never wait for the device
ROUNDS = 40


def measure(device: torch.device) -> dict[str, float]:
    """Microseconds per eager call (median of rounds) of ``topk_paged`` and ``topk_ragged`` on a small case."""
    out: dict[str, float] = {}
    for name, case in (("topk_paged", Case("decode", 4, 4096)), ("topk_ragged", Case("ragged", 4, 4096))):
        problem = inputs.make(case, device)
        scores = torch.randn(case.rows, case.columns, device=device)
        call = problem.call()
        call(scores)
        rounds = []
        for _ in range(ROUNDS if device.type == "cuda" else 3):
            _synchronise(device)
            begin = time.perf_counter()
            for _ in range(CALLS if device.type == "cuda" else 3):
                call(scores)
            rounds.append((time.perf_counter() - begin) * 1e6 / (CALLS if device.type == "cuda" else 3))
        _synchronise(device)
        out[name] = statistics.median(rounds)
    return out


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
