"""What runs under compute-sanitizer: launches of our kernels on small inputs, in groups (tools/sanitize.py).

    python tools/sanitize_driver.py                # "all": every kernel on every path, in each form and type
    python tools/sanitize_driver.py clusters-2     # one of GROUPS

``hostile`` makes the calls of tests/hostile/. The other groups are for racecheck, which is slow: float32, one launch
for each kernel and kind of row. Prints a line before each launch and a line of JSON at the end; exit code 0 when every
result was right. Inputs are made and results are checked on the CPU, so that nearly all that the tool instruments is
our own kernels.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dsa_topk import _plan
from dsa_topk.backends import cuda
from dsa_topk.testing import CallShape, distributions, shapes

CLUSTERS = (2, 3, 16)
GROUPS = (
    *("all", "hostile", "rows", "resident", "whole", "spread", "order"),
    *(f"{kind}-{size}" for kind in ("clusters", "split") for size in CLUSTERS),
)
# Groups of racecheck by what the names of their kernels begin with.
FAMILIES = {
    "rows": "Row",
    "resident": "Held",
    "whole": "Whole",
    "spread": "Spread",
    "clusters": "Cluster",
    "split": "Split",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("mixed", "ragged", "chunked")  # positions, ragged, paged
WIDTH, K = 4500, 300
# A row each; with the lengths below they take the paths of csrc/args.h: trivial, fast, plateau, exact, counted (nothing
# but NaN). The second try comes with a bracket of no width.
ROWS = ("normal", "normal", "plateau", "normal", "infinities", "all_nan", "fp16_bin")
LENGTHS = (K - 1, WIDTH, WIDTH, 200, WIDTH, WIDTH, WIDTH)
# Kinds of rows for racecheck, by the path they take: distribution, length, k, and whether the bracket has no width.
KINDS = {
    "fast": ("normal", WIDTH, K, False),
    "second try": ("normal", WIDTH, K, True),
    "plateau": ("plateau", WIDTH, K, False),
    "exact": ("normal", 200, 37, False),
}
NARROW = 3000  # for kernels that hold a row of up to 4096 scores
# Blocks of a cluster that racecheck takes long for: there only the fast path, which is quick, gets rows of full width.
MANY_BLOCKS, SHORT = 9, 600


class Run:
    """Counts launches, collects what is wrong."""

    def __init__(self) -> None:
        self.launches = 0
        self.problems: list[str] = []

    def launch(
        self, about: str, plan: _plan.Plan | None, shape: CallShape, scores: torch.Tensor, order: str, tie_break: str
    ) -> None:
        """One call; without a plan, by the backend's choice."""
        self.launches += 1
        print(f"launch {self.launches}: {about}", flush=True)
        if plan is None:
            wrong = select(shape, scores, order, tie_break)
        else:
            with cuda.use_plan(plan):
                wrong = select(shape, scores, order, tie_break)
        if wrong:
            self.problems.append(f"{about}: {wrong}")


def limits() -> _plan.DeviceLimits:
    """What the device can do, as the backend has probed it."""
    return cuda._load(torch.cuda.current_device())[1]


def plans() -> Iterator[_plan.Plan]:
    """Each kernel, with its usual bracket and with one of no width; cluster kernels with a few sizes."""
    usual = _plan.choose(len(ROWS), WIDTH, K, limits())
    for kernel in _plan.KERNELS:
        several = [size for size in CLUSTERS if limits().clusters[size] > 0]
        for size in several if kernel in _plan.SEVERAL else [5 if kernel in _plan.SPREAD else 1]:
            for margin in (usual.margin, 0.0):
                yield dataclasses.replace(usual, kernel=kernel, cluster=size, margin=margin)


def case(form: str, dtype: torch.dtype, k: int) -> tuple[CallShape, torch.Tensor]:
    """A call on the CPU: the form's own tables and starts, lengths that reach every path."""
    shape = shapes.make(form, rows=len(ROWS), width=WIDTH, k=k, page_size=48)
    scores = torch.cat(
        [distributions.make(name, 1, WIDTH, dtype=dtype, seed=row, k=k) for row, name in enumerate(ROWS)]
    )
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    if form == "mixed":
        shape.lengths, shape.row_starts = lengths, torch.arange(len(ROWS), dtype=torch.int32)
    elif shape.lengths is not None:
        shape.lengths = torch.minimum(shape.lengths, lengths)
    return shape, scores


def kind_case(kind: str, width: int) -> tuple[CallShape, torch.Tensor]:
    """A call on the CPU with a few rows of one kind; with more of those that a bracket of no width may yet hold."""
    name, length, k, no_width = KINDS[kind]
    rows = 6 if no_width and width > SHORT else 2
    scores = distributions.make(name, rows, width, k=k)
    lengths = torch.full((rows,), min(length, width), dtype=torch.int32)
    return CallShape(kind, "positions", rows, width, k, lengths=lengths), scores


def select(shape: CallShape, scores: torch.Tensor, order: str, tie_break: str) -> str | None:
    """Launch one call; what is wrong with its result, or None."""
    on_gpu, on_gpu_scores = shape.to("cuda"), scores.to("cuda")
    size = (shape.rows, shape.k)
    out = torch.full(size, -7, dtype=torch.int32).to("cuda")
    extra = {"out_positions": torch.full(size, -7, dtype=torch.int32).to("cuda")} if shape.form != "positions" else {}
    indices, returned = on_gpu.call(
        on_gpu_scores, order=order, tie_break=tie_break, out=out, return_scores=True, backend="cuda", **extra
    )
    positions = extra["out_positions"].cpu() if extra else None
    verdict = shape.check(
        scores,
        indices.cpu(),
        order=order,
        tie_break=tie_break,
        positions=positions,
        returned_scores=returned.cpu(),
    )
    return None if verdict.ok else verdict.reason


def run_all(run: Run) -> None:
    """Every kernel, form and type, with rows of all kinds in each call."""
    for dtype in DTYPES:
        for number, form in enumerate(FORMS):
            for k in (K, 37):  # the smaller one also for the short window, which is then no trivial row
                shape, scores = case(form, dtype, k)
                for turn, plan in enumerate(plans()):
                    order = "score" if (turn + number) % 6 == 0 else "position"
                    tie_break = "largest" if turn % 2 else "smallest"
                    run.launch(
                        f"{form} {dtype} k={k} {plan} {order} {tie_break}", plan, shape, scores, order, tie_break
                    )


def run_kinds(run: Run, plans: Sequence[_plan.Plan], width: int = WIDTH) -> None:
    """Each plan once for each kind of row."""
    for plan in plans:
        for kind, (_, _, _, no_width) in KINDS.items():
            columns = SHORT if plan.cluster >= MANY_BLOCKS and kind != "fast" else width
            shape, scores = kind_case(kind, columns)
            used = dataclasses.replace(plan, margin=0.0) if no_width else plan
            run.launch(f"{kind}, {columns} columns, {used}", used, shape, scores, "position", "smallest")


def run_order(run: Run) -> None:
    """The second launch of order="score": both tie rules, k below and at its largest."""
    for k in (K, 8192):
        for name, tie_break in (("normal", "smallest"), ("half_zeros", "largest")):
            shape = CallShape("order", "positions", 2, WIDTH, k, lengths=torch.tensor([WIDTH, 200], dtype=torch.int32))
            scores = distributions.make(name, 2, WIDTH, k=k)
            run.launch(f"order by score, k={k}, {name}, {tie_break}", None, shape, scores, "score", tie_break)


def run_hostile(run: Run) -> None:
    """The calls of tests/hostile/."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    hostile = importlib.import_module("hostile")
    for about, attempt in hostile.everything("cuda", "cuda"):
        run.launches += 1
        print(f"launch {run.launches}: {about}", flush=True)
        if wrong := attempt():
            run.problems.append(f"{about}: {wrong}")


def run_group(group: str, run: Run) -> str | None:
    """Make the launches of a group; why there are none, or None."""
    usual = dataclasses.replace(_plan.choose(1, WIDTH, K, limits()), cluster=1)
    if group == "all":
        run_all(run)
    elif group == "hostile":
        run_hostile(run)
    elif group == "order":
        run_order(run)
    else:
        family, _, size = group.partition("-")
        kernels = [kernel for kernel in _plan.KERNELS if kernel.startswith(FAMILIES[family])]
        if size and limits().clusters[int(size)] == 0:
            return f"the device runs no clusters of {size} blocks"
        blocks = int(size) if size else 5 if family == "spread" else 1
        used = [dataclasses.replace(usual, kernel=kernel, cluster=blocks) for kernel in kernels]
        for width in (NARROW, WIDTH) if family == "resident" else (WIDTH,):
            run_kinds(run, used, width)
    return None


def expected_paths(group: str) -> Sequence[str]:
    """The paths that rows of a group must have taken, or the group tests less than it says."""
    if group == "all":
        return cuda.PATHS
    return tuple(KINDS) if group == "rows" or group.startswith("clusters") else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a group: 0 if all results are right and every path was taken."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    group = given[0] if given else "all"
    if group not in GROUPS or len(given) > 1:
        print(f"sanitize_driver: expected one of {', '.join(GROUPS)}, got {' '.join(given)}", file=sys.stderr)
        return 2
    run = Run()
    with cuda.count_paths() as counts:
        absent = run_group(group, run)
    paths = dict(zip(cuda.PATHS, counts.tolist(), strict=True))
    problems = list(run.problems)
    if absent is None:
        problems += [f"no row took the path {path!r}" for path in expected_paths(group) if paths[path] == 0]
    report = {"launches": run.launches, "paths": paths, "problems": problems[:10], "absent": absent}
    print(json.dumps(report))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
