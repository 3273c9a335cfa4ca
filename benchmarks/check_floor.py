"""Shows that our floor kernel is as fast as a second, independently written one, within 3%. Needs a GPU.

The second source is not in the repository: tools/peers/build.sh floor makes floors.so of it where it is at hand.

usage: python benchmarks/check_floor.py [OUT.json]        exit 0: equal on every shape, 1: not
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dsa_topk.bench import inputs, peers
from dsa_topk.bench.cases import Case
from dsa_topk.bench.floor import Floor, Grid, grids
from dsa_topk.bench.timing import GraphTimer, Plan

TOLERANCE = 0.03
# Small, middling and large, aligned and not: where a difference of the two kernels could show.
SHAPES = (
    Case("decode", 1, 8192),
    Case("decode", 16, 65536),
    Case("decode", 64, 131072),
    Case("decode", 256, 262144),
    Case("mixed", 64, 131072),
    Case("ragged", 1024, 8192),
    Case("ragged", 4096, 32768),
    Case("ragged", 8192, 65536),
)


def their_read() -> Callable[..., int]:
    """The reference floor kernel, from the object that tools/peers/build.sh made."""
    for folder in peers.folders():
        if (path := folder / "floors.so").exists():
            read = ctypes.CDLL(str(path)).f_read
            pointer, integer = ctypes.c_void_p, ctypes.c_int
            read.argtypes = [pointer, ctypes.c_int64, pointer, pointer, *[integer] * 5, pointer, pointer]
            return read
    sys.exit("floors.so not found: run tools/peers/build.sh floor")


def call_on(read: Callable[[torch.Tensor, Grid], None], buffers: list[torch.Tensor], grid: Grid, buffer: int) -> None:
    """One read of one buffer."""
    read(buffers[buffer], grid)


def main() -> int:
    """Compare on every shape, print, return the exit code."""
    device = torch.device("cuda", torch.cuda.current_device())
    floor, read = Floor(device), their_read()
    timer, pool = GraphTimer(device, floor.flush), inputs.ScorePool(device)
    sink = torch.empty(1 << 20, device=device)
    ratios = []
    results: list[dict[str, object]] = []
    for case in SHAPES:
        problem = inputs.make(case, device)
        buffers, flush = pool.buffers(case)

        def theirs(scores: torch.Tensor, grid: Grid, problem: inputs.Problem = problem, case: Case = case) -> None:
            starts = 0 if problem.row_starts is None else problem.row_starts.data_ptr()
            stream = torch.cuda.current_stream().cuda_stream
            shape = (0, case.rows, grid.splits, grid.threads, grid.unroll)
            where = (scores.data_ptr(), case.columns, starts, problem.lengths.data_ptr())
            assert read(*where, *shape, sink.data_ptr(), stream) == 0

        # Both over the same launch shapes, then the best of each in turns with the other.
        calls: dict[tuple[str, Grid], Callable[[int], object]] = {}
        for grid in grids(case, floor.multiprocessors):
            calls["ours", grid] = partial(call_on, partial(floor.read, problem), buffers, grid)
            calls["theirs", grid] = partial(call_on, theirs, buffers, grid)
        named = {f"{who} {grid}": call for (who, grid), call in calls.items()}
        first = timer.measure(named, Plan(len(buffers), flush, reps=3, graph_us=500))
        best = {
            who: min((n for n in named if n.startswith(who)), key=lambda n: first[n].us) for who in ("ours", "theirs")
        }
        last = timer.measure({who: named[name] for who, name in best.items()}, Plan(len(buffers), flush, reps=15))
        ours, reference = last["ours"].us, last["theirs"].us
        ratios.append(ours / reference)
        results.append({"case": case.label(), "ours_us": ours, "reference_us": reference, "ratio": ours / reference})
        print(
            f"{case.label()}: ours {ours:.2f} us, reference {reference:.2f} us, ratio {ours / reference:.3f}",
            flush=True,
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(abs(ratio - 1) <= TOLERANCE for ratio in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
