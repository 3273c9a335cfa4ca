"""The built-in adapters `flashinfer` and `sgl-kernel` of ``dsa-topk check`` on the CPU: what is sent, what is refused.

The packages are played by the drop-in modules, which have their signatures, behind checks of what the packages leave to
their callers: no call may get there that breaks one.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsa_topk.compat import flashinfer as flashinfer_here
from dsa_topk.compat import sglang as sglang_here
from dsa_topk.conformance import adapters
from dsa_topk.conformance.cases.common import wrap
from dsa_topk.conformance.runner import run_problem
from dsa_topk.conformance.suite import specs

CPU = torch.device("cpu")
K = 2048  # the only k of sgl_kernel


class Package:
    """A stand-in that counts its calls; ``strict``: it insists on what the package leaves to its callers."""

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.calls: Counter[str] = Counter()

    def enter(self, name, scores, lengths, row_starts):
        self.calls[name] += 1
        for vector in (lengths, row_starts):
            assert vector is None or (vector.dtype == torch.int32 and vector.is_contiguous())
        if self.strict:
            start = torch.zeros_like(lengths) if row_starts is None else row_starts
            assert bool((start >= 0).all() and (lengths >= 0).all() and (start + lengths <= scores.shape[1]).all())

    def flashinfer(self):
        def paged(scores, table, lengths, k, row_to_batch=None, **options):
            self.enter("paged", scores, lengths, options["row_starts"])
            assert row_to_batch is not None or table.shape[0] == scores.shape[0]
            # In real ones the table begins where the scores do, unless told otherwise.
            assert options["row_starts"] is None or options["page_table_row_starts"] is not None
            if self.strict:
                first = options["page_table_row_starts"]
                first = torch.zeros_like(lengths) if first is None else first
                batch = torch.arange(len(lengths)) if row_to_batch is None else row_to_batch
                for request, at, count in zip(batch.tolist(), first.tolist(), lengths.tolist(), strict=True):
                    used = -(-count // options["page_size"])
                    assert at + used <= table.shape[1]
                    assert count == 0 or bool((table[request, at : at + used] >= 0).all())
            return flashinfer_here.top_k_page_table_transform(scores, table, lengths, k, row_to_batch, **options)

        def ragged(scores, offsets, lengths, k, row_starts=None):
            self.enter("ragged", scores, lengths, row_starts)
            return flashinfer_here.top_k_ragged_transform(scores, offsets, lengths, k, row_starts=row_starts)

        return SimpleNamespace(top_k_page_table_transform=paged, top_k_ragged_transform=ragged)

    def sgl_kernel(self):
        def positions(scores, lengths, k, row_starts=None):
            self.enter("positions", scores, lengths, row_starts)
            return sglang_here.fast_topk_v2(scores, lengths, k, row_starts=row_starts)

        def ragged(scores, lengths, offsets, k, row_starts=None):
            self.enter("ragged", scores, lengths, row_starts)
            assert row_starts is not None or bool((lengths <= k).all())  # as documented
            return sglang_here.fast_topk_transform_ragged_fused(scores, lengths, offsets, k, row_starts)

        def paged(scores, lengths, table, cu_seqlens_q, k, row_starts=None):
            self.enter("paged", scores, lengths, row_starts)
            assert not self.strict or bool((lengths <= table.shape[1]).all())
            return sglang_here.fast_topk_transform_fused(scores, lengths, table, cu_seqlens_q, k, row_starts)

        return SimpleNamespace(
            fast_topk_v2=positions, fast_topk_transform_ragged_fused=ragged, fast_topk_transform_fused=paged
        )


MODULES = {"flashinfer": "flashinfer", "sgl-kernel": "sgl_kernel"}


@pytest.fixture
def play(monkeypatch):
    """``play(name, package)``: the adapter with its package played by ``package``."""

    def use(name, package):
        module = MODULES[name]
        monkeypatch.setitem(sys.modules, module, getattr(package, module)())
        return adapters.get(name)

    monkeypatch.delenv("PEERS_BEYOND_DOCS", raising=False)
    return use


def scores(rows=3, width=2500, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODULES)
def test_the_suite_sends_nothing_that_is_its_callers_duty(name, play):
    # Every 13th of the thousand problems, and all of the cases whose integers are wild (B20, B24, hostile).
    package = Package()
    adapter = play(name, package)
    found: Counter[str] = Counter()
    for at, spec in enumerate(specs("quick", CPU)):
        if at % 13 and spec.case not in ("B20", "B24", "hostile"):
            continue
        result = run_problem(adapter, spec.build())
        assert result.status in ("exact", "unsupported"), f"{spec.case} {spec.name}: {result.status}: {result.reason}"
        assert "AssertionError" not in result.reason, f"{spec.case} {spec.name}: {result.reason}"
        found[result.status] += 1
    assert found["exact"] >= 3
    assert found["unsupported"] >= 3
    assert len(package.calls) >= 2


@pytest.mark.parametrize("starts", [None, 7])
@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
@pytest.mark.parametrize("name", MODULES)
def test_legal_calls_are_served(name, form, starts, play):
    package = Package()
    problem = wrap(scores(), 2200, K, form, starts=starts, page_size=1)
    assert run_problem(play(name, package), problem).status == "exact"
    sent = "ragged" if (name, form) == ("flashinfer", "positions") else form
    assert dict(package.calls) == {sent: 1}


def test_ragged_starts_are_zeros_for_sgl_kernel_where_the_call_has_none(play):
    """None is documented for rows with no more than k scores only (the stand-in asserts it)."""
    longer = wrap(scores(), K + 1, K, "ragged")
    assert run_problem(play("sgl-kernel", Package()), longer).status == "exact"


WILD = {
    "negative length": {"lengths": [-1, 5, 9]},
    "length beyond the scores": {"lengths": [2501, 5, 9]},
    "negative start": {"lengths": 5, "starts": [0, -1, 2]},
    "start and length beyond the scores": {"lengths": 2200, "starts": [0, 301, 2]},
}


@pytest.mark.parametrize("case", WILD)
@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
@pytest.mark.parametrize("name", MODULES)
def test_windows_outside_are_sent_on_request_only(name, form, case, play, monkeypatch):
    problem = wrap(scores(), WILD[case]["lengths"], K, form, starts=WILD[case].get("starts"), page_size=1)
    package = Package(strict=False)  # it clamps, as no package promises to
    adapter = play(name, package)
    refused = run_problem(adapter, problem)
    assert (refused.status, not package.calls) == ("unsupported", True)
    assert refused.reason == "windows that leave the scores or the page table (its callers' duty)"
    monkeypatch.setenv("PEERS_BEYOND_DOCS", "0")
    assert run_problem(adapter, problem).status == "unsupported"
    monkeypatch.setenv("PEERS_BEYOND_DOCS", "1")
    run_problem(adapter, problem)
    assert package.calls


@pytest.mark.parametrize("name", MODULES)
def test_a_table_that_ends_early_is_outside_unless_the_call_gives_no_lengths(name, play):
    """Without lengths the adapter makes them: those of the contract, which end where the table does."""
    whole = wrap(scores(), None, K, "paged", page_size=1)
    table = whole.shape.page_table
    assert table is not None
    shape = replace(whole.shape, page_table=table[:, :2300].contiguous())
    package = Package()
    assert run_problem(play(name, package), replace(whole, shape=shape)).status == "exact"
    assert dict(package.calls) == {"paged": 1}
    shape = replace(shape, lengths=torch.full((3,), 2301, dtype=torch.int32))
    assert "(its callers' duty)" in run_problem(play(name, package), replace(whole, shape=shape)).reason
    assert dict(package.calls) == {"paged": 1}


def test_flashinfer_gets_no_pages_below_0_and_one_table_row_for_each_score_row(play):
    problem = wrap(scores(), 200, 32, "paged")
    table = problem.shape.page_table
    assert table is not None
    more = torch.cat([table, table])
    package = Package()
    adapter = play("flashinfer", package)
    assert run_problem(adapter, replace(problem, shape=replace(problem.shape, page_table=more))).status == "exact"
    table[:, 3] = -5  # tokens 192 to 199 of the windows
    assert "page-table entries" in run_problem(adapter, problem).reason
    assert dict(package.calls) == {"paged": 1}
