"""What runs under compute-sanitizer: every kernel on every path, in each form and type, once, on small inputs.

    python tools/sanitize_driver.py            # prints a line of JSON; exit code 0 when every result was right
    python tools/sanitize_driver.py --brief    # float32 only, each plan in one form: for racecheck, which is slow

Inputs are made and results are checked on the CPU, so that nearly all that the tool instruments is our own kernels.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch

from dsa_topk import _plan
from dsa_topk.backends import cuda
from dsa_topk.testing import CallShape, distributions, shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("mixed", "ragged", "chunked")  # positions, ragged, paged
WIDTH, K = 4500, 300
# A row each; with the lengths below they take the paths of csrc/args.h: trivial, fast, plateau, exact, counted (nothing
# but NaN). The second try comes with a bracket of no width.
ROWS = ("normal", "normal", "plateau", "normal", "infinities", "all_nan", "fp16_bin")
LENGTHS = (K - 1, WIDTH, WIDTH, 200, WIDTH, WIDTH, WIDTH)
CLUSTERS = (2, 3, 16)


def plans() -> Iterator[_plan.Plan]:
    """Each kernel, with its usual bracket and with one of no width; cluster kernels with a few sizes."""
    limits = cuda._load(torch.cuda.current_device())[1]
    usual = _plan.choose(len(ROWS), WIDTH, K, limits)
    for kernel in _plan.KERNELS:
        sizes = [size for size in CLUSTERS if limits.clusters[size] > 0] if kernel.startswith("Cluster") else [1]
        for size in sizes:
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


def run(shape: CallShape, scores: torch.Tensor, order: str, tie_break: str) -> str | None:
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


def main() -> int:
    """Run everything: 0 if all results are right and every path was taken."""
    problems, launches = [], 0
    brief = "--brief" in sys.argv[1:]
    with cuda.count_paths() as counts:
        for dtype in DTYPES[:1] if brief else DTYPES:
            for number, form in enumerate(FORMS):
                for k in (K, 37):  # the smaller one also for the short window, which is then no trivial row
                    shape, scores = case(form, dtype, k)
                    for turn, plan in enumerate(plans()):
                        if (
                            brief and turn // 2 % len(FORMS) != number
                        ):  # a plan and its twin without width stay together
                            continue
                        order = "score" if (turn + number) % 6 == 0 else "position"
                        tie_break = "largest" if turn % 2 else "smallest"
                        with cuda.use_plan(plan):
                            wrong = run(shape, scores, order, tie_break)
                        launches += 1
                        if wrong:
                            problems.append(f"{form} {dtype} k={k} {plan} {order} {tie_break}: {wrong}")
    paths = dict(zip(cuda.PATHS, counts.tolist(), strict=True))
    problems += [f"no row took the path {path!r}" for path, count in paths.items() if count == 0]
    print(json.dumps({"launches": launches, "paths": paths, "problems": problems[:10]}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
