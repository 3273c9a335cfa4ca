"""Runs one problem on one adapter in this process and judges everything that the call did."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dsa_topk.testing import Verdict
from dsa_topk.testing.checker import Mode

from .adapters import Adapter, Outputs, Result, Unsupported
from .problem import Problem

SENTINEL = 0x5A5A5A5A
_GUARD = 16  # sentinel columns on each side of the outputs
_POISONS = ("inf", "nan", "max")
_REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError)
_MAX_COPY_BYTES = 1 << 31  # inputs above this are compared by a checksum

#: What can become of a problem; the first four are good.
STATUSES = (
    "exact",
    "unsupported",
    "unavailable",
    "skipped",
    "wrong",
    "invalid",
    "unstable",
    "modified",
    "error",
    "crash",
    "hang",
)
GOOD = frozenset(("exact", "unsupported", "unavailable", "skipped"))


@dataclass(slots=True)
class Outcome:
    """What became of a problem.

    ``wrong``: valid candidates, but not the right ones, or not in the right order; ``invalid``: padding, ranges,
    duplicates or mapping broken, so that following the output reads foreign memory; ``unstable``: two calls differ;
    ``modified``: an input or memory beside an output was written; ``error``: an exception; ``crash`` and ``hang``: the
    process died or had to be ended.
    """

    status: str
    reason: str = ""
    rows: int = 0
    bad_rows: int = 0
    wrong: int = 0
    row: int | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.status in GOOD

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class _Fault(Exception):
    """Carries the outcome of the first fault out of the examination."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def run_problem(adapter: Adapter, problem: Problem, mode: Mode | None = None) -> Outcome:
    """Run ``problem`` and judge output, repeatability, poison, graph replay, memory around the outputs and the inputs.

    ``mode`` overrides what the adapter promises. Only a dead or hanging process is beyond this function.
    """
    started = time.perf_counter()
    rows = problem.shape.rows
    try:
        _examine(adapter, problem, mode or adapter.mode)
        outcome = Outcome("exact")
    except _Fault as fault:
        outcome = fault.outcome
    except Unsupported as refusal:
        outcome = Outcome("unsupported", str(refusal))
    except torch.cuda.OutOfMemoryError as error:
        outcome = Outcome("skipped", str(error).splitlines()[0])
    except Exception as error:  # any exception of a backend is a finding, whatever its type
        text = str(error).splitlines()[0] if str(error) else ""
        # After an error on the device itself no further call of this process can be trusted.
        if problem.scores.is_cuda and "CUDA error" in text:
            status = "crash"
        elif not adapter.canonical and isinstance(error, _REFUSALS):
            status = "unsupported"  # a peer that says no is not wrong
        else:
            status = "error"
        outcome = Outcome(status, f"{type(error).__name__}: {text}")
    outcome.rows = rows
    outcome.seconds = time.perf_counter() - started
    return outcome


def _examine(adapter: Adapter, problem: Problem, mode: Mode) -> None:
    if not adapter.canonical:  # what a set-exact backend never promised is not asked of it
        problem = replace(problem, return_scores=False, return_positions=False)
    before = {name: _snapshot(tensor) for name, tensor in problem.tensors().items()} if adapter.read_only else {}
    first = _call(adapter, problem)
    _unmodified(problem, before)  # before the checker reads them
    _judge(problem, first, mode)
    for number in range(1, problem.repeats):
        again = _call(adapter, problem)
        if mode == "canonical" and not _same(first, again):
            raise _Fault(Outcome("unstable", f"call {number + 1} gave other bits than the first"))
        if mode != "canonical":
            _judge(problem, again, mode)
    if problem.poison:
        _poison(adapter, problem, first, mode)
    _unmodified(problem, before)
    if problem.graph and adapter.graph and problem.scores.is_cuda:
        _replay(adapter, problem, mode)


def _unmodified(problem: Problem, before: dict[str, torch.Tensor]) -> None:
    for name, tensor in problem.tensors().items():
        if name in before and not torch.equal(before[name], _snapshot(tensor)):
            raise _Fault(Outcome("modified", f"the call wrote into its input {name}"))


def _call(adapter: Adapter, problem: Problem) -> Result:
    """One call into outputs full of sentinels between guard columns; synchronises, so that faults surface here."""
    rows, k, device = problem.shape.rows, problem.k, problem.scores.device
    number = 2 if problem.return_positions else 1
    frames = [torch.full((rows + 2, k + 2 * _GUARD), SENTINEL, dtype=torch.int32, device=device) for _ in range(number)]
    inner = [frame[1:-1, _GUARD : _GUARD + k] for frame in frames]
    # Peers that are known to write their scores get a copy, so that the checker sees what they were given.
    given = problem if adapter.read_only else replace(problem, scores=_copy(problem.scores))
    result = adapter.call(given, Outputs(inner[0], inner[1] if problem.return_positions else None))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for frame in frames:
        beside = (frame[0], frame[-1], frame[:, :_GUARD], frame[:, _GUARD + k :])
        if not all(bool((part == SENTINEL).all()) for part in beside):
            raise _Fault(Outcome("modified", "the call wrote beside its output"))
    if result.indices.dtype == torch.int64:  # torch.topk and its like
        result = replace(result, indices=result.indices.to(torch.int32))
    return result


def _judge(problem: Problem, result: Result, mode: Mode) -> None:
    _raise(
        problem.shape.check(
            problem.scores,
            result.indices,
            order=problem.order,
            tie_break=problem.tie_break,
            positions=result.positions,
            returned_scores=result.scores,
            mode=mode,
        )
    )


def _raise(verdict: Verdict, prefix: str = "") -> None:
    if not verdict.ok:
        status = "invalid" if verdict.invalid else "wrong"
        reason = f"{prefix}{verdict.kind}: {verdict.reason}"
        raise _Fault(Outcome(status, reason, bad_rows=verdict.bad_rows, wrong=verdict.wrong, row=verdict.row))


def _same(one: Result, two: Result) -> bool:
    for a, b in ((one.indices, two.indices), (one.positions, two.positions), (one.scores, two.scores)):
        if a is not None and b is not None and not torch.equal(_bits(a), _bits(b)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return tensor


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    bits = _bits(tensor)
    if tensor.numel() * tensor.element_size() <= _MAX_COPY_BYTES:
        return bits.clone()
    return bits.sum(dtype=torch.int64)


def _poison(adapter: Adapter, problem: Problem, first: Result, mode: Mode) -> None:
    """Every cell outside the windows is overwritten; the answer may not notice."""
    start, count = problem.windows()
    column = torch.arange(problem.shape.width, device=problem.scores.device)
    outside = (column < start[:, None]) | (column >= (start + count)[:, None])
    for name in _POISONS:
        poison = torch.finfo(problem.scores.dtype).max if name == "max" else float(name)
        changed = replace(problem, scores=problem.scores.masked_fill(outside, poison))
        again = _call(adapter, changed)
        if mode == "canonical" and not _same(first, again):
            raise _Fault(Outcome("wrong", f"the answer changes when cells outside the windows hold {poison}"))
        if mode != "canonical":
            _judge(changed, again, mode)


def _copy(scores: torch.Tensor) -> torch.Tensor:
    """The scores in memory of their own, contiguous: a plain clone of overlapping rows (row stride 1) is transposed."""
    return scores.clone(memory_format=torch.contiguous_format)


def _replay(adapter: Adapter, problem: Problem, mode: Mode) -> None:
    """Capture the call, then replay it on the same and on exchanged inputs in the same buffers."""
    shape = problem.shape
    static = replace(problem, scores=_copy(problem.scores))
    static.shape = replace(shape, lengths=None if shape.lengths is None else shape.lengths.clone())
    out = torch.full((shape.rows, shape.k), SENTINEL, dtype=torch.int32, device=problem.scores.device)
    outputs = Outputs(out, torch.full_like(out, SENTINEL))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(problem.scores.device)
    with torch.cuda.device(problem.scores.device), torch.cuda.graph(graph):
        result = adapter.call(static, outputs)
    for turn in range(3):
        if turn:
            static.scores.copy_(static.scores.flip(0))
            if static.shape.lengths is not None:
                static.shape.lengths.copy_(static.shape.lengths.flip(0))
        out.fill_(SENTINEL)
        graph.replay()
        torch.cuda.synchronize(problem.scores.device)
        verdict = static.shape.check(
            static.scores,
            result.indices,
            order=problem.order,
            tie_break=problem.tie_break,
            positions=result.positions,
            returned_scores=result.scores,
            mode=mode,
        )
        _raise(verdict, f"graph replay {turn}: ")
