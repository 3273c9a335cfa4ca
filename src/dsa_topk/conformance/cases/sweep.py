"""Named distributions over row lengths, and named call shapes: what no report has broken yet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dsa_topk.testing import distributions, shapes

from ..problem import Problem
from .common import Case, Setting, Spec, wrap

# Lengths around the borders of known kernels: trivial, register, streaming, split rows.
_LENGTHS = (2047, 2048, 2049, 8192, 8193, 16384, 16385, 40000, 131072, 300000)


def _distribution(name: str, s: Setting) -> Iterator[Spec]:
    def make(length: int, form: str, dtype: torch.dtype) -> Problem:
        rows = s.pick(2, 34)
        scores = distributions.make(name, rows, length + 3, dtype=dtype, device=s.device, seed=length)
        starts = [(5 * i) % 4 for i in range(rows)] if form == "ragged" else None
        return wrap(scores, length, 2048, form, starts=starts, return_scores=form == "positions")

    for length in s.pick((2047, 2049, 8193, 40000), _LENGTHS):
        for form, dtype in (("paged", torch.float32), ("ragged", torch.float32), ("positions", torch.bfloat16)):
            kind = f"{form}, {str(dtype).removeprefix('torch.')}"
            yield Spec(name, kind, length, partial(make, length, form, dtype))


def _shape(name: str, s: Setting) -> Iterator[Spec]:
    def make(rows: int, width: int, k: int, page_size: int, dtype: torch.dtype) -> Problem:
        shape = shapes.make(name, rows=rows, width=width, k=k, page_size=page_size, device=s.device, index_dtype=dtype)
        scores = distributions.make("indexer", rows, width, device=s.device, seed=rows)
        return Problem("", shape, scores, return_positions=True, poison=True, graph=True)

    sizes = [(5, 5000, 512), (33, 3001, 2048), (1, 70000, 2048)]
    if not s.small:
        sizes += [(300, 20000, 1024), (64, 131072, 2048), (2000, 9001, 2048), (3, 1048576, 2048)]
    for rows, width, k in sizes:
        for page_size, dtype in ((64, torch.int32), (1, torch.int64)):
            kind = f"{rows} rows, k = {k}, pages of {page_size}"
            yield Spec(name, kind, width, partial(make, rows, width, k, page_size, dtype))


CASES = (
    *(Case(name, distributions.ABOUT[name], partial(_distribution, name)) for name in distributions.NAMES),
    *(Case(name, "the call shape of that name", partial(_shape, name)) for name in shapes.NAMES),
)
