"""The object that an indexer calls: one forward pass's metadata and backend behind one ``topk_transform``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsa_topk.engine import rows
from dsa_topk.engine.backend import DSATopKBackend
from dsa_topk.engine.metadata import TopkMetadataLike, row_lengths
from dsa_topk.engine.route import TopkTransformMethod


@dataclass
class BaseIndexerMetadata:
    """What an indexer layer holds during a forward pass.

    An engine that must change the result afterwards overrides `topk_transform`.

    Attributes
    ----------
    attn_metadata : TopkMetadataLike
        Page tables, lengths and row maps of the pass.
    topk_transform_method : TopkTransformMethod
        What this pass's indices must point at.
    topk_backend : DSATopKBackend
        Who computes them.
    force_unfused_topk : bool
        Return window-relative positions and leave the transform to the caller.
    """

    attn_metadata: TopkMetadataLike | Any
    topk_transform_method: TopkTransformMethod
    topk_backend: DSATopKBackend = DSATopKBackend.CUDA
    force_unfused_topk: bool = False

    def topk_transform(
        self,
        logits: torch.Tensor,
        topk: int,
        *,
        ks: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        ke_offset: torch.Tensor | None = None,
        batch_idx_list: Sequence[int] | torch.Tensor | None = None,
        topk_indices_offset_override: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Select and transform; every keyword is optional and passed on to the backend.

        Parameters
        ----------
        logits : Tensor [R, N]
            Indexer scores.
        topk : int
            How many to select.
        ks : Tensor [R], optional
            First score column of each row (``row_starts``).
        cu_seqlens_q : Tensor, optional
            Query lengths of this call's requests or shards, one each; with one entry more it is taken as cumulative
            already. RAGGED offsets are then the first *query* row of each row's shard.
        ke_offset : Tensor [R], optional
            Valid scores of each row, in place of the metadata's lengths.
        batch_idx_list : list of int or Tensor, optional
            Request of each shard, or of each row; see `DSATopKBackend.topk_transform`.
        topk_indices_offset_override : Tensor [R], optional
            RAGGED offsets, in place of the metadata's and of those from ``cu_seqlens_q``.

        Returns
        -------
        Tensor [R, topk] int32
            Whatever the attention kernel of this pass takes; not necessarily columns of ``logits``.

        Raises
        ------
        ValueError
            There are no lengths, or ``cu_seqlens_q`` has a size that fits neither reading.
        RuntimeError, TypeError
            As `DSATopKBackend.topk_transform`.
        """
        lengths = row_lengths(self.attn_metadata) if ke_offset is None else ke_offset
        if lengths is None:
            raise ValueError("ke_offset: expected a tensor [R], or lengths in the metadata; got neither")
        cu_topk: torch.Tensor | None = None
        offset = topk_indices_offset_override
        if cu_seqlens_q is not None:
            cu_topk = self._cumulative(cu_seqlens_q, batch_idx_list)
        if offset is None and self.topk_transform_method == TopkTransformMethod.RAGGED:
            if cu_topk is not None:
                offset = rows.take(cu_topk[:-1], rows.requests_of_rows(cu_topk, logits.shape[0]))
            else:
                offset = getattr(self.attn_metadata, "topk_indices_offset", None)
        return self.topk_backend.topk_transform(
            logits,
            lengths,
            topk,
            self.topk_transform_method,
            self.attn_metadata,
            cu_seqlens_q_topk=cu_topk,
            topk_indices_offset=offset,
            row_starts=ks,
            batch_idx_list=batch_idx_list,
            force_unfused_topk=self.force_unfused_topk,
        )

    def _cumulative(
        self, cu_seqlens_q: torch.Tensor, batch_idx_list: Sequence[int] | torch.Tensor | None
    ) -> torch.Tensor:
        if batch_idx_list is not None:
            count = batch_idx_list.numel() if isinstance(batch_idx_list, torch.Tensor) else len(batch_idx_list)
        else:
            own = getattr(self.attn_metadata, "cu_seqlens_q", None)
            count = cu_seqlens_q.numel() if own is None else own.numel() - 1
        if cu_seqlens_q.numel() == count:
            return rows.cumulative(cu_seqlens_q)
        if cu_seqlens_q.numel() == count + 1:
            return cu_seqlens_q
        raise ValueError(
            f"cu_seqlens_q: expected {count} query lengths or {count + 1} cumulative ones, got {cu_seqlens_q.numel()}"
        )
