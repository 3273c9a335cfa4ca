"""Every fault known from public reports, by its number: what went wrong for others must not go wrong here.

Cases that are calls come from the suite (``dsa_topk.conformance.cases``), the same that ``dsa-topk check`` runs; cases
about errors, building and the API are functions below; what makes sense on GPUs only is in ``test_regressions_gpu.py``.
``test_no_case_is_missing`` holds the list. On a CPU the torch backend runs all of this; with a GPU the cuda backend
runs it too, at full size.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_topk
from dsa_topk import _plan
from dsa_topk.conformance import adapters, isolate
from dsa_topk.conformance.cases import CASES, Setting
from dsa_topk.conformance.cases.common import from_bits, permutations, wrap
from dsa_topk.conformance.runner import run_problem
from dsa_topk.testing import check_selection, distributions

CUDA = torch.cuda.is_available()
ONE_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
BACKENDS = [pytest.param("torch", id="torch"), pytest.param("cuda", id="cuda", marks=[pytest.mark.gpu, ONE_GPU])]
FAULTS = [case for case in CASES.values() if re.fullmatch(r"B\d\d", case.id)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors on a shared machine: two threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "cuda" else "cpu")


# ---- cases that are calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAULTS, ids=[f"{case.id} {case.guards}" for case in FAULTS])
def test_case(case: Any, backend: str) -> None:
    """The suite's problems for one fault: output, repeatability, poison, graph replay, inputs untouched."""
    adapter = adapters.get(backend)
    setting = Setting(device_of(backend), small=backend == "torch")
    ran = 0
    for spec in case.build(setting):
        outcome = run_problem(adapter, spec.build())
        assert outcome.status in ("exact", "skipped"), f"{spec.case} {spec.name}, length {spec.length}: {outcome}"
        ran += outcome.status == "exact"
    assert ran, "nothing of this case fits this machine"


# ---- 4. Lengths ----------------------------------------------------------------------------------------------------


def test_b21_negative_length_does_not_hang(backend: str) -> None:
    """In a process of its own, with a watchdog."""
    config = {"backend": backend, "suite": "fault:B21", "device": str(device_of(backend))}
    ends = [message for message in isolate.run_suite(config, timeout=120) if message["event"] == "end"]
    assert ends
    assert {message["outcome"]["status"] for message in ends} == {"exact"}


def test_b26_filled_slots_follow_from_length_and_k_alone(backend: str) -> None:
    device = device_of(backend)
    lengths = torch.tensor([0, 1, 5, 6, 7, 400], device=device)
    scores = torch.full((6, 300), float("nan"), device=device)
    out = dsa_topk.topk_positions(scores, lengths, 6, backend=backend)
    assert (out >= 0).sum(1).tolist() == [0, 1, 5, 6, 6, 6]


# ---- 5. Row windows, offsets, leaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lengths", "row_starts", "out_offsets", "row_to_batch", "page_table_starts"])
@pytest.mark.parametrize("size", [2, 7, 9])
def test_b33_wrong_row_counts_are_named(name: str, size: int, backend: str) -> None:
    """No broadcast and no fault: ValueError with the tensor's name and both sizes."""
    device = device_of(backend)
    scores = torch.randn(8, 64, device=device)
    given = {name: torch.zeros(size, dtype=torch.int32, device=device)}
    lengths = given.pop("lengths", None)
    call: Callable[..., Any] = dsa_topk.topk_ragged
    flags: dict[str, Any] = {"backend": backend, **given}
    if name in ("row_to_batch", "page_table_starts"):
        call = dsa_topk.topk_paged
        flags |= {"page_table": torch.zeros(8, 4, dtype=torch.int32, device=device), "page_size": 16}
    elif name != "out_offsets":
        flags["out_offsets"] = torch.zeros(8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"{name}.*8.*{size}"):
        call(scores, lengths, 4, **flags)


def test_b33_missing_offsets_and_short_tables_are_errors(backend: str) -> None:
    device = device_of(backend)
    scores = torch.randn(8, 64, device=device)
    with pytest.raises(TypeError, match="out_offsets"):
        dsa_topk.topk_ragged(scores, None, 4, out_offsets=None, backend=backend)  # type: ignore[arg-type]
    table = torch.zeros(7, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="page_table"):
        dsa_topk.topk_paged(scores, None, 4, page_table=table, page_size=16, backend=backend)


def test_b33_batch_numbers_that_do_not_exist(backend: str) -> None:
    """Empty rows; with ``validate=True`` an error that names the first one."""
    device = device_of(backend)
    scores = torch.randn(3, 64, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    owner = torch.tensor([0, 2, -1], device=device)
    flags = {"page_table": table, "page_size": 16, "row_to_batch": owner, "backend": backend}
    out = dsa_topk.topk_paged(scores, None, 4, **flags)
    assert (out[0] >= 0).all()
    assert (out[1:] == -1).all()
    with pytest.raises(ValueError, match=r"row_to_batch.*row: 1"):
        dsa_topk.topk_paged(scores, None, 4, validate=True, **flags)


@pytest.mark.parametrize("chunk", [1, 7, 64, 333])
def test_b33_b75_chunks_of_rows_equal_the_whole(chunk: int, backend: str) -> None:
    """Callers cut rows to fit a memory budget: the bits may not depend on it."""
    device = device_of(backend)
    rows = 1000 if backend == "cuda" else 333
    scores = distributions.make("quantised", rows, 900, device=device)
    lengths = (torch.arange(rows, device=device) * 7) % 901
    table = torch.arange(90, dtype=torch.int32, device=device).view(6, 15)
    owner = torch.arange(rows, device=device) % 6
    common: dict[str, Any] = {"page_table": table, "page_size": 64, "backend": backend}
    whole = dsa_topk.topk_paged(scores, lengths, 100, row_to_batch=owner, **common)
    for lo in range(0, rows, chunk * (1 if backend == "cuda" else 9)):
        cut = slice(lo, lo + chunk)
        part = dsa_topk.topk_paged(scores[cut], lengths[cut], 100, row_to_batch=owner[cut], **common)
        assert torch.equal(part, whole[cut])


# ---- 9. Devices and ranks ------------------------------------------------------------------------------------------


def test_b45_tensors_of_several_devices_are_an_error() -> None:
    scores = torch.randn(2, 9)
    with pytest.raises(ValueError, match=r"lengths.*cpu.*meta"):
        dsa_topk.topk_positions(scores, torch.zeros(2, dtype=torch.int32, device="meta"), 3)


def test_b47_a_row_selects_the_same_in_any_batch(backend: str) -> None:
    """Alone, in the middle of a batch, in a wider buffer, with k and order of the same call: the same bits."""
    device = device_of(backend)
    row = (16 * distributions.make("normal", 1, 30000, device=device)).round() / 16
    ties = (row == row.sort(descending=True)[0][0, 2047]).sum()
    assert ties > 100
    alone = dsa_topk.topk_positions(row, None, 2048, backend=backend)
    for rows, place in ((2, 1), (9, 4), (33, 32)):
        batch = distributions.make("quantised", rows, 40003, device=device, seed=rows)
        batch[place, 3:30003] = row[0]
        starts = torch.full((rows,), 3, device=device)
        lengths = torch.full((rows,), 30000, device=device)
        out = dsa_topk.topk_positions(batch, lengths, 2048, row_starts=starts, backend=backend)
        assert torch.equal(out[place], alone[0])


# ---- 10. Determinism and the tie rule ------------------------------------------------------------------------------


def test_b51_selections_are_nested(backend: str) -> None:
    """The set for k is a subset of the set for k + 1, for every k through the ties."""
    scores = distributions.make("quantised", 1, 4000, device=device_of(backend))
    for tie_break in ("smallest", "largest"):
        before: set[int] = set()
        for k in range(1, 601):
            chosen = set(dsa_topk.topk_positions(scores, None, k, tie_break=tie_break, backend=backend)[0].tolist())
            assert before < chosen
            assert len(chosen) == k
            before = chosen


def test_b79_backends_agree_on_ties(backend: str) -> None:
    """Equal to a stable sort on the CPU, for both rules."""
    scores = distributions.make("two_values", 3, 5000, device=device_of(backend), k=1000)
    rank = scores.cpu().sort(dim=1, descending=True, stable=True)[1][:, :1000].sort(1)[0]
    assert torch.equal(dsa_topk.topk_positions(scores, None, 1000, backend=backend).cpu().long(), rank)
    back = scores.cpu().flip(1).sort(dim=1, descending=True, stable=True)[1][:, :1000]
    largest = dsa_topk.topk_positions(scores, None, 1000, tie_break="largest", backend=backend)
    assert torch.equal(largest.cpu().long(), (4999 - back).sort(1)[0])


# ---- 11. Concurrency, barriers, programmatic launch ----------------------------------------------------------------


def test_b52_threads_do_not_share_state(backend: str) -> None:
    """Two host threads, each with its own stream on a GPU, different data, no synchronisation between them."""
    device = device_of(backend)
    rounds, width = (200, 262144) if backend == "cuda" else (10, 9000)
    problems: list[str] = []

    def work(seed: int) -> None:
        scores = distributions.make("normal", 1 + seed, width, device=device, seed=seed)
        stream = torch.cuda.Stream(device) if backend == "cuda" else None
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream(device))
            results = [dsa_topk.topk_positions(scores, None, 2048, backend=backend) for _ in range(rounds)]
            if stream is not None:
                stream.synchronize()
            verdict = check_selection(scores, None, 2048, results[0])
            if not verdict or any(not torch.equal(result, results[0]) for result in results):
                problems.append(verdict.reason or "results of one thread differ")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4 if backend == "cuda" else 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "hangs"
    assert not problems


# ---- 12. k ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), (2**31, ValueError), ("3", TypeError)],
)
def test_b60_k_is_checked(k: Any, error: type[Exception], backend: str) -> None:
    with pytest.raises(error, match=r"k: expected"):
        dsa_topk.topk_positions(torch.randn(2, 9, device=device_of(backend)), None, k, backend=backend)


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (3, 5), (1, 5), (10,)])
def test_b60_out_is_checked(shape: tuple[int, ...], backend: str) -> None:
    device = device_of(backend)
    out = torch.full(shape, 7, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out: expected.*2, 5"):
        dsa_topk.topk_positions(torch.randn(2, 9, device=device), None, 5, out=out, backend=backend)
    assert (out == 7).all(), "nothing is written by a refused call"


# ---- 13. Layout, alignment, dtype, empty ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lengths", "row_starts", "out_offsets", "row_to_batch", "page_table_starts"])
def test_b63_int64_integers_are_taken_at_their_value(name: str, backend: str) -> None:
    """Same answer as int32, also where a reinterpretation of halves would show (odd rows)."""
    device = device_of(backend)
    scores = distributions.make("normal", 5, 200, device=device)
    table = torch.arange(60, dtype=torch.int32, device=device).view(5, 12)
    values = torch.tensor([3, 1, 4, 0, 2], device=device)
    form = "ragged" if name == "out_offsets" else "paged"

    def answer(dtype: torch.dtype) -> torch.Tensor:
        given: dict[str, Any] = {name: values.to(dtype)}
        lengths = given.pop("lengths", None)
        if form == "ragged":
            return dsa_topk.topk_ragged(scores, lengths, 7, backend=backend, **given)
        return dsa_topk.topk_paged(scores, lengths, 7, page_table=table, page_size=20, backend=backend, **given)

    assert torch.equal(answer(torch.int64), answer(torch.int32))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (name, dtype)
            for name in ("lengths", "row_starts", "row_to_batch")
            for dtype in (torch.float32, torch.int16)
        ),
        ("page_table", torch.int64),
        ("out", torch.int64),
        ("out_positions", torch.int64),
        ("scores", torch.float64),
        ("scores", torch.int32),
    ],
)
def test_b63_wrong_types_are_named(name: str, dtype: torch.dtype, backend: str) -> None:
    device = device_of(backend)
    given: dict[str, Any] = {
        "scores": torch.zeros(3, 40, device=device),
        "lengths": torch.zeros(3, dtype=torch.int32, device=device),
        "row_starts": torch.zeros(3, dtype=torch.int32, device=device),
        "row_to_batch": torch.zeros(3, dtype=torch.int32, device=device),
        "page_table": torch.zeros(3, 4, dtype=torch.int32, device=device),
        "out": torch.zeros(3, 5, dtype=torch.int32, device=device),
        "out_positions": torch.zeros(3, 5, dtype=torch.int32, device=device),
    }
    given[name] = given[name].to(dtype)
    with pytest.raises(TypeError, match=name):
        dsa_topk.topk_paged(**given, k=5, page_size=10, backend=backend)


def test_aliasing_outputs_are_refused(backend: str) -> None:
    """Hostile calls: an output inside an input, or over the other output, is an error and writes nothing."""
    device = device_of(backend)
    memory = torch.zeros(64, dtype=torch.int32, device=device)
    scores = memory[:40].view(torch.float32).view(4, 10)
    table = torch.zeros(4, 4, dtype=torch.int32, device=device)
    both = torch.zeros(4, 3, dtype=torch.int32, device=device)
    for flags in (
        {"out": memory[30:42].view(4, 3)},
        {"out_positions": table[:, :3]},
        {"out": both, "out_positions": both},
    ):
        with pytest.raises(ValueError, match="overlap"):
            dsa_topk.topk_paged(scores, None, 3, page_table=table, page_size=8, backend=backend, **flags)
    assert (memory == 0).all()


# ---- 14. Build, cache, install, architectures ----------------------------------------------------------------------


def test_b65_every_listed_architecture_counts() -> None:
    from dsa_topk.jit import archs

    assert set(archs.parse("86,90a")) == {"86", "90a"}
    assert archs.runs_on("86", (8, 9))
    assert not archs.runs_on("90a", (8, 6))
    with pytest.raises(ValueError, match=r"expected names like.*'8\.6;9\.0'"):
        archs.parse("8.6;9.0")  # another tool's spelling is refused, not half understood


def test_b67_b77_an_explicit_backend_is_used_or_refused_never_replaced() -> None:
    """The cuda backend on CPU tensors: refused with the reason, whatever the environment says."""
    with pytest.raises((RuntimeError, ValueError), match="backend='cuda'"):
        dsa_topk.topk_positions(torch.randn(2, 9), None, 3, backend="cuda")


def test_b67_auto_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that dies must not stop the engine: auto goes on with torch, and says so once."""
    from dsa_topk import backends

    cuda = backends.get("cuda")
    stub = type("Broken", (), {"capabilities": cuda.capabilities, "name": "cuda"})()
    stub.unavailable = lambda: "nvcc ended with exit status 139"
    monkeypatch.setitem(backends._loaded, "cuda", stub)
    monkeypatch.setattr(backends, "_warned", set())
    call = type("OnCuda", (), {"scores": type("Scores", (), {"is_cuda": True})()})()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert backends.choose(call).name == "torch"
        assert backends.choose(call).name == "torch"
    assert len(caught) == 1
    assert "139" in str(caught[0].message)


@pytest.mark.parametrize("home", [":/usr/local/cuda", "/no/such/folder", "", "/a path/with spaces"])
def test_b68_odd_cuda_home_is_explained(home: str, tmp_path: Path) -> None:
    """Status and error are one readable text, never a bare CalledProcessError or an impossible path."""
    program = "from dsa_topk import jit; s = jit.status(); print('nvcc', s.nvcc); print(s.nvcc_problem or s.reason)"
    environment = {
        "PATH": "/usr/bin:/bin",
        "CUDA_HOME": home,
        "DSA_TOPK_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"nvcc (.*)", done.stdout)
    assert found
    assert found[1] == "None" or Path(found[1]).exists(), "a path that is not there"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_b69_every_capability_has_a_target_or_a_reason(capability: tuple[int, int]) -> None:
    """What a device can run is decided before a build."""
    from dsa_topk.jit import archs

    target = archs.native(capability)
    assert archs.runs_on(target, capability)
    assert all(archs.runs_on(name, capability) for name in archs.acceptable(capability))


@pytest.mark.parametrize("smem", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("sms", [8, 46, 132])
@pytest.mark.parametrize("largest", [0, 8, 16])
def test_b69_every_device_has_a_launchable_plan(smem: int, sms: int, largest: int) -> None:
    """By what the device can hold, not by its family: no cluster that it cannot run, for every k and width to 1M."""
    clusters = tuple(sms // size if 2 <= size <= largest else 0 for size in range(17))
    limits = _plan.DeviceLimits(sms=sms, smem_per_block=smem, clusters=clusters)
    for rows in (1, 2, 7, 64, 300, 5000):
        for width in (1, 4096, 16384, 65536, 262144, 1 << 20):
            for k in (1, 512, 2048, 4096, 8192):
                plan = _plan.choose(rows, width, k, limits)
                assert plan.kernel in _plan.KERNELS
                spread = plan.kernel in _plan.SPREAD  # blocks of one row, no cluster launch
                assert plan.cluster == 1 or spread or clusters[plan.cluster] >= 1


def test_b70_works_without_gpu_nvcc_and_tools(tmp_path: Path) -> None:
    """An empty PATH and no CUDA variables: the package imports, selects on the CPU, and names its version."""
    program = """
import torch, dsa_topk
print(dsa_topk.__version__, dsa_topk.topk_positions(torch.tensor([[1.0, 3.0, 2.0]]), None, 2).tolist())
"""
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [dsa_topk.__version__, "[[1,", "2]]"]
    assert done.stderr == ""


# ---- 15. torch.compile ---------------------------------------------------------------------------------------------


def test_b71_traces_without_a_break() -> None:
    """Also with an output that is given, and for a second shape without a new trace."""
    traces = []

    def count(module: Any, inputs: Any) -> Callable[..., Any]:
        traces.append(module)
        return module.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def select(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        dsa_topk.topk_positions(scores * 2, lengths, 3, out=out)
        return out + 1

    for rows, width in ((4, 9), (5, 12), (6, 33)):
        scores, lengths = torch.randn(rows, width), torch.full((rows,), width - 2)
        out = torch.zeros(rows, 3, dtype=torch.int32)
        assert torch.equal(select(scores, lengths, out), out + 1)
        check_selection(scores * 2, lengths, 3, out).raise_if_bad()
    assert len(traces) == 1


# ---- 16. Which route -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [512, 1024, 2048, 192, 8192])
def test_b76_the_choice_can_be_asked_for(k: int) -> None:
    """No silent slow route: ``explain`` names the backend and gives a reason for every other one."""
    answer = dsa_topk.explain(k=k, device="cpu", dtype=torch.bfloat16)
    assert answer.backend == "torch"
    assert set(answer.reasons) == {"cuda", "flashinfer", "sgl-kernel", "torch"}
    assert all(answer.reasons.values())
    if CUDA:
        assert dsa_topk.explain(k=k, device="cuda").backend == "cuda"


# ---- 17. API -------------------------------------------------------------------------------------------------------


def test_b77_unknown_names_are_refused_with_the_list() -> None:
    for flag, known in (("backend", "flashinfer"), ("order", "position"), ("tie_break", "smallest")):
        with pytest.raises(ValueError, match=rf"{flag}.*{known}"):
            dsa_topk.topk_positions(torch.randn(2, 9), None, 3, **{flag: "fastest"})  # type: ignore[arg-type]


def test_b77_environment_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every switch that the sources mention, set to something tempting: an explicit backend still runs."""
    package = Path(dsa_topk.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    switches = set(re.findall(r"\bDSA_TOPK_[A-Z_]+\b", text)) | {"FLASHINFER_TOPK_ALGO", "SGLANG_OPT_USE_TOPK_V2"}
    assert len(switches) > 3
    for name in switches - {"DSA_TOPK_VALIDATE"}:  # that one raises on purpose
        monkeypatch.setenv(name, "cuda")
    ran = []
    from dsa_topk import backends

    module = backends.get("torch")
    run = module.run
    monkeypatch.setattr(module, "run", lambda call: (ran.append("torch"), run(call)))
    dsa_topk.topk_positions(torch.randn(2, 9), None, 3, backend="torch")
    assert ran == ["torch"]


def test_b80_positions_beside_slots_and_a_check_for_users(backend: str) -> None:
    """Sequence positions next to physical slots in one call, and the checker that settles who is to blame."""
    device = device_of(backend)
    scores = distributions.make("indexer", 4, 500, device=device)
    table = torch.randperm(64, device=device).to(torch.int32).view(4, 16)
    positions = torch.empty(4, 60, dtype=torch.int32, device=device)
    form: dict[str, Any] = {"page_table": table, "page_size": 32}
    slots = dsa_topk.topk_paged(scores, None, 60, out_positions=positions, backend=backend, **form)
    assert check_selection(scores, None, 60, slots, form="paged", positions=positions, **form)
    row = torch.arange(4, device=device)[:, None]
    assert torch.equal(slots, table[row, positions.long() // 32] * 32 + positions % 32)
    worse = positions.clone()
    worse[2, 0] = next(p for p in range(500) if p not in positions[2].tolist())
    assert not check_selection(scores, None, 60, worse.sort(1)[0])


def test_b81_nearly_top_k_is_told_from_top_k() -> None:
    """What a truncating kernel loses on B04's row: hundreds of entries, and the checker counts them."""
    setting = Setting(torch.device("cpu"), small=True)
    place = permutations(1, 7613, setting, 4)
    crowd = from_bits(0x3F800000 + 29 * (place - 889))
    scores = torch.where(place < 889, 2 + 0.87 * place / 889, torch.where(place < 5028, crowd, -1.0)).float()
    coarse = torch.where(scores > 0, scores.half().view(torch.int16) >> 4, -1)  # its first 12 bits
    first_come = coarse.sort(dim=1, descending=True, stable=True)[1][:, :2048].sort(1)[0].int()
    verdict = check_selection(scores, None, 2048, first_come, mode="set")
    assert (verdict.kind, verdict.row) == ("selection", 0)
    assert verdict.wrong > 100
    assert run_problem(adapters.get("torch"), wrap(scores, None, 2048)).status == "exact"


# ---- the list ------------------------------------------------------------------------------------------------------

ALL = """
B01 B03 B04 B07 B08 B10 B11 B12 B14 B15 B17 B18 B20 B21 B23 B24 B26 B27 B29 B30 B32 B33 B34 B35 B37 B38 B39 B40 B42
B43 B45 B46 B47 B48 B51 B52 B54 B55 B56 B58 B60 B61 B63 B64 B65 B67 B68 B69 B70 B71 B73 B75 B76 B77 B79 B80 B81
"""


def test_no_case_is_missing() -> None:
    """Each number has a test above; the suite adds no number that is not in the list."""
    tested = {case.id for case in FAULTS}
    for file in (Path(__file__), Path(__file__).with_name("test_regressions_gpu.py")):
        for name in re.findall(r"^def (test_b\w+)", file.read_text(), re.MULTILINE):
            tested |= {number.upper() for number in re.findall(r"b\d\d", name)}
    assert tested == set(ALL.split())
