"""The suite can fail: planted backends of every kind of wrongness are found, told apart, minimised and replayed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dsa_topk import cli
from dsa_topk.conformance import adapters, isolate, report
from dsa_topk.conformance.adapters import Adapter, Outputs, Result
from dsa_topk.conformance.cases import CASES, Setting
from dsa_topk.conformance.cases.common import wrap
from dsa_topk.conformance.minimise import minimise
from dsa_topk.conformance.problem import Problem
from dsa_topk.conformance.runner import Outcome, run_problem
from dsa_topk.conformance.suite import select, specs
from dsa_topk.testing import distributions, shapes

CPU = torch.device("cpu")
TORCH = adapters.get("torch")

# A module of backends to be found out, importable by the worker process from its working directory.
PLANTS = """
import os, signal, time
import torch
from dsa_topk.conformance import adapters

_right = adapters.get("torch.topk").call

def right(problem):
    return _right(problem, None).indices

def wrong(problem):
    low = right(problem.take(torch.arange(problem.shape.rows)))
    return low.masked_fill(low >= problem.shape.width - 1, -1)

def dies(problem):
    if problem.k > 1000:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(problem)

def hangs(problem):
    if problem.k == 512 and problem.lengths[0] < 0:
        time.sleep(600)
    return right(problem)

def chatty(problem):
    print("hello from a backend")
    return right(problem)

for function in (right, wrong, dies, hangs, chatty):
    function.forms = ("positions", "ragged")
"""


@pytest.fixture
def plants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plants.py").write_text(PLANTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


# ---- the sweep on the reference ------------------------------------------------------------------------------------
# The fault cases run in test_regressions.py; these are the other cases of the suite, in the sizes of a CPU.


@pytest.mark.parametrize("case", [*distributions.NAMES, *shapes.NAMES, "hostile", "overlap"])
def test_torch_is_exact(case: str) -> None:
    for spec in CASES[case].build(Setting(CPU, small=True)):
        outcome = run_problem(TORCH, spec.build())
        assert outcome.status == "exact", f"{spec.name}: {outcome}"


# ---- the runner tells faults apart ---------------------------------------------------------------------------------


def planted(change: Callable[[Problem, Result, Outputs], Result | None], mode: str = "canonical") -> Adapter:
    """The reference with something done to its answer."""

    def call(problem: Problem, outputs: Outputs) -> Result:
        result = TORCH.call(problem, outputs)
        return change(problem, result, outputs) or result

    return Adapter("planted", mode, call, canonical=mode == "canonical")


def problem(form: str = "positions", **flags: object) -> Problem:
    scores = distributions.make("half_zeros", 5, 60, k=20)
    return wrap(scores, [50, 40, 30, 10, 0], 20, form, starts=[1, 2, 3, 0, 5], page_size=8, **flags)


def write_beside(problem: Problem, result: Result, outputs: Outputs) -> None:
    outputs.out.as_strided((1,), (1,), outputs.out.storage_offset() - 1).fill_(3)


def write_input(problem: Problem, result: Result, outputs: Outputs) -> None:
    problem.scores[0, 59] = 1e3


def write_lengths(problem: Problem, result: Result, outputs: Outputs) -> None:
    assert problem.lengths is not None
    problem.lengths[4] += 0
    problem.lengths[0] = 49 if problem.lengths[0] == 50 else 50


def drop_last(problem: Problem, result: Result, outputs: Outputs) -> None:
    result.indices[0, -1] = -1


def pick_later_ties(problem: Problem, result: Result, outputs: Outputs) -> Result:
    largest = problem.shape.call(problem.scores, tie_break="largest", backend="torch")
    return Result(largest)


def fail_loudly(problem: Problem, result: Result, outputs: Outputs) -> Result:
    raise RuntimeError("boom")


def refuse(problem: Problem, result: Result, outputs: Outputs) -> Result:
    raise adapters.Unsupported("never")


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        (write_beside, "modified", "beside its output"),
        (write_input, "modified", "its input scores"),
        (write_lengths, "modified", "its input lengths"),
        (drop_last, "invalid", "range: row 0 slot 19"),
        (pick_later_ties, "wrong", "tie: row 1"),
        (fail_loudly, "error", "RuntimeError: boom"),
        (refuse, "unsupported", "never"),
    ],
)
def test_statuses(change: Callable[..., Result | None], status: str, reason: str) -> None:
    outcome = run_problem(planted(change), problem())
    assert outcome.status == status
    assert reason in outcome.reason
    assert outcome.rows == 5


def test_an_unstable_backend_is_found() -> None:
    """Both answers are exact sets, so only repetition can tell; in set mode it is allowed."""
    calls = [0]

    def rotate(problem: Problem, result: Result, outputs: Outputs) -> Result | None:
        calls[0] += 1
        return pick_later_ties(problem, result, outputs) if calls[0] % 2 == 0 else None

    assert run_problem(planted(rotate), problem(repeats=3)).status == "unstable"
    calls[0] = 0
    assert run_problem(planted(rotate, "set"), problem(repeats=3)).status == "exact"


def test_a_backend_that_looks_outside_its_window_is_found_by_poison() -> None:
    def leak(problem: Problem, result: Result, outputs: Outputs) -> Result | None:
        if bool(problem.scores[:, 0].isinf().any()):
            result.indices[3, 0] = 1
        return None

    assert run_problem(planted(leak), problem()).status == "exact"
    outcome = run_problem(planted(leak), problem(poison=True))
    assert (outcome.status, "outside the windows" in outcome.reason) == ("wrong", True)


def test_what_a_set_backend_never_promised_is_not_asked() -> None:
    asked = []

    def look(problem: Problem, result: Result, outputs: Outputs) -> None:
        asked.append((problem.return_scores, problem.return_positions))

    full = problem("paged", return_scores=True, return_positions=True)
    assert run_problem(planted(look, "set"), full).status == "exact"
    assert run_problem(planted(look), full).status == "exact"
    assert asked == [(False, False), (True, True)]


def test_mode_can_be_forced() -> None:
    assert run_problem(planted(pick_later_ties), problem(), "set").status == "exact"
    assert run_problem(planted(pick_later_ties, "set"), problem(), "canonical").status == "wrong"


# ---- replay files and the minimiser --------------------------------------------------------------------------------


def test_replay_files_keep_values_strides_and_alignment(tmp_path: Path) -> None:
    for form in ("positions", "ragged", "paged"):
        before = problem(form, order="score", tie_break="largest", return_scores=True)
        base = torch.randn(5 * 70 + 3)
        before.scores = base.as_strided((5, 60), (70, 1), 3)
        if form == "paged":
            assert before.shape.page_table is not None
            before.shape.page_table = torch.cat([before.shape.page_table] * 2, 1)[:, 1:9]
        before.save(tmp_path / "one.replay")
        after = Problem.load(tmp_path / "one.replay")
        assert after.describe() == before.describe()
        for name, tensor in before.tensors().items():
            assert torch.equal(after.tensors()[name], tensor)
            assert after.tensors()[name].stride() == tensor.stride()
        assert run_problem(TORCH, after).status == "exact"
    assert [path.name for path in tmp_path.iterdir()] == ["one.replay"]


def test_rows_far_apart_are_stored_compactly(tmp_path: Path) -> None:
    far = problem()
    base = torch.empty(1 << 28)  # 1 GB of address space; only the rows are touched
    far.scores = base.as_strided((5, 60), (1 << 25, 1)).copy_(far.scores)
    far.save(tmp_path / "far.replay")
    assert (tmp_path / "far.replay").stat().st_size < 20_000
    assert torch.equal(Problem.load(tmp_path / "far.replay").scores, far.scores)


def test_damaged_replay_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.replay"
    problem().save(path)
    for content in (b"", b"nonsense", path.read_bytes()[:-200]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a replay file"):
            Problem.load(path)


@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
def test_minimiser_finds_a_small_call(form: str) -> None:
    """A backend that loses candidates behind the 30th is shown with one row just long enough, and a small k."""

    def cut(problem: Problem, result: Result, outputs: Outputs) -> Result | None:
        start, count = problem.windows()
        shape = shapes.CallShape(
            "cut",
            "positions",
            problem.shape.rows,
            problem.shape.width,
            problem.k,
            lengths=count.clamp(max=30),
            row_starts=start,
        )
        if bool((count > 30).any()):
            positions = shape.call(problem.scores, backend="torch")
            whole = torch.where(positions >= 0, positions, -1)
            return Result(whole if problem.form == "positions" else whole + 1)
        return None

    adapter = planted(cut)
    scores = distributions.make("ascending", 12, 400)
    start = wrap(scores, 380, 64, form, starts=3, page_size=16, return_scores=True, poison=True)
    first = run_problem(adapter, start)
    assert not first.good

    def fails(candidate: Problem) -> bool:
        return run_problem(adapter, candidate).status == first.status

    small = minimise(start, fails, 200)
    assert fails(small)
    assert small.shape.rows == 1
    assert not small.poison
    assert small.k <= start.k
    if first.status == "wrong":
        assert small.shape.width <= 40


def test_minimiser_stops_at_its_budget() -> None:
    asked = []

    def fails(candidate: Problem) -> bool:
        asked.append(candidate)
        return True

    minimise(problem(), fails, 7)
    assert len(asked) == 7


# ---- isolation -----------------------------------------------------------------------------------------------------


def outcomes(
    backend: str, suite: str, timeout: float = 60, save: Path | None = None
) -> list[tuple[Outcome, str | None]]:
    config = {"backend": backend, "suite": suite, "device": "cpu", "save": save and str(save), "trials": 2}
    ends = [message for message in isolate.run_suite(config, timeout) if message["event"] == "end"]
    return [(Outcome(**message["outcome"]), message["file"]) for message in ends]


def test_a_crash_costs_one_problem_and_is_stored(plants: Path) -> None:
    found = outcomes("plants:dies", "fault:B18", save=plants / "kept")
    assert [outcome.status for outcome, _ in found] == ["crash", "crash"]
    assert "SIGSEGV" in found[0][0].reason
    kept = Problem.load(Path(str(found[0][1])))
    assert kept.shape.rows == 1, "shrunk as far as two trial processes go"
    assert kept.k == 2048
    assert found[1][1] is None, "one file for a case"
    assert len(list((plants / "kept").iterdir())) == 1


def test_a_hang_is_ended_and_the_rest_still_runs(plants: Path) -> None:
    found = outcomes("plants:hangs", "fault:B21,B18", timeout=8)
    assert [outcome.status for outcome, _ in found] == ["hang"] + ["exact"] * 5
    assert "8 s" in found[0][0].reason


def test_output_of_a_backend_does_not_disturb_the_messages(plants: Path) -> None:
    found = outcomes("plants:chatty", "fault:B18")
    assert [outcome.status for outcome, _ in found] == ["exact", "exact"]


def test_a_worker_that_cannot_start_is_an_error(plants: Path) -> None:
    with pytest.raises(isolate.WorkerError, match="no_such_module"):
        outcomes("no_such_module:function", "fault:B18")


# ---- adapters ------------------------------------------------------------------------------------------------------


def test_three_line_adapter(plants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapters.get("plants:right")
    assert (adapter.name, adapter.mode) == ("plants:right", "set")
    assert run_problem(adapter, problem()).status == "exact"
    assert run_problem(adapter, problem("paged")).status == "unsupported"
    assert run_problem(adapters.get("plants:wrong"), wrap(torch.arange(9.0)[None], None, 3)).status == "invalid"


def test_entry_points_are_adapters(plants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("mine", "plants:right", adapters.ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(plants))
    monkeypatch.setattr(
        adapters.metadata, "entry_points", lambda group: [point] if group == "dsa_topk.adapters" else []
    )
    assert "mine" in adapters.names()
    assert run_problem(adapters.get("mine"), problem()).status == "exact"


def test_unknown_backends_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"torch, cuda, flashinfer, sgl-kernel, torch\.topk"):
        adapters.get("tensorrt")
    with pytest.raises(ValueError, match="no_such_module"):
        adapters.get("no_such_module:function")


def test_kernels_of_the_cuda_backend_can_be_forced() -> None:
    for name in ("cuda-Row256", "cuda-Cluster512-4"):
        assert adapters.get(name).name == name
        assert adapters.get(name).device_type == "cuda"
    with pytest.raises(ValueError, match="one of Row128"):
        adapters.get("cuda-Row7")


def test_torch_topk_is_judged_like_a_peer() -> None:
    """Exact on finite scores, and shown to rank NaN first."""
    peer = adapters.get("torch.topk")
    finite = wrap(distributions.make("half_zeros", 4, 500), [400, 64, 3, 0], 64, "ragged", starts=[0, 1, 2, 3])
    assert run_problem(peer, finite).status == "exact"
    assert run_problem(peer, wrap(distributions.make("nan_both_signs", 3, 500), None, 64)).status == "wrong"
    assert run_problem(peer, wrap(torch.zeros(2, 9), None, 3, "paged")).status == "unsupported"


# ---- suite, report, command ----------------------------------------------------------------------------------------


def test_suites() -> None:
    assert {case.id for case in select("full")} == set(CASES)
    assert {case.id for case in select("quick")} < set(CASES)
    assert [case.id for case in select("fault:B03,B15")] == ["B03", "B15"]
    for wrong in ("slow", "fault:", "fault:B99", ""):
        with pytest.raises(ValueError, match="suite"):
            select(wrong)
    names = [f"{spec.case} {spec.name} {spec.length}" for spec in specs("quick", CPU)]
    assert len(names) == len(set(names)), "two problems of one name cannot be told apart in a report"


def test_table_cells() -> None:
    def record(*outcomes: Outcome) -> list[report.Record]:
        return [report.Record("B03", "x", 8320, outcome) for outcome in outcomes]

    exact, wrong = Outcome("exact", rows=4), Outcome("wrong", rows=4, bad_rows=3)
    assert report.cell(record(exact, exact)) == "exact"
    assert report.cell(record(exact, wrong)) == "wrong 3/8"
    assert report.cell(record(wrong, Outcome("invalid", rows=2, bad_rows=1))) == "invalid 4/6"
    assert report.cell(record(exact, Outcome("crash"))) == "crash"
    assert report.cell(record(Outcome("unsupported"))) == "n/s"
    assert report.cell(record(exact, Outcome("unsupported"))) == "exact"
    assert report.cell([]) == ""
    found = report.Report("x", "set", records=[*record(wrong), report.Record("B03", "y", 300000, exact)])
    assert found.cells() == {"B03": ["", "", "wrong 3/4", "", "", "exact"]}
    assert (found.failed, found.rows, found.counts()) == (True, 8, {"exact": 1, "wrong": 1})


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    report.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        report.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(path.parent) == ["out.json"]


def test_check_command_finds_minimises_and_replays(plants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = ["check", "--suite", "fault:B18", "--device", "cpu"]
    assert cli.run([*suite, "--backend", "plants:wrong", "--json", "out.json"]) == 1
    assert "plants:wrong: 2 problems, 4 rows: 2 invalid" in capsys.readouterr().out
    content = json.loads((plants / "out.json").read_text())
    records = content["reports"][0]["records"]
    assert [record["status"] for record in records] == ["invalid", "invalid"]
    file = records[0]["replay"]
    assert Problem.load(Path(file)).shape.rows == 1
    replay = ["check", "--replay", file, "--device", "cpu"]
    assert cli.run([*replay, "--backend", "plants:wrong", "--backend", "torch"]) == 1
    shown = capsys.readouterr().out
    assert "plants:wrong: invalid" in shown
    assert "torch: exact" in shown


def test_check_command_exit_codes(plants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = ["check", "--suite", "fault:B18", "--device", "cpu"]
    assert cli.run([*suite, "--backend", "torch"]) == 0
    assert "2 exact" in capsys.readouterr().out
    assert cli.run([*suite, "--backend", "flashinfer", "--backend", "torch"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("dsa-topk: flashinfer: ")
    assert "not installed" in shown.err or "runs on cuda devices" in shown.err
    assert "2 exact" in shown.out
    (plants / "broken.replay").write_bytes(b"x")
    for arguments in (
        ("--suite", "fault:B99"),
        ("--backend", "tensorrt"),
        ("--device", "tpu"),
        ("--mode", "loose"),
        ("--replay", "missing.replay"),
        ("--replay", "broken.replay"),
    ):
        assert cli.run(["check", *arguments]) == 2, arguments
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, arguments


@pytest.mark.parametrize("command", [["check", "--suite", "fault:B18"], ["fuzz", "--calls", "3"]])
def test_json_replaces_only_results(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    path = tmp_path / "results.json"
    arguments = [*command, "--device", "cpu", "--backend", "torch", "--json", str(path)]
    for mine in ("notes", "[1]", '{"kind": "mine"}'):
        path.write_text(mine)
        assert cli.run(arguments) == 2
        assert "it is left as it is" in capsys.readouterr().err
        assert path.read_text() == mine
    path.write_text("")
    for _ in range(2):  # over an empty file, and over its own
        assert cli.run(arguments) == 0
        assert json.loads(path.read_text())["kind"] == f"dsa-topk {command[0]}"


def test_a_missing_replay_file_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "--device", "cpu", "--replay", str(tmp_path / "no.replay")]) == 2
    assert capsys.readouterr().err == f"dsa-topk: --replay {tmp_path / 'no.replay'}: No such file or directory\n"


def test_check_command_lists_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "B03" in listed
    assert "module:function" in listed
