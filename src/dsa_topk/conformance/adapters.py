"""Backends under test: ours by name, installed peers through their public Python functions, and anybody's function.

An adapter of one's own is a function from a :class:`~.problem.Problem` to the int indices ``[R, k]``::

    def mine(problem):
        return mylib.topk(problem.scores, problem.lengths, problem.k)

Name it ``module:function`` on the command line, or publish it as an entry point of the group ``dsa_topk.adapters``.
Its attributes ``forms`` (default ``("positions",)``), ``dtypes`` (float32), ``max_k`` (8192), ``mode`` (``"set"``),
``orders`` and ``graph`` say what it promises; raising :class:`Unsupported` refuses a call.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dsa_topk.testing.checker import Mode

from .duties import Unsupported, documented, int32, int32_windows, pages_fit, zeros
from .problem import Problem

ENTRY_POINTS = "dsa_topk.adapters"
OURS = ("torch", "cuda")


@dataclass(slots=True)
class Outputs:
    """Outputs that the runner hands in, already filled with a sentinel."""

    out: torch.Tensor
    positions: torch.Tensor | None


@dataclass(slots=True)
class Result:
    """What a backend returned."""

    indices: torch.Tensor
    positions: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A backend as the runner sees it."""

    name: str
    mode: Mode
    call: Callable[[Problem, Outputs], Result]
    unavailable: Callable[[], str | None] = lambda: None
    device_type: str | None = None  # None: any
    graph: bool = False
    read_only: bool = True  # promises not to write its inputs
    canonical: bool = False


def names() -> list[str]:
    """Every name that :func:`get` knows, beside ``module:function``."""
    return [*OURS, *sorted(_PEERS), *sorted(point.name for point in metadata.entry_points(group=ENTRY_POINTS))]


def get(name: str) -> Adapter:
    """The adapter called ``name``.

    Raises
    ------
    ValueError
        For an unknown name, or a ``module:function`` that cannot be imported.
    """
    if name in OURS:
        return _ours(name)
    if name.startswith("cuda-"):
        return _forced(name)
    if name in _PEERS:
        return _PEERS[name](name)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return from_function(name, point.load())
    if ":" in name:
        module, _, attribute = name.partition(":")
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)  # as python -m does: an adapter beside the user's work
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"backend {name!r}: {error}") from error
        return from_function(name, function)
    raise ValueError(f"backend: expected one of {', '.join(names())} or module:function, got {name!r}")


def from_function(name: str, function: Callable[[Problem], Any]) -> Adapter:
    """An adapter around a function; see the module's text for the attributes that it may carry."""
    forms = getattr(function, "forms", ("positions",))
    dtypes = getattr(function, "dtypes", (torch.float32,))
    max_k = getattr(function, "max_k", 8192)
    orders = getattr(function, "orders", ("position",))
    mode: Mode = getattr(function, "mode", "set")

    def call(problem: Problem, outputs: Outputs) -> Result:
        if problem.form not in forms:
            raise Unsupported(f"form {problem.form}")
        if problem.scores.dtype not in dtypes:
            raise Unsupported(f"{problem.scores.dtype} scores")
        if problem.k > max_k:
            raise Unsupported(f"k above {max_k}")
        if mode == "canonical" and problem.order not in orders:
            raise Unsupported(f"order={problem.order!r}")
        answer = function(problem)
        return answer if isinstance(answer, Result) else Result(answer)

    graph = bool(getattr(function, "graph", False))
    return Adapter(name, mode, call, graph=graph, canonical=mode == "canonical")


# ---- ours ----------------------------------------------------------------------------------------------------------


def _ours(name: str) -> Adapter:
    def call(problem: Problem, outputs: Outputs) -> Result:
        extra: dict[str, Any] = {"out": outputs.out, "backend": name}
        if problem.return_positions and problem.form != "positions":
            extra["out_positions"] = outputs.positions
        answer = problem.shape.call(
            problem.scores,
            order=problem.order,
            tie_break=problem.tie_break,
            return_scores=problem.return_scores,
            **extra,
        )
        indices, scores = answer if problem.return_scores else (answer, None)
        return Result(indices, extra.get("out_positions"), scores)

    def unavailable() -> str | None:
        from dsa_topk import backends

        return backends.get(name).unavailable()

    cuda = "cuda" if name == "cuda" else None
    return Adapter(name, "canonical", call, unavailable, device_type=cuda, graph=True, canonical=True)


def _forced(name: str) -> Adapter:
    """``cuda-KERNEL`` or ``cuda-KERNEL-CLUSTER``: the cuda backend with one kernel for every call of any size."""
    from dsa_topk import _plan
    from dsa_topk.backends import cuda

    kernel, _, size = name.removeprefix("cuda-").partition("-")
    if kernel not in _plan.KERNELS or not (size or "1").isdigit():
        raise ValueError(f"backend {name!r}: expected cuda-KERNEL[-CLUSTER] with one of {', '.join(_plan.KERNELS)}")
    plain = _ours("cuda")
    margin = _plan.choose(1, 1, 1, _plan.DeviceLimits(sms=1, smem_per_block=1)).margin
    plan = _plan.Plan(kernel, int(size or 1), margin)

    def call(problem: Problem, outputs: Outputs) -> Result:
        with cuda.use_plan(plan):
            return plain.call(problem, outputs)

    return replace(plain, name=name, call=call)


# ---- peers ---------------------------------------------------------------------------------------------------------


def _missing(module: str) -> str | None:
    """Why a peer cannot be used: in plain words, also when its import fails for other reasons."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # a peer's import may fail in any way it likes
        return f"installed, but importing {module} fails: {error}"
    return None


def _flashinfer(name: str) -> Adapter:
    """flashinfer.top_k_page_table_transform and top_k_ragged_transform, default arguments: set-exact by promise."""

    def call(problem: Problem, outputs: Outputs) -> Result:
        import flashinfer

        lengths, starts = int32_windows(problem)
        if problem.form == "paged":
            owner, first = int32(problem, "row_to_batch", "page_table_starts")
            size, table = problem.shape.page_size, problem.shape.page_table
            assert table is not None
            if size & (size - 1):
                raise Unsupported("page sizes that are no power of two")
            documented(pages_fit(problem), "page-table entries below 0, results beyond int32")
            if first is None and starts is not None:
                first = zeros(problem)  # by default it takes the score starts
            indices = flashinfer.top_k_page_table_transform(
                problem.scores,
                table[: problem.shape.rows] if owner is None else table,
                lengths,
                problem.k,
                row_to_batch=owner,
                row_starts=starts,
                page_table_row_starts=first,
                page_size=size,
            )
            return Result(indices)
        offsets = int32(problem, "out_offsets")[0] if problem.form == "ragged" else zeros(problem)
        return Result(flashinfer.top_k_ragged_transform(problem.scores, offsets, lengths, problem.k, row_starts=starts))

    return Adapter(name, "set", call, lambda: _missing("flashinfer"), device_type="cuda")


def _sgl_kernel(name: str) -> Adapter:
    """sgl_kernel.fast_topk_v2 and its fused transforms: k = 2048, float32, page size 1."""

    def call(problem: Problem, outputs: Outputs) -> Result:
        import sgl_kernel

        if problem.k != 2048 or problem.scores.dtype != torch.float32:
            raise Unsupported("k other than 2048, or scores other than float32")
        lengths, starts = int32_windows(problem)
        if problem.form == "positions":
            return Result(sgl_kernel.fast_topk_v2(problem.scores, lengths, problem.k, row_starts=starts))
        if problem.form == "ragged":
            offsets = int32(problem, "out_offsets")[0]
            starts = zeros(problem) if starts is None else starts  # optional only where no length exceeds k
            return Result(
                sgl_kernel.fast_topk_transform_ragged_fused(
                    problem.scores, lengths, offsets, problem.k, row_starts=starts
                )
            )
        table = problem.shape.page_table
        assert table is not None
        if problem.shape.page_size != 1 or problem.shape.row_to_batch is not None:
            raise Unsupported("pages above one token, row_to_batch")
        if problem.shape.page_table_starts is not None or table.shape[0] != problem.shape.rows:
            raise Unsupported("page_table_starts, tables of other rows")
        bounds = torch.arange(problem.shape.rows + 1, dtype=torch.int32, device=problem.scores.device)
        return Result(
            sgl_kernel.fast_topk_transform_fused(problem.scores, lengths, table, bounds, problem.k, row_starts=starts)
        )

    return Adapter(name, "set", call, lambda: _missing("sgl_kernel"), device_type="cuda", read_only=False)


def _torch_topk(name: str) -> Adapter:
    """torch.topk over masked rows, the fallback that engines write by hand."""

    def call(problem: Problem, outputs: Outputs) -> Result:
        if problem.form == "paged":
            raise Unsupported("page tables")
        start, count = problem.windows()
        column = torch.arange(problem.shape.width, device=problem.scores.device)
        outside = (column < start[:, None]) | (column >= (start + count)[:, None])
        width = min(problem.k, problem.shape.width)
        masked = problem.scores.masked_fill(outside, -torch.inf)
        chosen = torch.topk(masked, width, dim=1, sorted=False)[1] - start[:, None]
        chosen = torch.nn.functional.pad(chosen, (0, problem.k - width), value=-1)
        chosen = torch.where((chosen >= 0) & (chosen < count[:, None]), chosen, -1)
        chosen = chosen.sort(dim=1, descending=True)[0]  # the padding goes last
        if problem.form == "ragged":
            assert problem.shape.out_offsets is not None
            chosen = torch.where(chosen >= 0, chosen + problem.shape.out_offsets[:, None], chosen)
        return Result(chosen)

    return Adapter(name, "set", call)


_PEERS: dict[str, Callable[[str], Adapter]] = {
    "flashinfer": _flashinfer,
    "sgl-kernel": _sgl_kernel,
    "torch.topk": _torch_topk,
}
