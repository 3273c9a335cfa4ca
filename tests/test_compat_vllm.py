"""dsa_topk.compat.vllm: vLLM's decode module and per-row operators over our kernels."""

from __future__ import annotations

import inspect

import pytest
import torch

from dsa_topk.compat import vllm
from engine_cases import BACKENDS, expect, extend, ints, snippet, stand_in


@pytest.fixture(params=BACKENDS)
def device(request):
    return request.param[1]


@pytest.mark.parametrize(
    ("function", "documented"),
    [
        (vllm.forward, "logits seq_lens next_n topk_indices topk_tokens max_seq_len"),
        (vllm.SparseIndexerTopk.forward, "self logits seq_lens next_n topk_indices topk_tokens max_seq_len"),
        (
            vllm.top_k_per_row_prefill,
            "logits cu_seqlen_ks cu_seqlen_ke raw_topk_indices num_rows stride0 stride1 topk_tokens",
        ),
        (
            vllm.top_k_per_row_decode,
            "logits next_n seq_lens raw_topk_indices num_rows stride0 stride1 topk_tokens",
        ),
    ],
)
def test_signature(function, documented):
    assert list(inspect.signature(function).parameters) == documented.split()


@pytest.mark.parametrize("shape", ["[B]", "[B, 1]", "[B, next_n]"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_decode_lengths_in_every_shape(device, next_n, shape):
    seq_lens = [300, 2, 150]
    lengths = [s - next_n + 1 + t for s in seq_lens for t in range(next_n)]
    given = ints(seq_lens, device)
    if shape == "[B, 1]":
        given = given.reshape(3, 1)
    if shape == "[B, next_n]":
        given = ints(lengths, device).reshape(3, next_n)
    scores = torch.randn(3 * next_n, 320).to(device)
    buffer = torch.full((3 * next_n + 2, 48), -9, dtype=torch.int32, device=device)
    out = buffer[: 3 * next_n, :40]  # a view of the engine's buffer for the whole step
    assert vllm.SparseIndexerTopk("auto")(scores, given, next_n, out, 40, 320) is None
    torch.testing.assert_close(out.cpu(), expect(scores, lengths, 40), rtol=0, atol=0)
    assert (buffer[3 * next_n :] == -9).all()
    assert (buffer[:, 40:] == -9).all()
    again = torch.zeros_like(buffer)
    vllm.top_k_per_row_decode(scores, next_n, given, again, 3 * next_n, *scores.stride(), 40)
    assert torch.equal(again[: 3 * next_n, :40], out)


def test_the_longest_row_changes_nothing(device):
    scores, lengths = torch.randn(2, 4096).to(device), ints([4000, 900], device)
    out, again = (torch.zeros(2, 512, dtype=torch.int32, device=device) for _ in range(2))
    vllm.forward(scores, lengths, 1, out, 512, 4096)
    vllm.forward(scores, lengths, 1, again, 512, 1 << 20)
    assert torch.equal(out, again)


def test_prefill_indices_are_relative_to_the_start(device):
    batch = extend([3, 2], [70, 50], device=device)
    out = torch.full((5, 24), -9, dtype=torch.int32, device=device)
    starts = ints(batch.starts, device)
    ends = starts + ints(batch.lengths, device)
    padded = torch.full((9, 128), 5e3, device=device)[:, :120]
    padded[:5] = batch.scores
    vllm.top_k_per_row_prefill(padded, starts, ends, out, 5, 128, 1, 24)
    torch.testing.assert_close(out.cpu(), expect(batch.scores, batch.lengths, 24, batch.starts), rtol=0, atol=0)


def test_prefill_writes_its_rows_only_and_pads_them(device):
    out = torch.full((4, 6), -9, dtype=torch.int32, device=device)
    scores = torch.randn(4, 30).to(device)
    vllm.top_k_per_row_prefill(scores, ints([4, 9, 0], device), ints([7, 9, 0], device), out, 3, 30, 1, 5)
    assert out[:, 5].tolist() == [-9] * 4
    assert out[:3, :5].tolist() == [[0, 1, 2, -1, -1], [-1] * 5, [-1] * 5]
    assert (out[3] == -9).all()


def test_strides_must_be_those_of_the_logits():
    out = torch.zeros(2, 4, dtype=torch.int32)
    zero, end = ints([0, 0], "cpu"), ints([8, 8], "cpu")
    with pytest.raises(ValueError, match=r"stride0, stride1: expected those of logits, \(8, 1\), got \(16, 1\)"):
        vllm.top_k_per_row_prefill(torch.zeros(2, 8), zero, end, out, 2, 16, 1, 4)


def test_transposed_logits(device):
    scores = torch.randn(40, 2).to(device).t()
    out = torch.zeros(2, 4, dtype=torch.int32, device=device)
    vllm.top_k_per_row_decode(scores, 1, ints([40, 30], device), out, 2, *scores.stride(), 4)
    torch.testing.assert_close(out.cpu(), expect(scores, [40, 30], 4), rtol=0, atol=0)


def test_lengths_that_fit_no_reading():
    with pytest.raises(ValueError, match=r"seq_lens: expected one length per row \(4\) or per request"):
        vllm.forward(torch.zeros(4, 8), ints([1, 2, 3], "cpu"), 2, torch.zeros(4, 2, dtype=torch.int32), 2, 8)


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_compiles_whole(device, dynamic):
    def step(scores, seq_lens, out):
        vllm.forward(scores, seq_lens, 2, out, 16, 200)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    scores, seq_lens = torch.randn(6, 200).to(device), ints([200, 50, 1], device)
    eager = step(scores, seq_lens, torch.zeros(6, 16, dtype=torch.int32, device=device))
    assert torch.equal(compiled(scores, seq_lens, torch.zeros(6, 16, dtype=torch.int32, device=device)), eager)


def test_the_documented_snippet_replaces(monkeypatch):
    class Theirs(torch.nn.Module):
        def forward(self, *arguments):
            raise AssertionError("replaced")

    operators = stand_in(monkeypatch, "vllm._custom_ops", top_k_per_row_prefill="theirs")
    stand_in(monkeypatch, "vllm.model_executor.layers.indexer_topk", SparseIndexerTopk=Theirs)
    original = Theirs.forward
    scope: dict = {}
    exec(snippet("integrate-vllm.md"), scope)
    assert scope["before"] == (original, "theirs")
    assert operators.top_k_per_row_prefill is vllm.top_k_per_row_prefill
    scores, out = torch.randn(2, 20), torch.zeros(2, 4, dtype=torch.int32)
    Theirs()(scores, ints([20, 3], "cpu"), 1, out, 4, 20)
    assert torch.equal(out, expect(scores, [20, 3], 4))
