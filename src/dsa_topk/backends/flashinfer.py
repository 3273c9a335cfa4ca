"""FlashInfer's fused top-k transforms as a comparison backend, through its public Python functions.

Feature-detected once from their signatures, so that an installed version that lacks an argument is refused with the
version needed instead of failing inside a call. Not canonical: the order inside a row, NaN and signed zeros follow
FlashInfer, and lengths, starts and tables must be valid because nothing clamps them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dsa_topk._call import Call
from dsa_topk.backends import Capabilities

name = "flashinfer"
capabilities = Capabilities(
    max_k=2048,  # the graph-safe route of its own kernels ends there; newer versions may go on with CUB's
    orders=("position",),
    canonical=False,
    returns_scores=False,
    device_types=("cuda",),
    note="exact set for valid finite input; order inside a row, NaN and signed zeros as FlashInfer has them",
)

_PAGED, _RAGGED = "top_k_page_table_transform", "top_k_ragged_transform"
# First release whose wheel has each argument (of 0.6.0, 0.6.4, 0.6.7 to 0.6.13, 0.6.15 to 0.6.17 and 0.7.0 to 0.7.4).
_FUSED = {"deterministic": "0.6.8", "tie_break": "0.6.9", "dsa_graph_safe": "0.6.10", "row_starts": "0.6.10"}
_PACKED = {"row_to_batch": "0.6.0", "page_table_row_starts": "0.6.17"}
_COMPACT = "0.7.0"  # page_size, out, out_raw_indices, and the word that rows of scores may be padded
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Function:
    call: Callable[..., torch.Tensor]
    arguments: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Options:
    deterministic: bool = False
    tie_break: int | None = None  # None: the call's own rule


_options: ContextVar[_Options | None] = ContextVar("dsa_topk_flashinfer_options", default=None)


@contextlib.contextmanager
def using(deterministic: bool, tie_break: int | None) -> Iterator[None]:
    """Set FlashInfer's switches for the calls inside: ``tie_break`` 0 any, 1 small, 2 large, None the call's rule."""
    token = _options.set(_Options(deterministic, tie_break))
    try:
        yield
    finally:
        _options.reset(token)


@functools.cache
def unavailable() -> str | None:
    """Say why FlashInfer can't run here, without importing it."""
    if "flashinfer" not in sys.modules and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (pip install 'flashinfer-python>=0.7.4')"
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA device and torch sees none"
    return None


@functools.cache
def _functions() -> dict[str, _Function]:
    module = importlib.import_module("flashinfer")
    found = {}
    for function in (_PAGED, _RAGGED):
        call = getattr(module, function, None)
        if call is not None:
            # Decorated for logging or tracing in some versions; signature() follows __wrapped__.
            found[function] = _Function(call, frozenset(inspect.signature(call).parameters))
    return found


def refuses(call: Call) -> str | None:
    """Say what of ``call`` the installed FlashInfer can't do."""
    reason = capabilities.refuses_call(call)
    if reason is not None:
        return reason
    needed = dict(_FUSED)
    if call.form == "paged":
        if call.page_size & (call.page_size - 1) or call.page_size > 2**30:
            return f"page_size = {call.page_size}; FlashInfer serves powers of two up to 2**30"
        if call.row_to_batch is not None or call.row_starts is not None or call.page_table_starts is not None:
            needed |= _PACKED
        if call.page_size > 1:
            needed["page_size"] = _COMPACT
        if call.out_positions is not None:
            needed["out_raw_indices"] = _COMPACT
    elif call.out_positions is not None:
        return "out_positions of the 'ragged' form; FlashInfer returns raw indices with page tables only"
    try:
        function = _functions().get(_PAGED if call.form == "paged" else _RAGGED)
    except Exception as error:  # any failure of a third party's import is a reason, not ours to raise
        return f"flashinfer can't be imported ({type(error).__name__}: {error})"
    missing = sorted(needed) if function is None else sorted(set(needed) - function.arguments)
    if missing:
        version = max((needed[argument] for argument in missing), key=lambda text: [int(n) for n in text.split(".")])
        where = _PAGED if call.form == "paged" else _RAGGED
        return (
            f"{where} of the installed flashinfer-python {_version()} has no {', '.join(missing)}; "
            f"install flashinfer-python>={version}"
        )
    return None


def run(call: Call) -> None:
    """Fill ``call.out`` and, with page tables, ``call.out_positions``."""
    out = call.out
    assert out is not None  # allocated by the api
    rows, width = call.scores.shape
    no_pages = call.form == "paged" and (call.page_table is None or call.page_table.numel() == 0)
    if rows == 0 or width == 0 or no_pages:
        out.fill_(-1)
        if call.out_positions is not None:
            call.out_positions.fill_(-1)
        return
    options = _options.get() or _Options()
    tie_break = options.tie_break
    common: dict[str, Any] = {
        "deterministic": options.deterministic,
        "tie_break": (1 if call.tie_break == "smallest" else 2) if tie_break is None else tie_break,
        "dsa_graph_safe": True,
        "row_starts": _int32(call.row_starts),
    }
    lengths = _int32(call.lengths)
    if lengths is None:
        lengths = torch.full((rows,), width, dtype=torch.int32, device=call.scores.device)
    if call.form == "paged":
        _run_paged(call, out, lengths, common)
        return
    offsets = _int32(call.out_offsets)
    if offsets is None:
        offsets = torch.zeros(rows, dtype=torch.int32, device=call.scores.device)
    out.copy_(_functions()[_RAGGED].call(_without_padding(call.scores), offsets, lengths, call.k, **common))


def _run_paged(call: Call, out: torch.Tensor, lengths: torch.Tensor, common: dict[str, Any]) -> None:
    function = _functions()[_PAGED]
    starts = _int32(call.page_table_starts)
    if starts is None and call.row_starts is not None:
        # FlashInfer's default would be row_starts itself; ours is the table's first entry.
        starts = torch.zeros_like(lengths)
    if call.row_to_batch is not None:
        common["row_to_batch"] = _int32(call.row_to_batch)
    if starts is not None:
        common["page_table_row_starts"] = starts
    if call.page_size > 1:
        common["page_size"] = call.page_size
    direct = "out" in function.arguments and out.is_contiguous()
    if direct:
        common["out"] = out
    raw = call.out_positions
    if raw is not None:
        common["out_raw_indices"] = (
            raw if raw.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        )
    assert call.page_table is not None
    # Scores keep their row padding where that is documented; the table must be dense.
    scores = call.scores if "page_size" in function.arguments else _without_padding(call.scores)
    result = function.call(scores, call.page_table.contiguous(), lengths, call.k, **common)
    if not direct:
        out.copy_(result)
    if raw is not None and not raw.is_contiguous():
        raw.copy_(common["out_raw_indices"])


def _int32(values: torch.Tensor | None) -> torch.Tensor | None:
    if values is None:
        return None
    if values.dtype is not torch.int32:
        values = values.clamp(_INT32_MIN, _INT32_MAX).to(torch.int32)
    return values.contiguous()


def _without_padding(scores: torch.Tensor) -> torch.Tensor:
    """Return contiguous scores for functions that take no row stride, without a copy where memory allows.

    A row's padding is as good as columns that no length reaches, so a padded view widened to its row stride is
    contiguous; only the last row's padding must exist.
    """
    rows, stride = scores.shape[0], scores.stride(0)
    if scores.is_contiguous() or stride < scores.shape[1]:
        return scores.contiguous()
    end = (scores.storage_offset() + rows * stride) * scores.element_size()
    if end > scores.untyped_storage().nbytes():
        return scores.contiguous()
    return scores.as_strided((rows, stride), (stride, 1))


def _version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
