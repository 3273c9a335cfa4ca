"""Other projects' kernels as contestants: found when their Python packages, or objects built by tools/peers, are here.

A peer joins with three lines: an adapter of ``dsa-topk check`` (``--peers module:function``), or, with more control, a
function from a problem to a :class:`Peer` given to :func:`register`. Nothing here is a peer's code: their own kernels
are called the way their own Python wrappers call them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .cases import PAGE_SIZE, RAGGED_MARGIN
from .inputs import Problem


class NotApplicable(Exception):
    """Why a peer takes no part in a case (or anywhere): not installed, wrong type, form it does not have."""


@dataclass
class Peer:
    """A peer ready for one problem.

    Attributes
    ----------
    run : callable
        ``run(scores)`` launches one call on the current stream.
    result : callable
        The last call's output, int32 [R, k], in ``form``.
    form : str or None
        None: the form of the problem's public call. ``"positions"``: window positions, for peers without a transform.
    mode : str
        What the checker holds it to: ``set`` (exact) or ``canonical``.
    first_column : int or None
        Where the windows of all rows began for a peer without row starts; None for one that takes the problem's.
    writes_scores : bool
        True for peers that write into the score buffer outside the problem's windows.
    """

    run: Callable[[torch.Tensor], object]
    result: Callable[[], torch.Tensor]
    form: str | None = None
    mode: str = "set"
    first_column: int | None = None
    writes_scores: bool = False

    def check(self, problem: Problem, scores: torch.Tensor) -> str | None:
        """Why the last output is wrong; None when it is exact."""
        result = self.result()
        if self.form == "positions":
            from ..testing import check_selection

            starts = problem.row_starts
            verdict = check_selection(
                scores,
                problem.lengths,
                problem.case.k,
                result,
                row_starts=starts,
                mode=self.mode,  # type: ignore[arg-type]
            )
            return None if verdict else verdict.reason
        if self.first_column is None:
            return problem.check(scores, result, self.mode)
        return problem.check(scores[:, self.first_column :], result, self.mode, row_starts=None)


Adapter = Callable[[Problem], Peer]
_adapters: dict[str, tuple[Adapter, str]] = {}


def register(name: str, adapter: Adapter, about: str = "") -> None:
    """Add a peer (or replace one) under ``name``. ``about`` is the line that reports print beside it."""
    _adapters[name] = (adapter, about or (adapter.__doc__ or "").strip().split("\n")[0])


def about() -> dict[str, str]:
    """One line about each registered peer."""
    return {name: text for name, (_, text) in _adapters.items()}


def resolve(wanted: str) -> list[str]:
    """Names of the peers of ``--peers``: ``auto`` (all registered; absent ones drop out at their first case), ``none``,
    or names separated by commas, adapters of ``dsa-topk check`` (``module:function``, entry points) included.

    Raises
    ------
    ValueError
        For a name that is not registered.
    """
    if wanted == "none":
        return []
    if wanted == "auto":
        return list(_adapters)
    names = [name for name in wanted.split(",") if name]
    for name in names:
        if name not in _adapters:
            from . import adapters

            if adapters.known(name):
                register(name, adapters.contestant(name), "adapter of dsa-topk check")
                continue
            raise ValueError(f"peers: expected auto, none or names of {', '.join(_adapters)}, got {name!r}")
    return names


def prepare(name: str, problem: Problem) -> Peer:
    """The peer for a problem. Raises :class:`NotApplicable`."""
    return _adapters[name][0](problem)


# ------------------------------------------------------------------------------------------------ finding kernels


def folders() -> list[Path]:
    """Where prebuilt objects may lie: PEERS_ROOT, the working folder's and the checkout's ``.peers``."""
    roots = [Path(os.environ["PEERS_ROOT"])] if os.environ.get("PEERS_ROOT") else []
    roots += [Path.cwd() / ".peers", Path(__file__).resolve().parents[3] / ".peers"]
    return [folder for root in roots for folder in (root / "so", root) if folder.is_dir()]


@cache
def prebuilt(name: str) -> Any:
    """A prebuilt TVM-FFI module. Raises :class:`NotApplicable` when there is none."""
    for folder in folders():
        if (path := folder / f"{name}.so").exists():
            import tvm_ffi

            return tvm_ffi.load_module(str(path))
    raise NotApplicable(
        f"{name}.so is not in {', '.join(map(str, folders())) or 'any .peers folder'} (tools/peers/build.sh)"
    )


@cache
def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotApplicable(reason)


def _need_cuda(problem: Problem) -> None:
    _need(problem.device.type == "cuda", "needs a CUDA device")


def _output(problem: Problem) -> torch.Tensor:
    return torch.empty(problem.case.rows, problem.case.k, dtype=torch.int32, device=problem.device)


# ---------------------------------------------------------------------------------------------------------- sglang


@cache
def _sgl_v2() -> Any:
    """sglang's kernels, prebuilt: the object that fits this GPU."""
    probe = prebuilt("sgl_probe").get_max_active_clusters
    clusters = int(probe(8, 2)), int(probe(16, 1))
    return prebuilt("sgl_v2_pdl_{}_{}".format(*clusters))


def sgl_v2(problem: Problem) -> Peer:
    """sglang topk_v2 with PDL; its plan is computed outside the timing, its cluster path is inexact on overflow"""
    _need_cuda(problem)
    _need(problem.case.dtype == "float32", "float32 only")
    _need(problem.case.k <= 2048, "k <= 2048")
    _need(problem.case.mode != "packed", "no packed form on CUDA")
    if _installed("sglang.kernels"):
        return _sgl_v2_package(problem)
    module, out, lengths = _sgl_v2(), _output(problem), problem.lengths
    if problem.form == "ragged":
        starts, offsets = problem.row_starts, problem.out_offsets
        return Peer(
            lambda s: module.topk_transform_ragged(s, lengths, starts, offsets, out), lambda: out, writes_scores=True
        )
    table = problem.rows_table()
    plan = torch.full((problem.case.rows + 1, 2), -1, dtype=torch.int32, device=problem.device)
    module.topk_plan(lengths, plan, -1)
    return Peer(lambda s: module.topk_transform_paged(s, lengths, table, out, PAGE_SIZE, plan, None), lambda: out)


def _sgl_v2_package(problem: Problem) -> Peer:
    """The same kernels through sglang's public functions, which compile them at their first call."""
    from sglang.kernels.ops.attention.dsv4 import topk as theirs  # type: ignore[import-not-found]

    out, lengths = _output(problem), problem.lengths
    if problem.form == "ragged":
        options = {"out_offsets": problem.out_offsets, "out_indices": out, "row_starts": problem.row_starts}
        return Peer(lambda s: theirs.topk_transform_ragged_v2(s, lengths, **options), lambda: out, writes_scores=True)
    table, plan = problem.rows_table(), theirs.plan_topk_v2(lengths)
    return Peer(lambda s: theirs.topk_transform_paged_v2(s, lengths, table, out, PAGE_SIZE, plan), lambda: out)


def _deepselect(problem: Problem, dtype: str) -> Peer:
    case = problem.case
    _need_cuda(problem)
    _need(case.dtype == {"fp32": "float32", "bf16": "bfloat16"}[dtype], f"{dtype} only")
    _need(case.k <= 4096, "k <= 4096")
    _need(case.mode != "packed", "no row starts")
    _need(case.columns * (4 if dtype == "fp32" else 2) % 128 == 0, "rows must be whole 128-byte lines")
    bucket = 512 if case.k <= 512 else 1024 if case.k <= 1024 else 4096
    out, lengths = _output(problem), problem.lengths

    def storage(scores: torch.Tensor) -> int:
        return int(scores.untyped_storage().nbytes() - scores.storage_offset() * scores.element_size())

    if problem.form == "ragged":
        # DeepSelect rejects row starts: windows of the same lengths from one aligned column, which is in its favour.
        # The column is behind every row's start, because sglang's ragged kernel writes NaN in front of those.
        first = 0 if problem.row_starts is None else RAGGED_MARGIN

        def ragged(scores: torch.Tensor) -> None:
            view = scores[:, first:]
            topk(view, None, out, None, lengths, offsets, None, 0, case.k, storage(view), -1, float("-inf"), False)

        topk, offsets = prebuilt(f"ds_{dtype}_{bucket}_false").topk, problem.out_offsets
        return Peer(ragged, lambda: out, first_column=first)
    topk, table = prebuilt(f"ds_{dtype}_{bucket}_true").topk, problem.rows_table()
    return Peer(
        lambda s: topk(s, None, out, None, lengths, None, table, PAGE_SIZE, case.k, storage(s), -1, 0.0, False),
        lambda: out,
    )


def ds_fp32(problem: Problem) -> Peer:
    """DeepSelect fp32, one block per row; on ragged shapes all windows start at one column (it has no row starts)"""
    return _deepselect(problem, "fp32")


def ds_bf16(problem: Problem) -> Peer:
    """DeepSelect bf16, one block per row; on ragged shapes all windows start at one column (it has no row starts)"""
    return _deepselect(problem, "bf16")


def sgl_fast(problem: Problem) -> Peer:
    """sgl-kernel fast_topk_v2 (the legacy radix kernel): raw positions, k = 2048"""
    _need_cuda(problem)
    _need(problem.case.dtype == "float32" and problem.case.k == 2048, "float32 and k = 2048 only")
    _need(_installed("sgl_kernel"), "sgl_kernel is not installed")
    import sgl_kernel

    box: dict[str, torch.Tensor] = {}
    lengths, starts = problem.lengths, problem.row_starts

    def run(scores: torch.Tensor) -> None:
        box["out"] = sgl_kernel.fast_topk_v2(scores, lengths, 2048, row_starts=starts)

    return Peer(run, lambda: box["out"], form="positions")


# ------------------------------------------------------------------------------------------------------ FlashInfer


@cache
def _row_states(device: torch.device) -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8, device=device)


def _flashinfer(deterministic: bool, tie: int) -> Adapter:
    def adapter(problem: Problem) -> Peer:
        _need_cuda(problem)
        case, lengths, starts = problem.case, problem.lengths, problem.row_starts
        if _installed("flashinfer"):
            return _flashinfer_package(problem, deterministic, tie)
        module, out, states = prebuilt("fi_topk"), _output(problem), _row_states(problem.device)
        modes = (case.k, deterministic, tie)
        if problem.form == "ragged":
            transform, offsets = module.radix_topk_ragged_transform, problem.out_offsets
            return Peer(lambda s: transform(s, out, offsets, lengths, states, *modes, False, starts), lambda: out)
        transform, table = module.radix_topk_page_table_transform, problem.page_table
        batch, first = problem.row_to_batch, problem.page_table_starts
        return Peer(
            lambda s: transform(s, out, table, batch, lengths, states, *modes, PAGE_SIZE, False, starts, first, None),
            lambda: out,
        )

    return adapter


def _flashinfer_package(problem: Problem, deterministic: bool, tie: int) -> Peer:
    import flashinfer

    box: dict[str, torch.Tensor] = {}
    options = {"deterministic": deterministic, "tie_break": tie, "row_starts": problem.row_starts}
    if problem.form == "ragged":
        offsets = problem.out_offsets

        def run(scores: torch.Tensor) -> None:
            box["out"] = flashinfer.top_k_ragged_transform(scores, offsets, problem.lengths, problem.case.k, **options)

        return Peer(run, lambda: box["out"])
    box["out"] = _output(problem)

    def run_paged(scores: torch.Tensor) -> None:
        flashinfer.top_k_page_table_transform(
            scores,
            problem.page_table,
            problem.lengths,
            problem.case.k,
            problem.row_to_batch,
            page_table_row_starts=problem.page_table_starts,
            page_size=PAGE_SIZE,
            out=box["out"],
            **options,
        )

    return Peer(run_paged, lambda: box["out"])


# ----------------------------------------------------------------------------------------------------------- torch


def torch_topk(problem: Problem) -> Peer:
    """torch.topk(sorted=False) after masked_fill outside the window: positions, no page table"""
    case = problem.case
    _need(case.columns >= case.k, "rows shorter than k")
    column = torch.arange(case.columns, device=problem.device)
    start = torch.zeros_like(problem.lengths) if problem.row_starts is None else problem.row_starts
    begin, end = start[:, None], (start + problem.lengths)[:, None]
    box: dict[str, torch.Tensor] = {}

    def run(scores: torch.Tensor) -> None:
        masked = scores.masked_fill((column < begin) | (column >= end), -torch.inf)
        box["at"] = torch.topk(masked, case.k, dim=-1, sorted=False)[1]

    def result() -> torch.Tensor:
        # A row shorter than k gets arbitrary masked columns: they count as padding, which the checker wants at the end.
        at = box["at"] - begin
        at = torch.where((at < 0) | (at >= problem.lengths[:, None]), torch.full_like(at, 1 << 40), at).sort(1)[0]
        return torch.where(at == 1 << 40, -1, at).int()

    return Peer(run, result, form="positions")


register("sgl_v2", sgl_v2)
register("ds_fp32", ds_fp32)
register("ds_bf16", ds_bf16)
register("sgl_fast", sgl_fast)
register(
    "fi_native",
    _flashinfer(False, 0),
    "FlashInfer, default arguments: its package picks CUB's or its own kernels by shape, prebuilt objects are its own",
)
register("fi_det", _flashinfer(True, 0), "FlashInfer, deterministic=True")
register("fi_tieS", _flashinfer(False, 1), "FlashInfer, tie_break=small")
register("fi_tieL", _flashinfer(False, 2), "FlashInfer, tie_break=large")
register("torch", torch_topk)
