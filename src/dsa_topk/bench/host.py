"""Host cost of an eager call: the time the caller's thread spends in a public call with preallocated output."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import inputs
from .cases import Case

WHERE = "on the quietest of up to 8 CPUs"
"""How to read the figure."""

FORMS = (("topk_paged", Case("decode", 4, 4096)), ("topk_ragged", Case("ragged", 4, 4096)))


class Effort(NamedTuple):
    """How much is timed: `rounds` rounds of `calls` calls on each of at most `cpus` CPUs."""

    cpus: int
    rounds: int
    calls: int


FULL = Effort(cpus=8, rounds=10, calls=50)  # calls: far fewer than a launch queue holds, the host must never wait
SHORT = Effort(cpus=2, rounds=3, calls=3)  # without a GPU a call does the device's work too: the figure says little


def measure(device: torch.device) -> dict[str, float]:
    """Host time of an eager call of ``topk_paged`` and ``topk_ragged`` on a small case, on the quietest of some CPUs.

    The calling thread goes to up to 8 of its allowed CPUs in turn, and the least of the CPUs' medians is the figure.
    Other processes only ever add time, and on a shared host they may do so for seconds on end (a busy hyperthread
    sibling: up to 1.6 times was seen within one process), which no median taken there can remove. What the library's
    own work costs is what it takes where nobody interferes. The standard library's documentation of ``timeit`` gives
    the same reason for taking the minimum. The median within a CPU keeps a lucky round from being the figure.

    Parameters
    ----------
    device : torch.device
        Where the tensors are. Anything but a CUDA device gets a short measurement.

    Returns
    -------
    dict[str, float]
        Microseconds per call, by form.

    Notes
    -----
    The thread's affinity is put back also when a call raises. Where it cannot be set, all rounds are taken where the
    thread happens to run.
    """
    effort = FULL if device.type == "cuda" else SHORT
    return {name: _measure_form(case, device, effort) for name, case in FORMS}


def _measure_form(case: Case, device: torch.device, effort: Effort) -> float:
    problem = inputs.make(case, device)
    scores = torch.randn(case.rows, case.columns, device=device)
    call = problem.call()
    call(scores)  # before any pinning: threads that a first call starts would inherit the one CPU for good

    def median(rounds: int) -> float:
        return _median_here(lambda: call(scores), device, rounds, effort.calls)

    return _on_quietest_cpu(median, effort)


def _on_quietest_cpu(median: Callable[[int], float], effort: Effort) -> float:
    """The least ``median(rounds)`` over the CPUs; where no CPU can be chosen, one of all the rounds."""
    allowed = _allowed_cpus()
    medians = []
    try:
        for cpu in _spread(sorted(allowed), effort.cpus):
            if _pin(cpu):
                medians.append(median(effort.rounds))
    finally:
        # Asking what is, not remembering what was done: right after an interrupt, and no call where all were refused.
        if allowed and os.sched_getaffinity(0) != allowed:
            os.sched_setaffinity(0, allowed)
    return min(medians) if medians else median(effort.cpus * effort.rounds)


def _allowed_cpus() -> set[int]:
    """The CPUs the calling thread may run on (0 means that thread, not the process); none where it cannot choose."""
    if not hasattr(os, "sched_setaffinity"):  # Linux alone has it
        return set()
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()


def _spread(cpus: list[int], most: int) -> list[int]:
    """At most `most` of `cpus`, evenly: neighbours are often siblings of one core, quiet or disturbed together."""
    count = min(most, len(cpus))
    return [cpus[i * len(cpus) // count] for i in range(count)]


def _pin(cpu: int) -> bool:
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError:  # a sandbox's refusal, or a CPU that has gone away meanwhile
        return False
    return True


def _median_here(call: Callable[[], object], device: torch.device, rounds: int, calls: int) -> float:
    """Median microseconds per call of `rounds` rounds, after one that warms this CPU's caches and does not count."""
    return statistics.median([_round(call, device, calls) for _ in range(rounds + 1)][1:])


def _round(call: Callable[[], object], device: torch.device, calls: int) -> float:
    _synchronise(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - begin
    _synchronise(device)
    return taken * 1e6 / calls


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
