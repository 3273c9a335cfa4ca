"""Decide how a top-k call of an engine is served: which form, table, row map and table starts. Host facts only."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import torch

from dsa_topk._call import Form, TieBreak
from dsa_topk.engine.settings import Settings


class TopkTransformMethod(IntEnum):
    """What the indices must point at: physical slots through a page table, or tokens of the flattened keys."""

    PAGED = 1
    RAGGED = 2


Rows = Literal["identity", "token_to_batch_idx", "cu_seqlens_q", "batch_idx_list per row", "batch_idx_list per shard"]
Starts = Literal["request start", "window_starts", "row_starts - cu_seqlens_k"]


class Route(NamedTuple):
    """One way through the engine layer. Equal routes are logged once; ``str()`` says it in a line."""

    backend: str
    form: Form
    tie_break: TieBreak = "smallest"
    table: str = ""  # attribute of the metadata, PAGED only
    page_size: int = 1
    rows: Rows = "identity"
    starts: Starts = "request start"
    packed: bool = False  # row_starts given

    def __str__(self) -> str:
        parts = [f"{self.backend}: topk_{self.form}"]
        if self.form == "paged":
            parts.append(f"{self.table} with page size {self.page_size}")
            parts.append(f"rows by {self.rows}, table window from {self.starts}")
        parts.append("scores window from row_starts" if self.packed else "scores window from column 0")
        parts.append(f"ties {self.tie_break}")
        return ", ".join(parts)


def plan(
    backend: str,
    method: TopkTransformMethod,
    metadata: object,
    settings: Settings,
    *,
    num_rows: int,
    packed: bool,
    cu_seqlens_q_topk: torch.Tensor | None,
    batch_idx_list: Sequence[int] | torch.Tensor | None,
    has_offset: bool,
    unfused: bool,
) -> Route:
    """Choose the route of one call from shapes and from which arguments are there; no device data is read.

    Raises
    ------
    ValueError
        ``method`` is no `TopkTransformMethod`.
    RuntimeError
        The call lacks something that its layout needs (the text names it).
    """
    tie_break = _tie_break(backend, settings)
    if unfused or not settings.fuse:
        return Route(backend, "positions", tie_break, packed=packed)
    method = TopkTransformMethod(method)
    if method is TopkTransformMethod.RAGGED:
        if not has_offset:
            raise RuntimeError("topk_indices_offset: RAGGED needs a tensor [R], got None")
        return Route(backend, "ragged", tie_break, packed=packed)

    rows = _rows(metadata, num_rows, packed, cu_seqlens_q_topk, batch_idx_list)
    starts = _starts(backend, metadata, num_rows, packed, rows, batch_idx_list is not None)
    table, page_size = _table(backend, metadata, settings, starts)
    if rows == "identity" and getattr(metadata, table).shape[0] < num_rows:
        raise RuntimeError(
            f"{table}: PAGED with {num_rows} rows needs a table row for each, or cu_seqlens_q, token_to_batch_idx or "
            f"batch_idx_list to map them; got {getattr(metadata, table).shape[0]} table rows and none of these"
        )
    return Route(backend, "paged", tie_break, table, page_size, rows, starts, packed)


def _tie_break(backend: str, settings: Settings) -> TieBreak:
    if backend == "flashinfer":
        return "largest" if settings.flashinfer_tie_break == 2 else "smallest"
    return "smallest" if backend == "sgl-kernel" else settings.tie_break


def _rows(
    metadata: object,
    num_rows: int,
    packed: bool,
    cu_seqlens_q_topk: torch.Tensor | None,
    batch_idx_list: Sequence[int] | torch.Tensor | None,
) -> Rows:
    own_cu = getattr(metadata, "cu_seqlens_q", None)
    cu = own_cu if cu_seqlens_q_topk is None else cu_seqlens_q_topk
    if batch_idx_list is not None:
        count = batch_idx_list.numel() if isinstance(batch_idx_list, torch.Tensor) else len(batch_idx_list)
        per_shard = cu is not None and cu.numel() == count + 1
        # One query per shard makes both readings fit: the caller's own cumulative lengths mean shards.
        if per_shard and (count != num_rows or cu is not own_cu):
            return "batch_idx_list per shard"
        if count == num_rows:
            return "batch_idx_list per row"
        raise RuntimeError(
            f"batch_idx_list: expected one request per row ({num_rows}), or one per shard with cumulative query "
            f"lengths in cu_seqlens_q_topk; got {count} requests and "
            f"{'no cu_seqlens_q_topk' if cu is None else f'cu_seqlens_q_topk of {cu.numel()} entries'}"
        )
    table = _first(metadata, "real_page_table", "page_table_1")
    if not packed and table is not None and table.shape[0] == num_rows:
        return "identity"
    token_to_batch_idx = getattr(metadata, "token_to_batch_idx", None)
    if cu is own_cu and token_to_batch_idx is not None and token_to_batch_idx.numel() == num_rows:
        return "token_to_batch_idx"
    if cu is not None:
        return "cu_seqlens_q"
    if packed:
        raise RuntimeError(
            "row_starts: packed PAGED rows need cu_seqlens_q, token_to_batch_idx or batch_idx_list to find their "
            "page-table row; got none of these"
        )
    return "identity"


def _starts(backend: str, metadata: object, num_rows: int, packed: bool, rows: Rows, listed: bool) -> Starts:
    # Shards of prefill context parallelism have score columns of their own (their keys gathered one after another), so
    # row_starts says nothing about the table; a shard's keys begin with its request. sgl-kernel knows no other start.
    if not packed or rows == "batch_idx_list per shard" or backend == "sgl-kernel":
        return "request start"
    window_starts = getattr(metadata, "window_starts", None)
    if window_starts is not None and not listed and window_starts.numel() == num_rows:
        return "window_starts"
    if getattr(metadata, "cu_seqlens_k", None) is None:
        raise RuntimeError(
            "row_starts: packed PAGED rows need cu_seqlens_k or window_starts in the metadata, which say where each "
            "request's scores begin; got neither"
        )
    return "row_starts - cu_seqlens_k"


def _table(backend: str, metadata: object, settings: Settings, starts: Starts) -> tuple[str, int]:
    if backend == "sgl-kernel":
        names = ["page_table_1"]
    elif backend == "flashinfer":
        names = ["page_table_1", "real_page_table"]
    elif settings.page_table != "auto":
        names = (
            ["real_page_table", "page_table_1"]
            if settings.page_table == "compact"
            else ["page_table_1", "real_page_table"]
        )
    elif starts == "request start" and settings.use_topk_v2:
        names = ["real_page_table", "page_table_1"]
    else:  # a start may lie inside a page, which only the table of page size 1 can say
        names = ["page_table_1", "real_page_table"]
    for name in names:
        if getattr(metadata, name, None) is not None:
            return name, 1 if name == "page_table_1" else int(getattr(metadata, "page_size", 1))
    raise RuntimeError(f"attn_metadata: PAGED on backend {backend!r} needs {' or '.join(names)}, got None")


def _first(metadata: object, *names: str) -> torch.Tensor | None:
    for name in names:
        value = getattr(metadata, name, None)
        if value is not None:
            return value
    return None
