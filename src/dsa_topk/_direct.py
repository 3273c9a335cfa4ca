"""The short way of the usual eager call to the kernels: one test and one launch, with nothing made in between.

Engines call once a layer and step, and on the host a launch costs no more than forty reads of a tensor's attributes. So
what ``check``, the registry and the cuda backend do in turn for any call is done here at once for the plain ones: CUDA
tensors, an ``out``, no other output. All other calls, right or wrong, are left to them.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from dsa_topk import _validate
from dsa_topk._call import Form, Order, TieBreak
from dsa_topk._checks import check_usual

_CUDA = "dsa_topk.backends.cuda"


def launched(
    form: Form,
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    row_starts: Tensor | None,
    order: Order,
    tie_break: TieBreak,
    out: Tensor,
    return_scores: bool,
    validate: bool,
    backend: str,
    out_positions: Tensor | None = None,
    out_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_batch: Tensor | None = None,
    page_table_starts: Tensor | None = None,
) -> bool:
    """Serve a usual call, and say whether it was one; if not, nothing was done. For calls that need no operator."""
    cuda: Any = sys.modules.get(_CUDA)  # the first call loads it
    if (
        cuda is None
        or not scores.is_cuda
        or out_positions is not None
        or return_scores is not False
        or validate is not False
        or _validate.KEY in _validate.ENVIRON
        or (backend != "auto" and backend != "cuda")
    ):
        return False
    geometry = check_usual(
        form,
        scores,
        lengths,
        k,
        row_starts,
        out_offsets,
        page_table,
        page_size,
        row_to_batch,
        page_table_starts,
        order,
        tie_break,
        out,
    )
    if geometry is None:
        return False
    rows, width, row_stride, address = geometry
    done: bool = cuda.launch(
        scores,
        rows,
        width,
        row_stride,
        address,
        lengths,
        row_starts,
        out_offsets,
        page_table,
        row_to_batch,
        page_table_starts,
        out,
        None,
        None,
        k,
        form,
        page_size,
        tie_break,
        order,
    )
    return done
