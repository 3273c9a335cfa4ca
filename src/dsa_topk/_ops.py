"""Ways into a backend: directly (eager calls) or through a torch.library operator (everything that traces).

Operators, in the namespace ``dsa_topk`` (``torch.ops.dsa_topk.<name>``), two for each public function:

``topk_positions``, ``topk_ragged``, ``topk_paged``
    functional: the public function's arguments without outputs and ``return_scores``; returns the index tensor.
``topk_positions_out``, ``topk_ragged_out``, ``topk_paged_out``
    write to ``out_indices`` and, where given, ``out_positions`` (not for positions) and ``out_scores``; return nothing.
    (Not ``out``: Dynamo refuses tensors with gaps between their rows for an argument of that name.)

An operator costs 10 to 30 us of host time, so eager calls on plain tensors skip it. All have fake kernels: they work
under ``torch.compile(fullgraph=True)``, ``torch.export``, ``make_fx`` and ``FakeTensorMode`` (with CUDA fake tensors,
and no GPU) and on meta tensors.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from dsa_topk import _validate
from dsa_topk._call import FORMS, Call, Form
from dsa_topk._checks import check, check_out_scores
from dsa_topk.backends import choose

_NAMESPACE = "dsa_topk"
_INPUTS: dict[Form, str] = {
    "positions": "",
    "ragged": "Tensor out_offsets, ",
    "paged": "Tensor page_table, SymInt page_size, Tensor? row_to_batch=None, Tensor? page_table_starts=None, ",
}
_OPTIONS = (
    'Tensor? row_starts=None, str order="position", str tie_break="smallest", bool validate=False, str backend="auto"'
)

_mode_depth = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


def needs_operator(scores: Tensor) -> bool:
    """Whether a call must go through its operator: it is being compiled, traced or faked, or is on no plain tensor."""
    return _is_compiling() or type(scores) is not Tensor or _mode_depth() > 0 or scores.is_meta


def execute(call: Call, backend: str, validate: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Choose a backend for a checked call, allocate what the caller did not give, run, and return the results."""
    chosen = choose(call, backend)
    if validate is not False or _validate.KEY in _validate.ENVIRON:
        _validate_values(call, validate)
    scores = call.scores
    if call.out is None:
        call.out = torch.empty((scores.shape[0], call.k), dtype=torch.int32, device=scores.device)
    if not call.return_scores:
        chosen.run(call)
        return call.out
    if call.out_scores is None:
        call.out_scores = torch.empty((scores.shape[0], call.k), dtype=scores.dtype, device=scores.device)
    chosen.run(call)
    return call.out, call.out_scores


def execute_operator(
    form: Form,
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out: Tensor | None,
    out_positions: Tensor | None,
    return_scores: bool,
    validate: bool,
    backend: str,
    **inputs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Serve a public call through the operator of its form, with the outputs allocated by traced code."""
    if not _is_compiling():
        # Compiled calls are checked by the fake kernel and again at run time; here errors come before the allocation.
        check(form, scores, lengths, k, out=out, out_positions=out_positions, return_scores=return_scores, **inputs)
    scores = scores.detach()  # indices have no gradient, and returned scores are copies outside the graph
    inputs.update(validate=validate, backend=backend)
    if out is None and out_positions is None and not return_scores:
        return _operator(form)(scores, lengths, k, **inputs)
    if out is None:
        out = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    inputs["out_indices"] = out
    if form != "positions":
        inputs["out_positions"] = out_positions
    if not return_scores:
        _operator(f"{form}_out")(scores, lengths, k, **inputs)
        return out
    out_scores = torch.empty((scores.shape[0], k), dtype=scores.dtype, device=scores.device)
    _operator(f"{form}_out")(scores, lengths, k, out_scores=out_scores, **inputs)
    return out, out_scores


def _operator(name: str) -> Any:
    return getattr(torch.ops.dsa_topk, f"topk_{name}").default


def _validate_values(call: Call, validate: bool) -> None:
    if validate is not False and validate is not True:
        raise TypeError(f"validate: expected a bool, got {type(validate).__name__}")
    setting = os.environ.get(_validate.VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{_validate.VARIABLE}: expected 0 or 1 in the environment, got {setting!r}")
    if validate or setting == "1":
        _validate.check_values(call)


# --- definitions


def _checked(
    form: Form,
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    out_indices: Tensor | None = None,
    out_scores: Tensor | None = None,
    validate: bool = False,
    backend: str = "auto",
    **inputs: Any,
) -> tuple[Call, str, bool]:
    """The checked call of an operator's arguments (torch leaves out those that have their default), and its options."""
    call = check(form, scores, lengths, k, out=out_indices, return_scores=out_scores is not None, **inputs)
    check_out_scores(call, out_scores)
    call.out_scores = out_scores
    return call, backend, validate


def _define(library: torch.library.Library, form: Form) -> None:
    """Define the functional and the out-variant operator of a form, each with a kernel and a fake one."""

    def functional(*args: Any, **kwargs: Any) -> Tensor:
        result = execute(*_checked(form, *args, **kwargs))
        assert isinstance(result, Tensor)
        return result

    def functional_fake(*args: Any, **kwargs: Any) -> Tensor:
        call, _, _ = _checked(form, *args, **kwargs)
        return call.scores.new_empty((call.scores.shape[0], call.k), dtype=torch.int32)

    def out_variant(*args: Any, **kwargs: Any) -> None:
        execute(*_checked(form, *args, **kwargs))

    def out_variant_fake(*args: Any, **kwargs: Any) -> None:
        _checked(form, *args, **kwargs)

    inputs = f"Tensor scores, Tensor? lengths, SymInt k, *, {_INPUTS[form]}"
    positions = "" if form == "positions" else "Tensor(b!)? out_positions=None, "
    outputs = f"Tensor(a!) out_indices, {positions}Tensor(c!)? out_scores=None, "
    name = f"topk_{form}"
    library.define(f"{name}({inputs}{_OPTIONS}) -> Tensor")
    library.impl(name, functional, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", functional_fake, lib=library)
    library.define(f"{name}_out({inputs}{outputs}{_OPTIONS}) -> ()")
    library.impl(f"{name}_out", out_variant, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}_out", out_variant_fake, lib=library)


_library = torch.library.Library(_NAMESPACE, "DEF")  # operators live as long as this object
for _form in FORMS:
    _define(_library, _form)
