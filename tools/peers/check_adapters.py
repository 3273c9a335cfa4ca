"""The peers that tools/peers/build.sh builds, as adapters of ``dsa-topk check``.

For machines without the peers' Python packages, from the root of the checkout:

    tools/peers/build.sh probe v2 ds fi
    dsa-topk check --backend tools.peers.check_adapters:sgl_v2 --suite quick --json sgl_v2.json

Here are ``sgl_v2``, ``ds_fp32``, ``fi_native``, ``fi_det`` and ``fi_tie_small``; ``--backend`` may be repeated. Where
the flashinfer package is installed its public functions run instead, and ``sgl_fast`` runs sgl_kernel's. How a
peer is called stands in src/dsa_topk/bench/peers.py alone: this file turns the suite's calls into that module's
problems and refuses what a peer does not take. Refused is also what a peer leaves to its callers (windows that leave
the scores or the table, unaligned rows, ...), so that a fault in the report is a fault on the peer's own terms; with
PEERS_BEYOND_DOCS=1 in the environment such calls are sent too (they may crash or hang).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from dsa_topk.bench import cases, inputs, peers
from dsa_topk.conformance.adapters import Result, Unsupported
from dsa_topk.conformance.duties import documented, int32, int32_windows, pages_fit, window_of, zeros
from dsa_topk.conformance.problem import Problem
from dsa_topk.conformance.runner import SENTINEL
from dsa_topk.testing.window import low32

FORMS = ("positions", "ragged", "paged")
PAGE_SIZE = 64  # of the tables made up here, for calls that have none

_INT32_MAX = 2**31 - 1
_NO_POSITION = -2  # in place of what is no candidate's position, so that the checker sees it
_NOT_BUILT = ".so is not in"  # how bench/peers.py says that an object is missing

Function = TypeVar("Function", bound=Callable[[Problem], torch.Tensor | Result])


class NotRepeatableError(Exception):
    """Two equal calls of a mode that is documented as deterministic gave different bits."""


def promises(**attributes: Any) -> Callable[[Function], Function]:
    """Say what an adapter promises: the attributes that ``dsa-topk check`` reads."""

    def mark(function: Function) -> Function:
        for name, value in attributes.items():
            setattr(function, name, value)
        return function

    return mark


# ---------------------------------------------------------------------------------------------------- the adapters


@promises(forms=FORMS, max_k=2048, mode="set")
def sgl_v2(call: Problem) -> torch.Tensor:
    """sglang topk_v2: decode (plan and page table) where the windows start at column 0, else its ragged kernel."""
    _aligned(call, 16, "16-byte vectorised loads")
    if call.form == "paged" or (call.form == "positions" and not _starts(call)):
        return _run(peers.sgl_v2, call, _rows_with_table(call))
    # Its ragged kernel is documented to write up to three columns in front of each window, so overlap is its caller's.
    documented(call.shape.rows < 2 or call.scores.stride(0) >= call.shape.width, "scores of overlapping rows")
    return _run(peers.sgl_v2, call, _ragged(call))


@promises(forms=FORMS, max_k=4096, mode="set")
def ds_fp32(call: Problem) -> torch.Tensor:
    """DeepSelect fp32 (sglang's copy): windows that start at column 0, rows of whole 128-byte lines."""
    if call.form != "ragged":
        return _run(peers.ds_fp32, call, _rows_with_table(call))
    if _starts(call):
        raise Unsupported("row starts")
    if call.k <= 1024:
        raise Unsupported("offsets with k <= 1024 (tools/peers/build.sh builds these with a page table only)")
    return _run(peers.ds_fp32, call, _ragged(call))


@promises(max_k=2048, mode="set")
def sgl_fast(call: Problem) -> torch.Tensor:
    """sgl_kernel's legacy kernel, from its package only: k = 2048."""
    if call.k != 2048:
        raise Unsupported("k other than 2048")
    return _run(peers.sgl_fast, call, _ragged(call))


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@promises(forms=FORMS, dtypes=_FLOATS, mode="set")
def fi_native(call: Problem) -> torch.Tensor:
    """FlashInfer's transforms, default arguments."""
    return _run(peers._flashinfer(False, 0), call, _flashinfer_problem(call))


@promises(forms=FORMS, dtypes=_FLOATS, mode="set")
def fi_det(call: Problem) -> torch.Tensor:
    """FlashInfer, ``deterministic=True``: an exact set, and the same bits from call to call."""
    problem = _flashinfer_problem(call)
    first = _run(peers._flashinfer(True, 0), call, problem)
    if call.repeats > 1 and not torch.equal(first, _run(peers._flashinfer(True, 0), call, problem)):
        raise NotRepeatableError("deterministic=True, yet two equal calls gave different bits")
    return first


@promises(forms=FORMS, dtypes=_FLOATS, mode="canonical")
def fi_tie_small(call: Problem) -> Result:
    """FlashInfer, ``deterministic=True, tie_break=small``: the canonical set; its order is made here.

    It promises which of equal scores are taken, not where they stand, so its positions are sorted before the checker
    sees them. Paged calls run on a table of ascending pages, whose results say the positions.
    """
    if call.tie_break != "smallest":
        raise Unsupported(f"tie_break={call.tie_break!r}")
    problem = _flashinfer_problem(call)
    window = window_of(call)
    origin = torch.zeros_like(window.start)
    if problem.page_table is not None:
        batches, entries = problem.page_table.shape
        if entries * call.shape.page_size > _INT32_MAX:
            raise Unsupported("tables of more than 2^31 tokens")
        problem.page_table = _ascending_pages(batches, entries, call.scores.device)
        assert window.table_start is not None
        origin = window.table_start * call.shape.page_size
    elif call.form == "ragged":
        assert window.offsets is not None
        origin = window.offsets
    found = _run(peers._flashinfer(True, 1), call, problem)
    selected = torch.arange(call.k, device=found.device) < window.filled[:, None]
    positions = low32(found.to(torch.int64) - origin[:, None])
    positions = torch.where(selected, positions, _INT32_MAX).sort(dim=1)[0]
    stored = torch.where((positions >= 0) & (positions < window.count[:, None]), window.stored(positions), _NO_POSITION)
    # The padding as it came. Knowing the positions, the checker tells a broken tie rule from a wrong selection.
    indices, positions = torch.where(selected, stored, found), torch.where(selected, positions, -1)
    return Result(indices.to(torch.int32), positions.to(torch.int32))


# ------------------------------------------------------------------------------------- from the suite to the bench


def _run(prepare: peers.Adapter, call: Problem, problem: inputs.Problem) -> torch.Tensor:
    """The peer's answer; whatever it refuses becomes :class:`Unsupported`."""
    with _pages_of(call.shape.page_size if call.form == "paged" else PAGE_SIZE):
        try:
            peer = prepare(problem)
            with suppress(KeyError):  # peers that allocate their output have none yet
                peer.result().fill_(SENTINEL)  # memory of an earlier call could hold its right answer
            peer.run(_copy(call.scores) if peer.writes_scores else call.scores)
        except peers.NotApplicable as reason:
            if _NOT_BUILT in str(reason):
                raise FileNotFoundError(str(reason)) from None
            raise Unsupported(str(reason)) from None
        except (RuntimeError, ValueError, TypeError) as error:
            if call.scores.is_cuda:
                torch.cuda.synchronize(call.scores.device)  # a refusal leaves the device alive, a fault raises here
            raise Unsupported(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return peer.result()


@contextmanager
def _pages_of(size: int) -> Iterator[None]:
    """The benchmark knows one page size; the suite has many."""
    if size & (size - 1) or size > 1 << 30:
        raise Unsupported("page sizes that are no power of two up to 2^30")
    before = peers.PAGE_SIZE
    peers.PAGE_SIZE = size
    try:
        yield
    finally:
        peers.PAGE_SIZE = before


def _problem(call: Problem, mode: str, **tensors: torch.Tensor | None) -> inputs.Problem:
    """A problem of the benchmark with the suite's windows as int32 (``mode`` decides its form)."""
    lengths, starts = int32_windows(call)
    rows, k = call.shape.rows, call.k
    # The benchmark's rows are contiguous; where they are not, their pitch is what its conditions on the width mean.
    pitch = call.scores.stride(0) if rows > 1 else -(-call.shape.width // 32) * 32
    margin = cases.RAGGED_MARGIN if mode in ("ragged", "packed") else 0
    case = cases.Case(mode, rows, pitch - margin, k, str(call.scores.dtype).removeprefix("torch."))
    out = torch.empty(0, dtype=torch.int32, device=call.scores.device)  # ours: the peers have their own
    return inputs.Problem(case, call.scores.device, lengths, out, row_starts=starts, **tensors)


def _ragged(call: Problem) -> inputs.Problem:
    """Offsets added, or none for positions."""
    offsets = int32(call, "out_offsets")[0]
    return _problem(call, "ragged", out_offsets=zeros(call) if offsets is None else offsets)


def _rows_with_table(call: Problem) -> inputs.Problem:
    """One table row for each score row and windows from column 0: the decode form of peers without starts."""
    if _starts(call):
        raise Unsupported("row starts or table starts with a page table")
    rows = call.shape.rows
    if call.form == "positions":
        entries = -(-call.shape.width // PAGE_SIZE)
        problem = _problem(call, "decode", page_table=_ascending_pages(rows, entries, call.scores.device))
    else:
        table, owner = call.shape.page_table, int32(call, "row_to_batch")[0]
        assert table is not None
        if owner is not None and rows and not bool(((owner >= 0) & (owner < table.shape[0])).all()):
            raise Unsupported("row_to_batch outside the table: these peers take a table row for each score row")
        table = table[:rows] if owner is None else table
        problem = _problem(call, "decode", page_table=table, row_to_batch=owner)
    problem.row_starts = None
    return problem


def _flashinfer_problem(call: Problem) -> inputs.Problem:
    """FlashInfer takes every form; positions are ragged ones without offsets."""
    if call.form != "paged":
        return _ragged(call)
    owner, first = int32(call, "row_to_batch", "page_table_starts")
    table = call.shape.page_table
    assert table is not None
    table = table[: call.shape.rows] if owner is None else table
    if first is None and call.row_starts is not None:
        first = zeros(call)  # its default: score starts
    problem = _problem(call, "packed", page_table=table, row_to_batch=owner, page_table_starts=first)
    documented(pages_fit(call), "page-table entries below 0, results beyond int32")
    return problem


# -------------------------------------------------------------------------------------------------- what they take


def _aligned(call: Problem, size: int, why: str) -> None:
    rows, step = call.shape.rows, call.scores.stride(0) * call.scores.element_size()
    documented(call.scores.data_ptr() % size == 0 and (rows < 2 or step % size == 0), f"unaligned rows: {why}")


def _starts(call: Problem) -> bool:
    """Whether any window starts elsewhere than at column 0 and table entry 0."""
    given = (call.row_starts, call.shape.page_table_starts)
    return any(tensor is not None and bool((tensor != 0).any()) for tensor in given)


def _ascending_pages(batches: int, entries: int, device: torch.device) -> torch.Tensor:
    """int32 [batches, entries]: entry t of every row is page t, so that a result is its position in the table."""
    return torch.arange(entries, dtype=torch.int32, device=device).repeat(batches, 1)


def _copy(scores: torch.Tensor) -> torch.Tensor:
    """The same values at the same strides and offset in other memory, for peers that write into their scores."""
    memory = scores.untyped_storage().clone()
    return scores.new_empty(0).set_(memory, scores.storage_offset(), scores.shape, scores.stride())
