"""CUDA graphs of the engine layer: one capture, then replays with other scores, lengths, tables, starts and offsets.

The capture is the very first call of its shape, so nothing may need a warm-up. Each replay must equal an eager call of
the reference on the values that the buffers hold by then.
"""

from __future__ import annotations

import pytest
import torch

from dsa_topk.compat import sglang, vllm
from dsa_topk.compat.flashinfer import top_k_page_table_transform
from dsa_topk.engine import BaseIndexerMetadata, DSATopKBackend, TopkMetadata, TopkTransformMethod

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED
K, WIDTH, PAGE = 512, 6000, 64
LENGTHS = ([0, K - 1, K + 73, WIDTH], [WIDTH, 0, K, K + 1], [-1, 1, 4097, 2 * WIDTH])


class Buffers:
    """What stays at its address while values change: four rows over two packed requests, tables of four requests."""

    def __init__(self, seed):
        self.scores = torch.zeros(4, 2 * WIDTH, device="cuda")
        self.lengths = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros_like(self.lengths)
        self.offsets = torch.zeros_like(self.lengths)
        self.requests = torch.zeros_like(self.lengths)
        self.compact = torch.zeros(4, -(-WIDTH // PAGE), dtype=torch.int32, device="cuda")
        self.wide = torch.zeros(4, WIDTH, dtype=torch.int32, device="cuda")
        self.cu_q = torch.zeros(3, dtype=torch.int32, device="cuda")
        self.cu_k = torch.zeros(3, dtype=torch.int32, device="cuda")
        self.fill(0, seed)

    def fill(self, step, seed):
        """Write the values of one step in place."""
        generator = torch.Generator().manual_seed(seed)
        self.scores.copy_(torch.randn(self.scores.shape, generator=generator))
        self.scores[step % 4].mul_(4).round_()  # one row full of ties
        self.lengths.copy_(torch.tensor(LENGTHS[step]))
        self.cu_q.copy_(torch.tensor([0, 1 + step, 4]))
        self.cu_k.copy_(torch.tensor([0, 37 + step, WIDTH]))
        self.requests.copy_(torch.tensor([0] * (1 + step) + [1] * (3 - step)))
        self.starts.copy_(self.cu_k[self.requests.long()])
        self.offsets.copy_(torch.tensor([5, 0, 1 << 20, 7]) + step)
        pages = torch.randperm(self.compact.numel(), generator=generator).reshape(self.compact.shape)
        self.compact.copy_(pages + 100 * step)
        tokens = torch.arange(WIDTH)
        self.wide.copy_(pages[:, tokens // PAGE] * PAGE + tokens % PAGE + 100 * step)

    def metadata(self, wide=True):
        return TopkMetadata(
            real_page_table=self.compact,
            page_size=PAGE,
            page_table_1=self.wide if wide else None,
            cu_seqlens_q=self.cu_q,
            cu_seqlens_k=self.cu_k,
        )


def decode(b, backend):
    return backend.topk_transform(b.scores, b.lengths, K, PAGED, b.metadata(wide=False))


def mtp(b, backend):
    metadata = b.metadata(wide=False)
    metadata.real_page_table = b.compact[:2]
    return backend.topk_transform(b.scores, b.lengths, K, PAGED, metadata)


def packed(b, backend):
    return backend.topk_transform(b.scores, b.lengths, K, PAGED, b.metadata(), row_starts=b.starts)


def packed_compact(b, backend):
    return backend.topk_transform(b.scores, b.lengths, K, PAGED, b.metadata(wide=False), row_starts=b.starts)


def ragged(b, backend):
    return backend.topk_transform(
        b.scores, b.lengths, K, RAGGED, None, topk_indices_offset=b.offsets, row_starts=b.starts
    )


def chunk(b, backend):
    return backend.topk_transform(
        b.scores, b.lengths, K, PAGED, b.metadata(), row_starts=b.starts, batch_idx_list=b.requests
    )


def context_parallel(b, backend):
    return BaseIndexerMetadata(b.metadata(), PAGED, backend).topk_transform(
        b.scores, K, ks=b.starts, cu_seqlens_q=b.cu_q, ke_offset=b.lengths, batch_idx_list=[3, 1]
    )


def context_parallel_ragged(b, backend):
    return BaseIndexerMetadata(b.metadata(), RAGGED, backend).topk_transform(
        b.scores, K, ks=b.starts, cu_seqlens_q=b.cu_q, ke_offset=b.lengths, batch_idx_list=[3, 1]
    )


def unfused(b, backend):
    return backend.topk_func(b.scores, b.lengths, K, b.starts)


LAYOUTS = [
    decode,
    mtp,
    packed,
    packed_compact,
    ragged,
    chunk,
    context_parallel,
    context_parallel_ragged,
    unfused,
]


def replay(call, expected, seed):
    """Capture ``call`` as the first of its kind, then check each step's replay, twice."""
    buffers = Buffers(seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(buffers)
    for step in (1, 2, 0):
        buffers.fill(step, seed + step)
        before = buffers.scores.clone()
        for _ in range(2):
            for result in results:
                result.fill_(-7)
            graph.replay()
            for got, want in zip(results, expected(buffers), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(buffers.scores, before)


@pytest.mark.parametrize("name", ["cuda", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_replays(layout, name):
    replay(
        lambda b: [layout(b, DSATopKBackend(name))],
        lambda b: [layout(b, DSATopKBackend.TORCH)],
        seed=LAYOUTS.index(layout),
    )


def test_page_and_raw_outputs_replay():
    def call(b):
        plan = sglang.plan_topk_v2(b.lengths)
        page, raw = (torch.zeros(4, K, dtype=torch.int32, device="cuda") for _ in range(2))
        sglang.topk_transform_paged_v2(b.scores, b.lengths, b.compact, page, PAGE, plan, raw)
        return [page, raw]

    def expected(b):
        # Over-long lengths end with the table, in the raw output as well.
        raw = DSATopKBackend.TORCH.topk_func(b.scores, b.lengths.clamp(max=b.compact.shape[1] * PAGE), K)
        return [decode(b, DSATopKBackend.TORCH), raw]

    replay(call, expected, seed=50)


def test_flashinfer_drop_in_replays():
    def call(b):
        out, raw = (torch.zeros(4, K, dtype=torch.int32, device="cuda") for _ in range(2))
        top_k_page_table_transform(
            b.scores,
            b.wide,
            b.lengths,
            K,
            row_to_batch=b.requests,
            row_starts=b.starts,
            page_table_row_starts=torch.zeros_like(b.starts),
            out=out,
            out_raw_indices=raw,
        )
        return [out]

    replay(call, lambda b: [packed(b, DSATopKBackend.TORCH)], seed=60)


def test_vllm_drop_in_replays():
    def call(b):
        wide = torch.zeros(8, K + 4, dtype=torch.int32, device="cuda")
        ends = b.starts + b.lengths
        vllm.top_k_per_row_prefill(b.scores, b.starts, ends, wide, 4, *b.scores.stride(), K)
        return [wide[:4, :K]]

    replay(call, lambda b: [unfused(b, DSATopKBackend.TORCH)], seed=70)


def test_lists_survive_a_replay_after_other_host_work():
    # A captured copy from pinned memory would read the block again after its reuse.
    buffers = Buffers(80)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = context_parallel(buffers, DSATopKBackend.CUDA)
    rubbish = [torch.full((2,), 2, dtype=torch.int32, pin_memory=True) for _ in range(64)]
    graph.replay()
    assert torch.equal(result, context_parallel(buffers, DSATopKBackend.TORCH))
    del rubbish  # alive until here, so that the pinned block was really taken again
