"""Every planted fault of the kernels must be noticed by the emulated tests (issue 3 point 3, issue 7 point 1)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from emulator.build import CSRC, HERE, build, compiler
from emulator.build import DECODE as ONLY_DECODE
from emulator.build import FILTER as ONLY_FILTER
from emulator.cases import GROUPS, first_wrong
from emulator.decode_cases import DECODE_GROUPS, SMALL_ROUTES
from emulator.decode_mutants import DECODE
from emulator.emulated import Emulated, emulated
from emulator.kernel_mutants import KERNELS
from emulator.mutants import SELFTEST, Mutant, StaleMutant, plant
from emulator.process import EmulationError, Options, Process
from emulator.selftest_cases import CASES

FAULTY = (*KERNELS, *DECODE)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="no g++")]


def selftest_notices(process: Process, case: str) -> str | None:
    """What the first failing seed of a self-test case says, None when all 40 pass (a fault needs a few schedules)."""
    for seed in range(40):
        try:
            if not CASES[case](process, Options(seed=seed, max_switches=3_000_000)):
                return f"wrong result, seed {seed}"
        except EmulationError as e:
            return f"{e}, seed {seed}"
    return None


def try_selftest(mutant: Mutant, work: Path) -> str | None:
    """Build the self-test with the fault in it; what notices it, or None."""
    here = plant([mutant], HERE, work / "emulator")
    process = Process(build("selftest", here=here, include=work / "none", into=work / "built"))
    try:
        return selftest_notices(process, mutant.hint)
    finally:
        process.close()


def decode_wrong(e: Emulated, groups: str, seeds: int) -> str | None:
    """As `first_wrong`, on the decode kernels of the small build; `long_held` alone is of another one."""
    routes = (("Held32K", 1),) if groups == "long_held" else SMALL_ROUTES
    return first_wrong(e, groups, seeds, small_routes=routes, known={**GROUPS, **DECODE_GROUPS})


def try_kernel(mutant: Mutant, work: Path) -> str | None:
    """Build the kernels with the fault in them; what notices it, or None. Four seeds: a race needs a few schedules."""
    decode = mutant in DECODE
    look = decode_wrong if decode else first_wrong
    csrc = plant([mutant], CSRC, work / "csrc")
    e = Emulated(
        Process(
            build("runner", include=csrc, small=ONLY_DECODE if decode else ONLY_FILTER, into=work / "built"), timeout=60
        )
    )
    try:
        return look(e, mutant.hint, seeds=4)
    finally:
        e.close()


Outcome = Callable[[Mutant], str | None]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """Compiling takes most of the time, so the mutants are tried ahead, as many at once as there are cores."""
    root = tmp_path_factory.mktemp("mutants")
    selected = {item.callspec.params.get("mutant") for item in request.session.items if hasattr(item, "callspec")}
    jobs = [(m, try_selftest) for m in SELFTEST if m in selected] + [(m, try_kernel) for m in FAULTY if m in selected]
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the parallelism, and each sees only some of the tests
        attempts = {m: (lambda m=m, f=f, i=i: f(m, root / str(i))) for i, (m, f) in enumerate(jobs)}
        yield lambda mutant: attempts[mutant]()
        return
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        futures: dict[Mutant, Future[str | None]] = {
            m: pool.submit(f, m, root / str(i)) for i, (m, f) in enumerate(jobs)
        }
        yield lambda mutant: futures[mutant].result()
        for future in futures.values():
            future.cancel()


def identifier(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "-")


@pytest.mark.parametrize("mutant", [*SELFTEST, *FAULTY], ids=identifier)
def test_mutant_is_caught(mutant: Mutant, outcome: Outcome) -> None:
    noticed = outcome(mutant)
    assert noticed is not None, f"{mutant.name} survived: {mutant.why}"
    print(noticed)


def test_without_a_fault_the_cases_are_right() -> None:
    """What the mutants are measured against: the same cases, no fault, nothing noticed. (test_decode.py runs those of
    the decode kernels.)"""
    groups = sorted({name for m in KERNELS for name in m.hint.split()})
    assert first_wrong(emulated(), " ".join(groups), seeds=1) is None


def test_stale_mutant_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StaleMutant, match="occurs 0 times"):
        plant([Mutant("gone", "selftest.cu.h", "no such text", "", "")], HERE, tmp_path / "a")
    with pytest.raises(StaleMutant, match="there is no"):
        plant([Mutant("gone", "no_such_file.h", "x", "", "")], HERE, tmp_path / "b")
