"""benchmarks/goals.py: the goals of issues 4 and 5 against made-up results."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bench_helpers import HEADER
from dsa_topk.bench import cases
from dsa_topk.bench.cases import Case
from dsa_topk.bench.record import Record, Row

ROOT = Path(__file__).resolve().parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("goals", ROOT / "benchmarks" / "goals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["goals"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


goals = _load()
PREFILL = "prefill,k,dist", "mode=ragged,packed"  # what tools/gpu_session.sh runs
DECODE = "decode,mtp,k,dist", "mode=decode,mtp,mixed"


def results(suites: str, only: str, *, us: float = 10.0, peer: float = 30.0) -> Record:
    """Every case of a run: at the floor, a third of every peer's time, bf16 in half."""
    data = Record(dict(HEADER), host_us={"topk_paged": 9.0, "topk_ragged": 9.0})
    for case in cases.select(cases.suite(suites.split(",")), only):
        own = us / 2 if case.dtype == "bfloat16" else us
        data.add(Row(case, own, 0.0, own, {"sgl_v2": peer, "fi_det": peer + 1}, True))
    return data


def change(data: Record, case: Case, **changes: object) -> Record:
    assert case in data.rows
    data.add(replace(data.rows[case], **changes))  # type: ignore[arg-type]
    return data


def missed(cells: object) -> list[tuple[str, str, str]]:
    return [(cell.kind, cell.goal, cell.verdict) for cell in cells if not cell.met]  # type: ignore[attr-defined]


def test_the_session_gives_a_figure_for_every_goal() -> None:
    assert missed(goals.prefill(results(*PREFILL))) == []
    assert missed(goals.decode(results(*DECODE))) == []
    session = (ROOT / "tools" / "gpu_session.sh").read_text()
    for suites, only in (PREFILL, DECODE):
        assert f"--suite {suites} --only {only}\n" in session


def test_the_counts_are_those_of_the_issues() -> None:
    cells = [*goals.prefill(results(*PREFILL)), *goals.decode(results(*DECODE))]
    by_goal = {
        goal: sum(cell.goal == goal and cell.kind == "must" for cell in cells) for goal in {c.goal for c in cells}
    }
    assert by_goal["times the floor"] == by_goal["best peer over ours"] == by_goal["packed over ragged"] == 14
    assert by_goal["bfloat16 over float32"] == 8
    assert by_goal["best peer over ours, cold"] == by_goal["best peer over ours, warm"] == 51
    assert by_goal["FlashInfer deterministic over ours"] == 102


RAGGED = Case("ragged", 4096, 8192)
LONG = Case("ragged", 4096, 65536)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        (RAGGED, {"floor_us": 10 / 2.91}, [("must", "times the floor"), ("aim", "times the floor")]),
        (RAGGED, {"floor_us": 10 / 2.1}, [("aim", "times the floor")]),
        (LONG, {"floor_us": 10 / 1.69}, [("aim", "times the floor")]),
        (RAGGED, {"peers": {"a": 40.0, "b": 9.9}}, [("must", "best peer over ours")]),
        (replace(RAGGED, mode="packed"), {"us": 10.9}, [("must", "packed over ragged")]),
        (replace(LONG, dist="narrow"), {"us": 11.1}, [("must", "indexer-like, narrow over normal")]),
        (replace(LONG, dist="mask_1e9"), {"us": 16.9}, []),
        (replace(LONG, dist="mask_1e9"), {"us": 17.1}, [("must", "hard distributions over normal")]),
        (replace(RAGGED, dist="recorded"), {"us": 11.6}, [("must", "recorded over normal")]),
        (replace(LONG, k=512), {"us": 10.4}, [("must", "k = 512, 1024 over k = 2048")]),
        (replace(LONG, dtype="bfloat16"), {"us": 7.6}, [("must", "bfloat16 over float32")]),
    ],
)
def test_each_prefill_goal_can_be_missed(
    case: Case, changes: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    cells = list(goals.prefill(change(results(*PREFILL), case, **changes)))
    assert missed(cells) == [(*goal, "missed") for goal in expected]


FEW, MANY = Case("decode", 1, 65536), Case("decode", 256, 65536, regime="warm")


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        (FEW, {"peers": {"sgl_v2": 9.75, "fi_det": 30.0}}, [("aim", "best peer over ours, cold")]),
        (
            FEW,
            {"peers": {"sgl_v2": 9.65, "fi_det": 30.0}},
            [("must", "best peer over ours, cold"), ("aim", "best peer over ours, cold")],
        ),
        (MANY, {"floor_us": 10 / 1.36}, [("aim", "times the floor")]),
        (MANY, {"peers": {"sgl_v2": 12.0, "fi_det": 30.0}}, [("must", "best peer over ours, warm")]),
        (Case("decode", 1, 4096), {"peers": {"fi_det": 9.99}}, None),
        (Case("mixed", 64, 131072), {"peers": {"sgl_v2": 9.9}}, [("must", "best peer over ours, mixed")]),
        (Case("mtp", 4, 8192), {"peers": {"sgl_v2": 9.9}}, [("must", "best peer over ours, mtp")]),
        (
            Case("decode", 1, 131072, dist="half_zeros"),
            {"us": 14.1},
            [("must", "recorded, indexer-like, narrow, half zeros over normal")],
        ),
        (Case("decode", 1, 131072, dist="all_equal"), {"us": 14.1}, []),
        (Case("decode", 1, 131072, 1024), {"us": 10.4}, [("must", "k = 512, 1024 over k = 2048")]),
    ],
)
def test_each_decode_goal_can_be_missed(
    case: Case, changes: dict[str, object], expected: list[tuple[str, str]] | None
) -> None:
    found = missed(goals.decode(change(results(*DECODE), case, **changes)))
    if expected is None:
        assert ("must", "FlashInfer deterministic over ours", "missed") in found
    else:
        assert found == [(*goal, "missed") for goal in expected]


def test_the_mean_and_the_host_time_can_be_missed() -> None:
    data = results(*DECODE, peer=13.0)
    data.host_us["topk_paged"] = 15.2
    found = missed(goals.decode(data))
    assert ("aim", "geometric mean of best peer over ours", "missed") in found
    assert ("must", "geometric mean of best peer over ours", "missed") not in found
    assert found.count(("must", "host time of an eager call (us)", "missed")) == 1


def test_what_was_not_timed_has_no_figure_and_is_not_met() -> None:
    data = results(*DECODE)
    del data.rows[FEW]
    found = missed(goals.decode(data))
    assert ("must", "best peer over ours, cold", "no figure") in found
    assert ("must", "geometric mean of best peer over ours", "no figure") in found  # a mean of the rest is another one
    data = results(*PREFILL)
    del data.rows[LONG]
    assert {goal for _, goal, verdict in missed(goals.prefill(data)) if verdict == "no figure"} >= {
        "times the floor",
        "packed over ragged",
        "bfloat16 over float32",
        "hard distributions over normal",
    }


def test_the_command_counts_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert goals.main([str(tmp_path)]) == 2
    assert "No such file" in capsys.readouterr().err
    results(*DECODE).save(tmp_path / "decode.json")
    results(*PREFILL).save(tmp_path / "prefill.json")
    assert goals.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["issue 4", "issue 5"]
    assert lines[-2].endswith("14 of 14 aims")
    change(results(*PREFILL), RAGGED, peers={"fast": 5.0}).save(tmp_path / "prefill.json")
    assert goals.main([str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "best peer over ours: NOT MET, 13 of 14 cells, worst 0.500 (ragged 4096 x 8192" in text
    assert text.count("    missed") == 1
    goals.main([str(tmp_path), "--all"])
    assert capsys.readouterr().out.count("    met") > 300
