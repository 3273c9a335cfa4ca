"""The self-test kernels as one check each, shared by the shim's own tests and by its mutants."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .process import Buffer, Options, Process, Stats


class Args(ctypes.Structure):
    """Same layout as selftest::Args."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input", "out", "workspace")),
        *((name, ctypes.c_int) for name in ("n", "rows", "threshold", "extra")),
    ]


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small random integers."""
    return torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def run(
    process: Process,
    entry: str,
    given: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    *,
    rows: int = 1,
    threshold: int = 0,
    extra: int = 1,
    options: Options | None = None,
) -> Stats:
    """One launch of a self-test kernel."""
    a = Args(n=given.shape[-1], rows=rows, threshold=threshold, extra=extra)
    buffers = [Buffer(Args.input.offset, given), Buffer(Args.out.offset, out, "w")]
    if workspace is not None:
        buffers.append(Buffer(Args.workspace.offset, workspace, "k", keep=1))
    return process.launch(entry, bytes(a), buffers, options)


def compact(p: Process, o: Options) -> bool:
    """Ordered compaction: block scan, two sets of warp totals."""
    x = ints(2, 700, seed=o.seed)
    out = torch.empty_like(x)
    run(p, "compact", x, out, rows=2, threshold=300, options=o)
    ok = True
    for r in range(2):
        want = torch.full((700,), -1, dtype=torch.int32)
        kept = (x[r] >= 300).nonzero().flatten().int()
        want[: len(kept)] = kept
        ok &= torch.equal(out[r], want)
    return ok


def cluster_sum(p: Process, o: Options) -> bool:
    """Blocks of a cluster read each other's shared memory; sizes that are no powers of two."""
    x, size = ints(3, 1000, seed=o.seed), (1, 3, 4)[o.seed % 3]
    out = torch.empty(3, size, dtype=torch.int32)
    run(p, "cluster_sum", x, out, rows=3, extra=size, options=o)
    return torch.equal(out, x.sum(1, dtype=torch.int32)[:, None].expand(3, size))


def ring(p: Process, o: Options) -> bool:
    """Bulk copies into a ring of stages, mbarriers both ways."""
    x = ints(2, (1, 2, 3, 4, 7, 20)[o.seed % 6] * 64, seed=o.seed)
    out = torch.empty(2, dtype=torch.int32)
    run(p, "ring", x, out, rows=2, options=o)
    return torch.equal(out, x.sum(1, dtype=torch.int32))


def exchange(p: Process, o: Options) -> bool:
    """Bulk copies from every block of a cluster to every other."""
    size = 5
    x = ints(2 * size, 32, seed=o.seed)
    out = torch.empty(2 * size * size * 32, dtype=torch.int32)
    run(p, "exchange", x, out, rows=2, extra=size, options=o)
    return torch.equal(out.view(2, size, size, 32), x.view(2, 1, size, 32).expand(2, size, size, 32))


def last_arriver(p: Process, o: Options) -> bool:
    """A sum over several blocks through a workspace that resets itself; the workspace stays between launches."""
    rows, parts = 3, 6
    x = ints(rows, 2000, seed=o.seed)
    out = torch.empty(rows, dtype=torch.int32)
    workspace = torch.zeros(rows + rows * parts, dtype=torch.int32)
    run(p, "last_arriver", x, out, workspace, rows=rows, extra=parts, options=o)
    return torch.equal(out, x.sum(1, dtype=torch.int32)) and bool((workspace[:rows] == 0).all())


def staged(p: Process, o: Options) -> bool:
    """cp.async, and the wait for the preceding launch."""
    x = ints(2, 128, seed=o.seed)
    out = torch.empty_like(x)
    o.pdl = o.seed % 2 == 1
    run(p, "staged", x, out, rows=2, options=o)
    return torch.equal(out, x.roll(-1, 1))


CASES: dict[str, Callable[[Process, Options], bool]] = {
    f.__name__: f for f in (compact, cluster_sum, ring, exchange, last_arriver, staged)
}
