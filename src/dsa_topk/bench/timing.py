"""The timing core: contestants captured as CUDA graphs of many calls, replayed in turns, medians and spread.

A contestant is a function of a buffer number that launches one call on that buffer. Calls of a graph rotate over the
buffers, so that with more than an L2's worth of them every call finds its scores in DRAM (cold); with one buffer they
are in L2 (warm). Taking turns (A B C A B C ...) spreads clock and temperature drift over all contestants alike.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Contestant = Callable[[int], object]
Inspect = Callable[[str, int], None]


@dataclass(frozen=True)
class Timing:
    """One contestant's time. ``spread``: second highest less second lowest repetition, over the median."""

    us: float
    spread: float
    reps: int
    calls: int


class ContestantError(RuntimeError):
    """A contestant raised while it was called or captured; ``name`` says which."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {type(error).__name__}: {error}")
        self.name = name


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    buffers: int = 1
    flush: bool = False  # read something larger than L2 at the end of each graph; its own time is subtracted
    reps: int = 7  # at least 5; medians of fewer say little
    graph_us: float = 1500.0  # device time that a graph should take, so that launch gaps do not count
    max_calls: int = 128


class Timer(Protocol):
    """What a session times with; tests replace it."""

    def measure(
        self,
        contestants: Mapping[str, Contestant],
        plan: Plan,
        *,
        reset: Callable[[str], None] | None = None,
        inspect: Inspect | None = None,
    ) -> dict[str, Timing]:
        """Time all contestants against each other; see :class:`GraphTimer`."""
        ...


def summarise(samples: list[float], calls: int, subtract: float = 0.0) -> Timing:
    """Median and spread per call of repetitions in microseconds."""
    ordered = sorted(samples)
    median = statistics.median(ordered)
    inner = ordered[1:-1] if len(ordered) >= 5 else ordered
    return Timing((median - subtract) / calls, (inner[-1] - inner[0]) / max(median, 1e-9), len(ordered), calls)


def calls_per_graph(us: float, plan: Plan) -> int:
    """Calls of one graph for a contestant that takes ``us``: every buffer once at least, about ``graph_us`` in all."""
    if plan.flush:
        return plan.buffers  # a second round would find the first one's scores in L2
    wanted = max(plan.buffers, 4, min(plan.max_calls, int(plan.graph_us / max(us, 0.1))))
    return plan.buffers * max(1, round(wanted / plan.buffers)) if us < plan.graph_us else max(plan.buffers, 2)


class GraphTimer:
    """Times with CUDA graphs on one device.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    flush : callable, optional
        Launches a read of more than L2 on the current stream (the floor's own kernel). Without it ``plan.flush`` falls
        back on filling a buffer of 256 MB.
    """

    def __init__(self, device: torch.device, flush: Callable[[], object] | None = None) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._spare: torch.Tensor | None = None
        self._flush = flush or self._fill

    def _fill(self) -> None:
        if self._spare is None:
            self._spare = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        self._spare.zero_()

    def measure(
        self,
        contestants: Mapping[str, Contestant],
        plan: Plan,
        *,
        reset: Callable[[str], None] | None = None,
        inspect: Inspect | None = None,
    ) -> dict[str, Timing]:
        """Time all contestants.

        Parameters
        ----------
        contestants : mapping of name to callable
            ``call(buffer)`` launches one call on the current stream, without synchronising.
        plan : Plan
            Buffers, repetitions, flush.
        reset, inspect : callable, optional
            After the repetitions each graph is replayed once more between ``reset(name)`` and
            ``inspect(name, buffer)``, ``buffer`` being the last one called on: the timed graph's own output can be
            checked there.

        Returns
        -------
        dict of name to Timing

        Raises
        ------
        ContestantError
            When a contestant cannot be called or captured.
        """
        with torch.cuda.device(self.device):
            free, total = torch.cuda.mem_get_info(self.device)
            if free < total / 3:  # the memory pools of dead graphs are not reused before they are given back
                torch.cuda.empty_cache()
            graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
            for name, call in contestants.items():
                try:
                    calls = calls_per_graph(self._estimate(call, plan), plan)
                    graphs[name] = (self._capture(call, calls, plan), calls)
                except Exception as error:
                    raise ContestantError(name, error) from error
            samples: dict[str, list[float]] = {name: [] for name in graphs}
            flushes: list[float] = []
            flush_graph = self._flush_graph() if plan.flush else None
            for repetition in range(-1, plan.reps):  # the first round warms up and is not counted
                # Whoever comes first would be timed on a device that has just been idle, which costs it 2 to 10%: so
                # each round begins with a replay that is not timed.
                for graph, _ in list(graphs.values())[:1]:
                    graph.replay()
                events = {name: self._timed(graph) for name, (graph, _) in graphs.items()}
                if flush_graph is not None:
                    events[""] = self._timed(flush_graph)
                torch.cuda.synchronize(self.device)
                if repetition >= 0:
                    for name, (begin, end) in events.items():
                        (samples[name] if name else flushes).append(begin.elapsed_time(end) * 1e3)
            subtract = statistics.median(flushes) if flushes else 0.0
            if inspect is not None:
                for name, (graph, calls) in graphs.items():
                    if reset is not None:
                        reset(name)
                    graph.replay()
                    torch.cuda.synchronize(self.device)
                    inspect(name, (calls - 1) % plan.buffers)
        return {name: summarise(samples[name], calls, subtract) for name, (_, calls) in graphs.items()}

    def _timed(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        return begin, end

    def _estimate(self, call: Contestant, plan: Plan) -> float:
        call(0)  # builds, allocates and warms up outside the capture
        torch.cuda.synchronize(self.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(0)
        call(plan.buffers - 1)
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) * 1e3 / 2

    def _capture(self, call: Contestant, calls: int, plan: Plan) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache, 0.1 s per capture.
        with torch.cuda.stream(self._side):
            # "relaxed": peers may query attributes or load modules at their first call inside a capture
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                for i in range(calls):
                    call(i % plan.buffers)
                if plan.flush:
                    self._flush()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what broke the capture is the error to show
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        return graph

    def _flush_graph(self) -> torch.cuda.CUDAGraph:
        self._flush()
        return self._capture(lambda _: self._flush(), 1, Plan())


class HostTimer:
    """Times with the host's clock, one call after the other: for CPU tensors, where no launch is asynchronous."""

    def measure(
        self,
        contestants: Mapping[str, Contestant],
        plan: Plan,
        *,
        reset: Callable[[str], None] | None = None,
        inspect: Inspect | None = None,
    ) -> dict[str, Timing]:
        """Time all contestants, taking turns as :class:`GraphTimer` does; ``plan.flush`` is ignored."""
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        for repetition in range(-1, plan.reps):
            for name, call in contestants.items():
                begin = time.perf_counter()
                call(repetition % plan.buffers)
                if repetition >= 0:
                    samples[name].append((time.perf_counter() - begin) * 1e6)
        if inspect is not None:
            for name, call in contestants.items():
                if reset is not None:
                    reset(name)
                call(0)
                inspect(name, 0)
        return {name: summarise(values, 1) for name, values in samples.items()}
