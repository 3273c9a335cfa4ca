"""Order on and between streams: dependent calls back to back under programmatic launch, two streams, two threads."""

from __future__ import annotations

import threading

import pytest
import torch

import dsa_topk
from dsa_topk import _plan
from dsa_topk.testing import check_selection, distributions
from gpu_helpers import GPU, Mode, Verdicts, forced_plans, launched_as, on_gpu, select, shape_of, verify

ROWS = 16


def usual_and_forced(rows: int, width: int, k: int) -> list[_plan.Plan | None]:
    return [None, *forced_plans(rows, width, k)]


def chain(scores: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Three calls, each of which reads what the one before has just written: scores, lengths, starts, offsets, table.

    The outputs lie in ``buffers``, so that a call of the next chain overwrites what this one's last call reads.
    """
    a, b, c = buffers
    _, first = dsa_topk.topk_positions(scores, None, 8192, return_scores=True, out=a, backend="cuda")
    _, second = dsa_topk.topk_ragged(
        first, a[:, 4097], 2048, out_offsets=a[:, 2], row_starts=a[:, 0], return_scores=True, out=b, backend="cuda"
    )
    dsa_topk.topk_paged(
        second, b[:, 1500], 512, page_table=a, page_size=3, page_table_starts=b[:, 1], out=c, backend="cuda"
    )
    return [first, second]


def check_chain(scores: torch.Tensor, buffers: list[torch.Tensor], between: list[torch.Tensor], about: str) -> None:
    a, b, c = buffers
    first, second = between
    verdicts = [
        check_selection(scores, None, 8192, a, returned_scores=first),
        check_selection(
            first, a[:, 4097], 2048, b, form="ragged", out_offsets=a[:, 2], row_starts=a[:, 0], returned_scores=second
        ),
        check_selection(second, b[:, 1500], 512, c, form="paged", page_table=a, page_size=3, page_table_starts=b[:, 1]),
    ]
    for step, verdict in enumerate(verdicts):
        assert verdict.ok, f"{about}, call {step} of the chain: {verdict.reason}"


def new_buffers() -> list[torch.Tensor]:
    return [torch.empty(ROWS, k, dtype=torch.int32, device="cuda") for k in (8192, 2048, 512)]


@on_gpu
def test_dependent_calls_back_to_back() -> None:
    """100 chains without a gap for every launch; a copy produces the scores right before each. The results of each
    source are checked once and must then come again bit for bit."""
    sources = [distributions.make("normal", ROWS, 12001, device="cuda", seed=seed) for seed in range(4)]
    scores, buffers = torch.empty_like(sources[0]), new_buffers()
    for plan in usual_and_forced(ROWS, 12001, 2048):
        right: dict[int, torch.Tensor] = {}
        with launched_as(plan):
            for turn, source in enumerate(sources):
                scores.copy_(source)
                between = chain(scores, buffers)
                check_chain(scores, buffers, between, str(plan))
                right[turn] = buffers[2].clone()
            verdicts = Verdicts()
            for turn in range(100):
                scores.copy_(sources[turn % 4])
                chain(scores, buffers)
                verdicts.add((buffers[2] != right[turn % 4]).any(), f"chain {turn}, {plan}")
        verdicts.settle()


@on_gpu
def test_dependent_calls_in_a_graph() -> None:
    """The same chain, three times over in one graph: its edges keep the order of programmatic launches."""
    sources = [distributions.make("quantised", ROWS, 12001, device="cuda", seed=seed) for seed in range(3)]
    scores = torch.empty_like(sources[0])
    graph, kept = torch.cuda.CUDAGraph(), []
    every = [new_buffers() for _ in sources]
    with torch.cuda.graph(graph):
        for source, buffers in zip(sources, every, strict=True):
            scores.copy_(source)
            kept.append(chain(scores, buffers))
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for source, buffers, between in zip(sources, every, kept, strict=True):
        check_chain(source, buffers, between, "graph")


@on_gpu
def test_a_short_call_does_not_overtake_a_long_one() -> None:
    """Both write the same output: the one launched last must be what stays, however early its blocks start."""
    slow = distributions.make("normal", 64, 262144, device="cuda")
    quick = distributions.make("normal", 64, 300, device="cuda", seed=1)
    out = torch.empty(64, 256, dtype=torch.int32, device="cuda")
    want = dsa_topk.topk_positions(quick, None, 256, backend="cuda")
    check_selection(quick, None, 256, want).raise_if_bad()
    verdicts = Verdicts()
    for turn in range(50):
        dsa_topk.topk_positions(slow, None, 256, out=out, backend="cuda")
        dsa_topk.topk_positions(quick, None, 256, out=out, backend="cuda")
        verdicts.add((out != want).any(), f"turn {turn}")
    verdicts.settle()


@on_gpu
@pytest.mark.parametrize("order", ["position", "score"])
def test_two_streams_at_once(order: str) -> None:
    """Eager calls by turns on two streams, 100 each, every output its own."""
    mode = Mode(order)
    streams = [torch.cuda.Stream() for _ in range(2)]
    shapes_ = [shape_of(name, ROWS, 131072, 2048, "cuda") for name in ("ragged", "decode")]
    scores = [distributions.make("normal", ROWS, 131072, device="cuda", seed=seed) for seed in range(2)]
    right = [select(GPU, shape, score, mode) for shape, score in zip(shapes_, scores, strict=True)]
    for shape, score, outputs in zip(shapes_, scores, right, strict=True):
        verify(shape, score, mode, outputs)
    torch.cuda.synchronize()
    verdicts = Verdicts()
    for turn in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                verdicts.add(select(GPU, shapes_[i], scores[i], mode).differs(right[i]), f"turn {turn}, stream {i}")
    torch.cuda.synchronize()
    verdicts.settle()


@on_gpu
def test_threads_with_their_own_streams() -> None:
    """Four threads call at once. One that loaded, probed or staged anything in shared state would disturb another."""
    shape = shape_of("packed", ROWS, 50000, 2048, "cuda")
    scores = [distributions.make("normal", ROWS, 50000, device="cuda", seed=seed) for seed in range(4)]
    right = [select(GPU, shape, score, Mode()) for score in scores]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                flags = [select(GPU, shape, scores[i], Mode()).differs(right[i]) for _ in range(50)]
                if torch.stack(flags).any():
                    wrong.append(f"thread {i}: another result")
        except Exception as error:
            wrong.append(f"thread {i}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for score, outputs in zip(scores, right, strict=True):
        verify(shape, score, Mode(), outputs)
