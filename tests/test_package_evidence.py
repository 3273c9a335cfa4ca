"""What tools/peers/package_evidence.py counts, without a GPU, and the files it has left in tests/results/packages."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests" / "results" / "packages").glob("*.json"))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("package_evidence", ROOT / "tools" / "peers" / "package_evidence.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def messages(*outcomes):
    for number, (case, status) in enumerate(outcomes):
        yield {"event": "begin", "index": number, "case": case, "name": f"problem {number}"}
        yield {"event": "end", "index": number, "outcome": {"status": status, "reason": f"reason {number}"}}


def test_a_suite_is_counted_with_the_first_fault_of_each_case(tool):
    stream = messages(("B1", "exact"), ("B1", "wrong"), ("B1", "crash"), ("B2", "unsupported"), ("B3", "hang"))
    found = tool.tally(stream, 9, time.monotonic() + 60)
    assert (found["problems"], found["of"]) == (5, 9)
    assert found["counts"] == {"exact": 1, "wrong": 1, "crash": 1, "unsupported": 1, "hang": 1}
    assert {case: (fault["name"], fault["status"]) for case, fault in found["faults"].items()} == {
        "B1": ("problem 1", "wrong"),
        "B3": ("problem 4", "hang"),
    }


def test_a_suite_out_of_time_says_how_far_it_came(tool):
    def endless():
        while True:
            yield from messages(("B1", "exact"))

    found = tool.tally(endless(), 1000, time.monotonic() + 0.01)
    assert 0 < found["problems"] == found["counts"]["exact"]


ROW = {"mode": "decode", "rows": 2, "width": 64, "dtype": "float32"}


def test_a_benchmark_is_summed_up_by_peer(tool):
    rows = [
        {**ROW, "peers": {"fi_native": 1.0, "sgl_v2": 1.0, "sgl_fast": 2.0}, "peer_failures": {"sgl_v2": "not asked"}},
        {**ROW, "peers": {"fi_native": 1.0}, "peer_failures": {"fi_det": "raised"}},
    ]
    found = tool.summary(rows)
    assert found["cases"] == 2
    assert found["timed"] == {"fi_native": 2, "fi_det": 0, "fi_tieS": 0, "fi_tieL": 0, "sgl_fast": 1}
    assert found["failures"] == {"decode 2 x 64 float32: fi_det": "raised"}


def test_good_needs_every_part(tool):
    bench = {"exit_code": 0, "timed": dict.fromkeys(tool.PEERS, 1), "failures": {}}
    assert tool.good({"outcome": "passed", "bench": bench})
    assert not tool.good({"outcome": "failed", "bench": bench})
    for spoilt in ({"exit_code": 1}, {"timed": {**bench["timed"], "sgl_fast": 0}}, {"failures": {"x": "y"}}):
        assert not tool.good({"outcome": "passed", "bench": {**bench, **spoilt}})


@pytest.fixture
def machine(tool, monkeypatch):
    """A GPU machine with both packages, on which all is well."""
    counts = {"passed": 3, "failed": 0, "errors": 0, "skipped": 0}
    tests = {"outcome": "passed", "counts": counts, "failed": [], "skipped": {}, "measured": {}, "seconds": 1.0}
    bench = {"exit_code": 0, "timed": dict.fromkeys(tool.PEERS, 1), "failures": {}}
    check = {"problems": 1, "of": 2, "counts": {"exact": 1}, "faults": {}}
    header = {**dict.fromkeys(tool.gpu_evidence.TEXTS[1:], "x"), "content_hash": "0" * 64, "gpu": "NVIDIA H200"}
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tool, "versions", lambda: {"flashinfer-python": "0.7.4", "sglang-kernel": "0.4.6"})
    monkeypatch.setattr(tool.gpu_evidence, "describe", lambda command: dict(header))
    monkeypatch.setattr(tool.gpu_evidence, "run_tests", lambda more, *, limit: dict(tests))
    monkeypatch.setattr(tool, "bench", lambda limit: bench)
    monkeypatch.setattr(tool, "check_all", lambda limit: [{"backend": name, **check} for name in tool.BACKENDS])
    return bench


def test_a_run_writes_what_its_parts_say(tool, machine, tmp_path):
    path = tmp_path / "nvidia-h200.json"
    assert tool.main(["--out", str(path)]) == 0
    test_recorded_results_are_well_formed(path, tool)
    machine["failures"]["decode"] = "raised"
    assert tool.main(["--out", str(path)]) == 1
    assert json.loads(path.read_text())["bench"]["failures"] == {"decode": "raised"}


@pytest.mark.parametrize("missing", ["flashinfer-python", "sglang-kernel"])
def test_a_missing_package_is_said_before_anything_runs(missing, tool, machine, tmp_path, monkeypatch, capsys):
    versions = {name: version for name, version in tool.versions().items() if name != missing}
    monkeypatch.setattr(tool, "versions", lambda: versions)
    assert tool.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "are needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_recorded_results_are_well_formed(path, tool):
    data = json.loads(path.read_text())
    assert tool.gpu_evidence.problems(data) == []
    assert path.stem == tool.gpu_evidence.slug(data["gpu"])
    assert data["outcome"] == "passed"
    assert {"flashinfer-python", "sglang-kernel"} <= set(data["packages"])
    # A package that was not there would have left its tests skipped.
    assert not [name for name, reason in data["skipped"].items() if reason in ("no flashinfer", "no sgl_kernel")]
    assert [found["backend"] for found in data["checks"]] == list(tool.BACKENDS)
