"""Every planted fault of the kernels must be noticed by the emulated tests (issue 3 point 3, issue 7 point 1)."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulator.build import HERE, build, compiler
from emulator.mutants import SELFTEST, Mutant, StaleMutant, plant
from emulator.process import EmulationError, Options, Process
from emulator.selftest_cases import CASES

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++")


def selftest_notices(process: Process, case: str) -> str | None:
    """What the first failing seed of a self-test case says, None when all 40 pass (a fault needs a few schedules)."""
    for seed in range(40):
        try:
            if not CASES[case](process, Options(seed=seed, max_switches=3_000_000)):
                return f"wrong result, seed {seed}"
        except EmulationError as e:
            return f"{e}, seed {seed}"
    return None


@pytest.mark.parametrize("mutant", SELFTEST, ids=lambda m: m.name.replace(" ", "-"))
def test_self_test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    here = plant([mutant], HERE, tmp_path / "emulator")
    process = Process(build("selftest", here=here, include=tmp_path / "none", keep=False))
    noticed = selftest_notices(process, mutant.hint)
    process.close()
    assert noticed is not None, f"{mutant.name} survived: {mutant.why}"
    print(noticed)


def test_stale_mutant_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StaleMutant, match="occurs 0 times"):
        plant([Mutant("gone", "selftest.cu.h", "no such text", "", "")], HERE, tmp_path / "a")
    with pytest.raises(StaleMutant, match="there is no"):
        plant([Mutant("gone", "no_such_file.h", "x", "", "")], HERE, tmp_path / "b")
