"""The host cost of a call is taken on the quietest of several CPUs, and leaves the thread's affinity as it was."""

from __future__ import annotations

import os

import pytest

from bench_helpers import CPU
from dsa_topk.bench import host
from dsa_topk.bench.host import Effort

EFFORT = Effort(cpus=8, rounds=10, calls=50)


class FakeScheduler:
    """Stands in for the two affinity calls of a machine with any CPUs, and keeps where the thread was sent."""

    def __init__(self, monkeypatch, allowed, refused=()):
        self.allowed, self.refused, self.now, self.pins = set(allowed), set(refused), set(allowed), []
        monkeypatch.setattr(os, "sched_getaffinity", lambda tid: set(self.now), raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.set, raising=False)

    def set(self, tid, cpus):
        assert tid == 0  # the calling thread and no other
        if set(cpus) <= self.refused:
            raise OSError(1, "Operation not permitted")
        self.now = set(cpus)
        if self.now != self.allowed:
            self.pins.append(*cpus)


def test_the_least_of_the_cpus_medians_is_the_figure(monkeypatch):
    scheduler = FakeScheduler(monkeypatch, range(16))
    us = {0: 12.9, 2: 16.3, 4: 10.3, 6: 12.9, 8: 10.4, 10: 16.3, 12: 12.9, 14: 16.3}
    rounds = []

    def median(count):
        rounds.append(count)
        return us[min(scheduler.now)]

    assert host._on_quietest_cpu(median, EFFORT) == 10.3
    assert scheduler.pins == list(us)
    assert rounds == [10] * 8
    assert scheduler.now == scheduler.allowed


@pytest.mark.parametrize(
    ("cpus", "taken"),
    [
        ([3], [3]),
        ([1, 5], [1, 5]),
        (list(range(8)), list(range(8))),
        (list(range(16)), list(range(0, 16, 2))),
        (list(range(100, 132)), list(range(100, 132, 4))),
        ([], []),
    ],
)
def test_the_cpus_are_spread_over_those_allowed(cpus, taken):
    assert host._spread(cpus, 8) == taken


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_affinity_is_restored_when_a_call_raises(monkeypatch, error):
    scheduler = FakeScheduler(monkeypatch, {1, 2, 3})

    def median(_):
        assert len(scheduler.now) == 1
        raise error("in the midst of it")

    with pytest.raises(error, match="in the midst"):
        host._on_quietest_cpu(median, EFFORT)
    assert scheduler.now == {1, 2, 3}


def test_a_cpu_that_is_refused_is_left_out(monkeypatch):
    scheduler = FakeScheduler(monkeypatch, {1, 2}, refused={1})
    assert host._on_quietest_cpu(lambda _: float(min(scheduler.now)), EFFORT) == 2.0
    assert scheduler.pins == [2]
    assert scheduler.now == {1, 2}


def test_a_refused_affinity_means_one_measurement_in_place(monkeypatch):
    FakeScheduler(monkeypatch, {1, 2}, refused={1, 2})  # refuses the restoring too: none must be tried
    rounds = []
    assert host._on_quietest_cpu(lambda count: rounds.append(count) or 9.0, EFFORT) == 9.0
    assert rounds == [80]


def test_a_system_without_affinity_means_one_measurement_in_place(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    rounds = []
    assert host._on_quietest_cpu(lambda count: rounds.append(count) or 9.0, EFFORT) == 9.0
    assert rounds == [80]


def test_the_round_after_a_move_does_not_count_and_the_median_does(monkeypatch):
    took = iter([900e-6, 20e-6, 40e-6, 30e-6])  # seconds of two calls
    clock = iter(float(at) for start, us in zip((0, 1, 2, 3), took, strict=True) for at in (start, start + us))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    calls = []
    assert host._median_here(lambda: calls.append(1), CPU, rounds=3, calls=2) == pytest.approx(15.0)
    assert len(calls) == 8


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_a_cpu_device_is_measured_and_the_thread_is_free_afterwards():
    before = os.sched_getaffinity(0)
    us = host.measure(CPU)
    assert list(us) == ["topk_paged", "topk_ragged"]
    assert all(value > 0 for value in us.values())
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_the_threads_affinity_is_restored_when_the_timed_call_raises(monkeypatch):
    before = os.sched_getaffinity(0)
    pinned = []

    def fails(*_):
        pinned.append(os.sched_getaffinity(0))
        raise RuntimeError("launch failed")

    monkeypatch.setattr(host, "_round", fails)
    with pytest.raises(RuntimeError, match="launch failed"):
        host.measure(CPU)
    assert [len(cpus) for cpus in pinned] == [1]
    assert os.sched_getaffinity(0) == before
