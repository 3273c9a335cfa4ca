"""The legacy fused top-k functions of the sgl_kernel package as a comparison backend.

PyPI has the package as sglang-kernel, until 0.3.21 as sgl-kernel; SGLang's name for the backend stayed ``sgl-kernel``.
Not canonical and not exact: order and ties are arbitrary, a coarse bin with more than 4096 candidates loses some, and
lengths, starts and tables must be valid because nothing clamps them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from dsa_topk._call import Call
from dsa_topk.backends import Capabilities

name = "sgl-kernel"
_K = 2048  # the only k of the packaged kernels

capabilities = Capabilities(
    dtypes=(torch.float32,),
    max_k=_K,
    tie_breaks=("smallest",),
    orders=("position",),
    canonical=False,
    returns_scores=False,
    device_types=("cuda",),
    note=f"k = {_K} and page size 1 only; order and ties arbitrary, set not exact when one coarse bin overflows",
)

_FUNCTIONS = {
    "positions": "fast_topk_v2",
    "ragged": "fast_topk_transform_ragged_fused",
    "paged": "fast_topk_transform_fused",
}
_rows_by: ContextVar[torch.Tensor | None] = ContextVar("dsa_topk_sgl_kernel_cu_seqlens_q", default=None)


@contextlib.contextmanager
def rows_by(cu_seqlens_q: torch.Tensor | None) -> Iterator[None]:
    """Say, for the PAGED calls inside, that ``row_to_batch`` is what these cumulative query lengths mean.

    The package maps rows to requests by cumulative lengths only; without them a call's table rows are gathered.
    """
    token = _rows_by.set(cu_seqlens_q)
    try:
        yield
    finally:
        _rows_by.reset(token)


@functools.cache
def unavailable() -> str | None:
    """Say why the package can't run here, without importing it."""
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        return "sgl-kernel is not installed (pip install sglang-kernel)"
    if not torch.cuda.is_available():
        return "sgl-kernel needs a CUDA device and torch sees none"
    return None


@functools.cache
def _module() -> Any:
    return importlib.import_module("sgl_kernel")


def refuses(call: Call) -> str | None:
    """Say what of ``call`` the package can't do."""
    reason = capabilities.refuses_call(call)
    if reason is not None:
        return reason
    if call.k != _K:
        return f"k = {call.k}; it serves {_K} only"
    if call.out_positions is not None:
        return "out_positions; it writes one output"
    if call.form == "paged":
        if call.page_size != 1:
            return f"page_size = {call.page_size}; it reads tables of page size 1 only"
        if call.page_table_starts is not None:
            return "page_table_starts; its table windows begin at entry 0"
    function = _FUNCTIONS[call.form]
    try:
        module = _module()
    except Exception as error:  # any failure of a third party's import is a reason, not ours to raise
        return f"sgl_kernel can't be imported ({type(error).__name__}: {error})"
    if not hasattr(module, function):
        return f"the installed sgl-kernel has no {function}"
    return None


def run(call: Call) -> None:
    """Fill ``call.out``."""
    out = call.out
    assert out is not None  # allocated by the api
    rows, width = call.scores.shape
    if rows == 0 or width == 0 or (call.page_table is not None and call.page_table.numel() == 0):
        out.fill_(-1)
        return
    function = getattr(_module(), _FUNCTIONS[call.form])
    device = call.scores.device
    lengths = _int32(call.lengths)
    if lengths is None:
        lengths = torch.full((rows,), width, dtype=torch.int32, device=device)
    starts = _int32(call.row_starts)
    if call.form == "positions":
        result = function(call.scores, lengths, call.k, row_starts=starts)
    elif call.form == "ragged":
        if starts is None:  # documented as optional only where no length exceeds k, which nobody here knows
            starts = torch.zeros_like(lengths)
        result = function(call.scores, lengths, _int32(call.out_offsets), call.k, row_starts=starts)
    else:
        table, cu_seqlens_q = _table_and_rows(call)
        result = function(call.scores, lengths, table, cu_seqlens_q, call.k, row_starts=starts)
    out.copy_(result)


def _table_and_rows(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    table = call.page_table
    assert table is not None  # a paged call has one
    rows = call.scores.shape[0]
    given = _rows_by.get()
    if call.row_to_batch is not None and given is not None:
        return table, given.to(torch.int32).contiguous()
    if call.row_to_batch is not None:
        table = table.index_select(0, call.row_to_batch.clamp(0, table.shape[0] - 1))
    return table[:rows], torch.arange(rows + 1, dtype=torch.int32, device=table.device)


def _int32(values: torch.Tensor | None) -> torch.Tensor | None:
    if values is None:
        return None
    if values.dtype is not torch.int32:
        values = values.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return values.contiguous()
