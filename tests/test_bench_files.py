"""What a benchmark run leaves behind: result files, comparison, figures, page; and the command itself, GPU included."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench_helpers import CPU, HEADER, SMALL, FakeTimer, row
from dsa_topk import _evidence
from dsa_topk.bench import app, cases, compare, docs, figures, floor, inputs, record, report, timing
from dsa_topk.bench.cases import Case
from dsa_topk.bench.record import Record
from dsa_topk.bench.session import OURS
from dsa_topk.bench.timing import Plan

ROOT = Path(__file__).resolve().parents[1]


# --------------------------------------------------------------------------------------------------------------- record


def test_records_survive_the_file(tmp_path):
    saved = Record(dict(HEADER), host_us={"topk_paged": 9.5}, notes={"sgl_v2": "a line"})
    saved.add(row(peer_failures={"torch": "out of memory"}, variants={"order_score": 11.0}))
    saved.save(tmp_path / "deep" / "r.json")
    assert record.load(tmp_path / "deep" / "r.json") == saved


def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    saved = Record(dict(HEADER))
    saved.save(tmp_path / "r.json")
    before = (tmp_path / "r.json").read_bytes()
    saved.add(row())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        saved.save(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"header": {}}', '{"header": {}, "rows": [{"mode": "decode"}]}'])
def test_files_that_are_no_results_are_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match="not a benchmark result file"):
        record.load(tmp_path / "r.json")


def test_the_header_ties_results_to_the_tree():
    header = record.make_header(CPU, ["dsa-topk", "bench"])
    assert list(header) == list(HEADER)
    assert header["content_hash"] == _evidence.content_hash()


def test_derived_figures():
    one = row(Case("decode", 1, 4096), us=4.0)
    assert one.best_peer == ("sgl_v2", 15.0)
    assert one.speedup == pytest.approx(3.75)
    assert one.floor_ratio == pytest.approx(0.8)
    assert one.gigabytes_per_second == pytest.approx(4096 * 4 / 4e-6 / 1e9)


def test_the_table_marks_inexact_peers():
    text = report.table([row(peer_failures={"ds_fp32": "row 0"})])
    assert "30.00!" in text
    assert "15.00 " in text
    assert "1.500" in text  # the geometric mean


# ------------------------------------------------------------------------------------------------------------- evidence


def test_the_content_hash_covers_names_and_bytes_but_no_build_products(tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "b.cuh").write_text("2")
    first = _evidence.content_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_text("3")
    (tmp_path / "module.so").write_text("4")
    assert _evidence.content_hash(tmp_path) == first
    (tmp_path / "csrc" / "b.cuh").write_text("5")
    second = _evidence.content_hash(tmp_path)
    (tmp_path / "csrc" / "b.cuh").rename(tmp_path / "csrc" / "c.cuh")
    assert len({first, second, _evidence.content_hash(tmp_path)}) == 3


def test_the_package_hash_covers_kernels_and_python():
    names = {path.name for path in _evidence.content_files()}
    assert {"api.py", "floor.cu", "keys.cuh"} <= names


# -------------------------------------------------------------------------------------------------------------- compare


@pytest.mark.parametrize(
    ("us", "spread", "verdict"),
    [(10.2, 0.0, "same"), (10.4, 0.0, "slower"), (9.6, 0.0, "faster"), (10.4, 0.05, "same"), (13.0, 0.05, "slower")],
)
def test_changes_count_beyond_noise_only(us, spread, verdict):
    change = compare.Change(row(spread=spread), row(us=us, spread=spread), 0.03)
    assert change.verdict == verdict


def test_comparisons_exit_1_on_a_regression(tmp_path, capsys):
    for name, us in (("old", 10.0), ("new", 12.0)):
        Record(dict(HEADER), {case: row(case, us) for case in SMALL}).save(tmp_path / f"{name}.json")
    assert app.compare_files(tmp_path / "old.json", tmp_path / "new.json", 0.03) == 1
    assert "geometric mean new/old 1.200, 5 slower" in capsys.readouterr().out
    assert app.compare_files(tmp_path / "new.json", tmp_path / "old.json", 0.03) == 0


def test_comparisons_say_what_cannot_be_compared():
    old = Record(dict(HEADER), {case: row(case) for case in SMALL[:3]})
    new = Record({**HEADER, "gpu": "Other GPU"}, {case: row(case) for case in SMALL[2:]})
    text = compare.text(compare.compare(old, new))
    assert "only in the old file: 2 cases" in text
    assert "only in the new file: 2 cases" in text
    assert "gpu: Test GPU -> Other GPU" in text
    assert "machines, not code" in text


# ----------------------------------------------------------------------------------------------------- figures and docs


def recorded_results() -> Record:
    """Enough rows for every figure and every table."""
    whole = Record(dict(HEADER), notes={"sgl_v2": "a peer", "torch": "took no part"}, host_us={"topk_paged": 9.9})
    shapes = [("decode", b, w) for b in (1, 16) for w in (4096, 65536)]
    shapes += [(mode, 1024, w) for mode in ("ragged", "packed") for w in (8192, 16384)]
    for mode, batch, width in shapes:
        for change in ({}, {"dist": "narrow"}, {"k": 512}, {"dtype": "bfloat16"}):
            case = replace(Case(mode, batch, width), **change)
            whole.add(row(case, us=case.window_bytes / 1e6 + 3, floor_us=case.window_bytes / 2e6 + 2))
    whole.add(row(Case("mtp", 8, 8192)))
    return whole


def test_figures_are_drawn_as_named_and_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    rows = list(recorded_results())
    paths = figures.draw(rows, tmp_path / "a", HEADER)
    stems = figures.names(rows)
    assert {path.stem for path in paths} == set(stems)
    assert "latency-decode-cold" in stems
    assert "speedup-prefill-cold" in stems
    assert "latency-packed-cold" in stems
    again = figures.draw(rows, tmp_path / "b", HEADER)
    assert [p.read_bytes() for p in paths] == [p.read_bytes() for p in again]
    svg = (tmp_path / "a" / "latency-decode-cold.svg").read_text()
    for label in (OURS, "SGLang v2", "read floor", "64K", "16 rows", "Test GPU"):
        assert label in svg, label


def test_one_width_makes_no_line():
    assert figures.names([row(Case("decode", b, 4096)) for b in (1, 4)]) == []


def test_the_page_shows_every_case_and_picture():
    text = docs.page({"test-gpu": recorded_results()})
    for title in ("Decode, cold", "Prefill, packed paged, cold", "MTP verify", "Packed beside ragged"):
        assert f"### {title}" in text
    for title in ("Score distributions", "Other k", "Other types"):
        assert f"### {title}" in text
    assert "images/benchmarks/test-gpu/latency-decode-cold.svg" in text
    assert '- sgl_v2 (in pictures "SGLang v2"): a peer' in text
    assert "took no part" not in text
    assert "`topk_paged` 9.9 us" in text


def test_the_committed_page_is_what_the_recorded_results_give():
    assert (ROOT / docs.PAGE).read_text() == docs.page(docs.load_results(ROOT / docs.RESULTS)), (
        "docs/benchmarks.md is out of date: run `dsa-topk bench --docs`"
    )


def test_files_of_one_machine_are_merged_without_losing_variants(tmp_path):
    first, second = Record(dict(HEADER)), Record(dict(HEADER))
    first.add(row(variants={"order_score": 11.0}))
    second.add(row(us=9.0))
    second.add(row(SMALL[0]))
    first.save(tmp_path / "gpu" / "a.json")
    second.save(tmp_path / "gpu" / "b.json")
    merged = docs.load_results(tmp_path)["gpu"]
    assert (merged.rows[SMALL[2]].us, merged.rows[SMALL[2]].variants) == (9.0, {"order_score": 11.0})
    assert set(merged.rows) == {SMALL[2], SMALL[0]}


def test_of_a_case_in_two_files_the_row_with_more_peers_is_shown(tmp_path):
    first, second = Record(dict(HEADER)), Record(dict(HEADER))
    first.add(row(us=11.0, peers={"a": 1.0, "b": 2.0, "c": 3.0}))
    second.add(row(us=9.0, peers={"a": 1.5}, variants={"tie_largest": 12.0}))
    first.save(tmp_path / "gpu" / "a.json")
    second.save(tmp_path / "gpu" / "b.json")
    (shown,) = docs.load_results(tmp_path)["gpu"]
    assert (shown.us, shown.peers) == (11.0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert shown.variants == {"tie_largest": 12.0}


def test_ratios_of_two_rows_are_of_one_run(tmp_path):
    ragged, packed = Case("ragged", 1024, 8192), Case("packed", 1024, 8192)
    prefill, only_packed = Record(dict(HEADER)), Record(dict(HEADER))
    prefill.add(row(ragged, us=10.0))
    prefill.add(row(packed, us=11.0))
    only_packed.add(row(packed, us=20.0, peers={"a": 30.0, "b": 30.0, "c": 30.0}))
    prefill.save(tmp_path / "gpu" / "prefill.json")
    only_packed.save(tmp_path / "gpu" / "packed.json")
    text = docs.page(docs.load_results(tmp_path))
    assert "| packed | 1024 | 8K | packed | cold | 11.00 | 10.00 | 1.10 |" in text
    assert "**20.00**" in text


def test_host_times_of_several_runs_are_shown_as_a_range(tmp_path):
    for name, us in (("a", 12.34), ("b", 19.8)):
        Record(dict(HEADER), {SMALL[2]: row()}, host_us={"topk_paged": us, "topk_ragged": 10.0}).save(
            tmp_path / "gpu" / f"{name}.json"
        )
    text = docs.page(docs.load_results(tmp_path))
    assert "`topk_paged` 12.3 to 19.8 us, `topk_ragged` 10.0 us (least and most of the files' runs)" in text


def test_docs_need_a_checkout(tmp_path):
    with pytest.raises(ValueError, match="no folder docs"):
        docs.write(tmp_path)


# ------------------------------------------------------------------------------------------------------------------ app


def test_a_run_on_the_cpu_times_checks_and_records(tmp_path, capsys):
    options = app.Options(only="mode=mtp regime=warm", peers="torch", json=tmp_path / "r.json", reps=5, device="cpu")
    assert app.run(options, progress=False) == app.OK
    data = record.load(tmp_path / "r.json")
    (result,) = data
    assert result.us > 0
    assert result.peers["torch"] > 0
    assert data.notes[OURS] == "backend torch"
    assert set(data.host_us) == {"topk_paged", "topk_ragged"}
    assert "mtp" in capsys.readouterr().out


def test_an_unfinished_run_says_so(tmp_path, capsys):
    options = app.Options(only="mode=mtp", peers="none", json=tmp_path / "r.json", device="cpu", budget=-1)
    assert app.run(options, timer=FakeTimer(), progress=False) == app.INCOMPLETE
    assert "2 cases left" in capsys.readouterr().out


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    timer = FakeTimer()
    measure = timer.measure

    def second_time_interrupted(*args, **kwargs):
        if timer.seen:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(timer, "measure", second_time_interrupted)
    options = app.Options(only="mode=mtp", peers="none", json=tmp_path / "r.json", device="cpu")
    assert app.run(options, timer=timer, progress=False) == app.INTERRUPTED
    assert len(record.load(tmp_path / "r.json").rows) == 1


def test_an_interrupt_after_the_last_case_is_one_too(tmp_path, monkeypatch):
    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.host, "measure", interrupted)
    options = app.Options(only="mode=mtp", peers="none", json=tmp_path / "r.json", device="cpu")
    assert app.run(options, timer=FakeTimer(), progress=False) == app.INTERRUPTED
    assert len(record.load(tmp_path / "r.json").rows) == 2


def test_a_run_that_allows_no_figure_says_why(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = app.Options(only="mode=mtp", peers="none", plot=tmp_path / "figures", device="cpu", host_cost=False)
    assert app.run(options, timer=FakeTimer(), progress=False) == app.OK
    assert "no figure: a line needs" in capsys.readouterr().out


def test_a_wrong_result_fails_the_run(tmp_path, monkeypatch, capsys):
    import dsa_topk

    monkeypatch.setattr(dsa_topk, "topk_paged", lambda scores, lengths, k, *, out, **rest: out.fill_(0))
    options = app.Options(only="mode=decode k=2048", peers="none", json=tmp_path / "r.json", device="cpu")
    assert app.run(options, timer=FakeTimer(), progress=False) == app.FAILED
    assert "WRONG RESULT: decode 2 x 4096" in capsys.readouterr().err


@pytest.mark.parametrize("options", [app.Options(reps=3), app.Options(only="rows=3"), app.Options(peers="no-such")])
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match=r"^(reps|only|peers): "):
        app.run(options)


def test_both_command_lines_have_the_same_options():
    import inspect

    typer_command = pytest.importorskip("dsa_topk.cli.bench", reason="needs typer").bench
    theirs = set(inspect.signature(typer_command).parameters) - {"compare", "tolerance", "docs"}
    parsed = app.parse(["--suite", "k,mtp", "--reps", "9", "--no-floor"])
    assert (parsed.suites, parsed.reps, parsed.floor) == (["k", "mtp"], 9, False)
    ours = {"suite" if name == "suites" else name for name in vars(parsed)} - {"command"}
    assert theirs == ours


def test_the_command_reports_wrong_use_in_one_line(capsys):
    pytest.importorskip("typer")
    from dsa_topk import cli

    assert cli.run(["bench", "--suite", "fast"]) == 2
    assert capsys.readouterr().err.startswith("dsa-topk: suite: expected one of decode,")


# ------------------------------------------------------------------------------------------------------------------ gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
def test_graph_times_grow_with_the_work_and_outputs_are_inspected():
    device = torch.device("cuda", 0)
    reader = floor.Floor(device)
    timer, pool = timing.GraphTimer(device, reader.flush), inputs.ScorePool(device)
    case = Case("decode", 64, 131072)
    problem = inputs.make(case, device)
    buffers, flush = pool.buffers(case)
    grid = floor.Grid(16, 512, 4)
    seen: list[tuple[str, int]] = []
    times = timer.measure(
        {
            "once": lambda i: reader.read(problem, buffers[i], grid),
            "thrice": lambda i: [reader.read(problem, buffers[i - n], grid) for n in range(3)],
        },
        Plan(len(buffers), flush),
        inspect=lambda name, buffer: seen.append((name, buffer)),
    )
    # 33.5 MB at no more than 5 TB/s, and at no less than 1.
    assert 6.7 < times["once"].us < 34
    assert 2.0 < times["thrice"].us / times["once"].us < 4.0
    assert seen == [("once", len(buffers) - 1), ("thrice", len(buffers) - 1)]


@pytest.mark.gpu
@needs_gpu
def test_a_flushed_case_is_colder_than_a_warm_one():
    device = torch.device("cuda", 0)
    reader = floor.Floor(device)
    timer, pool = timing.GraphTimer(device, reader.flush), inputs.ScorePool(device)
    us = {}
    for regime in cases.REGIMES:
        case = Case("decode", 16, 8192, regime=regime)
        problem = inputs.make(case, device)
        buffers, flush = pool.buffers(case)
        assert flush == (regime == "cold")
        calls = {"floor": lambda i, p=problem, b=buffers: reader.read(p, b[i], floor.Grid(8, 256, 4))}
        us[regime] = timer.measure(calls, Plan(len(buffers), flush))["floor"].us
    assert 0.5 < us["warm"] < us["cold"] < 10


@pytest.mark.gpu
@needs_gpu
def test_the_smoke_suite_runs_on_the_gpu(tmp_path):
    options = app.Options(peers="auto", json=tmp_path / "r.json", reps=5)
    assert app.run(options, progress=False) == app.OK
    results = record.load(tmp_path / "r.json")
    assert len(results.rows) == len(cases.suite(["smoke"]))
    assert all(result.floor_us for result in results)
