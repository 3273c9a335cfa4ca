"""CUDA graphs: capture (the first call ever included), replay with everything changed, two graphs at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dsa_topk import _plan
from dsa_topk.testing import CallShape, distributions
from gpu_helpers import DTYPES, GPU, MODES, Mode, Outputs, forced_plans, launched_as, on_gpu, select, shape_of, verify

ROWS, WIDTH, K = 8, 131072, 2048
VECTORS = ("lengths", "row_starts", "out_offsets", "page_table", "row_to_batch", "page_table_starts")
# Short, long and short again: nothing that was decided for one may serve the other. None: the shape's own lengths.
LENGTHS = (1, WIDTH, 1, None, K, K + 1, -5, 2**30)
NAMES = ("normal", "half_zeros", "normal", "nan_both_signs", "ladder", "indexer", "all_equal", "bit_patterns")


def refill(shape: CallShape, name: str, turn: int) -> None:
    """Put other lengths, starts, offsets and tables of the same sizes into the captured tensors."""
    fresh = shape_of(name, shape.rows, shape.width, shape.k, "cuda", seed=10 + turn)
    for field in VECTORS:
        mine, other = getattr(shape, field), getattr(fresh, field)
        if mine is not None:
            rows = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape, other.shape, strict=True))
            mine[rows].copy_(other[rows])
    length = LENGTHS[turn]
    if length is not None:
        shape.lengths.fill_(length)
        shape.lengths[1] = -shape.lengths[1]  # and always a negative one among them


def capture_and_replay(name: str, dtype: torch.dtype, mode: Mode, plan: _plan.Plan | None) -> None:
    made = shape_of(name, ROWS, WIDTH, K, "cuda")
    shape = made.to("cuda")
    for field in VECTORS:
        if getattr(made, field) is not None:
            setattr(shape, field, getattr(made, field).clone())
    scores = distributions.make("normal", ROWS, WIDTH, dtype=dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), launched_as(plan):
        outputs = select(GPU, shape, scores, mode)
    for turn, source in enumerate(NAMES):
        scores.copy_(distributions.make(source, ROWS, WIDTH, dtype=dtype, device="cuda", seed=turn))
        refill(shape, name, turn)
        outputs.out.fill_(-7)
        graph.replay()
        verify(shape, scores, mode, outputs, f"replay {turn}, {plan}")


@on_gpu
@pytest.mark.parametrize("name", ["decode", "mtp", "ragged", "packed", "chunked", "mixed"])
def test_replay_with_everything_changed(name: str) -> None:
    """The backend's own choice: every form, dtype and switch in turn."""
    for turn, dtype in enumerate(DTYPES):
        capture_and_replay(name, dtype, MODES[(turn + len(name)) % len(MODES)], None)


@on_gpu
@pytest.mark.parametrize("kernel", _plan.KERNELS)
def test_replay_of_every_kernel(kernel: str) -> None:
    for plan in forced_plans(ROWS, WIDTH, K):
        if plan.kernel == kernel:
            capture_and_replay("chunked", torch.float32, Mode(positions=True), plan)


FIRST_CALL = """
import torch, dsa_topk
from dsa_topk.backends import cuda
from dsa_topk.testing import check_selection
scores = torch.randn(3, 70000, device="cuda")
typed = [scores.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
table = torch.arange(4000, dtype=torch.int32, device="cuda").expand(3, 4000)
torch.cuda.synchronize()
graph, results = torch.cuda.CUDAGraph(), []
with torch.cuda.graph(graph, capture_error_mode=MODE):
    for s in typed:
        for order in ("position", "score"):
            results.append((s, order, dsa_topk.topk_positions(s, None, 2048, order=order, backend="cuda")))
    many = dsa_topk.topk_paged(
        scores[:1].expand(4000, 70000), None, 512, page_table=table[:1].expand(4000, 4000), page_size=64, backend="cuda"
    )
assert cuda._modules, "the module was loaded inside the capture"
graph.replay()
torch.cuda.synchronize()
for s, order, out in results:
    check_selection(s, None, 2048, out, order=order).raise_if_bad()
check_selection(scores[:1], None, 512, many[:1], form="paged", page_table=table, page_size=64).raise_if_bad()
assert (many == many[:1]).all()
"""


@on_gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_first_call_ever_inside_a_capture(mode: str) -> None:
    """A fresh process in which nothing was loaded, probed or queried before the capture began."""
    program = FIRST_CALL.replace("MODE", repr(mode))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@on_gpu
@pytest.mark.parametrize("order", ["position", "score"])
def test_two_graphs_at_once_on_two_streams(order: str) -> None:
    """Graphs that share their inputs and a memory pool, 100 replays each without waiting; every output is right."""
    mode = Mode(order, return_scores=True, positions=True)
    shape = shape_of("packed", ROWS, WIDTH, K, "cuda")
    scores = distributions.make("normal", ROWS, WIDTH, device="cuda")
    captured: list[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream, Outputs]] = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = select(GPU, shape, scores, mode)
        captured.append((graph, torch.cuda.Stream(), outputs))
    torch.cuda.synchronize()
    for _ in range(100):
        for graph, stream, _outputs in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _graph, _stream, outputs in captured:
        verify(shape, scores, mode, outputs)


@on_gpu
def test_a_capture_with_branches() -> None:
    """A graph whose two branches may run at once, each with a call."""
    scores = [distributions.make("normal", ROWS, WIDTH, device="cuda", seed=seed) for seed in range(2)]
    shape = shape_of("mixed", ROWS, WIDTH, K, "cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = select(GPU, shape, scores[1], Mode())
        first = select(GPU, shape, scores[0], Mode())
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    verify(shape, scores[0], Mode(), first)
    verify(shape, scores[1], Mode(), second)
