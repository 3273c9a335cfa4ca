"""The GPU evidence (tests/results) against the tree, and the tools that make it, without a GPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsa_topk._evidence import content_hash

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up, and gpu_evidence imports sanitize by name
    spec.loader.exec_module(module)
    return module


evidence = _load("gpu_evidence")
sanitize = _load("sanitize")

# ---- the files -----------------------------------------------------------------------------------------------------

FILES = sorted(RESULTS.glob("*.json"))


def demand(text: str) -> None:
    """Out-of-date evidence is a warning: most changes are made where there is no GPU."""
    if os.environ.get("DSA_TOPK_REQUIRE_EVIDENCE") == "1":
        pytest.fail(text)
    warnings.warn(text, stacklevel=2)


def test_there_is_evidence() -> None:
    if not FILES:
        demand("GPU evidence is missing: run `make test-gpu` on a machine with a GPU")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_evidence_is_well_formed(path: Path) -> None:
    data = json.loads(path.read_text())
    assert evidence.problems(data) == []
    assert path.stem == evidence.slug(data["gpu"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_evidence_speaks_for_this_tree(path: Path) -> None:
    data = json.loads(path.read_text())
    if evidence.problems(data):
        pytest.fail("malformed")
    for shortcoming in evidence.shortcomings(data, content_hash()):
        demand(f"GPU evidence {path.name}: {shortcoming}")


# ---- the tool ------------------------------------------------------------------------------------------------------

CLEAN = {"outcome": "clean"}
GOOD: dict[str, Any] = {
    "outcome": "passed",
    **dict.fromkeys(evidence.TEXTS[1:], "x"),
    "content_hash": "0" * 64,
    "counts": {"passed": 3, "failed": 0, "errors": 0, "skipped": 1},
    "failed": [],
    "skipped": {"tests/a.py::b": "needs two CUDA GPUs"},
    "sanitizers": {tool: {**CLEAN, "groups": {"rows": CLEAN}} for tool in evidence.SANITIZERS},
}


def test_good_evidence_has_no_problems() -> None:
    assert evidence.problems(GOOD) == []
    assert evidence.shortcomings(GOOD, "0" * 64) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("driver"), "driver"),
        (lambda d: d.update(torch=2.11), "torch"),
        (lambda d: d.update(outcome="fine"), "outcome"),
        (lambda d: d["counts"].update(failed=1), "disagrees"),
        (lambda d: d["counts"].update(passed=0), "disagrees"),
        (lambda d: d["counts"].update(passed="3"), "counts"),
        (lambda d: d["counts"].update(skipped=2), "skipped"),
        (lambda d: d.update(content_hash="abc"), "content_hash"),
        (lambda d: d["sanitizers"].pop("racecheck"), "racecheck"),
        (lambda d: d["sanitizers"]["racecheck"].update(groups={"rows": {}}), "rows"),
        (lambda d: d["sanitizers"]["racecheck"].update(groups=["rows"]), "racecheck"),
        (lambda d: (d["counts"].update(failed=2), d.update(outcome="failed", failed=["a"])), "failed"),
    ],
)
def test_malformed_evidence(change: Callable[[dict[str, Any]], object], problem: str) -> None:
    data = copy.deepcopy(GOOD)
    change(data)
    assert any(problem in text for text in evidence.problems(data))


@pytest.mark.parametrize("data", [None, [], "passed", {}])
def test_something_else_is_malformed(data: object) -> None:
    assert evidence.problems(data)


@pytest.mark.parametrize(
    ("change", "shortcoming"),
    [
        ({"content_hash": "1" * 64}, "out of date"),
        ({"outcome": "failed", "failed": ["tests/a.py::c"]}, "tests/a.py::c"),
        ({"partial": True}, "part"),
        ({"sanitizers": {}}, "not run"),
        ({"sanitizers": {"memcheck": {"outcome": "errors"}}}, "memcheck: errors"),
        ({"sanitizers": {"racecheck": {"outcome": "timeout"}}}, "racecheck: timeout"),
        ({"sanitizers": {"initcheck": {"outcome": "missing"}}}, "initcheck: missing"),
        (
            {"sanitizers": {"racecheck": {"outcome": "wrong", "groups": {"rows": {"outcome": "wrong"}, "x": CLEAN}}}},
            "racecheck: wrong (rows)",
        ),
    ],
)
def test_evidence_that_does_not_speak_for_the_tree(change: dict[str, Any], shortcoming: str) -> None:
    assert any(shortcoming in text for text in evidence.shortcomings({**GOOD, **change}, "0" * 64))


def test_a_refused_sanitizer_is_no_shortcoming() -> None:
    refused = {tool: {"outcome": "refused", "message": "Device not supported"} for tool in evidence.SANITIZERS}
    assert evidence.shortcomings({**GOOD, "sanitizers": refused}, "0" * 64) == []


def test_file_names() -> None:
    assert evidence.slug("NVIDIA H200") == "nvidia-h200"
    assert evidence.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"


JUNIT_TESTS = """
import pytest
def test_right(record_property): record_property("host_us", 7.25)
def test_wrong(): assert False
@pytest.fixture
def broken(): raise OSError("no")
def test_broken(broken): pass
@pytest.mark.skip(reason="needs two CUDA GPUs")
@pytest.mark.parametrize("x", [1])
def test_skipped(x): pass
"""


def test_a_real_report_is_read(tmp_path: Path) -> None:
    """Made by pytest itself, so that a change of its format is noticed."""
    (tmp_path / "test_sample.py").write_text(JUNIT_TESTS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=j.xml", "test_sample.py"]
    subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    found = evidence.read_junit(tmp_path / "j.xml")
    assert found == {
        "counts": {"passed": 1, "failed": 1, "errors": 1, "skipped": 1},
        "failed": ["test_sample.py::test_wrong", "test_sample.py::test_broken"],
        "skipped": {"test_sample.py::test_skipped[1]": "needs two CUDA GPUs"},
        "measured": {"host_us": 7.25},
    }


@pytest.mark.parametrize("text", [None, "", "<testsuites>", "no xml"])
def test_a_broken_report_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "j.xml").write_text(text)
    with pytest.raises(ValueError, match="no junit file"):
        evidence.read_junit(tmp_path / "j.xml")


def stand_in_pytest(monkeypatch: pytest.MonkeyPatch, code: int, cases: str | None) -> None:
    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[1:5] == ["-m", "pytest", "-m", "gpu"]
        junit = next(word for word in words if word.startswith("--junitxml=")).partition("=")[2]
        if cases is not None:
            Path(junit).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(evidence.subprocess, "run", run)


@pytest.mark.parametrize(
    ("code", "cases", "outcome"),
    [
        (0, '<testcase classname="tests.a" name="b"/>', "passed"),
        (1, '<testcase classname="tests.a" name="b"><failure/></testcase>', "failed"),
        (1, '<testcase classname="tests.a" name="b"/>', "error"),  # something else went wrong
        (0, '<testcase classname="tests.a" name="b"><skipped message="x"/></testcase>', "error"),  # nothing ran
        (5, "", "error"),  # nothing was collected
        (-11, None, "error"),  # died without a report
    ],
)
def test_outcomes(monkeypatch: pytest.MonkeyPatch, code: int, cases: str | None, outcome: str) -> None:
    stand_in_pytest(monkeypatch, code, cases)
    found = evidence.run_tests([], limit=5)
    assert found["outcome"] == outcome
    if cases is None:
        assert found["failed"] == ["pytest ended with exit code -11, without a report"]


def on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(evidence.torch.cuda, "get_device_name", lambda index: "Pretended GPU 1")
    monkeypatch.setattr(evidence.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(evidence, "_output", lambda *command: "580.1")
    monkeypatch.setenv("DSA_TOPK_COMMIT", "abc")


def test_the_written_file_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_pretended_gpu(monkeypatch)
    stand_in_pytest(monkeypatch, 0, '<testcase classname="tests.a" name="b"/>')
    outcomes = {tool: sanitize.Outcome("refused", 1.0, "Device not supported") for tool in sanitize.TOOLS}
    monkeypatch.setattr(sanitize, "run_all", lambda **options: outcomes)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    assert evidence.main(["--sanitize"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name == "pretended-gpu-1.json"
    data = json.loads(path.read_text())
    assert evidence.problems(data) == []
    assert evidence.shortcomings(data, content_hash()) == []
    assert data["commit"] == "abc"
    assert data["sanitizers"]["memcheck"]["message"] == "Device not supported"


def test_failures_and_findings_give_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_pretended_gpu(monkeypatch)
    out = tmp_path / "e.json"
    stand_in_pytest(monkeypatch, 1, '<testcase classname="tests.a" name="b"><failure/></testcase>')
    assert evidence.main(["--out", str(out), "--", "-k", "b"]) == 1
    data = json.loads(out.read_text())
    assert data["failed"] == ["tests/a.py::b"]
    assert data["partial"] is True
    assert evidence.problems(data) == []
    stand_in_pytest(monkeypatch, 0, '<testcase classname="tests.a" name="b"/>')
    outcomes = {tool: sanitize.Outcome("errors", 1.0, "1 error") for tool in sanitize.TOOLS}
    monkeypatch.setattr(sanitize, "run_all", lambda **options: outcomes)
    assert evidence.main(["--out", str(out), "--sanitize"]) == 1


def test_sanitizers_join_the_evidence_of_the_same_code_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_pretended_gpu(monkeypatch)
    monkeypatch.setattr(evidence, "run_tests", lambda *a, **b: pytest.fail("the tests were run"))
    outcomes = {tool: sanitize.Outcome("clean", 1.0, "0 errors") for tool in sanitize.TOOLS}
    monkeypatch.setattr(sanitize, "run_all", lambda **options: outcomes)
    path = tmp_path / "e.json"
    words = ["--out", str(path), "--add-sanitizers"]
    assert evidence.main(words) == 2
    old = {**GOOD, "seconds": 1.0, "sanitizers": {}, "date": "yesterday"}
    evidence.write_json(path, old)
    assert evidence.main(words) == 2
    assert "other code" in capsys.readouterr().err
    evidence.write_json(path, {**old, "content_hash": content_hash()})
    assert evidence.main(words) == 0
    data = json.loads(path.read_text())
    assert data["date"] == "yesterday"
    assert {entry["outcome"] for entry in data["sanitizers"].values()} == {"clean"}


def test_tests_run_again_keep_what_sanitizers_said_of_the_same_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_pretended_gpu(monkeypatch)
    stand_in_pytest(monkeypatch, 0, '<testcase classname="tests.a" name="b"/>')
    monkeypatch.setattr(sanitize, "run_all", lambda **options: pytest.fail("the sanitizers were run"))
    out, old = tmp_path / "e.json", tmp_path / "old.json"
    words = ["--out", str(out), "--keep-sanitizers", str(old)]
    said = {tool: {"outcome": "clean"} for tool in sanitize.TOOLS}
    before = {**GOOD, "seconds": 1.0, "sanitizers": said, "date": "yesterday", "counts": dict(GOOD["counts"])}
    evidence.write_json(old, before)
    assert evidence.main(words) == 2
    assert "other code" in capsys.readouterr().err
    evidence.write_json(old, {**before, "content_hash": content_hash(), "sanitizers": {}})
    assert evidence.main(words) == 2
    assert "no sanitizers" in capsys.readouterr().err
    assert not out.exists()
    evidence.write_json(old, {**before, "content_hash": content_hash()})
    assert evidence.main(words) == 0
    data = json.loads(out.read_text())
    assert data["sanitizers"] == said
    assert data["sanitized"] == "yesterday"
    assert data["counts"]["passed"] == 1
    assert evidence.shortcomings(data, content_hash()) == []
    with pytest.raises(SystemExit):
        evidence.main([*words, "--sanitize"])


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    evidence.write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(evidence.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        evidence.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(evidence.torch.cuda, "is_available", lambda: False)
    assert evidence.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
