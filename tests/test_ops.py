"""The operators: opcheck, torch.compile against eager, fake and meta tensors, tracing."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dsa_topk
from dsa_topk import backends

R, N, K = 4, 50, 6
FORMS = ("positions", "ragged", "paged")


def arguments(form: str, rows: int = R, width: int = N, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    kw: dict[str, Any] = {
        "scores": torch.randn(rows, width, generator=generator).to(device),
        "lengths": torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32).to(device),
        "row_starts": torch.randint(0, 5, (rows,), generator=generator).to(device),
    }
    if form == "ragged":
        kw["out_offsets"] = torch.randint(0, 99, (rows,), generator=generator).to(device)
    elif form == "paged":
        kw["page_table"] = torch.randint(0, 99, (rows, 9), generator=generator, dtype=torch.int32).to(device)
        kw["page_size"] = 7
        kw["row_to_batch"] = torch.arange(rows).flip(0).to(device)
    return kw


def public(form: str) -> Any:
    return getattr(dsa_topk, f"topk_{form}")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- operators


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_functional(form: str, requires_grad: bool) -> None:
    kw = arguments(form)
    scores = kw.pop("scores").requires_grad_(requires_grad)
    operator = getattr(torch.ops.dsa_topk, f"topk_{form}").default
    torch.library.opcheck(operator, (scores, kw.pop("lengths"), K), kw)
    torch.library.opcheck(operator, (scores.half(), None, 60), {**kw, "row_starts": None, "order": "score"})


@pytest.mark.parametrize("form", FORMS)
def test_opcheck_out_variant(form: str) -> None:
    kw = arguments(form)
    arguments_ = (kw.pop("scores"), kw.pop("lengths"), K)
    operator = getattr(torch.ops.dsa_topk, f"topk_{form}_out").default
    out = torch.empty(R, K, dtype=torch.int32)
    torch.library.opcheck(operator, arguments_, {**kw, "out_indices": out})
    kw |= {"out_indices": out, "out_scores": torch.empty(R, K), "tie_break": "largest", "backend": "torch"}
    if form != "positions":
        kw["out_positions"] = torch.empty(R, K, dtype=torch.int32)
    torch.library.opcheck(operator, arguments_, kw)


@pytest.mark.parametrize("form", FORMS)
def test_operators_equal_the_public_functions(form: str) -> None:
    kw = arguments(form)
    expected, scores = public(form)(k=K, return_scores=True, **kw)
    head = (kw.pop("scores"), kw.pop("lengths"), K)
    assert torch.equal(getattr(torch.ops.dsa_topk, f"topk_{form}")(*head, **kw), expected)
    out, out_scores = torch.empty(R, K, dtype=torch.int32), torch.empty(R, K)
    getattr(torch.ops.dsa_topk, f"topk_{form}_out")(*head, out_indices=out, out_scores=out_scores, **kw)
    assert torch.equal(out, expected)
    assert torch.equal(out_scores, scores)


@pytest.mark.parametrize(
    ("out_scores", "error"),
    [
        (torch.empty(R, K, dtype=torch.float16), TypeError),
        (torch.empty(R, K + 1), ValueError),
        (torch.empty(K, R).t(), ValueError),
        (torch.empty(R, K, device="meta"), ValueError),
    ],
)
def test_out_scores_of_an_operator_are_checked(out_scores: torch.Tensor, error: type[Exception]) -> None:
    out = torch.empty(R, K, dtype=torch.int32)
    with pytest.raises(error, match="out_scores: expected"):
        torch.ops.dsa_topk.topk_positions_out(torch.randn(R, N), None, K, out_indices=out, out_scores=out_scores)


def test_out_scores_may_not_overlap() -> None:
    scores = torch.randn(1, N)
    out = torch.empty(1, K, dtype=torch.int32)
    for shared in (scores[:, 3 : 3 + K], out.view(torch.float32)):
        with pytest.raises(ValueError, match="out_scores: expected memory of its own"):
            torch.ops.dsa_topk.topk_positions_out(scores, None, K, out_indices=out, out_scores=shared)


# --- torch.compile


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(form: str, dynamic: bool) -> None:
    # Every combination of outputs; two sizes, so that the second run uses other shapes than the traced ones.
    def plain(kw: dict[str, Any], k: int) -> Any:
        return public(form)(k=k, **kw)

    def everything(kw: dict[str, Any], k: int, out: torch.Tensor, out_positions: torch.Tensor) -> Any:
        more = {} if form == "positions" else {"out_positions": out_positions}
        indices, scores = public(form)(
            k=k, out=out, return_scores=True, order="score", tie_break="largest", **more, **kw
        )
        return indices + 1, scores * 2, out

    compiled_plain = torch.compile(plain, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compiled_everything = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, width, k in ((4, 50, 6), (3, 40, 50)):
        kw = arguments(form, rows, width)
        assert torch.equal(compiled_plain(kw, k), plain(kw, k))
        results = []
        for function in (compiled_everything, everything):
            buffer = torch.zeros(rows, 2 * k + 1, dtype=torch.int32)  # outputs are disjoint columns of one buffer
            returned = function(kw, k, buffer[:, :k], buffer[:, k + 1 :])
            results.append([*returned, buffer])
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_one_trace_serves_other_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dsa_topk.topk_positions, fullgraph=True, dynamic=True, backend=counter)
    for rows, width in ((4, 50), (5, 60), (7, 9)):
        scores = torch.randn(rows, width)
        assert torch.equal(compiled(scores, None, K), dsa_topk.topk_positions(scores, None, K))
    assert counter.frame_count == 1


def test_backend_and_validate_survive_compilation() -> None:
    def select(scores: torch.Tensor, lengths: torch.Tensor, backend: str, validate: bool) -> Any:
        return dsa_topk.topk_positions(scores, lengths, K, backend=backend, validate=validate)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    scores, lengths = torch.randn(R, N), torch.tensor([1, -1, 3, 4])
    assert torch.equal(compiled(scores, lengths, "torch", False), select(scores, lengths, "torch", False))
    with pytest.raises(ValueError, match=r"lengths\[1\]"):
        compiled(scores, lengths, "torch", True)
    with pytest.raises((RuntimeError, ValueError), match="backend='cuda'"):
        compiled(scores, lengths, "cuda", False)


def test_a_compiled_call_reaches_the_named_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = backends.choose

    def spy(call: Any, requested: str = "auto") -> Any:
        seen.append(requested)
        return original(call, requested)

    monkeypatch.setattr("dsa_topk._ops.choose", spy)
    compiled = torch.compile(lambda x: dsa_topk.topk_positions(x, None, K, backend="torch"), backend="aot_eager")
    compiled(torch.randn(R, N))
    assert seen == ["torch"]


def test_errors_reach_the_user_of_a_compiled_function() -> None:
    compiled = torch.compile(lambda x, k: dsa_topk.topk_positions(x, None, k), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="k: expected 1 <= k <= 8192, got 9000"):
        compiled(torch.randn(R, N), 9000)
    with pytest.raises(Exception, match="scores: expected dtype"):
        compiled(torch.randn(R, N).double(), 3)


def test_compiled_with_scores_that_require_grad() -> None:
    scores = torch.randn(R, N, requires_grad=True)

    def select(x: torch.Tensor) -> Any:
        indices, best = dsa_topk.topk_positions(x, None, K, return_scores=True)
        return (x.gather(1, indices.long()) * 2).sum(), best

    total, best = torch.compile(select, fullgraph=True, backend="aot_eager")(scores)
    total.backward()
    assert not best.requires_grad
    assert scores.grad is not None
    assert int((scores.grad == 2).sum()) == R * K


# --- fake, meta and traced tensors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_need_no_gpu(form: str, device: str) -> None:
    with FakeTensorMode():
        kw = {
            name: torch.empty(value.shape, dtype=value.dtype, device=device) if name != "page_size" else value
            for name, value in arguments(form).items()
        }
        out = torch.empty(R, 2 * K, dtype=torch.int32, device=device).narrow(1, 0, K)
        indices = public(form)(k=K, **kw)
        given, scores = public(form)(k=K, out=out, return_scores=True, **kw)
        with pytest.raises(ValueError, match="k: expected"):
            public(form)(k=0, **kw)
    assert given is out
    for tensor, dtype in ((indices, torch.int32), (scores, torch.float32)):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((R, K), dtype, device)


@pytest.mark.parametrize("form", FORMS)
def test_meta_tensors(form: str) -> None:
    indices, scores = public(form)(k=K, return_scores=True, **arguments(form, device="meta"))
    assert (indices.shape, indices.dtype, indices.device.type) == ((R, K), torch.int32, "meta")
    assert scores.device.type == "meta"


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(mode: Literal["real", "fake", "symbolic"]) -> None:
    def select(scores: torch.Tensor) -> Any:
        return dsa_topk.topk_positions(scores, None, K)

    scores = torch.randn(R, N)
    graph = make_fx(select, tracing_mode=mode)(scores)
    assert "dsa_topk.topk_positions" in graph.code
    other = torch.randn(R, N)
    assert torch.equal(graph(other), select(other))


def test_export_keeps_the_operator() -> None:
    class Selector(torch.nn.Module):
        def forward(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return dsa_topk.topk_positions(scores, lengths, K)

    scores, lengths = torch.randn(R, N), torch.tensor([1, 2, 3, 40])
    exported = torch.export.export(Selector(), (scores, lengths))
    assert torch.equal(exported.module()(scores, lengths), dsa_topk.topk_positions(scores, lengths, K))


class Labelled(torch.Tensor):
    """A plain subclass, with memory of its own, as users define for bookkeeping."""


def test_parameters_and_subclasses_work_as_their_values() -> None:
    scores = torch.randn(R, N)
    expected = dsa_topk.topk_positions(scores, None, K)
    assert torch.equal(dsa_topk.topk_positions(torch.nn.Parameter(scores), None, K), expected)
    assert torch.equal(dsa_topk.topk_positions(scores.as_subclass(Labelled), None, K), expected)
    for kind in (torch.nn.Parameter(scores), scores.as_subclass(Labelled)):
        with pytest.raises(ValueError, match="out: expected memory of its own"):
            dsa_topk.topk_positions(kind, None, K, out=scores.view(torch.int32)[:, :K])


def test_eager_calls_skip_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an eager call on plain tensors went through the operator")

    monkeypatch.setattr("dsa_topk.api.execute_operator", refuse)
    for form in FORMS:
        public(form)(k=K, **arguments(form))
