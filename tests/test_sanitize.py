"""The sanitizer tool (tools/sanitize.py) with a stand-in for compute-sanitizer, and its driver's inputs, on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sanitize = _load("sanitize")
driver = _load("sanitize_driver")

REPORT = '{"launches": 84, "paths": {"fast": 9}, "problems": []}\n'
WRONG = '{"launches": 84, "paths": {"fast": 9}, "problems": ["row 3"]}\n'
ABSENT = '{"launches": 0, "paths": {"fast": 0}, "problems": [], "absent": "no clusters of 16"}\n'
HEAD = "========= COMPUTE-SANITIZER\n"


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, HEAD + REPORT + "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (
            99,
            HEAD
            + "========= Invalid __global__ read of size 4 bytes\n"
            + REPORT
            + "========= ERROR SUMMARY: 2 errors\n",
            "errors",
        ),
        (0, HEAD + REPORT + "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", "errors"),
        (0, HEAD + REPORT + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (0, HEAD + ABSENT + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "absent"),
        (1, HEAD + WRONG + "========= ERROR SUMMARY: 0 errors\n", "wrong"),
        (1, "Traceback\nImportError: no module\n", "wrong"),
        (0, HEAD, "wrong"),  # the driver said nothing: nothing was checked
        (
            1,
            HEAD + "========= Error: Device not supported. Please refer to ...\n========= ERROR SUMMARY: 1 error\n",
            "refused",
        ),
        (None, HEAD + "launch 1: a\nlaunch 2: b\n", "timeout"),
    ],
)
def test_a_run_is_judged(code: int | None, output: str, outcome: str) -> None:
    found = sanitize.judge(code, output, 1.5)
    assert found.outcome == outcome
    assert found.ok == (outcome in ("clean", "refused", "absent"))
    expected = {"errors": "SUMMARY", "refused": "Error: Device not supported", "absent": "16", "timeout": "launch 2: b"}
    assert expected.get(outcome, "") in found.message


def stand_in_sanitizer(tmp_path: Path, body: str) -> str:
    """A program that says what ``body``, a shell script, says; ``$group`` is the driver's group."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\nfor group; do :; done\n{body}\n")
    program.chmod(0o755)
    return str(program)


CLEAN = f"echo '{REPORT.strip()}'; echo '========= ERROR SUMMARY: 0 errors'"


def test_a_tool_is_run_with_its_options(tmp_path: Path) -> None:
    body = f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {tmp_path}/words; {CLEAN}'
    program = stand_in_sanitizer(tmp_path, body)
    outcome = sanitize.run_tool("memcheck", limit=20, program=program)
    assert outcome.outcome == "clean"
    assert outcome.launches == 2 * 84
    assert outcome.paths == {"fast": 18}
    lines = (tmp_path / "words").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["all", "hostile"]
    assert all(line.startswith("1 --tool memcheck --error-exitcode 99") for line in lines)
    assert all("sanitize_driver.py" in line and "--kernel-name" not in line for line in lines)
    (tmp_path / "words").unlink()
    sanitize.run_tool("racecheck", limit=20, program=program)
    lines = (tmp_path / "words").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [group.name for group in sanitize.PLAN["racecheck"]]
    assert all(line.startswith(" --tool racecheck") and "--kernel-name kns=" in line for line in lines)


def test_a_group_that_hangs_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with the program under it, which would hold the device; the groups behind it are run."""
    groups = tuple(
        dataclasses.replace(group, limit=0.7 if group.name == "clusters-2" else 20.0)
        for group in sanitize.PLAN["racecheck"]
    )
    monkeypatch.setitem(sanitize.PLAN, "racecheck", groups)
    hang = f"echo 'launch 5: second try'; sleep 60 & echo $! > {tmp_path}/child; wait"
    program = stand_in_sanitizer(tmp_path, f'if [ "$group" = clusters-2 ]; then {hang}; fi; {CLEAN}')
    outcome = sanitize.run_tool("racecheck", limit=60, program=program)
    assert outcome.outcome == "timeout"
    assert "clusters-2: stopped after 1 s in launch 5: second try" in outcome.message
    assert {part.outcome for name, part in outcome.groups.items() if name != "clusters-2"} == {"clean"}
    assert outcome.groups.keys() == {group.name for group in groups}
    child = int((tmp_path / "child").read_text())
    for _ in range(50):  # until its new parent has buried it
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the program under the sanitizer goes on")


def test_a_spent_tool_says_which_groups_were_not_begun(tmp_path: Path) -> None:
    program = stand_in_sanitizer(tmp_path, "sleep 60")
    outcome = sanitize.run_tool("memcheck", limit=0.6, program=program)
    assert outcome.outcome == "timeout"
    assert outcome.groups["all"].message.startswith("stopped")
    assert outcome.groups["hostile"].message.startswith("not begun")
    assert outcome.seconds < 10


def test_a_refused_tool_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"echo x >> {tmp_path}/runs; echo '========= Error: Device not supported'; exit 1"
    program = stand_in_sanitizer(tmp_path, body)
    monkeypatch.setattr(sanitize, "find_tool", lambda: program)
    assert sanitize.main([]) == 0
    assert (tmp_path / "runs").read_text() == "x\n"


def test_a_missing_tool_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 2  # nothing was looked at: no success
    assert capsys.readouterr().out.count("compute-sanitizer was not found") == 4


def test_findings_give_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only one group has some, and when that group is asked for alone."""
    body = f"if [ $group = hostile ]; then echo '========= ERROR SUMMARY: 2 errors'; exit 99; fi; {CLEAN}"
    program = stand_in_sanitizer(tmp_path, body)
    monkeypatch.setattr(sanitize, "find_tool", lambda: program)
    assert sanitize.main(["--tool", "memcheck"]) == 1
    assert sanitize.main(["--group", "hostile"]) == 1
    assert sanitize.main(["--tool", "memcheck", "--group", "all"]) == 0
    with pytest.raises(SystemExit) as raised:
        sanitize.main(["--tool", "initcheck", "--group", "hostile"])
    assert raised.value.code == 2


def test_the_worst_group_speaks_for_the_tool() -> None:
    parts = {name: sanitize.Outcome(name, 1.0, f"it was {name}", 2) for name in sanitize.SEVERITY}
    merged = sanitize.merge(parts)
    assert (merged.outcome, merged.message, merged.launches) == ("errors", "errors: it was errors", 14)
    del parts["errors"], parts["wrong"]
    assert sanitize.merge(parts).outcome == "timeout"
    alone = sanitize.Outcome("clean", 1.0, "0 errors")
    assert sanitize.merge({"all": alone}) is alone
    written = sanitize.as_json({"racecheck": merged})["racecheck"]
    assert json.loads(json.dumps(written)) == written
    assert written["groups"]["absent"] == {
        "outcome": "absent",
        "seconds": 1.0,
        "message": "it was absent",
        "launches": 2,
    }


def test_racecheck_looks_at_every_kernel() -> None:
    """A kernel that no group's filter names would never be looked at."""
    sources = "".join(path.read_text() for path in (ROOT / "src" / "dsa_topk" / "csrc").glob("*.cuh"))
    kernels = set(re.findall(r"__global__[^;{]*?\b(\w+_kernel)\s*\(", sources))
    assert {"filter_kernel", "order_kernel"} <= kernels
    assert kernels == {group.kernel for group in sanitize.PLAN["racecheck"]}


def test_the_plan_names_groups_of_the_driver() -> None:
    assert {group.name for groups in sanitize.PLAN.values() for group in groups} == set(driver.GROUPS)
    groups = sanitize.PLAN["racecheck"]
    assert [group.name for group in groups][-2:] == ["split-16", "clusters-16"]  # the likeliest to hang: last


def test_a_tool_has_time_for_its_largest_groups() -> None:
    """One that hangs leaves half a minute to the other; all the rest took 5 s each on an H200."""
    groups = sanitize.PLAN["racecheck"]
    last = [group.limit for group in groups if group.name.endswith("-16")]
    assert len(last) == 2
    assert all(60 <= limit <= 75 for limit in last)
    evidence = (ROOT / "tools" / "gpu_evidence.py").read_text()
    session = (ROOT / "tools" / "gpu_session.sh").read_text()
    defaults = [
        *re.findall(r'"--tool-limit", type=float, default=(\d+)', evidence),
        *re.findall(r"--tool-limit (\d+)", session),
    ]
    assert [float(text) for text in defaults] == [sanitize.LIMIT] * 2
    assert 5 * (len(groups) - 2) + max(last) + 30 <= sanitize.LIMIT


def test_large_clusters_get_short_rows_but_for_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int]] = []
    monkeypatch.setattr(driver, "select", lambda shape, *_: made.append((shape.name, shape.rows, shape.width)))
    plan = driver._plan.Plan("Split512", 16, 4.5)
    driver.run_kinds(driver.Run(), [plan])
    assert made == [
        ("fast", 2, driver.WIDTH),
        *((kind, 2, driver.SHORT) for kind in ("second try", "plateau", "exact")),
    ]
    assert driver.WIDTH > 16 * 256, "a block without scores"
    made.clear()
    driver.run_kinds(driver.Run(), [dataclasses.replace(plan, cluster=3)])
    assert {width for _, _, width in made} == {driver.WIDTH}


def test_the_drivers_inputs_reach_what_it_says() -> None:
    """On the CPU: its shapes are legal calls, with a window too short to sample and long ones in every form."""
    for form in driver.FORMS:
        shape, scores = driver.case(form, driver.DTYPES[0], 37)
        out = shape.call(scores, backend="torch")
        assert shape.check(scores, out)
        assert 37 < int(shape.lengths.min()) <= 256
        assert int(shape.lengths.max()) > 1000
    for kind in driver.KINDS:
        for width in (driver.SHORT, driver.NARROW, driver.WIDTH):
            shape, scores = driver.kind_case(kind, width)
            assert int(shape.lengths.min()) > shape.k, "a trivial row"
            assert shape.check(scores, shape.call(scores, backend="torch"))


def test_a_wrong_result_of_the_driver_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = driver.Run()
    monkeypatch.setattr(driver, "select", lambda *call: "row 3")
    driver.run_order(run)
    assert run.launches == len(run.problems) == 4
    assert "row 3" in run.problems[0]
    assert capsys.readouterr().out.startswith("launch 1: order by score")


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["everything"]) == 2
    assert "expected one of all, hostile" in capsys.readouterr().err
