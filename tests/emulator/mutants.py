"""Planted faults: each is a small change of a kernel source that the emulated tests must notice.

A mutant names the text it replaces; white space does not matter, so that formatting breaks no mutant. Text that is not
there (any more), or not exactly as often as said, is an error of the list and not a caught mutant.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted fault.

    ``old`` must occur exactly ``times`` times in ``file``; all of them are replaced. ``also`` are further (old, new)
    pairs of the same file, each found once. ``hint`` names the cases of the test that should notice (they run first).
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    times: int = 1
    also: tuple[tuple[str, str], ...] = ()
    hint: str = ""


class StaleMutant(RuntimeError):
    """The text that a mutant replaces is not in the source."""


def _replace(text: str, old: str, new: str, times: int, mutant: Mutant) -> str:
    pattern = re.compile(r"\s*".join(re.escape(c) for c in old if not c.isspace()))
    found = len(pattern.findall(text))
    if found != times:
        raise StaleMutant(f"mutant {mutant.name!r}: {old!r} occurs {found} times in {mutant.file}, expected {times}")
    return pattern.sub(lambda _: new.strip("\n"), text)


def plant(mutants: Sequence[Mutant], source: Path, target: Path) -> Path:
    """Copy the directory ``source`` to ``target`` with the faults of ``mutants`` in it; returns ``target``."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for mutant in mutants:
        path = target / mutant.file
        if not path.exists():
            raise StaleMutant(f"mutant {mutant.name!r}: there is no {mutant.file}")
        text = _replace(path.read_text(), mutant.old, mutant.new, mutant.times, mutant)
        for old, new in mutant.also:
            text = _replace(text, old, new, 1, mutant)
        path.write_text(text)
    return target


# Faults of the self-test kernels: that each is noticed proves the feature of the emulator which it breaks.
SELFTEST = (
    Mutant(
        "scan without its barrier",
        "selftest.cu.h",
        "  if (lane == 31) totals[warp] = v;\n  __syncthreads();\n",
        "  if (lane == 31) totals[warp] = v;\n",
        "a warp reads the totals of warps that have not written them",
        hint="compact",
    ),
    Mutant(
        "scan with one set of totals",
        "selftest.cu.h",
        "block_scan(keep, totals + (round & 1) * kWarps, all)",
        "block_scan(keep, totals, all)",
        "a fast warp overwrites totals that a slow one still reads: shows only where a warp runs ahead",
        hint="compact",
    ),
    Mutant(
        "scan leaves out a warp's total",
        "selftest.cu.h",
        "if (i < warp) v += totals[i];",
        "if (i + 1 < warp) v += totals[i];",
        "an off-by-one in the prefix",
        hint="compact",
    ),
    Mutant(
        "store past the row",
        "selftest.cu.h",
        "for (int i = base + t; i < a.n; i += kThreads) out[i] = -1;",
        "for (int i = base + t; i <= a.n; i += kThreads) out[i] = -1;",
        "one element behind the output",
        hint="compact",
    ),
    Mutant(
        "shared counter not cleared",
        "selftest.cu.h",
        "  if (threadIdx.x == 0) *part = 0;\n",
        "",
        "shared memory starts as garbage",
        hint="cluster_sum",
    ),
    Mutant(
        "cluster sum without waiting",
        "selftest.cu.h",
        "  cpu::cluster_arrive();\n  cpu::cluster_wait();\n  unsigned all = 0;",
        "  unsigned all = 0;",
        "reads what peers have not counted yet",
        hint="cluster_sum",
    ),
    Mutant(
        "block leaves while peers read it",
        "selftest.cu.h",
        "  cpu::cluster_arrive();  // nobody leaves while another reads\n",
        "",
        "distributed shared memory of an exited block",
        also=(("all);\n  cpu::cluster_wait();\n}\n\n// Sum of a row", "all);\n}\n\n// Sum of a row"),),
        hint="cluster_sum",
    ),
    Mutant(
        "tile read before it has arrived",
        "selftest.cu.h",
        "      while (!cpu::mbarrier_try_wait(full + s, static_cast<unsigned>(i / kStages) & 1)) {\n      }\n",
        "",
        "a bulk copy is asynchronous",
        hint="ring",
    ),
    Mutant(
        "wrong parity of the full barrier",
        "selftest.cu.h",
        "static_cast<unsigned>(i / kStages) & 1)) {",
        "static_cast<unsigned>(i / kStages + 1) & 1)) {",
        "passes at once in the first round, when nothing has arrived",
        hint="ring",
    ),
    Mutant(
        "ring stage reused while it is read",
        "selftest.cu.h",
        "        if (i >= kStages) cpu::mbarrier_wait(empty + s, static_cast<unsigned>(i / kStages - 1) & 1);\n",
        "",
        "the producer overwrites a tile that consumers still sum up",
        hint="ring",
    ),
    Mutant(
        "stage released by every lane",
        "selftest.cu.h",
        "if (threadIdx.x % 32 == 0) cpu::mbarrier_arrive(empty + s);",
        "cpu::mbarrier_arrive(empty + s);",
        "more arrivals than the barrier counts",
        hint="ring",
    ),
    Mutant(
        "stage released before the warp has read it",
        "selftest.cu.h",
        "      __syncwarp();\n      if (threadIdx.x % 32 == 0) cpu::mbarrier_arrive",
        "      if (threadIdx.x % 32 == 0) cpu::mbarrier_arrive",
        "one lane speaks for 32",
        hint="ring",
    ),
    Mutant(
        "too few bytes expected",
        "selftest.cu.h",
        "cpu::mbarrier_arrive_expect_tx(full + s, kTile * 4);",
        "cpu::mbarrier_arrive_expect_tx(full + s, kTile * 4 - 16);",
        "the phase never ends, or ends with bytes to come",
        hint="ring",
    ),
    Mutant(
        "named barrier for too many threads",
        "selftest.cu.h",
        "cpu::named_barrier(1, kThreads - 32);",
        "cpu::named_barrier(1, kThreads);",
        "waits for a warp that never comes",
        hint="ring",
    ),
    Mutant(
        "sending before the peer's barrier is ready",
        "selftest.cu.h",
        "  cpu::cluster_wait();  // the barriers of all blocks are ready\n",
        "",
        "arrives on an mbarrier that is not initialised",
        also=(("  cpu::cluster_arrive();\n  own[", "  own["),),
        hint="exchange",
    ),
    Mutant(
        "leaving before the copies have landed",
        "selftest.cu.h",
        "  cpu::cluster_arrive();\n  for (unsigned r = 0; r < size; ++r) a.out[",
        "  for (unsigned r = 0; r < size; ++r) a.out[",
        "a peer's copy still reads this block's memory",
        also=(("  cpu::cluster_wait();  // what this block sent has arrived everywhere\n", ""),),
        hint="exchange",
    ),
    Mutant(
        "counter read before the part is written",
        "selftest.cu.h",
        "    sums[part] = flag[1];\n    __threadfence();\n    flag[0] = atomicInc(counter, parts - 1) == parts - 1;\n",
        "    flag[0] = atomicInc(counter, parts - 1) == parts - 1;\n    sums[part] = flag[1];\n",
        "the last block to arrive sums up parts that are not there",
        hint="last_arriver",
    ),
    Mutant(
        "workspace counter not reset",
        "selftest.cu.h",
        "atomicInc(counter, parts - 1) == parts - 1;",
        "atomicAdd(counter, 1) == parts - 1;",
        "right once, wrong in every later launch",
        hint="last_arriver",
    ),
    Mutant(
        "read before the dependency wait",
        "selftest.cu.h",
        "  cpu::pdl_wait();\n",
        "",
        "the preceding launch has not written its results yet",
        hint="staged",
    ),
    Mutant(
        "staged word read before its copy has landed",
        "selftest.cu.h",
        "  cpu::cp_async_wait_group(0);\n",
        "",
        "cp.async is asynchronous",
        hint="staged",
    ),
    Mutant(
        "staged word of a neighbour read without a barrier",
        "selftest.cu.h",
        "  cpu::cp_async_wait_group(0);\n  __syncthreads();\n",
        "  cpu::cp_async_wait_group(0);\n",
        "a wait makes only the own copies visible",
        hint="staged",
    ),
    Mutant(
        "collective inside a branch",
        "selftest.cu.h",
        "  sum = __reduce_add_sync(~0u, sum);\n",
        "  if (sum != 0 && threadIdx.x != 77) sum = __reduce_add_sync(~0u, sum);\n",
        "lanes of the mask never arrive",
        hint="cluster_sum",
    ),
)
