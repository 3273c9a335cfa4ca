"""What the engine layer needs to know about a forward pass: the attributes it reads, and a dataclass that has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from dsa_topk.engine import rows


class TopkMetadataLike(Protocol):
    """The attributes that ``topk_transform`` reads from ``attn_metadata``. All but the tables may be missing or None.

    SGLang's own ``DSAMetadata`` fits as it is (its ``dsa_seqlens_expanded`` is read where ``lengths`` is missing).
    All tensors live on the scores' device; integers are int32 or int64.

    Attributes
    ----------
    real_page_table : Tensor [B, T] int32
        Compact page table: page ``t`` of request ``b`` is physical page ``real_page_table[b, t]``. Read by PAGED calls.
    page_size : int
        Tokens per entry of ``real_page_table``.
    page_table_1 : Tensor [B, T1] int32 or None
        The same with one token per entry. None in decode graphs that dropped it.
    cu_seqlens_q : Tensor [B + 1] or None
        Cumulative query lengths: rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` belong to request ``b``.
    cu_seqlens_k : Tensor [B + 1] or None
        Cumulative key lengths: the first score column of each request in packed scores.
    token_to_batch_idx : Tensor [R] or None
        Request of each row, where the engine has it already.
    lengths : Tensor [R] or None
        Valid scores of each row, for callers that pass none.
    topk_indices_offset : Tensor [R] or None
        Offset of each row for RAGGED calls, for callers that pass none.
    window_starts : Tensor [R] or None
        First token, within its request, of each row's window. None computes it from ``row_starts - cu_seqlens_k``.
    """

    @property
    def real_page_table(self) -> torch.Tensor | None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_table_1(self) -> torch.Tensor | None: ...


@dataclass(slots=True)
class TopkMetadata:
    """A `TopkMetadataLike` for engines that have no metadata class of their own. Attributes as there."""

    real_page_table: torch.Tensor | None = None
    page_size: int = 64
    page_table_1: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    token_to_batch_idx: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    topk_indices_offset: torch.Tensor | None = None
    window_starts: torch.Tensor | None = field(default=None)

    def prepared(self, num_rows: int, row_starts: torch.Tensor | None = None) -> TopkMetadata:
        """Return a copy with ``token_to_batch_idx`` and, given ``row_starts``, ``window_starts`` filled in.

        Computed once per forward pass instead of once per layer; without it every PAGED call with packed rows launches
        a few small kernels for them.

        Parameters
        ----------
        num_rows : int
            Score rows of the pass.
        row_starts : Tensor [num_rows], optional
            First score column of each row.

        Raises
        ------
        ValueError
            ``cu_seqlens_q``, or with ``row_starts`` also ``cu_seqlens_k``, is None.
        """
        if self.cu_seqlens_q is None:
            raise ValueError("cu_seqlens_q: expected a tensor [B + 1] to map rows to requests, got None")
        requests = rows.requests_of_rows(self.cu_seqlens_q, num_rows)
        if row_starts is None:
            return replace(self, token_to_batch_idx=requests)
        if self.cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k: expected a tensor [B + 1] beside row_starts, got None")
        starts = rows.window_starts(row_starts, self.cu_seqlens_k, requests)
        return replace(self, token_to_batch_idx=requests, window_starts=starts)


def row_lengths(metadata: object) -> torch.Tensor | None:
    """Return the per-row lengths that a metadata object carries, under our name or SGLang's."""
    lengths = getattr(metadata, "lengths", None)
    return getattr(metadata, "dsa_seqlens_expanded", None) if lengths is None else lengths
