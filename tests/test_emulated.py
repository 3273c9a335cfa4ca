"""The CUDA kernels themselves, on the CPU: every case of emulator/cases.py against the checker (issue 3 point 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from dsa_topk.testing import distributions
from emulator.args import kernels, paths
from emulator.build import compiler
from emulator.cases import (
    BF16,
    FP16,
    FP32,
    GROUPS,
    Case,
    by_distribution,
    by_layout,
    by_page_size,
    by_shape,
    crowds,
    hostile_integers,
    narrow_brackets,
    paths_of,
    routes,
)
from emulator.decode_cases import misleading_maxima
from emulator.emulated import emulated, new_counters, prepare
from emulator.process import Options

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++")

ROUTES = routes()
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def name_of(value: object) -> str:
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value)


def check_all(cases: Iterable[Case], sanitize: bool = False) -> None:
    e = emulated(sanitize)
    count = 0
    for case in thinned(cases):
        wrong = case.wrong(e)
        assert wrong is None, wrong
        count += 1
    assert count > 0


def thinned(cases: Iterable[Case]) -> Iterator[Case]:
    """All cases, but of large clusters, whose rows cost 20 times those of a small one, every third or twelfth."""
    for i, case in enumerate(cases):
        if case.kernel != "Split512" or i % {2: 1, 3: 1, 5: 3, 16: 12}[case.cluster] == 0:
            if case.cluster > 8:
                case.options.resident = 2  # the emulator's stacks for more of them pass the system's limit of mappings
            yield case


# Size: all kernels x element types x all distributions, 14 edge lengths each; (k, n), tie rule and outputs differ from
# one distribution to the next and from one element type to the next. 1 to 3 seconds a test.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_distributions(route: tuple[str, int], dtype: str) -> None:
    check_all(by_distribution(route, DTYPES[dtype], seed=list(DTYPES).index(dtype)))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_group(route: tuple[str, int], group: str) -> None:
    check_all(GROUPS[group](route))


SANITIZED = [("Row128", 1), ("Cluster512", 3), ("Held8K", 1), ("Split512", 2)]  # a kernel of each kind


# The sanitized build costs ten times as much: it runs what touches memory in unusual places.
@pytest.mark.parametrize("group", [by_shape, by_layout, by_page_size, hostile_integers], ids=lambda g: g.__name__)
@pytest.mark.parametrize("route", SANITIZED, ids=name_of)
def test_sanitized(route: tuple[str, int], group: object) -> None:
    assert callable(group)
    check_all(list(group(route))[:: 3 if group is by_shape else 2], sanitize=True)


@pytest.mark.parametrize("route", SANITIZED, ids=name_of)
def test_sanitized_distributions(route: tuple[str, int]) -> None:
    check_all(list(by_distribution(route, FP32))[::5], sanitize=True)


@pytest.mark.parametrize("kernel", list(kernels()))
def test_every_path_is_taken(kernel: str) -> None:
    """The cases together send rows through each path of the kernel, so that none is only thought to be tested."""
    route = next(r for r in ROUTES if r[0] == kernel)
    counters = new_counters()  # the emulator counts from its start on
    trivial = prepare(torch.zeros(1, 8), None, 8)
    emulated().run(trivial, kernel=kernel, cluster=route[1], counters=counters)
    before = counters.clone()
    for group in (narrow_brackets, crowds, hostile_integers, misleading_maxima):
        for case in group(route):
            case.run(emulated(), counters)
    taken = dict(zip(paths(), (counters - before).tolist(), strict=True))
    assert {path for path, rows in taken.items() if rows} == set(paths_of(kernel)), taken


@pytest.mark.parametrize("k", [300, 2048])
def test_same_bits_by_every_route_and_schedule(k: int) -> None:
    scores = distributions.make("indexer", 3, 4999, seed=5, k=k)
    results = []
    for i, (kernel, cluster) in enumerate(ROUTES):
        for rows in ([0, 1, 2], [2], [1, 0, 2, 1]):
            call = prepare(scores[rows].contiguous(), None, k)
            emulated().run(call, kernel=kernel, cluster=cluster, options=Options(seed=i))
            assert call.out is not None
            results.append((rows, call.out))
    want = results[0][1]
    for rows, out in results:
        assert torch.equal(out, want[rows])


@pytest.mark.parametrize("schedule", [0, 1, 2, 3])
def test_schedules(schedule: int) -> None:
    """Many seeds of one schedule on one call: a race shows in few of them."""
    k, n = 300, 3001
    names = ("normal", "half_zeros", "bit_patterns", "outliers")
    scores = torch.cat([distributions.make(d, 1, n, seed=1, k=k) for d in names])
    for kernel, cluster in (("Row128", 1), ("Row256", 1), ("Cluster512", 3), ("Held8K", 1), ("Split512", 3)):
        for seed in range(20):
            call = prepare(scores, None, k)
            options = Options(seed=seed, schedule=schedule, preempt=(0, 32, 1024)[seed % 3])
            case = Case(f"{kernel} schedule {schedule} seed {seed}", call, kernel, cluster, options=options)
            wrong = case.wrong(emulated())
            assert wrong is None, wrong


@pytest.mark.parametrize("route", [("Row512", 1), ("Cluster512", 5)], ids=name_of)
def test_long_rows(route: tuple[str, int]) -> None:
    """131072 columns, the real k: lists spill, bitmaps have thousands of words."""
    scores = torch.cat([distributions.make(d, 1, 131072, seed=2, k=2048) for d in ("indexer", "narrow")])
    wrong = Case(f"131072 columns {route}", prepare(scores, None, 2048), *route).wrong(emulated())
    assert wrong is None, wrong


def test_wider_than_the_bitmap() -> None:
    """Two million columns do not fit one block's bitmap: the exact path answers."""
    scores = distributions.make("normal", 1, 2_000_003, seed=2, k=2048)
    wrong = Case("2000003 columns", prepare(scores, None, 2048), "Row512").wrong(emulated())
    assert wrong is None, wrong


@pytest.mark.parametrize("route", [("Row512", 1), ("Cluster512", 3)], ids=name_of)
def test_largest_k(route: tuple[str, int]) -> None:
    scores = torch.cat([distributions.make(d, 1, 20001, seed=2, k=8192) for d in ("normal", "half_zeros")])
    for lengths in (None, torch.tensor([8193, 8191])):
        wrong = Case("k=8192", prepare(scores, lengths, 8192), *route).wrong(emulated())
        assert wrong is None, wrong
