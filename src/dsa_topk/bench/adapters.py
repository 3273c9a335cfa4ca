"""Adapters of ``dsa-topk check`` as contestants: the same function serves both commands."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import torch

from ..testing import CallShape
from .cases import PAGE_SIZE
from .inputs import Problem
from .peers import Adapter, NotApplicable, Peer


def known(name: str) -> bool:
    """Whether ``name`` speaks of such an adapter: ``module:function``, or an entry point of ``dsa_topk.adapters``."""
    from ..conformance.adapters import ENTRY_POINTS

    return ":" in name or any(point.name == name for point in metadata.entry_points(group=ENTRY_POINTS))


def contestant(name: str) -> Adapter:
    """The benchmark's adapter around a ``check`` adapter.

    Raises
    ------
    ValueError
        When the module or its function cannot be imported.
    """
    from ..conformance import adapters
    from ..conformance.problem import Problem as Call

    theirs = adapters.get(name)

    def adapter(problem: Problem) -> Peer:
        if reason := theirs.unavailable():
            raise NotApplicable(reason)
        if theirs.device_type not in (None, problem.device.type):
            raise NotApplicable(f"needs a {theirs.device_type} device")
        case = problem.case
        shape = CallShape(
            case.mode,
            problem.form,
            case.rows,
            case.columns,
            case.k,
            problem.lengths,
            page_size=PAGE_SIZE if problem.form == "paged" else 1,
            **{key: value for key, value in problem.arguments().items() if key != "page_size"},
        )
        bare = replace(shape, form="positions", page_table=None, row_to_batch=None, page_table_starts=None, page_size=1)
        outputs = adapters.Outputs(torch.empty_like(problem.out), None)
        # Which form the adapter serves shows at a call: a probe on empty windows costs nothing and decides it.
        probe = torch.zeros(case.rows, case.columns, dtype=torch.float32, device=problem.device)
        probe = probe.to(getattr(torch, case.dtype))
        for tried in (shape, replace(bare, out_offsets=None)):
            try:
                theirs.call(Call("bench", tried, probe), outputs)
                break
            except adapters.Unsupported as error:
                reason = str(error)
        else:
            raise NotApplicable(reason)
        box: dict[str, torch.Tensor] = {}

        def run(scores: torch.Tensor) -> None:
            box["out"] = theirs.call(Call("bench", tried, scores), outputs).indices

        form = "positions" if tried.form == "positions" else None
        return Peer(run, lambda: box["out"].int(), form, theirs.mode, writes_scores=not theirs.read_only)

    return adapter
