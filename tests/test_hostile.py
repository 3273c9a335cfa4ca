"""Hostile calls (issue 7 point 4): an error before anything is touched, or the contract's answer; never a stray byte.

The calls are in tests/hostile/. The reference takes all of them here, the emulated kernels what reaches a kernel, and
a GPU takes everything, plainly and (tools/sanitize.py) under memcheck.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

import dsa_topk
import hostile
from dsa_topk import _plan
from dsa_topk._call import Call
from emulator.args import kernels
from emulator.build import compiler
from emulator.cases import Case
from emulator.emulated import emulated
from emulator.process import Options
from gpu_helpers import Target, launched_as, on_gpu

FORMS = ("positions", "ragged", "paged")


def one_of_each_kind() -> list[tuple[str, int]]:
    """A kernel of each kind (Row128 for all of Row...), and how many blocks share a row."""
    kinds: dict[str, str] = {}
    for name in kernels():
        kinds.setdefault(re.split(r"\d", name)[0], name)
    return [(name, 3 if name in _plan.SEVERAL else 1) for name in kinds.values()]


def failures(found: list[str | None]) -> str:
    wrong = [text for text in found if text is not None]
    assert found, "nothing was tried"
    return f"{len(wrong)} of {len(found)}: " + "; ".join(wrong[:5]) if wrong else ""


@pytest.mark.parametrize("group", hostile.LEGAL)
def test_legal_calls_get_the_contracts_answer(target: Target, group: str) -> None:
    """By the backend's own choice of launch and, on a GPU, by each kernel in turn."""
    found = []
    for turn, (name, call) in enumerate(hostile.LEGAL[group]()):
        rows, width = call.scores.shape
        plans = target.plans(max(rows, 1), max(width, 1), call.k)
        for plan in (plans[0], plans[1 + turn % (len(plans) - 1)]):
            with launched_as(plan):
                wrong = hostile.attempt(call, target.backend, target.device)
            found.append(wrong and f"{name}, {plan}: {wrong}")
            if target.small:
                break  # both are the same there
    assert not failures(found), failures(found)


@pytest.mark.skipif(compiler() is None, reason="no g++")
@pytest.mark.parametrize("route", one_of_each_kind(), ids=lambda route: f"{route[0]}x{route[1]}")
@pytest.mark.parametrize("group", hostile.LEGAL)
def test_legal_calls_in_the_emulator(group: str, route: tuple[str, int]) -> None:
    """Each tensor is an allocation of its own there: a stray read or write ends the launch. A cluster has twelve times
    the threads, and gets every sixth call."""
    found = []
    for turn, (name, call) in enumerate(list(hostile.LEGAL[group]())[:: 1 if route[1] == 1 else 6]):
        if call.return_scores:
            call.out_scores = torch.empty(call.scores.shape[0], call.k, dtype=call.scores.dtype)
        case = Case(name, call, *route, margin=(4.0, 0.1)[turn % 2], options=Options(seed=turn))
        found.append(case.wrong(emulated()))
    assert not failures(found), failures(found)


def test_outputs_beside_inputs(target: Target) -> None:
    """Not one shared byte: legal, and answered."""
    found = [
        hostile.attempt_neighbours(given, there, target.backend)
        for _, given, there in hostile.neighbours(target.device)
    ]
    assert not failures(found), failures(found)


def test_outputs_on_inputs_are_refused(target: Target) -> None:
    found = [
        hostile.refuse(placed, (name, outputs, ValueError, "overlap"), target.backend)
        for name, placed, outputs in hostile.aliases(target.device)
    ]
    assert len(found) > 40
    assert not failures(found), failures(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", hostile.REFUSED)
def test_wrong_calls_are_refused(target: Target, group: str, form: str) -> None:
    """With the error's type and the argument's name, before a byte is written."""
    placed = hostile.refusable(form, target.device)
    assert placed.run(target.backend) is placed.call.out, "the call to spoil is right"
    placed = hostile.refusable(form, target.device)
    found = [hostile.refuse(placed, refusal, target.backend) for refusal in hostile.REFUSED[group](form, placed)]
    assert not failures(found), failures(found)


@pytest.mark.parametrize("name", hostile.FAR)
def test_beyond_31_bits(target: Target, name: str) -> None:
    """The second row or element lies more than 2**31 elements behind the first."""
    if not target.small and torch.cuda.mem_get_info()[0] < 10 << 30:
        pytest.skip("needs 10 GiB of free GPU memory")
    wrong = hostile.attempt_far(name, target.backend, target.device)
    assert wrong is None, wrong


def test_tensors_of_other_kinds_are_answered(target: Target) -> None:
    """With a gradient, a parameter, made in inference mode, a view of a complex number: the same bits."""
    plain = torch.randn(4, 90, device=target.device)
    want = dsa_topk.topk_positions(plain, None, 5, backend=target.backend)
    with torch.inference_mode():
        inference = plain.clone()
    kinds = {
        "leaf": plain.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(plain.clone()),
        "inference": inference,
        "middle of a graph": plain.clone().requires_grad_() * 1,
    }
    for name, scores in kinds.items():
        out, returned = dsa_topk.topk_positions(scores, None, 5, return_scores=True, backend=target.backend)
        assert torch.equal(out, want), name
        assert torch.equal(returned, plain.gather(1, want.long())), name
        assert not returned.requires_grad, name
        only = dsa_topk.topk_positions(scores, None, 5, backend=target.backend)
        assert torch.equal(only, want), name


def test_meta_tensors_give_shapes() -> None:
    out, returned = dsa_topk.topk_positions(torch.empty(3, 50, device="meta"), None, 5, return_scores=True)
    assert out.is_meta and out.shape == (3, 5) and returned.is_meta  # noqa: PT018


def test_a_negative_view_that_torch_itself_makes_is_refused(target: Target) -> None:
    """``imag`` of a conjugate is a view whose sign is turned only when torch reads it; a kernel would read the bits."""
    conjugate = torch.randn(3, 1, dtype=torch.complex64, device=target.device).conj().imag
    assert conjugate.is_neg()
    with pytest.raises(ValueError, match=r"scores: expected .*resolve_neg"):
        dsa_topk.topk_positions(conjugate, None, 1, return_scores=True, backend=target.backend)
    resolved = conjugate.resolve_neg()
    _, returned = dsa_topk.topk_positions(resolved, None, 1, return_scores=True, backend=target.backend)
    assert torch.equal(returned, resolved)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and strides without memory, as a sharded parameter has between two steps."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def lazy_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros that torch makes up where it reads them, as automatic differentiation passes them on."""
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@on_gpu
@pytest.mark.parametrize("empty", [freed, lazy_zeros])
@pytest.mark.parametrize("form", FORMS)
def test_tensors_without_memory_are_refused(form: str, empty: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their address is 0: a launch would end in a fault that leaves the process without a device. The refusal is the
    compiled module's, because an address costs Python too much to ask for; nothing is written by then."""
    placed = hostile.refusable(form, "cuda")
    found = []
    for name, frame in placed.frames.items():
        without = empty(frame.tensor)
        assert without.data_ptr() == 0
        assert without.shape == frame.tensor.shape
        found.append(hostile.refuse(placed, (name, {name: without}, ValueError, "^select: "), "cuda"))
        torch.cuda.synchronize()
    assert not failures(found), failures(found)
    assert placed.run("cuda") is placed.call.out, "the device still serves"


@pytest.mark.parametrize("name", ["lengths", "row_starts", "row_to_batch", "page_table_starts"])
@pytest.mark.parametrize("dtype", [hostile.INT32, hostile.INT64], ids=str)
def test_validation_names_every_extreme(name: str, dtype: torch.dtype) -> None:
    """``validate=True`` finds each value that is out of range, at its row, and takes those that are not."""
    limit = {"lengths": 300, "row_starts": 300, "row_to_batch": 19, "page_table_starts": 40}[name]
    for value in hostile.EXTREMES[dtype]:
        vector = torch.zeros(20, dtype=dtype)
        vector[13] = value
        call = hostile.make("paged", 0, **{"lengths": torch.zeros(20, dtype=hostile.INT32), name: vector})
        if 0 <= value <= limit:
            hostile.call_public(call, "torch", validate=True)
        else:
            with pytest.raises(ValueError, match=rf"{name}\[13\].*row: 13"):
                hostile.call_public(call, "torch", validate=True)


# ---- the tests can fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scores", "lengths", "page_table", "out", "out_positions"])
@pytest.mark.parametrize("where", ["before", "behind", "gap"])
def test_a_stray_write_is_noticed(name: str, where: str) -> None:
    call = hostile.make("paged", 0, rows=3)
    tensor = getattr(call, name)
    apart = hostile.spread(tensor[:, None] if tensor.dim() == 1 else tensor, 320 if name == "scores" else 50, 0)
    placed = hostile.Placed(dataclasses.replace(call, **{name: apart[:, 0] if tensor.dim() == 1 else apart}), "cpu")
    frame = placed.frames[name]
    assert placed.damage(ran=True) is None
    at = {"before": 32, "behind": -33, "gap": 33 + apart.shape[1]}[where]
    frame._whole[at] += 1
    assert name in str(placed.damage(ran=True))


def test_a_write_to_an_input_or_a_refused_output_is_noticed() -> None:
    placed = hostile.refusable("paged", "cpu")
    placed.frames["lengths"].tensor[2] += 1
    assert "lengths" in str(placed.damage(ran=True))
    placed = hostile.refusable("paged", "cpu")
    placed.frames["out"].tensor[1, 1] = 0
    assert placed.damage(ran=True) is None
    assert "out" in str(placed.damage(ran=False))


def test_a_wrong_answer_and_a_missing_refusal_are_noticed() -> None:
    call: Call = hostile.make("ragged", 0)
    assert "slot" in str(hostile.judge(call, torch.full((20, 7), hostile.UNWRITTEN, dtype=torch.int32), None, None))
    placed = hostile.refusable("positions", "cpu")
    assert "not refused" in str(hostile.refuse(placed, ("nothing wrong", {}, ValueError, "k"), "torch"))
    wrong = ("k", {"k": 0}, ValueError, "page_size")
    assert "without" in str(hostile.refuse(placed, wrong, "torch"))
    assert "instead of" in str(hostile.refuse(placed, ("k", {"k": 0}, TypeError, "k"), "torch"))
