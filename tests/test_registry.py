"""The registry: who serves a call and why, never a silent replacement."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch

import dsa_topk
from dsa_topk import backends
from dsa_topk._call import MAX_K, Call
from dsa_topk.backends import Capabilities

SCORES = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))


class CudaCall:
    """Looks like a call on a CUDA device, which is all that `choose` asks about."""

    class scores:
        is_cuda = True

    form = "positions"


def backend(name: str, unavailable: str | None = None, refuses: str | None = None, **capabilities: Any) -> Any:
    module = types.ModuleType(name)
    module.name = name  # type: ignore[attr-defined]
    module.capabilities = Capabilities(**capabilities)  # type: ignore[attr-defined]
    module.unavailable = lambda: unavailable  # type: ignore[attr-defined]
    module.refuses = lambda call: refuses  # type: ignore[attr-defined]
    module.run = lambda call: call.out.fill_(7)  # type: ignore[attr-defined]
    return module


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry's table, empty and restored afterwards; filled by the test."""
    table: dict[str, Any] = {}
    monkeypatch.setattr(backends, "_loaded", table)
    monkeypatch.setattr(backends, "_warned", set())
    return table


def test_names() -> None:
    assert backends.NAMES == ("cuda", "flashinfer", "sgl-kernel", "torch")
    for name in backends.NAMES:
        known = backends.get(name)
        assert known.name == name
        assert isinstance(known.capabilities, Capabilities)
        assert known.unavailable() is None or isinstance(known.unavailable(), str)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'auto' or one of 'cuda', 'flashinfer', 'sgl-kernel', 'torch', got 'tsl'"):
        backends.get("tsl")


def test_torch_serves_everything() -> None:
    torch_backend = backends.get("torch")
    assert torch_backend.unavailable() is None
    assert torch_backend.refuses(Call("positions", SCORES, None, MAX_K)) is None
    assert torch_backend.capabilities.canonical


def test_auto_on_the_cpu_is_torch() -> None:
    assert backends.choose(Call("positions", SCORES, None, 3)).name == "torch"


def test_auto_on_cuda_is_cuda_when_it_serves(registry: dict[str, Any]) -> None:
    registry["cuda"] = backend("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(CudaCall()) is registry["cuda"]  # type: ignore[arg-type]


@pytest.mark.parametrize("why", ["unavailable", "refuses"])
def test_auto_on_cuda_falls_back_to_torch_and_warns_once(registry: dict[str, Any], why: str) -> None:
    # Comparison backends that could serve it stay out.
    registry.update({name: backend(name, canonical=False) for name in ("flashinfer", "sgl-kernel")})
    registry["cuda"] = backend("cuda", **{why: "no toolchain here"})
    with pytest.warns(RuntimeWarning, match="falls back to the slower torch backend: no toolchain here"):
        assert backends.choose(CudaCall()).name == "torch"  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(CudaCall()).name == "torch"  # type: ignore[arg-type]


def test_a_named_backend_is_used_or_refused_never_replaced(registry: dict[str, Any]) -> None:
    registry["flashinfer"] = backend("flashinfer", canonical=False)
    assert (dsa_topk.topk_positions(SCORES, None, 3, backend="flashinfer") == 7).all()
    registry["flashinfer"] = backend("flashinfer", unavailable="not installed")
    with pytest.raises(RuntimeError, match="backend='flashinfer' is not available on this machine: not installed"):
        dsa_topk.topk_positions(SCORES, None, 3, backend="flashinfer")
    registry["flashinfer"] = backend("flashinfer", refuses="k = 3; its largest is 2")
    with pytest.raises(ValueError, match="backend='flashinfer' does not serve this call: k = 3; its largest is 2"):
        dsa_topk.topk_positions(SCORES, None, 3, backend="flashinfer")


def test_environment_variables_do_not_choose(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    registry["flashinfer"] = backend("flashinfer")
    monkeypatch.setenv("DSA_TOPK_BACKEND", "flashinfer")
    assert (dsa_topk.topk_positions(SCORES, None, 3) != 7).all()


def test_a_module_that_can_not_be_imported_is_unavailable_with_the_reason(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dsa_topk.backends.sgl_kernel", None)
    absent = backends.get("sgl-kernel")
    reason = absent.unavailable()
    assert reason is not None
    assert "dsa_topk.backends.sgl_kernel can't be imported" in reason
    assert absent.refuses(Call("positions", SCORES, None, 3)) == reason
    with pytest.raises(RuntimeError, match="backend='sgl-kernel' is not available"):
        dsa_topk.topk_positions(SCORES, None, 3, backend="sgl-kernel")
    with pytest.raises(RuntimeError, match="not available"):
        absent.run(Call("positions", SCORES, None, 3))
    assert "can't be imported" in dsa_topk.explain(device="cpu").reasons["sgl-kernel"]


CALL = {"form": "positions", "device_type": "cuda", "dtype": torch.float32, "k": 2048}


@pytest.mark.parametrize(
    ("limits", "change", "reason"),
    [
        ({"device_types": ("cuda",)}, {"device_type": "cpu"}, "device type 'cpu'; it serves 'cuda'"),
        ({"dtypes": (torch.float32,)}, {"dtype": torch.float16}, "torch.float16; it serves torch.float32"),
        ({"max_k": 2048}, {"k": 2049}, "k = 2049; its largest is 2048"),
        ({"forms": ("paged", "ragged")}, {"form": "positions"}, "'positions' form; it serves 'paged', 'ragged'"),
        ({"orders": ("position",)}, {"order": "score"}, "order='score'; it serves 'position'"),
        ({"tie_breaks": ("smallest",)}, {"tie_break": "largest"}, "tie_break='largest'; it serves 'smallest'"),
        ({"returns_scores": False}, {"return_scores": True}, "return_scores=True"),
    ],
)
def test_capabilities_refuse_what_lies_outside_them(
    limits: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    capabilities = Capabilities(**limits)
    accepted = {**CALL, "form": "paged"} if "forms" in limits else CALL
    assert capabilities.refuses(**accepted) is None  # type: ignore[arg-type]
    text = capabilities.refuses(**{**accepted, **change})
    assert text is not None
    assert reason in text


def test_capabilities_of_a_call() -> None:
    call = Call("positions", SCORES, None, 3, order="score", return_scores=True)
    assert Capabilities().refuses_call(call) is None
    assert "'cpu'" in str(Capabilities(device_types=("cuda",)).refuses_call(call))
    assert "order='score'" in str(Capabilities(orders=("position",)).refuses_call(call))
    assert "return_scores" in str(Capabilities(returns_scores=False).refuses_call(call))


# --- explain


def test_explain_on_the_cpu() -> None:
    explanation = dsa_topk.explain(form="paged", device="cpu", dtype=torch.bfloat16, k=512, rows=8, width=4096)
    assert explanation.backend == "torch"
    assert set(explanation.reasons) == set(backends.NAMES)
    assert explanation.reasons["torch"].startswith("chosen")
    text = str(explanation)
    assert "topk_paged: scores [8, 4096] torch.bfloat16 on cpu, k=512" in text
    assert text.count("\n") >= 4


def test_explain_agrees_with_choose_for_cuda(registry: dict[str, Any]) -> None:
    cuda = registry["cuda"] = backend("cuda", device_types=("cuda",), max_k=4096)
    cuda.describe = lambda **kw: f"one block per row\nrows={kw['rows']} k={kw['k']} {kw['device'].type}"
    registry["flashinfer"] = backend("flashinfer", canonical=False)
    explanation = dsa_topk.explain(device="cuda", k=2048, rows=3, width=9)
    assert explanation.backend == "cuda"
    assert "not canonical" in explanation.reasons["flashinfer"]
    assert "  cuda: one block per row\n  cuda: rows=3 k=2048 cuda" in str(explanation)
    larger = dsa_topk.explain(device="cuda", k=5000)
    assert larger.backend == "torch"
    assert larger.reasons["cuda"] == "refuses k = 5000; its largest is 4096"
    assert dsa_topk.explain(device="cpu").reasons["cuda"].startswith("refuses scores on device type 'cpu'")


def test_explain_of_a_named_backend_that_can_not(registry: dict[str, Any]) -> None:
    registry["cuda"] = backend("cuda", unavailable="no CUDA device")
    explanation = dsa_topk.explain(device="cuda", backend="cuda")
    assert explanation.backend is None
    assert explanation.reasons["cuda"] == "not available: no CUDA device"
    assert "-> refused" in str(explanation)


@pytest.mark.parametrize(
    "wrong", [{"form": "flat"}, {"order": "rank"}, {"tie_break": "none"}, {"backend": "triton"}, {"k": 0}, {"k": 8193}]
)
def test_explain_refuses_what_no_call_can_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        dsa_topk.explain(device="cpu", **wrong)
