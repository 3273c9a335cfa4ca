"""The launch choice (src/dsa_topk/_plan.py): a pure function that names kernels which exist and clusters which fit."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_topk import _plan
from dsa_topk._plan import DeviceLimits, Plan

LAUNCH = Path(_plan.__file__).with_name("csrc") / "launch.h"

# Made-up limits in the shape of devices: large clusters are scarce, missing, or end with the portable 8; or none exist.
H200 = DeviceLimits(132, 232448, (0, 0, 66, 44, 33, 24, 22, 18, 16, 14, 12, 12, 11, 10, 9, 8, 8))
AMPERE = DeviceLimits(108, 166912)
SMALL = DeviceLimits(20, 101376, (0, 0, 10, 6, 5, 4, 3, 2, 2, *([0] * 8)))
PORTABLE = dataclasses.replace(H200, clusters=(*H200.clusters[:9], *([0] * 8)))
DEVICES = {"h200": H200, "ampere": AMPERE, "small": SMALL, "portable": PORTABLE}

# Sizes of the field and their neighbours, and the ends of the contract.
ROWS = (1, 2, 3, 8, 16, 31, 32, 64, 132, 133, 264, 265, 512, 1024, 4096, 16384, 1 << 20)
WIDTHS = (0, 1, 255, 2048, 4096, 8191, 12288, 12289, 32768, 49153, 65536, 131072, 262144, 1 << 20, 2**31 - 1)
KS = (1, 37, 512, 1024, 2048, 2049, 8192)

sizes = st.tuples(st.integers(1, 1 << 20), st.integers(0, 2**31 - 1), st.integers(1, 8192))


def test_kernels_are_those_of_the_sources_in_their_order() -> None:
    """A name's place in KERNELS is the number that goes to the module."""
    body = re.search(r"enum Kernel[^{]*\{([^}]*)\}", LAUNCH.read_text())
    assert body is not None
    numbers = {name: int(value) for name, value in re.findall(r"k(\w+)\s*=\s*(\d+)", body[1])}
    count = numbers.pop("Kernels")
    assert numbers == {name: number for number, name in enumerate(_plan.KERNELS)}
    assert count == len(_plan.KERNELS)
    for number, name in enumerate(_plan.KERNELS):
        assert Plan(name, 1, 1.0).number == number


def configuration(name: str) -> tuple[str, list[str]]:
    """The kernel's template and its arguments behind the element type, from the sources."""
    alias = re.search(rf"using {name} = (\w+)Config<E, ([^>]*)>", LAUNCH.read_text())
    assert alias is not None, name
    return alias[1], alias[2].split(", ")


def test_the_table_of_kernels_is_that_of_the_sources() -> None:
    """Threads, samples and blocks a row decide which kernel has room for the candidates."""
    for kernel in _plan._TABLE:
        kind, arguments = configuration(kernel.name)
        assert kernel.threads == int(arguments[0]), kernel.name
        flags = {"Filter": arguments[4:5], "Split": arguments[4:], "Resident": []}[kind]
        assert [kernel.several, kernel.spread] == [flag == "true" for flag in [*flags, "", ""][:2]], kernel.name
        if kind == "Resident":
            assert kernel.samples == 0
            assert kernel.room == kernel.threads * int(arguments[1])
        else:
            each = int(arguments[1]) if kind == "Filter" else 4 * int(arguments[2])
            assert kernel.samples == kernel.threads * each, kernel.name


def test_what_fits_is_held() -> None:
    """One score more, or starts that may be misaligned, and the next kernel serves the call."""
    for width, name, following in ((4096, "Held4K", "Held8K"), (8192, "Held8K", "Held16K")):
        assert _plan.choose(64, width, 2048, H200).kernel == name
        assert _plan.choose(64, width + 1, 2048, H200).kernel == following
        assert _plan.choose(64, width - 3, 2048, H200, aligned=False).kernel == name
        assert _plan.choose(64, width - 2, 2048, H200, aligned=False).kernel == following
    assert not _plan.choose(64, 16385, 2048, H200).kernel.startswith("Held")


def fits(plan: Plan, limits: DeviceLimits) -> None:
    assert plan.kernel in _plan.KERNELS
    if plan.kernel in _plan.SEVERAL:
        assert plan.cluster in _plan.CLUSTER_SIZES
        assert limits.clusters[plan.cluster] > 0, "the device cannot run one such cluster"
    elif plan.kernel in _plan.SPREAD:
        assert plan.cluster > 1
        assert not any(limits.clusters), "clusters are faster"
        assert "kTickets = 4096;" in LAUNCH.with_name("args.h").read_text()  # rows that have a counter in a workspace
    else:
        assert plan.cluster == 1
    assert plan.margin > 0


@pytest.mark.parametrize("name", DEVICES)
def test_every_choice_can_be_launched(name: str) -> None:
    for rows, width, k in product(ROWS, WIDTHS, KS):
        fits(_plan.choose(rows, width, k, DEVICES[name]), DEVICES[name])


@given(sizes, st.sampled_from(sorted(DEVICES)))
def test_every_choice_can_be_launched_at_any_size(size: tuple[int, int, int], name: str) -> None:
    fits(_plan.choose(*size, DEVICES[name]), DEVICES[name])


def test_no_rows_have_a_choice_as_well() -> None:
    fits(_plan.choose(0, 4096, 512, H200), H200)


def test_a_single_long_row_is_shared_where_the_device_can() -> None:
    """Or the decode of one request would use one multiprocessor of 132."""
    assert _plan.choose(1, 131072, 2048, H200).cluster > 1
    assert _plan.choose(1, 131072, 2048, AMPERE).kernel == "Spread512"
    assert _plan.choose(1, 131072, 2048, AMPERE).cluster == 16


def test_many_rows_are_not() -> None:
    for width in WIDTHS:
        assert _plan.choose(4096, width, 2048, H200).cluster == 1


def test_the_choice_is_a_pure_function() -> None:
    """The same in another process, with other hash seeds: nothing but its arguments decides."""
    code = f"""
from dsa_topk._plan import DeviceLimits, choose
for rows in {ROWS}:
    for width in {WIDTHS}:
        print(choose(rows, width, 2048, {H200!r}))
"""
    here = [str(_plan.choose(rows, width, 2048, H200)) for rows, width in product(ROWS, WIDTHS)]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == here


def test_plans_are_values() -> None:
    plan = _plan.choose(1, 131072, 2048, H200)
    assert {plan: 1}[dataclasses.replace(plan)] == 1
    assert hash(H200) == hash(dataclasses.replace(H200))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.kernel = "Row128"  # type: ignore[misc]


def test_a_plan_says_what_it_is() -> None:
    for rows, width in product(ROWS, WIDTHS):
        plan = _plan.choose(rows, width, 2048, H200)
        assert plan.kernel in str(plan)
        assert ("cluster" in str(plan)) == (plan.cluster > 1)  # an H200 spreads no row
        assert "\n" not in str(plan)
