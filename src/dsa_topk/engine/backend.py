"""The top-k backends that an engine chooses from, and how each layout reaches one fused call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

from dsa_topk import backends
from dsa_topk.api import topk_paged, topk_positions, topk_ragged
from dsa_topk.engine import rows
from dsa_topk.engine.metadata import TopkMetadataLike
from dsa_topk.engine.route import Route, TopkTransformMethod, plan
from dsa_topk.engine.settings import Settings

logger = logging.getLogger("dsa_topk.engine")
_logged: set[tuple[Route, int, torch.dtype]] = set()

_ALIASES = {"dsa-topk": "cuda", "sglang": "sgl-kernel", "reference": "torch"}


@dataclass(frozen=True, slots=True)
class EngineExplanation:
    """Which route a call takes (`Route`) and what the registry says of its backend; ``str()`` gives both as text."""

    route: Route
    registry: backends.Explanation

    def __str__(self) -> str:
        return f"{self.route}\n{self.registry}"


class DSATopKBackend(Enum):
    """Top-k backend of a DeepSeek Sparse Attention layer; values are the names used on engines' command lines.

    ``CUDA`` (our kernels) and ``TORCH`` (the reference) return the canonical result of the contract. ``FLASHINFER`` and
    ``SGL_KERNEL`` are comparison backends that promise less; see their `capabilities` in `dsa_topk.backends`.
    """

    CUDA = "cuda"
    SGL_KERNEL = "sgl-kernel"
    FLASHINFER = "flashinfer"
    TORCH = "torch"

    @classmethod
    def parse(cls, name: str | DSATopKBackend) -> DSATopKBackend:
        """Return the member that an engine's string means.

        Case and ``_`` or ``-`` do not matter. Aliases: ``dsa-topk`` for ``cuda``, ``sglang`` for ``sgl-kernel``,
        ``reference`` for ``torch``. ``auto`` is ``cuda`` where it can run and ``torch`` elsewhere.

        Raises
        ------
        TypeError, ValueError
            ``name`` is neither a member nor a string that names one.
        """
        if isinstance(name, cls):
            return name
        if not isinstance(name, str):
            raise TypeError(f"backend: expected a str or DSATopKBackend, got {type(name).__name__}")
        text = name.strip().lower().replace("_", "-")
        text = _ALIASES.get(text, text)
        if text == "auto":
            return cls.CUDA if backends.get("cuda").unavailable() is None else cls.TORCH
        for member in cls:
            if member.value == text:
                return member
        known = ", ".join([member.value for member in cls] + list(_ALIASES) + ["auto"])
        raise ValueError(f"backend: expected one of {known}; got {name!r}")

    def is_cuda(self) -> bool:
        """Say whether this is our CUDA backend."""
        return self is DSATopKBackend.CUDA

    def is_sgl_kernel(self) -> bool:
        """Say whether this is the sgl-kernel comparison backend."""
        return self is DSATopKBackend.SGL_KERNEL

    def is_flashinfer(self) -> bool:
        """Say whether this is the FlashInfer comparison backend."""
        return self is DSATopKBackend.FLASHINFER

    def is_torch(self) -> bool:
        """Say whether this is the pure-torch reference."""
        return self is DSATopKBackend.TORCH

    def should_use_topk_v2(self) -> bool:
        """Say whether decode needs only the compact table, so that the engine may drop ``page_table_1`` for it.

        True for ``cuda`` and ``torch`` unless ``SGLANG_OPT_USE_TOPK_V2`` is off. Never needs a plan (`plan_topk_v2`).
        """
        return self in (DSATopKBackend.CUDA, DSATopKBackend.TORCH) and Settings.from_env().use_topk_v2

    def topk_func(
        self, score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Select the ``topk`` best columns of each row's window.

        Parameters
        ----------
        score : Tensor [R, N]
            Indexer scores; float32, bfloat16 or float16.
        lengths : Tensor [R]
            Valid scores of each row, int32 or int64.
        topk : int
            How many to select.
        row_starts : Tensor [R], optional
            First column of each row's window; None means 0.

        Returns
        -------
        Tensor [R, topk] int32
            Positions relative to the window's start, -1 padded.

        Raises
        ------
        TypeError, ValueError
            As `dsa_topk.topk_positions`.
        RuntimeError
            The backend can't run on this machine.
        """
        settings = Settings.from_env()
        route = plan(
            self.value,
            TopkTransformMethod.RAGGED,
            None,
            settings,
            num_rows=0,
            packed=row_starts is not None,
            cu_seqlens_q_topk=None,
            batch_idx_list=None,
            has_offset=False,
            unfused=True,
        )
        _log_once(route, topk, score.dtype)
        return self._positions(route, settings, score, lengths, topk, row_starts)

    def topk_transform(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: TopkTransformMethod,
        attn_metadata: TopkMetadataLike | Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: Sequence[int] | torch.Tensor | None = None,
        force_unfused_topk: bool = False,
    ) -> torch.Tensor:
        """Select the ``topk`` best scores of each row and write them as the attention kernel wants them, in one call.

        Parameters
        ----------
        logits : Tensor [R, N]
            Indexer scores; float32, bfloat16 or float16, any row stride. Never written.
        lengths : Tensor [R]
            Valid scores of each row, int32 or int64; negative means an empty row.
        topk : int
            How many to select.
        topk_transform_method : TopkTransformMethod
            PAGED writes physical slots, RAGGED adds ``topk_indices_offset``.
        attn_metadata : TopkMetadataLike
            Page tables and row maps; see `TopkMetadataLike`. RAGGED reads nothing of it.
        cu_seqlens_q_topk : Tensor, optional
            Cumulative query lengths of this call's rows; None takes ``attn_metadata.cu_seqlens_q``.
        topk_indices_offset : Tensor [R], optional
            Needed by RAGGED: added to every selected position, independent of ``row_starts``.
        row_starts : Tensor [R], optional
            First score column of each row's window, for scores packed over a batch. PAGED then finds the start in the
            page table as ``row_starts - cu_seqlens_k[request]``.
        batch_idx_list : list of int or Tensor, optional
            Request of each row (a chunk of rows), or of each shard of ``cu_seqlens_q_topk`` (prefill context
            parallelism: score columns are the shards' own, table windows begin with the request).
        force_unfused_topk : bool
            Return window-relative positions, whatever the method.

        Returns
        -------
        Tensor [R, topk] int32
            A fresh tensor, -1 padded.

        Raises
        ------
        RuntimeError
            Something that the layout needs is missing, or the backend can't run on this machine.
        TypeError, ValueError
            As the public function that serves the call.

        Notes
        -----
        No device data is read on the host, so the call may be captured in a CUDA graph: lengths, starts, tables and
        offsets may change between replays. A host ``batch_idx_list`` is part of the graph.
        """
        settings = Settings.from_env()
        route = plan(
            self.value,
            topk_transform_method,
            attn_metadata,
            settings,
            num_rows=logits.shape[0],
            packed=row_starts is not None,
            cu_seqlens_q_topk=cu_seqlens_q_topk,
            batch_idx_list=batch_idx_list,
            has_offset=topk_indices_offset is not None,
            unfused=force_unfused_topk,
        )
        _log_once(route, topk, logits.dtype)
        if route.form == "positions":
            return self._positions(route, settings, logits, lengths, topk, row_starts)
        if route.form == "ragged":
            with self._options(settings):
                return topk_ragged(
                    logits,
                    lengths,
                    topk,
                    out_offsets=cast(torch.Tensor, topk_indices_offset),  # plan refuses RAGGED without it
                    row_starts=row_starts,
                    tie_break=route.tie_break,
                    backend=self.value,
                )
        cu = getattr(attn_metadata, "cu_seqlens_q", None) if cu_seqlens_q_topk is None else cu_seqlens_q_topk
        return self._paged(route, settings, logits, lengths, topk, attn_metadata, cu, row_starts, batch_idx_list)

    def explain(
        self,
        logits: torch.Tensor,
        topk: int,
        topk_transform_method: TopkTransformMethod,
        attn_metadata: TopkMetadataLike | Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: Sequence[int] | torch.Tensor | None = None,
        force_unfused_topk: bool = False,
    ) -> EngineExplanation:
        """Say how `topk_transform` would serve these arguments, without running anything.

        Raises
        ------
        RuntimeError
            Something that the layout needs is missing.
        """
        route = plan(
            self.value,
            topk_transform_method,
            attn_metadata,
            Settings.from_env(),
            num_rows=logits.shape[0],
            packed=row_starts is not None,
            cu_seqlens_q_topk=cu_seqlens_q_topk,
            batch_idx_list=batch_idx_list,
            has_offset=topk_indices_offset is not None,
            unfused=force_unfused_topk,
        )
        registry = backends.explain(
            form=route.form,
            device=logits.device,
            dtype=logits.dtype,
            k=topk,
            tie_break=route.tie_break,
            rows=logits.shape[0],
            width=logits.shape[1],
            backend=self.value,
        )
        return EngineExplanation(route, registry)

    def _positions(
        self,
        route: Route,
        settings: Settings,
        score: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None,
    ) -> torch.Tensor:
        with self._options(settings):
            return topk_positions(
                score, lengths, topk, row_starts=row_starts, tie_break=route.tie_break, backend=self.value
            )

    def _paged(
        self,
        route: Route,
        settings: Settings,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        metadata: Any,
        cu_seqlens_q: torch.Tensor | None,
        row_starts: torch.Tensor | None,
        batch_idx_list: Sequence[int] | torch.Tensor | None,
    ) -> torch.Tensor:
        row_to_batch = _row_to_batch(route, logits, metadata, cu_seqlens_q, batch_idx_list)
        starts = _table_starts(route, metadata, row_starts, row_to_batch)
        with self._options(settings, cu_seqlens_q if route.rows == "cu_seqlens_q" else None):
            return topk_paged(
                logits,
                lengths,
                topk,
                page_table=getattr(metadata, route.table),
                page_size=route.page_size,
                row_to_batch=row_to_batch,
                row_starts=row_starts,
                page_table_starts=starts,
                tie_break=route.tie_break,
                backend=self.value,
            )

    def _options(
        self, settings: Settings, cu_seqlens_q: torch.Tensor | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Hand a comparison backend what the public signature has no word for."""
        if self is DSATopKBackend.FLASHINFER:
            from dsa_topk.backends import flashinfer

            return flashinfer.using(settings.flashinfer_deterministic, settings.flashinfer_tie_break)
        if self is DSATopKBackend.SGL_KERNEL:
            from dsa_topk.backends import sgl_kernel

            return sgl_kernel.rows_by(cu_seqlens_q)
        return contextlib.nullcontext()


def _row_to_batch(
    route: Route,
    logits: torch.Tensor,
    metadata: Any,
    cu_seqlens_q: torch.Tensor | None,
    batch_idx_list: Sequence[int] | torch.Tensor | None,
) -> torch.Tensor | None:
    if route.rows == "identity":
        return None
    if route.rows == "token_to_batch_idx":
        return cast(torch.Tensor, metadata.token_to_batch_idx).reshape(-1)
    if route.rows == "cu_seqlens_q":
        return rows.requests_of_rows(cast(torch.Tensor, cu_seqlens_q), logits.shape[0])
    requests = rows.list_on_device(cast(Sequence[int], batch_idx_list), logits.device)
    if route.rows == "batch_idx_list per shard":
        return rows.requests_of_shards(requests, cast(torch.Tensor, cu_seqlens_q), logits.shape[0])
    return requests


def _table_starts(
    route: Route, metadata: Any, row_starts: torch.Tensor | None, row_to_batch: torch.Tensor | None
) -> torch.Tensor | None:
    if route.starts == "request start":
        return None
    if route.starts == "window_starts":
        return rows.page_entries(metadata.window_starts, route.page_size)
    starts = rows.window_starts(cast(torch.Tensor, row_starts), metadata.cu_seqlens_k, cast(torch.Tensor, row_to_batch))
    return rows.page_entries(starts, route.page_size)


def _log_once(route: Route, topk: int, dtype: torch.dtype) -> None:
    if torch.compiler.is_compiling():  # a trace would guard on what has been logged so far
        return
    key = (route, topk, dtype)
    if key not in _logged:
        _logged.add(key)
        logger.info("top-k of %d on %s scores -> %s", topk, dtype, route)
