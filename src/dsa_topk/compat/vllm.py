"""vLLM's sparse-indexer top-k entry points, with its signatures, over the kernels of dsa-topk.

>>> from dsa_topk.compat.vllm import SparseIndexerTopk, top_k_per_row_prefill

Every slot of the output rows is written (no need to fill with -1 first); results are canonical, so they do not change
with the batch, the longest row or the rank. All functions are traceable by ``torch.compile``.
"""

from __future__ import annotations

import torch

from dsa_topk.api import topk_positions

__all__ = ["SparseIndexerTopk", "forward", "top_k_per_row_decode", "top_k_per_row_prefill"]


class SparseIndexerTopk(torch.nn.Module):
    """The decode stage as the module that vLLM's indexer holds; see `forward` of this file.

    Parameters
    ----------
    backend : str, optional
        vLLM's backend name; accepted, without effect.
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()

    def forward(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        """Write the selection into ``topk_indices``; arguments as the function `forward`."""
        forward(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)


def forward(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    next_n: int,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    max_seq_len: int,
) -> None:
    """Write the best ``topk_tokens`` positions of each decode row into ``topk_indices``.

    Parameters
    ----------
    logits : Tensor [B * next_n, N]
        Indexer scores; row ``b * next_n + t`` is draft token t of request b.
    seq_lens : Tensor [B], [B, 1] or [B, next_n]
        With one entry per row: the row's length. With one per request: the request's length s, and row t has
        ``s - next_n + 1 + t`` (negative means empty).
    next_n : int
        Rows per request.
    topk_indices : Tensor [>= B * next_n, >= topk_tokens] int32
        Rows and columns in front are written, -1 padded; any row stride.
    topk_tokens : int
        How many to select.
    max_seq_len : int
        Accepted, without effect: the route never depends on the longest row.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_positions`; ValueError also when ``seq_lens`` fits neither reading.
    """
    rows = logits.shape[0]
    topk_positions(logits, _row_lengths(seq_lens, next_n, rows), topk_tokens, out=topk_indices[:rows, :topk_tokens])


def top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Write the best ``topk_tokens`` columns of ``[ks, ke)`` of each row, **relative to ks**, -1 padded.

    Parameters
    ----------
    logits : Tensor [>= num_rows, N]
        Indexer scores.
    cu_seqlen_ks, cu_seqlen_ke : Tensor [num_rows]
        First column of each row's window, and the column behind its last; ``ke <= ks`` means empty.
    raw_topk_indices : Tensor [>= num_rows, >= topk_tokens] int32
        Rows and columns in front are written.
    num_rows : int
        How many rows to do.
    stride0, stride1 : int
        Strides of ``logits`` in elements.
    topk_tokens : int
        How many to select.

    Raises
    ------
    TypeError, ValueError
        As `dsa_topk.topk_positions`; ValueError also when the strides are not those of ``logits``.
    """
    starts, ends = cu_seqlen_ks[:num_rows], cu_seqlen_ke[:num_rows]
    topk_positions(
        _rows(logits, num_rows, stride0, stride1),
        ends - starts,
        topk_tokens,
        row_starts=starts,
        out=raw_topk_indices[:num_rows, :topk_tokens],
    )


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Write the best positions of each decode row: `forward` with vLLM's per-row argument list.

    Raises
    ------
    TypeError, ValueError
        As `forward`; ValueError also when the strides are not those of ``logits``.
    """
    scores = _rows(logits, num_rows, stride0, stride1)
    lengths = _row_lengths(seq_lens, next_n, num_rows)
    topk_positions(scores, lengths, topk_tokens, out=raw_topk_indices[:num_rows, :topk_tokens])


def _row_lengths(seq_lens: torch.Tensor, next_n: int, rows: int) -> torch.Tensor:
    if seq_lens.numel() == rows and (next_n == 1 or seq_lens.dim() == 2):
        return seq_lens.reshape(-1)
    if seq_lens.numel() * next_n != rows:
        raise ValueError(
            f"seq_lens: expected one length per row ({rows}) or per request ({rows} rows / next_n={next_n}), "
            f"got {list(seq_lens.shape)}"
        )
    steps = torch.arange(1 - next_n, 1, device=seq_lens.device, dtype=seq_lens.dtype)
    return (seq_lens.reshape(-1, 1) + steps).reshape(-1)


def _rows(logits: torch.Tensor, num_rows: int, stride0: int, stride1: int) -> torch.Tensor:
    scores = logits[:num_rows]
    # A stride along a dimension of one element is whatever the producer wrote there.
    if (num_rows > 1 and stride0 != scores.stride(0)) or (scores.shape[1] > 1 and stride1 != scores.stride(1)):
        raise ValueError(f"stride0, stride1: expected those of logits, {scores.stride()}, got {(stride0, stride1)}")
    return scores if scores.stride(1) == 1 or scores.shape[1] <= 1 else scores.contiguous()
