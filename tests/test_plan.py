"""The launch choice (src/dsa_topk/_plan.py): a pure function that names kernels which exist and clusters which fit."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_topk import _plan
from dsa_topk._plan import DeviceLimits, Plan

LAUNCH = Path(_plan.__file__).with_name("csrc") / "launch.h"

# Made-up limits in the shape of devices: large clusters are scarce, missing, or end with the portable 8; or none exist.
H200 = DeviceLimits(132, 232448, (0, 0, 66, 44, 33, 24, 22, 18, 16, 14, 12, 12, 11, 10, 9, 8, 8))
MEASURED = dataclasses.replace(H200, clusters=(0, 0, 66, 42, 32, 24, 20, 16, 16, 8, 8, 8, 8, 7, 7, 7, 6))
AMPERE = DeviceLimits(108, 166912, longest_held=16384)
SMALL = DeviceLimits(20, 101376, (0, 0, 10, 6, 5, 4, 3, 2, 2, *([0] * 8)), longest_held=16384)
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
        flags = {"Row": [], "Filter": arguments[4:5], "Split": arguments[4:], "Resident": []}[kind]
        assert [kernel.several, kernel.spread] == [flag == "true" for flag in [*flags, "", ""][:2]], kernel.name
        if kind == "Resident":
            assert kernel.samples == 0
            assert kernel.room == kernel.threads * int(arguments[1])
        else:
            each = int(arguments[1]) if kind in ("Row", "Filter") else 4 * int(arguments[2])
            assert kernel.samples == kernel.threads * each, kernel.name


def test_what_fits_is_held() -> None:
    """One score more, or starts that may be misaligned, and the next kernel serves the call."""
    for width, name, following in ((4096, "Held4K", "Held8K"), (8192, "Held8K", "Held16K")):
        assert _plan.choose(64, width, 2048, H200).kernel == name
        assert _plan.choose(64, width + 1, 2048, H200).kernel == following
        assert _plan.choose(64, width - 3, 2048, H200, aligned=False).kernel == name
        assert _plan.choose(64, width - 2, 2048, H200, aligned=False).kernel == following
    assert _plan.choose(64, 16384, 2048, H200).kernel == "Held16K"
    for more in (16385, 32768):  # two blocks a row are no match for one that holds it
        assert _plan.choose(64, more, 2048, H200).kernel == "Held32K"
        assert _plan.choose(64, more, 2048, AMPERE).kernel == "Whole1024"  # it would spill
    assert _plan.choose(64, 32765, 2048, H200, aligned=False).kernel == "Held32K"
    assert not _plan.choose(64, 32766, 2048, H200, aligned=False).kernel.startswith("Held")
    assert not _plan.choose(64, 32769, 2048, H200).kernel.startswith("Held")
    for kernel in _plan._TABLE:
        if kernel.samples == 0:
            assert _plan.choose(64, kernel.room, 2048, H200).kernel.startswith("Held")
            assert _plan.choose(64, kernel.room, 2048, AMPERE).kernel.startswith("Held") == (kernel.room <= 16384)


@pytest.mark.parametrize(
    ("rows", "kernel", "blocks"),
    [(1, "Split512", 8), (16, "Split512", 8), (32, "Held32K", 1), (64, "Held32K", 1), (128, "Held32K", 1)],
)
def test_32768_scores_are_held_unless_they_have_five_blocks(rows: int, kernel: str, blocks: int) -> None:
    plan = _plan.choose(rows, 32768, 2048, MEASURED)
    assert (plan.kernel, plan.cluster) == (kernel, blocks)


def test_32768_scores_are_not_held_where_rows_share_an_sm() -> None:
    assert _plan.choose(132, 32768, 2048, MEASURED).kernel == "Held32K"
    for rows in (133, 256):
        assert _plan.choose(rows, 32768, 2048, MEASURED).kernel == "Whole512"
        assert _plan.choose(rows, 32768, 2048, AMPERE).kernel == "Whole512"


def test_very_long_rows_of_a_few_go_over_the_whole_device() -> None:
    """At least eight blocks each, and rows so long that a cluster's 16 take longer to read one; else clusters."""
    for rows, blocks in ((1, 128), (2, 66), (8, 16), (16, 8)):
        plan = _plan.choose(rows, 1 << 20, 2048, MEASURED)
        assert (plan.kernel, plan.cluster) == ("Spread512", blocks)
    assert _plan.choose(17, 1 << 20, 2048, MEASURED).kernel != "Spread512"
    assert _plan.choose(1, 786432, 2048, MEASURED).kernel == "Spread512"
    for rows in (1, 8, 16, 64):
        for width in (524288, 786431):
            assert _plan.choose(rows, width, 2048, MEASURED).kernel != "Spread512"


@pytest.mark.parametrize(
    ("rows", "width", "element_bytes", "kernel", "margin", "prefetch"),
    [
        (1024, 8192, 4, "Row128", 2.9, -8192),
        (1024, 16384, 4, "Row128Deep", 4.0, -16384),
        (1024, 32768, 4, "Row256Light", 4.0, -32768),
        (1024, 65536, 4, "Row256", 4.0, -32768),
        (1024, 131072, 4, "Row512", 4.0, -65536),
        (1024, 32768, 2, "Row128Deep", 2.9, -12288),
        (1024, 65536, 2, "Row256", 4.0, -32768),
        (1024, 131072, 2, "Row256", 3.2, -32768),
        (2048, 32768, 4, "Row256Light", 2.9, 16384),
        (4096, 8192, 4, "Row128", 2.9, 8192),
        (4096, 32768, 4, "Row128Deep", 2.6, 16384),
        (4096, 65536, 4, "Row256Light", 2.9, 65536),
        (4096, 131072, 4, "Row256", 2.9, 32768),
        (4096, 32768, 2, "Row128Deep", 2.9, 16384),
        (4096, 65536, 2, "Row256", 2.9, 65536),
    ],
)
def test_rows_that_fill_the_device(
    rows: int, width: int, element_bytes: int, kernel: str, margin: float, prefetch: int
) -> None:
    """As docs/kernel-notes.md measured them."""
    plan = _plan.choose(rows, width, 2048, H200, element_bytes=element_bytes)
    assert plan == Plan(kernel, 1, margin, prefetch)


def test_the_sample_of_long_rows_is_that_of_the_sources() -> None:
    found = re.search(r"kLongRow = (\d+);", LAUNCH.with_name("bracket.cuh").read_text())
    assert found is not None
    assert int(found[1]) == _plan._LONG_ROW


def region_cap(blocks: int) -> int:
    """As many scores as one block of a cluster can send, from the sources."""
    found = re.search(r"a\.region_cap = C::kMulti \? \((.*)\) : 0;", LAUNCH.read_text().split("split_shape(")[1])
    assert found is not None
    *steps, least = re.split(r" : ", found[1])
    for step in steps:
        above, cap = re.fullmatch(r"cluster > (\d+) \? (\d+)", step).groups()  # type: ignore[union-attr]
        if blocks > int(above):
            return int(cap)
    return int(least)


def room_of(plan: Plan, width: int, k: int) -> float:
    """How many scores the lists of a plan's kernel hold, if a row's best are spread evenly."""
    if plan.kernel == "Split512":
        return plan.cluster * region_cap(plan.cluster)
    return _plan._BY_NAME[plan.kernel].room


def split_bytes(blocks: int) -> int:
    """Shared memory of a split kernel's block (csrc/lists.cuh, csrc/launch.h): what it needs for the k-th score, pages,
    its own list, and those of a cluster's blocks."""
    text = LAUNCH.with_name("lists.cuh").read_text()
    entries = re.search(r"kEntries = Multi \? (\d+) : (\d+);", text)
    pages = re.search(r"kPages = (\d+);", text)
    assert entries is not None
    assert pages is not None
    own = 9536 + 48 + 4 * int(pages[1]) + 8 * int(entries[1 if blocks > 1 else 2]) + 16
    return own + (blocks * 4 * (region_cap(blocks) + 4) if blocks > 1 else 0)


def test_lists_fit_the_shared_memory_of_devices() -> None:
    """Else a launch fails; or, of clusters, the probe of a device finds that it has none."""
    assert split_bytes(1) <= 101376  # the smallest of the supported devices
    for blocks in _plan.CLUSTER_SIZES:
        assert split_bytes(blocks) <= H200.smem_per_block
    assert split_bytes(2) <= SMALL.smem_per_block


@pytest.mark.parametrize("name", ["measured", "h200", "ampere", "portable", "small"])
def test_what_is_listed_fits_the_chosen_kernels_lists(name: str) -> None:
    """A full list is exact too, but an order of magnitude slower."""
    limits = {**DEVICES, "measured": MEASURED}[name]
    held = {kernel.name for kernel in _plan._TABLE if kernel.samples == 0}
    seen = set()
    widths = (*WIDTHS, 16385, 40000, 98303, 98304, 200_000, 524_288, 786_431, 786_432, 1 << 21, 1 << 23)
    for rows, width, k in product((*ROWS, 66, 96, 128, 256), widths, (*KS, 3000, 4096, 6000)):
        plan = _plan.choose(rows, width, k, limits)
        if plan.kernel in held:
            assert width <= room_of(plan, width, k), (plan, rows, width)
        elif plan.kernel.startswith(("Split", "Spread", "Whole")):
            listed = _plan.most_listed(width, k, _plan._BY_NAME[plan.kernel].samples, plan.margin)
            assert listed <= room_of(plan, width, k), (plan, rows, width, k)
            if plan.kernel == "Spread512":
                assert listed / plan.cluster <= 0.9 * 4096, (plan, rows, width, k)  # launch.h, kSpreadCap
            seen.add(plan.kernel)
    assert seen >= ({"Split512"} if any(limits.clusters) else {"Whole512", "Whole1024", "Spread512"})


def test_what_is_listed_is_about_what_a_sample_lists() -> None:
    """`most_listed` against a thousand sampled rows: none lists more, and none less than a quarter of it."""
    generator = np.random.default_rng(1)
    for width, k, samples in ((32768, 2048, 4096), (131072, 2048, 4096), (1 << 20, 2048, 8192), (65536, 600, 2048)):
        drawn = samples if width >= 98304 else 2048
        share, margin = k / width, 4.5
        rank = int(drawn * share + margin * math.sqrt(drawn * share * (1 - share)) + 2)
        # the rank-th of `drawn` uniform numbers
        listed = width * generator.beta(rank, drawn - rank + 1, size=1000)
        most = _plan.most_listed(width, k, samples, margin)
        assert listed.max() <= most
        assert listed.min() >= most / 4


def fits(plan: Plan, limits: DeviceLimits, width: int = 0) -> None:
    assert plan.kernel in _plan.KERNELS
    if plan.kernel in _plan.SEVERAL:
        assert plan.cluster in _plan.CLUSTER_SIZES
        assert limits.clusters[plan.cluster] > 0, "the device cannot run one such cluster"
    elif plan.kernel in _plan.SPREAD:
        assert plan.cluster > 1
        assert plan.cluster <= limits.sms
        if any(limits.clusters):
            assert width >= 786432, "clusters are faster"
            assert plan.cluster >= 8, "clusters are faster"
        assert "kTickets = 4096;" in LAUNCH.with_name("args.h").read_text()  # rows that have a counter in a workspace
    else:
        assert plan.cluster == 1
    assert plan.margin > 0


@pytest.mark.parametrize("name", DEVICES)
def test_every_choice_can_be_launched(name: str) -> None:
    for rows, width, k in product(ROWS, WIDTHS, KS):
        fits(_plan.choose(rows, width, k, DEVICES[name]), DEVICES[name], width)


@given(sizes, st.sampled_from(sorted(DEVICES)))
def test_every_choice_can_be_launched_at_any_size(size: tuple[int, int, int], name: str) -> None:
    fits(_plan.choose(*size, DEVICES[name]), DEVICES[name], size[1])


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
        assert ("cluster" in str(plan)) == (plan.kernel in _plan.SEVERAL)
        assert ("workspace" in str(plan)) == (plan.kernel in _plan.SPREAD)
        assert "\n" not in str(plan)
