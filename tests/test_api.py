"""The public functions: every argument error by name, overlap of outputs, value validation, host cost."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa_topk
from dsa_topk import _checks, backends
from dsa_topk._call import Call

R, N, K = 4, 50, 6


def arguments(form: str, **changes: Any) -> dict[str, Any]:
    """Valid arguments of a form, with changes."""
    kw: dict[str, Any] = {
        "scores": torch.randn(R, N, generator=torch.Generator().manual_seed(0)),
        "lengths": torch.tensor([50, 3, 0, 20], dtype=torch.int32),
        "k": K,
        "row_starts": torch.tensor([0, 1, 2, 3]),
    }
    if form == "ragged":
        kw["out_offsets"] = torch.tensor([0, 100, 200, 300])
    elif form == "paged":
        kw["page_table"] = torch.arange(R * 8, dtype=torch.int32).reshape(R, 8)
        kw["page_size"] = 7
        kw["row_to_batch"] = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
        kw["page_table_starts"] = torch.tensor([0, 1, 0, 2])
    kw.update(changes)
    return kw


def invoke(form: str, **changes: Any) -> Any:
    return getattr(dsa_topk, f"topk_{form}")(**arguments(form, **changes))


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FORMS = ("positions", "ragged", "paged")


# --- signatures and results


def test_signatures_are_those_of_the_contract() -> None:
    shared = "order='position', tie_break='smallest', out=None, return_scores=False, validate=False, backend='auto'"
    expected = {
        "positions": f"scores, lengths, k, *, row_starts=None, {shared}",
        "ragged": f"scores, lengths, k, *, out_offsets, row_starts=None, out_positions=None, {shared}",
        "paged": "scores, lengths, k, *, page_table, page_size, row_to_batch=None, row_starts=None, "
        f"page_table_starts=None, out_positions=None, {shared}",
    }
    for form, text in expected.items():
        signature = inspect.signature(getattr(dsa_topk, f"topk_{form}"))
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        assert str(inspect.Signature(bare)) == f"({text})"


@pytest.mark.parametrize("form", FORMS)
def test_docstrings_say_indices_first_and_name_every_argument(form: str) -> None:
    function = getattr(dsa_topk, f"topk_{form}")
    assert "Indices come first" in function.__doc__
    for name in inspect.signature(function).parameters:
        assert name in function.__doc__


@pytest.mark.parametrize("form", FORMS)
def test_returns_indices_then_scores_and_the_given_out_itself(form: str) -> None:
    indices = invoke(form)
    assert indices.dtype == torch.int32
    assert indices.shape == (R, K)
    assert indices.is_contiguous()
    out = ints(R, K)
    returned, scores = invoke(form, out=out, return_scores=True)
    assert returned is out
    assert torch.equal(out, indices)
    assert scores.dtype == torch.float32
    assert scores[2].tolist() == [-math.inf] * K


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_columns_are_ordinary_calls(form: str, rows: int, width: int) -> None:
    extra: dict[str, Any] = {"row_starts": None}
    if form == "ragged":
        extra["out_offsets"] = ints(rows)
    elif form == "paged":
        extra.update(row_to_batch=ints(rows), page_table_starts=None)
    lengths = torch.full((rows,), 9)
    indices, scores = invoke(form, scores=torch.empty(rows, width), lengths=lengths, return_scores=True, **extra)
    assert indices.tolist() == [[-1] * K] * rows
    assert scores.tolist() == [[-math.inf] * K] * rows


@pytest.mark.parametrize("table", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_page_table_makes_every_row_empty(table: tuple[int, int]) -> None:
    indices = invoke("paged", page_table=ints(*table), lengths=None, page_table_starts=None)
    assert (indices == -1).all()


def test_k_and_page_size_may_be_int_subclasses() -> None:
    class Number(int):
        pass

    assert torch.equal(invoke("paged", k=Number(K), page_size=Number(7)), invoke("paged"))


# --- errors: (form, changes, exception, text that must appear)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # nested tensors of this layout are a prototype; people have them
    NESTED = torch.nested.nested_tensor([torch.randn(3), torch.randn(4)])
ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # scores
    ("positions", {"scores": [[1.0]]}, TypeError, "scores: expected a torch.Tensor"),
    ("positions", {"scores": np.zeros((R, N), np.float32)}, TypeError, "scores: expected a torch.Tensor.*got ndarray"),
    ("positions", {"scores": None}, TypeError, "scores: expected a torch.Tensor.*got None"),
    ("positions", {"scores": torch.zeros(R, N, dtype=torch.float64)}, TypeError, "scores: expected dtype.*float64"),
    ("positions", {"scores": ints(R, N)}, TypeError, "scores: expected dtype.*int32"),
    ("positions", {"scores": torch.zeros(N)}, ValueError, r"scores: expected shape \[R, N\], got \[50\]"),
    ("positions", {"scores": torch.zeros(1, R, N)}, ValueError, r"scores: expected shape \[R, N\], got \[1, 4, 50\]"),
    ("positions", {"scores": torch.zeros(N, R).t()}, ValueError, r"scores: .*stride 1.*got strides \[1, 4\]"),
    ("positions", {"scores": torch.zeros(R, 1).expand(R, N)}, ValueError, "scores: .*stride 1"),
    ("positions", {"scores": torch.zeros(R, N).to_sparse()}, ValueError, "scores: .*strided.*sparse"),
    ("positions", {"scores": NESTED}, ValueError, "scores: .*nested"),
    (
        "positions",
        {"scores": torch.empty(1, 2**31, dtype=torch.float16, device="meta")},
        ValueError,
        r"scores: expected fewer than 2\*\*31 columns",
    ),
    # k
    ("positions", {"k": 0}, ValueError, "k: expected 1 <= k <= 8192, got 0"),
    ("positions", {"k": -1}, ValueError, "k: expected 1 <= k <= 8192, got -1"),
    ("positions", {"k": 8193}, ValueError, "k: .*got 8193"),
    ("positions", {"k": 2**31}, ValueError, "k: .*got 2147483648"),
    ("positions", {"k": 2.0}, TypeError, r"k: expected an int.*got 2\.0"),
    ("positions", {"k": True}, TypeError, "k: expected an int.*got True"),
    ("positions", {"k": "6"}, TypeError, "k: expected an int.*got '6'"),
    ("positions", {"k": None}, TypeError, "k: expected an int.*got None"),
    ("positions", {"k": torch.tensor(6)}, TypeError, "k: expected an int.*got Tensor"),
    # names
    ("positions", {"order": "rank"}, ValueError, "order: expected one of 'position', 'score', got 'rank'"),
    ("positions", {"order": None}, TypeError, "order: expected one of.*got None"),
    ("positions", {"order": torch.zeros(2)}, TypeError, "order: expected one of.*got Tensor"),
    ("positions", {"tie_break": "first"}, ValueError, "tie_break: expected one of 'smallest', 'largest', got 'first'"),
    ("positions", {"tie_break": 1}, TypeError, "tie_break: expected one of"),
    ("positions", {"return_scores": 1}, TypeError, "return_scores: expected a bool, got int"),
    ("positions", {"validate": "yes"}, TypeError, "validate: expected a bool, got"),
    ("positions", {"backend": "triton"}, ValueError, "backend: expected 'auto' or one of 'cuda', .*got 'triton'"),
    ("positions", {"backend": None}, TypeError, "backend: expected a str, got NoneType"),
    # page table
    ("paged", {"page_table": None}, TypeError, "page_table: expected an int32 tensor.*got None"),
    ("paged", {"page_table": [[0]]}, TypeError, "page_table: expected an int32 tensor.*got list"),
    ("paged", {"page_table": ints(R, 8, dtype=torch.int64)}, TypeError, "page_table: expected dtype int32, got.*int64"),
    ("paged", {"page_table": ints(8)}, ValueError, r"page_table: expected shape \[B, T\], got \[8\]"),
    ("paged", {"page_table": ints(8, R).t()}, ValueError, "page_table: .*stride 1"),
    ("paged", {"page_table": ints(R, 8).to_sparse()}, ValueError, "page_table: .*strided"),
    ("paged", {"page_table": ints(R, 8).to("meta")}, ValueError, "page_table: expected a tensor on cpu.*got.*meta"),
    ("paged", {"row_to_batch": None, "page_table": ints(3, 8)}, ValueError, "page_table: .*at least R = 4 rows.*got 3"),
    ("paged", {"page_size": 0}, ValueError, r"page_size: expected 1 <= page_size < 2\*\*31, got 0"),
    ("paged", {"page_size": 2**31}, ValueError, "page_size: .*got 2147483648"),
    ("paged", {"page_size": 64.0}, TypeError, r"page_size: expected an int.*got 64\.0"),
    ("paged", {"page_size": True}, TypeError, "page_size: expected an int.*got True"),
    ("paged", {"page_size": None}, TypeError, "page_size: expected an int.*got None"),
    ("ragged", {"out_offsets": None}, TypeError, "out_offsets: expected.*got None"),
]
for _form, _name in [
    ("positions", "lengths"),
    ("positions", "row_starts"),
    ("ragged", "out_offsets"),
    ("paged", "row_to_batch"),
    ("paged", "page_table_starts"),
]:
    ERRORS += [
        (_form, {_name: [1] * R}, TypeError, f"{_name}: expected an int32 or int64 tensor.*got list"),
        (_form, {_name: 5}, TypeError, f"{_name}: expected an int32 or int64 tensor.*got int"),
        *[
            (_form, {_name: torch.ones(R, dtype=dtype)}, TypeError, f"{_name}: expected dtype int32 or int64, got")
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.float32, torch.uint32)
        ],
        (_form, {_name: ints(R + 1)}, ValueError, rf"{_name}: expected shape \[R\] = \[4\], got \[5\]"),
        (_form, {_name: ints(R, 1)}, ValueError, rf"{_name}: expected shape \[R\] = \[4\], got \[4, 1\]"),
        (_form, {_name: ints(1)}, ValueError, f"{_name}: expected shape"),
        (_form, {_name: torch.tensor(3)}, ValueError, f"{_name}: expected shape"),
        (_form, {_name: ints(R).to_sparse()}, ValueError, f"{_name}: .*strided"),
        (_form, {_name: ints(R).to("meta")}, ValueError, f"{_name}: expected a tensor on cpu.*got.*meta"),
    ]
for _form, _name in [("positions", "out"), ("ragged", "out_positions"), ("paged", "out")]:
    ERRORS += [
        (_form, {_name: [[0] * K] * R}, TypeError, f"{_name}: expected an int32 tensor.*got list"),
        (_form, {_name: ints(R, K, dtype=torch.int64)}, TypeError, f"{_name}: expected dtype int32, got torch.int64"),
        (_form, {_name: torch.zeros(R, K)}, TypeError, f"{_name}: expected dtype int32, got torch.float32"),
        (_form, {_name: ints(R, K - 1)}, ValueError, rf"{_name}: expected shape \[R, k\] = \[4, 6\], got \[4, 5\]"),
        (_form, {_name: ints(R, K + 1)}, ValueError, f"{_name}: expected shape"),
        (_form, {_name: ints(R - 1, K)}, ValueError, f"{_name}: expected shape"),
        (_form, {_name: ints(R * K)}, ValueError, f"{_name}: expected shape"),
        (_form, {_name: ints(K, R).t()}, ValueError, f"{_name}: .*stride 1"),
        (_form, {_name: ints(1, K).expand(R, K)}, ValueError, f"{_name}: expected rows apart.*strides"),
        (_form, {_name: ints(99).as_strided((R, K), (K - 1, 1))}, ValueError, f"{_name}: expected rows apart.*strides"),
        (_form, {_name: ints(R, K).to_sparse()}, ValueError, f"{_name}: .*strided"),
        (_form, {_name: ints(R, K).to("meta")}, ValueError, f"{_name}: expected a tensor on cpu.*got.*meta"),
    ]


@pytest.mark.parametrize(("form", "changes", "error", "text"), ERRORS)
def test_wrong_use_names_the_argument_before_anything_is_allocated(
    form: str, changes: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kw = arguments(form, **changes)

    def allocate(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("allocated before the arguments were checked")

    monkeypatch.setattr(torch, "empty", allocate)
    with pytest.raises(error, match=text):
        getattr(dsa_topk, f"topk_{form}")(**kw)


def test_positions_have_no_out_positions_and_forms_have_names() -> None:
    with pytest.raises(TypeError, match="out_positions"):
        invoke("positions", out_positions=ints(R, K))
    with pytest.raises(ValueError, match="form: expected one of"):
        _checks.check("sorted", torch.zeros(R, N), None, K)  # type: ignore[arg-type]


def test_required_arguments_are_required() -> None:
    scores = torch.zeros(R, N)
    with pytest.raises(TypeError, match="out_offsets"):
        dsa_topk.topk_ragged(scores, None, K)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="page_table"):
        dsa_topk.topk_paged(scores, None, K)  # type: ignore[call-overload]


def test_one_column_tables_and_outputs_have_no_last_stride() -> None:
    scores = torch.randn(R, 3)[:, ::2][:, :1]
    out = ints(R, 5)[:, ::3][:, :1]
    assert dsa_topk.topk_positions(scores, None, 1, out=out).tolist() == [[0]] * R


# --- overlap


@pytest.mark.parametrize("form", ["ragged", "paged"])
def test_disjoint_columns_of_one_buffer_are_legal(form: str) -> None:
    # lengths, starts, both outputs and the scores' bits live in interleaved columns of one int32 buffer.
    buffer = ints(R, 2 * K + N + 3)
    scores = buffer[:, 2 * K : 2 * K + N].view(torch.float32)
    scores.copy_(torch.randn(R, N))
    lengths = buffer[:, -1]
    lengths.copy_(torch.tensor([50, 3, 0, 20]))
    out, out_positions = buffer[:, :K], buffer[:, K : 2 * K]
    expected = invoke(form, scores=scores.clone(), lengths=lengths.clone())
    got = invoke(form, scores=scores, lengths=lengths, out=out, out_positions=out_positions)
    assert torch.equal(got, expected)
    assert lengths.tolist() == [50, 3, 0, 20]


def _shared(form: str, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected memory of its own"):
        invoke(form, **changes)


def test_each_input_is_protected_from_each_output() -> None:
    for name in ("out", "out_positions"):
        buffer = ints(R, K + N)
        out = buffer[:, :K]
        for columns in (slice(K - 1, K - 1 + N), slice(0, N)):
            _shared("ragged", name, {name: out, "scores": buffer[:, columns].view(torch.float32)})
        _shared("paged", name, {name: out, "page_table": buffer[:, K - 1 : K + 7]})
        for vector in ("lengths", "row_starts", "row_to_batch", "page_table_starts"):
            _shared("paged", name, {name: out, vector: buffer[:, K - 1]})
            _shared("paged", name, {name: out, vector: buffer[2, 4 : 4 + R]})
            _shared("paged", name, {name: out, vector: buffer[1, :1].expand(R)})
        _shared("ragged", name, {name: out, "out_offsets": buffer[:, 0]})


def test_the_outputs_are_protected_from_each_other() -> None:
    buffer = ints(R, 2 * K)
    _shared("paged", "out", {"out": buffer[:, :K], "out_positions": buffer[:, :K]})
    _shared("paged", "out", {"out": buffer[:, :K], "out_positions": buffer[:, K - 1 : 2 * K - 1]})
    _shared("ragged", "out", {"out": buffer[:, K - 1 : 2 * K - 1], "out_positions": buffer[:, :K]})
    flat = ints(3 * R * K)
    _shared("ragged", "out", {"out": flat[: R * K].view(R, K), "out_positions": flat.as_strided((R, K), (2 * K, 1), 1)})


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A strided int32 view of a small shared buffer: 1-D or 2-D with unit last stride."""
    if draw(st.booleans()):
        size: tuple[int, ...] = (draw(st.integers(0, 5)),)
        stride: tuple[int, ...] = (draw(st.integers(0, 9)),)
    else:
        size = (draw(st.integers(0, 4)), draw(st.integers(0, 6)))
        stride = (draw(st.integers(0, 12)), 1)
    return BUFFER.as_strided(size, stride, draw(st.integers(0, 40)))


BUFFER = torch.zeros(120, dtype=torch.int32)


@settings(max_examples=600, deadline=None)
@given(strided(), strided())
def test_overlap_equals_the_intersection_of_element_sets(first: torch.Tensor, second: torch.Tensor) -> None:
    def elements(tensor: torch.Tensor) -> set[int]:
        index = torch.arange(120).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return set(index.flatten().tolist())

    assert _checks.overlap(first, second) == bool(elements(first) & elements(second))
    assert _checks.overlap(second, first) == bool(elements(first) & elements(second))


def test_overlap_counts_bytes_not_elements() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    half = raw[2:12].view(torch.float16)
    assert _checks.overlap(half, raw[8:16].view(torch.int32))
    assert not _checks.overlap(half, raw[12:16].view(torch.int32))


# --- the short way of usual calls


def usual(form: str, **changes: Any) -> tuple[int, int, int, int] | None:
    """What `check_usual` says of `arguments`, with an output."""
    names = inspect.signature(_checks.check_usual).parameters
    absent = dict.fromkeys(("row_starts", "out_offsets", "page_table", "row_to_batch", "page_table_starts"))
    given = {"page_size": 1, "order": "position", "tie_break": "smallest", "out": ints(R, K)}
    given |= arguments(form, **changes)
    return _checks.check_usual(form, **{**absent, **{name: given[name] for name in given if name in names}})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_usual_calls_are_known_as_such(form: str) -> None:
    scores = torch.randn(R, N + 2)[:, :N]
    facts = (R, N, N + 2, scores.data_ptr())
    columns = ints(R, 9, dtype=torch.int64)
    assert usual(form, scores=scores) == facts
    assert usual(form, scores=scores, lengths=None, row_starts=None) == facts
    assert usual(form, scores=scores, lengths=columns[:, 2], row_starts=columns[:, 3], order="score") == facts
    assert usual(form, scores=scores, out=ints(R, 2 * K)[:, K:], tie_break="largest") == facts
    for dtype in (torch.bfloat16, torch.float16):
        assert usual(form, scores=torch.zeros(R, N, dtype=dtype)) is not None
    if form == "ragged":
        shared = ints(R)
        assert usual(form, scores=scores, row_starts=shared, out_offsets=shared) == facts


@pytest.mark.parametrize(("form", "changes", "error", "text"), ERRORS)
def test_no_wrong_call_is_usual(form: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    # The three that it isn't asked about, and the one output that no usual call has, are the caller's to look at.
    if not changes.keys() & {"return_scores", "validate", "backend", "out_positions"}:
        assert usual(form, **changes) is None


def test_calls_whose_output_meets_an_input_are_not_usual() -> None:
    buffer = ints(R, K + N)
    out = buffer[:, :K]
    for columns in (slice(K - 1, K - 1 + N), slice(0, N)):
        assert usual("ragged", out=out, scores=buffer[:, columns].view(torch.float32)) is None
    assert usual("paged", out=out, page_table=buffer[:, K - 1 : K + 7]) is None
    for vector in ("lengths", "row_starts", "row_to_batch", "page_table_starts"):
        assert usual("paged", out=out, **{vector: buffer[:, K - 1]}) is None
        assert usual("paged", out=out, **{vector: buffer[2, 4 : 4 + R]}) is None
        assert usual("paged", out=out, **{vector: buffer[1, :1].expand(R)}) is None
    assert usual("ragged", out=out, out_offsets=buffer[:, 0]) is None
    shared = buffer[:, 0]
    assert usual("ragged", out=out, out_offsets=shared, row_starts=shared) is None


@settings(max_examples=300, deadline=None)
@given(strided(), strided())
def test_usual_outputs_have_memory_of_their_own(first: torch.Tensor, second: torch.Tensor) -> None:
    # One of the two is the output, the other an input of whatever kind it can be; both lie in one buffer.
    for out, other in ((first, second), (second, first)):
        if out.dim() != 2 or not out.numel() or not other.numel():
            continue
        rows, k = out.shape
        given: dict[str, Any] = {"scores": torch.zeros(rows, N), "lengths": None, "k": k, "row_starts": None}
        if other.dim() == 1:
            given["lengths"] = other
        else:
            given.update(page_table=other, page_table_starts=None, row_to_batch=ints(rows))
        if usual("positions" if other.dim() == 1 else "paged", out=out, **given) is not None:
            assert not _checks.overlap(out, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("starts", [False, True])
def test_both_ways_launch_the_same(form: str, starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_topk import _direct, _plan
    from dsa_topk.backends import cuda

    class OnGpu:
        """What is asked of the scores beside the checks."""

        is_cuda, device, shape = True, torch.device("cuda", 0), (R, N)
        stride, data_ptr, get_device = lambda _, i: 4 * N, lambda _: 4096, lambda _: 0
        dtype, element_size = torch.float32, lambda _: 4

    seen: list[tuple[Any, ...]] = []
    limits = _plan.DeviceLimits(sms=132, smem_per_block=232448)
    monkeypatch.setattr(_direct, "check_usual", lambda *_: (R, N, 4 * N, 4096))
    given = arguments(form, scores=OnGpu(), out=ints(R, K), order="score", tie_break="largest")
    if not starts:
        given["row_starts"] = None
    switches = {"out_positions": None, "return_scores": False, "validate": False, "backend": "auto"}
    defaults = {"out_offsets": None, "page_table": None, "page_size": 1, "row_to_batch": None}
    everything: dict[str, Any] = {**defaults, "page_table_starts": None, **given, **switches}
    monkeypatch.setattr(cuda, "_modules", {})
    assert not _direct.launched(form, **everything), "nothing is loaded yet"  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "_modules", {0: (lambda *arguments: seen.append(arguments), limits)})
    assert _direct.launched(form, **everything)  # type: ignore[arg-type]
    cuda.run(Call(form, **given))  # type: ignore[arg-type]
    direct, general = seen
    assert len(direct) == 20
    assert all(a is b or a == b for a, b in zip(direct, general, strict=True))

    others = [("out_positions", ints(R, K)), ("return_scores", True), ("validate", True), ("validate", 0)]
    for name, value in [*others, ("backend", "torch"), ("backend", None)]:
        assert not _direct.launched(form, **{**everything, name: value})  # type: ignore[arg-type]
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "1")
    assert not _direct.launched(form, **everything)  # type: ignore[arg-type]
    monkeypatch.delenv("DSA_TOPK_VALIDATE")
    monkeypatch.setattr(_direct, "check_usual", lambda *_: None)
    assert not _direct.launched(form, **everything)  # type: ignore[arg-type]
    assert len(seen) == 2


# --- validate=True

PARTLY_USED_TABLE = torch.tensor(
    [[-1, -1, 5, 0, 9, -1, -1, -1], [-9] * 8, [-9, 3, -1, -1, -1, -1, -1, -1], [0] * 8], dtype=torch.int32
)

BAD_VALUES: list[tuple[str, dict[str, Any], str, int]] = [
    ("positions", {"lengths": torch.tensor([1, -1, -2, 3])}, r"lengths\[1\]: .*got -1", 1),
    ("positions", {"lengths": torch.tensor([50, 49, 49, 0])}, r"lengths\[2\]: .*<= 48 .*got 49", 2),
    ("positions", {"lengths": torch.tensor([0, 0, 0, 2**63 - 1])}, r"lengths\[3\]: .*got 9223372036854775807", 3),
    ("positions", {"row_starts": torch.tensor([0, 51, 0, 0]), "lengths": ints(R)}, r"row_starts\[1\]: .*<= 50", 1),
    ("positions", {"row_starts": torch.tensor([0, 0, -(2**63), 0])}, r"row_starts\[2\]: .*got -9223372036854775808", 2),
    # the first bad row wins, whichever argument it is in
    ("positions", {"row_starts": ints(R) - 1, "lengths": torch.tensor([-5, 0, 0, 0])}, r"\[0\]", 0),
    (
        "positions",
        {"row_starts": torch.tensor([0, 0, 0, 99]), "lengths": torch.tensor([0, 0, -1, 0])},
        r"lengths\[2\]",
        2,
    ),
    ("paged", {"row_to_batch": torch.tensor([0, 1, 4, 9])}, r"row_to_batch\[2\]: .*<= 3 \(B - 1\), got 4", 2),
    ("paged", {"row_to_batch": torch.tensor([0, -1, 4, 9])}, r"row_to_batch\[1\]: .*got -1", 1),
    ("paged", {"page_table_starts": torch.tensor([0, 0, 0, 9])}, r"page_table_starts\[3\]: .*<= 8 \(T\), got 9", 3),
    ("paged", {"page_table_starts": torch.tensor([1, 0, 0, 0])}, r"lengths\[0\]: .*<= 49 .*got 50", 0),
    ("paged", {"page_table_starts": torch.tensor([1, 0, 0, 0]), "lengths": None}, r"lengths: .*row 0.*got 49", 0),
    (
        "paged",
        {"page_table": torch.tensor([[0, 1, -1] + [0] * 5] * 4, dtype=torch.int32)},
        r"page_table\[3, 2\].*-1",
        0,
    ),
    ("paged", {"page_table": torch.full((R, 8), 2**31 // 7 + 1, dtype=torch.int32)}, "page_table.*int32.*page", 0),
    ("ragged", {"out_offsets": torch.tensor([0, 2**31, 0, 2**31])}, r"out_offsets\[1\]: .*got offset 2147483648", 1),
    ("ragged", {"out_offsets": torch.tensor([2**31 - 49, 0, 0, 0])}, r"out_offsets\[0\]: .*0 \.\. 49", 0),
    ("paged", {"page_table": ints(R, 8) - 1, "lengths": torch.tensor([0, 3, -1, 0])}, r"page_table\[2, 1\]", 1),
    ("ragged", {"out_offsets": torch.tensor([2**31, 0, 0, 0]), "lengths": torch.tensor([1, 0, -1, 0])}, "out_off", 0),
    ("ragged", {"out_offsets": torch.tensor([0, 0, 0, -(2**63)])}, r"out_offsets\[3\]", 3),
]


@pytest.mark.parametrize(("form", "changes", "text", "row"), BAD_VALUES)
def test_validate_names_the_first_bad_row(
    form: str, changes: dict[str, Any], text: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(form, **changes)  # meaningful without validation: the contract clamps
    with pytest.raises(ValueError, match=rf"{text}.*first bad row: {row}\)"):
        invoke(form, validate=True, **changes)
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "1")
    with pytest.raises(ValueError, match=text):
        invoke(form, **changes)
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "0")
    invoke(form, **changes)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *[(form, {}) for form in FORMS],
        ("paged", {"lengths": None, "row_starts": ints(R), "page_table_starts": None}),
        # unused entries may hold anything: the rows use entries 0 .. 7 of table row 3, 1 of 2, none, 2 .. 4 of 0
        ("paged", {"page_table": PARTLY_USED_TABLE}),
        ("ragged", {"out_offsets": torch.tensor([2**31 - 50, -(2**31), 2**40, 0])}),
        ("paged", {"page_table": ints(0, 0), "scores": torch.zeros(0, 3), "lengths": ints(0), "row_starts": None}),
    ],
)
def test_validate_accepts_what_is_right(form: str, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    if form == "paged" and "scores" in changes:
        changes.update(row_to_batch=None, page_table_starts=None)
    assert torch.equal(invoke(form, validate=True, **changes), invoke(form, **changes))


def test_validate_reads_the_environment_of_each_call_and_refuses_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "ture")
    with pytest.raises(ValueError, match=r"DSA_TOPK_VALIDATE: expected 0 or 1.*'ture'"):
        invoke("positions")
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "")
    invoke("positions", lengths=ints(R) - 1)
    monkeypatch.delenv("DSA_TOPK_VALIDATE")
    invoke("positions", lengths=ints(R) - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_validate_refuses_to_run_during_capture() -> None:
    scores = torch.zeros(R, N, device="cuda")
    lengths = torch.zeros(R, dtype=torch.int32, device="cuda")
    out = torch.empty(R, K, dtype=torch.int32, device="cuda")
    dsa_topk.topk_positions(scores, lengths, K, out=out, backend="torch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dsa_topk.topk_positions(scores, lengths, K, out=out, backend="torch")
        with pytest.raises(RuntimeError, match=r"validate: .*capture"):
            dsa_topk.topk_positions(scores, lengths, K, out=out, validate=True, backend="torch")


# --- host cost


def _calls_made(function: Callable[[], Any]) -> tuple[int, int]:
    """How many Python functions and how many built-in ones a call enters."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


def test_checks_and_choice_stay_on_their_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # Around an empty backend a call takes 3.7 us (positions) to 6.2 us (packed paged) on a quiet machine. Counted, not
    # timed, because machines are busy: a slow path taken by mistake (the operator, the exact overlap test, an
    # environment lookup by name) adds dozens.
    monkeypatch.setattr(backends.get("torch"), "run", lambda call: None)
    positions = arguments("positions", out=ints(R, K), row_starts=None)
    paged = arguments("paged", out=ints(R, K))
    dsa_topk.topk_positions(**positions)
    python, builtin = _calls_made(lambda: dsa_topk.topk_positions(**positions))
    assert python <= 14  # 12 when written
    assert builtin <= 20  # 16
    python, builtin = _calls_made(lambda: dsa_topk.topk_paged(**paged))
    assert python <= 18  # 16
    assert builtin <= 42  # 36
    monkeypatch.setattr("dsa_topk.api.needs_operator", lambda scores: True)
    # The measure sees the slow path: 58 calls the first time in a process, 22 later on.
    assert _calls_made(lambda: dsa_topk.topk_positions(**positions))[0] > 18
