"""What a call leaves alone: its inputs, every byte around its outputs, the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import dsa_topk
from dsa_topk import _checks, backends
from dsa_topk.testing import CallShape, distributions
from gpu_helpers import DTYPES, GPU, MODES, Frame, Mode, Outputs, Target, launched_as, on_gpu, shape_of, verify

VECTORS = ("lengths", "row_starts", "out_offsets", "row_to_batch", "page_table_starts")


def framed_shape(name: str, rows: int, width: int, k: int, device: str) -> tuple[CallShape, dict[str, Frame]]:
    """A named shape whose integer tensors all lie in guarded memory."""
    made = shape_of(name, rows, width, k, device)
    shape, frames = made.to(device), {}
    for field in VECTORS:
        vector = getattr(made, field)
        if vector is not None:
            frames[field] = Frame(rows, 1, torch.int32, device)
            frames[field].tensor[:, 0] = vector
            setattr(shape, field, frames[field].tensor[:, 0])
    if made.page_table is not None:
        frames["page_table"] = Frame(*made.page_table.shape, torch.int32, device)
        frames["page_table"].tensor.copy_(made.page_table)
        shape.page_table = frames["page_table"].tensor
    return shape, frames


def select_into(target: Target, shape: CallShape, scores: torch.Tensor, mode: Mode, outputs: Outputs) -> None:
    """Check and choose as the public functions do, but with a place of our own for the returned scores as well."""
    call = _checks.check(
        shape.form,
        scores,
        shape.lengths,
        shape.k,
        **shape.kwargs(),
        order=mode.order,
        tie_break=mode.tie_break,
        return_scores=mode.return_scores,
        out=outputs.out,
        out_positions=outputs.positions,
    )
    call.out_scores = outputs.scores
    backends.choose(call, target.backend).run(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["decode", "ragged", "chunked", "mixed", "dp_padding"])
def test_inputs_and_guards_stay(target: Target, name: str, dtype: torch.dtype) -> None:
    """Every tensor of the call lies in poisoned memory: inputs keep every bit, outputs their guards, and every slot of
    an output is written (what was there would be a wrong answer)."""
    rows, width, k = (6, 1501, 200) if target.small else (12, 40001, 2048)
    shape, inputs = framed_shape(name, rows, width, k, target.device)
    inputs["scores"] = Frame(rows, width, dtype, target.device)
    scores = inputs["scores"].tensor
    scores.copy_(distributions.make("bit_patterns", rows, width, dtype=dtype, device=target.device))
    before = {field: frame.contents() for field, frame in inputs.items()}
    for turn, plan in enumerate(target.plans(rows, width, k)):
        for mode in (MODES[turn % 4 * 2], MODES[turn % 4 * 2 + 1]):
            out = Frame(rows, k, torch.int32, target.device)
            positions = Frame(rows, k, torch.int32, target.device, pad=7) if shape.form != "positions" else None
            returned = Frame(rows, k, dtype, target.device, pad=5) if mode.return_scores else None
            outputs = Outputs(out.tensor, positions and positions.tensor, returned and returned.tensor)
            with launched_as(plan):
                select_into(target, shape, scores, mode, outputs)
            verify(shape, scores, mode, outputs, plan)
            for frame in (out, positions, returned):
                assert frame is None or frame.intact(), f"{plan}, {mode}: written beside an output"
            for field, frame in inputs.items():
                assert frame.unchanged_since(before[field]), f"{plan}, {mode}: {field} was changed"


def test_the_frames_notice_a_stray_write() -> None:
    for row, column in [(0, 0), (1, 32), (1, 33 + 4), (3, 1)]:
        frame = Frame(2, 4, torch.float16, "cpu")
        frame.tensor.fill_(1.0)
        assert frame.intact()
        contents = frame.contents()
        frame._whole[row, column] = 3
        assert not frame.intact()
        assert not frame.unchanged_since(contents)


@on_gpu
def test_nothing_is_allocated_beside_the_outputs() -> None:
    """With given outputs a call of one launch takes no memory from torch at all."""
    shape = shape_of("chunked", 64, 131072, 2048, "cuda")
    scores = distributions.make("normal", 64, 131072, device="cuda")
    out, positions = (torch.empty(64, 2048, dtype=torch.int32, device="cuda") for _ in range(2))
    shape.call(scores, out=out, out_positions=positions, backend="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    shape.call(scores, out=out, out_positions=positions, backend="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def host_microseconds(call: Callable[[], object], batches: int = 15, calls: int = 100) -> float:
    """Host time of one call: the best of several batches, each short enough for the launch queue never to be full."""
    best = float("inf")
    for _ in range(batches):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return best * 1e6


@on_gpu
@pytest.mark.parametrize("name", ["mixed", "ragged", "chunked"])
def test_host_time_of_an_eager_call(name: str, record_property: Callable[[str, object], None]) -> None:
    """Engines call once a layer and step, outside graphs too: the host must not be what they wait for."""
    shape = shape_of(name, 2, 4096, 512, "cuda")
    scores = distributions.make("normal", 2, 4096, device="cuda")
    out = torch.empty(2, 512, dtype=torch.int32, device="cuda")
    function, rest = getattr(dsa_topk, f"topk_{shape.form}"), {**shape.kwargs(), "out": out, "backend": GPU.backend}
    microseconds = host_microseconds(lambda: function(scores, shape.lengths, shape.k, **rest))
    record_property(f"host_us_{shape.form}", round(microseconds, 2))
    assert microseconds < 40, f"{microseconds:.1f} us"  # a sanity bound; the recorded figure is what is read
