"""Our CUDA kernels as a backend: device limits, launch choice, and the call into the compiled module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from dsa_topk import _plan
from dsa_topk._call import FORMS, Call, Form, Order, TieBreak
from dsa_topk.backends import Capabilities

name = "cuda"
capabilities = Capabilities(
    device_types=("cuda",), note='one launch (two for order="score"), ordered by position, always graph-safe'
)

FORM_NUMBER = {form: number for number, form in enumerate(FORMS)}
_modules: dict[int, tuple[Any, _plan.DeviceLimits]] = {}  # by device index
_Arguments = tuple[int, int, float, int]
_chosen: dict[
    tuple[int, int, int, int, bool, torch.dtype], _Arguments
] = {}  # by rows, width, k, device index, alignment, type: an eager call counts microseconds
_MAX_CHOSEN = 4096
_override: _Arguments | None = None
_counters: torch.Tensor | None = None

PATHS = ("trivial", "fast", "second try", "plateau", "exact", "counted")
"""What `count_paths` counts: the paths of csrc/args.h."""


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why this machine can't run the kernels: no GPU, or no build and no compiler."""
    if not torch.cuda.is_available():
        return "no CUDA device (torch.cuda.is_available() is False)"
    from dsa_topk import jit

    return jit.unavailable_reason()


def refuses(call: Call) -> str | None:
    """Say why the kernels can't serve this call, or return None."""
    if call.scores.is_cuda:
        return None  # everything else of the contract is served
    return capabilities.refuses_call(call)


def launch(
    scores: torch.Tensor,
    rows: int,
    width: int,
    row_stride: int,
    address: int,
    lengths: torch.Tensor | None,
    row_starts: torch.Tensor | None,
    out_offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    row_to_batch: torch.Tensor | None,
    page_table_starts: torch.Tensor | None,
    out: torch.Tensor | None,
    out_positions: torch.Tensor | None,
    out_scores: torch.Tensor | None,
    k: int,
    form: Form,
    page_size: int,
    tie_break: TieBreak,
    order: Order,
) -> bool:
    """Launch the selection on the current stream of the scores' device.

    ``rows``, ``width``, ``row_stride`` and ``address`` are those of ``scores``: whoever calls has asked for them
    before, and each question costs as much as a twentieth of the launch. False before the first call on the device:
    nothing was done.
    """
    index = scores.get_device()
    found = _modules.get(index)
    if found is None:
        return False
    select, limits = found
    # Whether every row surely starts at a multiple of four scores in memory.
    aligned = row_starts is None and row_stride % 4 == 0 and address % 16 == 0
    key = (rows, width, k, index, aligned, scores.dtype)
    plan = _override or _chosen.get(key)
    if plan is None:
        if len(_chosen) >= _MAX_CHOSEN:
            _chosen.clear()
        plan = _plan.choose(rows, width, k, limits, aligned, scores.element_size()).arguments
        _chosen[key] = plan
    select(
        scores,
        lengths,
        row_starts,
        out_offsets,
        page_table,
        row_to_batch,
        page_table_starts,
        out,
        out_positions,
        out_scores,
        _counters,
        k,
        FORM_NUMBER[form],
        page_size,
        tie_break == "largest",
        order == "score",
        *plan,
    )
    return True


def run(call: Call) -> None:
    """Launch the selection on the current stream of the scores' device."""
    scores = call.scores
    index = scores.device.index
    if index not in _modules:
        _load(index)
    rows, width = scores.shape
    launched = launch(
        scores,
        rows,
        width,
        scores.stride(0),
        scores.data_ptr(),
        call.lengths,
        call.row_starts,
        call.out_offsets,
        call.page_table,
        call.row_to_batch,
        call.page_table_starts,
        call.out,
        call.out_positions,
        call.out_scores,
        call.k,
        call.form,
        call.page_size,
        call.tie_break,
        call.order,
    )
    assert launched


def _load(index: int) -> tuple[Any, _plan.DeviceLimits]:
    from dsa_topk import jit

    module = jit.load(device_index=index)
    found = _modules[index] = (module.select, _limits(index, module))
    return found


def _limits(index: int, module: Any) -> _plan.DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    clusters = [0] * 17
    if properties.major >= 9:
        kernels = [_plan.KERNELS.index(name) for name in _plan.SEVERAL]
        for size in _plan.CLUSTER_SIZES:
            # With a slice of 65536 scores, the widest that the choice gives a block of a cluster of up to 1M columns.
            clusters[size] = min(module.probe(index, kernel, size, 65536 * size, 2048) for kernel in kernels)
    return _plan.DeviceLimits(
        sms=properties.multi_processor_count,
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        clusters=tuple(clusters),
        longest_held=32768 if (properties.major, properties.minor) == (9, 0) else 16384,
    )


def describe(
    *,
    device: torch.device,
    rows: int | None = None,
    width: int | None = None,
    k: int = 2048,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> str:
    """Say which launch would serve a call of this size (for `dsa_topk.explain`)."""
    if rows is None or width is None:
        return "pass rows and width to see the launch"
    index = torch.cuda.current_device() if device.index is None else device.index
    _, limits = _modules.get(index) or _load(index)
    return str(_plan.choose(rows, width, k, limits, element_bytes=dtype.itemsize))


@contextlib.contextmanager
def use_plan(plan: _plan.Plan) -> Iterator[None]:
    """Launch every call with `plan` inside the block (tests and tuning)."""
    global _override
    before, _override = _override, plan.arguments
    try:
        yield
    finally:
        _override = before


@contextlib.contextmanager
def count_paths(device: torch.device | str | int = "cuda") -> Iterator[torch.Tensor]:
    """Count the rows that take each of `PATHS` inside the block: int32 on ``device``, filled by the kernels."""
    global _counters
    before, _counters = _counters, torch.zeros(len(PATHS), dtype=torch.int32, device=device)
    try:
        yield _counters
    finally:
        _counters = before
