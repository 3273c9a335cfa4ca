"""A benchmark run: case after case, ours against the floor and the peers in turns, checked, recorded, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import inputs, peers
from .cases import Case
from .floor import Floor, Grid, grids
from .inputs import Problem, ScorePool
from .record import Record, Row
from .timing import Contestant, ContestantError, Plan, Timer, Timing

OURS = "dsa-topk"
SENTINEL = -7  # what outputs are filled with before a checked call: no call may return it
# Our own call in other modes, timed beside the default one in the cases of the suites that ask for it.
VARIANTS: dict[str, dict[str, object]] = {"tie_largest": {"tie_break": "largest"}, "order_score": {"order": "score"}}


class WrongResult(RuntimeError):
    """Our own timed output does not meet the contract: no figure is worth printing."""


@dataclass
class Session:
    """What a run needs.

    Attributes
    ----------
    device, timer : where and with what to time
    record : Record
        Takes the rows; those it has already are not timed again.
    path : Path or None
        Where the record is saved after every case.
    floor : Floor or None
        None: no floor (a CPU, or no way to build it).
    peer_names : list of str
    reps : int
        Interleaved repetitions.
    budget_s : float
        No case is started after this many seconds.
    variants : bool
        Also time :data:`VARIANTS`.
    """

    device: torch.device
    timer: Timer
    record: Record
    path: Path | None = None
    floor: Floor | None = None
    peer_names: list[str] = field(default_factory=list)
    reps: int = 7
    budget_s: float = float("inf")
    variants: bool = False
    say: Callable[[str], None] = print
    absent: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ScorePool(self.device)
        self._finalists: dict[tuple[str, int, int, str, str], list[Grid]] = {}

    def run(self, cases: Iterable[Case], progress: Callable[[Case, Row | None], None] | None = None) -> list[Case]:
        """Time the cases that the record lacks; returns those left when the budget ran out.

        Raises
        ------
        WrongResult
            When an output of ours is wrong. What was timed before is saved.
        """
        begin = time.monotonic()
        todo = [case for case in cases if case not in self.record.rows]
        for number, case in enumerate(todo):
            if time.monotonic() - begin > self.budget_s:
                return todo[number:]
            row = self.time(case)
            self.record.add(row)
            if self.path is not None:
                self.record.save(self.path)
            if progress is not None:
                progress(case, row)
        return []

    def time(self, case: Case) -> Row:
        """Time and check one case."""
        problem = inputs.make(case, self.device)
        buffers, flush = self._pool.buffers(case)
        ours = problem.call()
        contestants: dict[str, Contestant] = {OURS: lambda i: ours(buffers[i])}
        variant_checks: dict[str, dict[str, object]] = {}
        if self.variants:
            for name, options in VARIANTS.items():
                variant = problem.call(**options)
                contestants[name] = lambda i, call=variant: call(buffers[i])  # type: ignore[misc]
                variant_checks[name] = options
        entered, failures = self._enter_peers(problem, buffers)
        for name, peer in entered.items():
            contestants[name] = lambda i, run=peer.run: run(buffers[i])  # type: ignore[misc]
        plan = Plan(buffers=len(buffers), flush=flush, reps=self.reps)
        finalists = self._floor_finalists(problem, buffers, plan)
        for number, grid in enumerate(finalists):
            contestants[f"floor{number}"] = self._floor_call(problem, buffers, grid)

        def reset(name: str) -> None:
            if name in entered:
                entered[name].result().fill_(SENTINEL)
            else:
                problem.out.fill_(SENTINEL)

        def inspect(name: str, buffer: int) -> None:
            if name == OURS or name in variant_checks:
                options = variant_checks.get(name, {})
                if reason := problem.check(buffers[buffer], problem.out, "canonical", **options):
                    raise WrongResult(f"{case.label()} {'' if name == OURS else name}: {reason}")
            elif name in entered and (reason := entered[name].check(problem, buffers[buffer])):
                failures[name] = reason[:200]

        writers = any(peer.writes_scores for peer in entered.values())
        try:
            times = self._measure(contestants, plan, entered, failures, reset=reset, inspect=inspect)
        finally:
            if writers:
                self._pool.dirty()
        floor = self._floor_result(case, finalists, times)
        return Row(
            case,
            times[OURS].us,
            times[OURS].spread,
            floor,
            {name: times[name].us for name in entered},
            checked=True,
            peer_failures=failures,
            variants={name: times[name].us for name in variant_checks},
        )

    def _enter_peers(
        self, problem: Problem, buffers: list[torch.Tensor]
    ) -> tuple[dict[str, peers.Peer], dict[str, str]]:
        """Peers that take part in a case, after one call each; and why others that should have do not."""
        entered: dict[str, peers.Peer] = {}
        failures: dict[str, str] = {}
        for name in self.peer_names:
            try:
                peer = peers.prepare(name, problem)
                peer.run(buffers[0])
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            except peers.NotApplicable as reason:
                self.absent.setdefault(name, str(reason))
                continue
            except Exception as error:  # a peer's own failure is a result, not the end of the run
                failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                self.say(f"{problem.case.label()}: {name} failed: {failures[name]}")
                continue
            entered[name] = peer
            self.absent.pop(name, None)
        return entered, failures

    def _measure(
        self,
        contestants: dict[str, Contestant],
        plan: Plan,
        entered: dict[str, peers.Peer],
        failures: dict[str, str],
        *,
        reset: Callable[[str], None],
        inspect: Callable[[str, int], None],
    ) -> dict[str, Timing]:
        """Time, leaving out peers that turn out not to work inside a graph capture."""
        while True:
            try:
                return self.timer.measure(contestants, plan, reset=reset, inspect=inspect)
            except ContestantError as error:
                if error.name not in entered:
                    raise
                failures[error.name] = str(error.__cause__ or error).split("\n")[0][:200]
                self.say(f"{error.name} left out: {failures[error.name]}")
                del entered[error.name], contestants[error.name]

    def _floor_call(self, problem: Problem, buffers: list[torch.Tensor], grid: Grid) -> Contestant:
        floor = self.floor
        assert floor is not None
        return lambda i: floor.read(problem, buffers[i], grid)

    def _floor_finalists(self, problem: Problem, buffers: list[torch.Tensor], plan: Plan) -> list[Grid]:
        """The two best launch shapes of a short search; the interleaved run decides between them."""
        if self.floor is None:
            return []
        case = problem.case
        if case.geometry in self._finalists:  # the same windows under another k, distribution or table
            return self._finalists[case.geometry]
        near = self.floor.near(case)
        tried = grids(case, self.floor.multiprocessors, *(near or ()))
        calls = {str(grid): self._floor_call(problem, buffers, grid) for grid in tried}
        short = Plan(buffers=plan.buffers, flush=plan.flush, reps=3, graph_us=500, max_calls=plan.max_calls)
        times = self.timer.measure(calls, short)
        self._finalists[case.geometry] = sorted(tried, key=lambda grid: times[str(grid)].us)[:2]
        return self._finalists[case.geometry]

    def _floor_result(self, case: Case, finalists: list[Grid], times: dict[str, Timing]) -> float | None:
        if not finalists:
            return None
        best = min(range(len(finalists)), key=lambda number: times[f"floor{number}"].us)
        assert self.floor is not None
        self.floor.remember(case, finalists[best])
        return times[f"floor{best}"].us
