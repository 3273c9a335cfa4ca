"""The benchmark's run: cases, inputs, timing, floor, sessions with a fake timer, peers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench_helpers import CPU, HEADER, SMALL, FakeTimer, session
from dsa_topk.bench import cases, floor, inputs, peers, record, timing
from dsa_topk.bench.cases import Case
from dsa_topk.bench.session import OURS, WrongResult
from dsa_topk.bench.timing import Plan


@pytest.fixture
def adapter():
    """Registers peers for one test."""
    before = dict(peers._adapters)
    yield peers.register
    peers._adapters.clear()
    peers._adapters.update(before)


# ---------------------------------------------------------------------------------------------------------------- cases


def test_the_decode_suite_is_51_shapes_in_both_regimes():
    decode = cases.suite(["decode"])
    assert len({(case.rows, case.width) for case in decode}) == 51
    assert len(decode) == 102


def test_the_prefill_suite_has_ragged_and_packed_twins_for_every_shape():
    cold = [c for c in cases.suite(["prefill"]) if c.regime == "cold" and c.dtype == "float32"]
    shapes = {mode: {(c.rows, c.width) for c in cold if c.mode == mode} for mode in ("ragged", "packed")}
    assert shapes["ragged"] == shapes["packed"] == set(cases.PREFILL_SHAPES)
    assert len(cases.PREFILL_SHAPES) == 14


@pytest.mark.parametrize("name", cases.SUITES)
def test_every_case_of_a_suite_can_be_described(name):
    for case in cases.suite([name]):
        assert case.mode in cases.MODES
        assert case.regime in cases.REGIMES
        assert case.dtype in inputs.DTYPES
        assert case.dist in (*cases.DISTS, "recorded")


def test_suites_together_hold_each_case_once():
    together = cases.suite(["decode", "k", "dist"])
    assert len(set(together)) == len(together)


def test_an_unknown_suite_is_named():
    with pytest.raises(ValueError, match=r"suite: expected one of .*got 'fast'"):
        cases.suite(["fast"])


def test_ragged_windows_grow_from_half_to_full_and_fit():
    lengths, starts = cases.lengths("ragged", 100, 8192), cases.row_starts("ragged", 100)
    assert (lengths[0], lengths[-1]) == (4096, 8192)
    assert lengths == sorted(lengths)
    assert all(start % 4 for start in starts)
    assert max(s + n for s, n in zip(starts, lengths, strict=True)) <= Case("ragged", 100, 8192).columns


def test_mtp_rows_of_a_request_see_one_score_more_each():
    assert cases.lengths("mtp", 8, 100) == [97, 98, 99, 100] * 2


def test_mixed_lengths_reach_from_short_to_full():
    lengths = cases.lengths("mixed", 64, 131072)
    assert lengths[0] == 131072
    assert min(lengths) < 2048 < 32768 < sorted(lengths)[-2]


def test_window_bytes_count_the_windows_not_the_tensor():
    assert Case("decode", 2, 4096).window_bytes == 2 * 4096 * 4
    assert Case("ragged", 2, 4096, dtype="bfloat16").window_bytes == (2048 + 4096) * 2


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("", 5),
        ("mode=decode,mtp", 2),
        ("rows=8 mode=ragged", 1),
        ("width>512", 0),
        ("width>=512 k<=64", 5),
        ("k<64", 0),
    ],
)
def test_only_selects(only, count):
    assert len(cases.select(SMALL, only)) == count


@pytest.mark.parametrize("only", ["rows", "colour=red", "mode>=decode", "rows>=many"])
def test_only_refuses_what_is_no_condition(only):
    with pytest.raises(ValueError, match="only: "):
        cases.select(SMALL, only)


# --------------------------------------------------------------------------------------------------------------- inputs


def test_cold_buffers_cover_four_l2_caches_or_are_flushed():
    for case in cases.suite(["decode", "prefill"]):
        count = inputs.buffer_count(case)
        if case.regime == "warm":
            assert count == 1, case
        elif count < inputs.MAX_BUFFERS:
            assert count * case.score_bytes >= inputs.ROTATED_BYTES, case


@pytest.mark.parametrize("case", SMALL, ids=Case.label)
def test_the_reference_passes_the_check_and_one_wrong_entry_fails(case):
    problem = inputs.make(case, CPU)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    problem.call()(scores)
    assert problem.check(scores, problem.out, "canonical") is None
    wrong = problem.out.clone()
    wrong[3, 5] = wrong[3, 6]
    assert "row 3" in (problem.check(scores, wrong, "set") or "")


@pytest.mark.parametrize("mode", ["decode", "packed", "mtp"])
def test_a_page_of_another_request_is_no_position(mode):
    problem = inputs.make(Case(mode, 8, 512, 64), CPU)
    stored = torch.full((8, 64), -1, dtype=torch.int32)
    stored[0, 0] = problem.page_table[-1, -1] * cases.PAGE_SIZE  # the last request's last page
    stored[0, 1] = 2**30
    assert problem.positions(stored)[0, :3].tolist() == [-2, -2, -1]


@pytest.mark.parametrize("dist", [*cases.DISTS, "recorded"])
def test_distributions_fill_every_row(dist):
    if dist == "recorded":
        pytest.importorskip("safetensors")
    case = Case("decode", 70, 256, 16, dist=dist)
    scores = inputs.distribution(case, CPU)
    assert scores.shape == (70, 256)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()


def test_a_normal_case_after_another_distribution_is_normal_again():
    pool = inputs.ScorePool(CPU)
    normal, equal = Case("decode", 4, 256, 16), Case("decode", 4, 256, 16, dist="all_equal")
    before = pool.buffers(normal)[0][0].clone()
    assert pool.buffers(equal)[0][0].unique().numel() == 1
    assert torch.equal(pool.buffers(normal)[0][0], before)


# --------------------------------------------------------------------------------------------------------------- timing


def test_summaries_are_medians_per_call_without_the_flush():
    result = timing.summarise([100.0, 110.0, 105.0, 500.0, 90.0], calls=10, subtract=5.0)
    assert result.us == pytest.approx(10.0)
    assert result.spread == pytest.approx((110 - 100) / 105)


@pytest.mark.parametrize("us", [0.5, 3.0, 100.0, 1400.0, 5000.0])
@pytest.mark.parametrize("buffers", [1, 2, 13, 128])
def test_graphs_hold_whole_rotations(us, buffers):
    calls = timing.calls_per_graph(us, Plan(buffers=buffers))
    assert calls >= max(buffers, 2)
    assert calls % buffers == 0
    assert calls <= 192 or calls == buffers


def test_a_flushed_graph_uses_each_buffer_once():
    assert timing.calls_per_graph(2.0, Plan(buffers=128, flush=True)) == 128


def test_contestants_take_turns():
    order: list[str] = []
    contestants = {name: lambda i, n=name: order.append(n) for name in "ABC"}
    timing.HostTimer().measure(contestants, Plan(reps=5))
    assert order == list("ABC") * 6  # one round warms up


# ---------------------------------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize("case", [Case("decode", 1, 4096), Case("decode", 256, 262144), Case("ragged", 8192, 65536)])
def test_floor_grids_are_few_next_to_a_neighbour(case):
    first = floor.grids(case, 132)
    assert 6 <= len(first) <= 36
    near = floor.grids(case, 132, floor.Grid(8, 512, 4), case.rows)
    assert 6 <= len(near) <= 12
    assert any((grid.threads, grid.unroll) == (512, 4) for grid in near)
    assert all(grid.splits * case.rows <= floor.MOST_BLOCKS for grid in (*first, *near))


def test_every_grid_shape_is_compiled_in_the_kernel():
    text = (floor.SOURCES / "floor.cu").read_text()
    compiled = {(int(t), int(u)) for t, u in re.findall(r"SHAPE\((\d+), (\d+)\)", text)}
    assert set(floor.SHAPES) == compiled


# -------------------------------------------------------------------------------------------------------------- session


def test_rows_have_exactly_the_documented_fields(tmp_path, adapter):
    adapter("twice", lambda problem: peers.Peer(problem.call(), lambda: problem.out))
    run = session(tmp_path, FakeTimer(), peer_names=["twice"])
    assert run.run(SMALL) == []
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["header"] == HEADER
    assert len(data["rows"]) == len(SMALL)
    assert data["rows"][0] == {
        "mode": "ragged",
        "rows": 8,
        "width": 512,
        "k": 64,
        "dtype": "float32",
        "dist": "normal",
        "regime": "cold",
        "us": 10.0,
        "spread": 0.01,
        "floor_us": None,
        "peers": {"twice": 20.0},
        "checked": True,
    }


def test_our_wrong_result_stops_the_run_and_keeps_what_was_timed(tmp_path, monkeypatch):
    import dsa_topk

    real = dsa_topk.topk_paged

    def broken(scores, lengths, k, *, out, **rest):
        real(scores, lengths, k, out=out, **rest)
        out[:, :2] = out[:, :2].flip(1)
        return out

    run = session(tmp_path, FakeTimer())
    run.run(SMALL[:1])
    monkeypatch.setattr(dsa_topk, "topk_paged", broken)
    with pytest.raises(WrongResult, match="packed 8 x 512"):
        run.run(SMALL)
    assert list(record.load(tmp_path / "r.json").rows) == SMALL[:1]


def test_a_wrong_peer_is_timed_and_flagged_a_failing_one_only_flagged(tmp_path, adapter):
    def wrong(problem):
        out = torch.zeros_like(problem.out)
        return peers.Peer(lambda scores: None, lambda: out)

    def failing(problem):
        raise RuntimeError("no such kernel")

    def absent(problem):
        raise peers.NotApplicable("not installed")

    for name, function in (("wrong", wrong), ("failing", failing), ("absent", absent)):
        adapter(name, function)
    run = session(tmp_path, FakeTimer(), peer_names=["wrong", "failing", "absent"])
    run.run(SMALL[2:3])
    (result,) = run.record
    assert result.peers == {"wrong": 20.0}
    assert set(result.peer_failures) == {"wrong", "failing"}
    assert "no such kernel" in result.peer_failures["failing"]
    assert run.absent == {"absent": "not installed"}


def test_a_peer_that_cannot_be_captured_is_left_out(tmp_path, adapter, monkeypatch):
    adapter("eager", lambda problem: peers.Peer(problem.call(), lambda: problem.out))
    timer = FakeTimer()
    measure = timer.measure

    def capturing(contestants, plan, **options):
        if "eager" in contestants:
            raise timing.ContestantError("eager", RuntimeError("not permitted when stream is capturing"))
        return measure(contestants, plan, **options)

    monkeypatch.setattr(timer, "measure", capturing)
    run = session(tmp_path, timer, peer_names=["eager"])
    run.run(SMALL[2:3])
    (result,) = run.record
    assert result.peers == {}
    assert "capturing" in result.peer_failures["eager"]


def test_our_own_failure_to_be_captured_ends_the_run(tmp_path, monkeypatch):
    def failing(contestants, plan, **options):
        raise timing.ContestantError(OURS, RuntimeError("capture"))

    timer = FakeTimer()
    monkeypatch.setattr(timer, "measure", failing)
    with pytest.raises(timing.ContestantError, match=OURS):
        session(tmp_path, timer).run(SMALL[:1])


def test_variants_are_timed_and_checked_by_their_own_rule(tmp_path):
    run = session(tmp_path, FakeTimer({"order_score": 12.0}), variants=True)
    run.run(SMALL[1:2])
    assert run.record.rows[SMALL[1]].variants == {"tie_largest": 20.0, "order_score": 12.0}


def test_no_case_starts_after_the_budget(tmp_path):
    run = session(tmp_path, FakeTimer(), budget_s=-1.0)
    assert run.run(SMALL) == SMALL
    assert not run.record.rows


def test_a_run_goes_on_where_it_stopped(tmp_path):
    first = session(tmp_path, FakeTimer())
    first.run(SMALL[:2])
    taken, message = record.resume(tmp_path / "r.json", dict(HEADER))
    assert "2 finished rows kept" in message
    timer = FakeTimer()
    second = session(tmp_path, timer)
    second.record = taken
    second.run(SMALL)
    assert len(timer.seen) == len(SMALL) - 2
    assert list(record.load(tmp_path / "r.json").rows) == SMALL


@pytest.mark.parametrize("key", record.IDENTITY)
def test_rows_of_other_code_or_machines_are_set_aside(tmp_path, key):
    session(tmp_path, FakeTimer()).run(SMALL[:1])
    taken, message = record.resume(tmp_path / "r.json", {**HEADER, key: "other"})
    assert not taken.rows
    assert key in message
    assert len(record.load(tmp_path / "r.previous.json").rows) == 1


# ---------------------------------------------------------------------------------------------------------------- peers


def fake_module(problem: inputs.Problem) -> SimpleNamespace:
    """The peers' entry points as their own Python wrappers call them, answered by the reference."""

    def paged(scores, lengths, table, out, *, batch=None, starts=None, first=None):
        assert table.shape[0] == scores.shape[0] or batch is not None
        call = inputs.make(problem.case, CPU, out=out)
        call.page_table, call.row_to_batch, call.row_starts, call.page_table_starts = table, batch, starts, first
        call.lengths = lengths
        call.call()(scores)

    def ragged(scores, lengths, offsets, starts, out):
        if starts is not None:  # sglang's kernel writes in front of the windows
            column = torch.arange(scores.shape[1])
            scores[(column >= starts[:, None] - 3) & (column < starts[:, None])] = torch.nan
        call = inputs.make(problem.case, CPU, out=out)
        call.lengths, call.out_offsets, call.row_starts = lengths, offsets, starts
        call.call()(scores)

    def deepselect(s, values, out, begin, end, offsets, table, page, k, storage, fill, value_fill, abort):
        assert (values, begin, k, fill, abort) == (None, None, problem.case.k, -1, False)
        assert storage >= s.numel() * 4
        if s.isnan().any():
            out.zero_()  # the real one repeats a position where NaN leaves it too few
        elif table is None:
            ragged(s, end, offsets, None, out)
        else:
            assert page == cases.PAGE_SIZE
            paged(s, end, table, out)

    def flashinfer_paged(s, out, table, batch, lengths, states, k, det, tie, page, safe, starts, first, raw):
        assert (k, page, safe, raw) == (problem.case.k, cases.PAGE_SIZE, False, None)
        paged(s, lengths, table, out, batch=batch, starts=starts, first=first)

    return SimpleNamespace(
        topk_plan=lambda lengths, plan, threshold: None,
        topk_transform_paged=lambda s, n, table, out, page, plan, raw: paged(s, n, table, out),
        topk_transform_ragged=lambda s, n, starts, offsets, out: ragged(s, n, offsets, starts, out),
        topk=deepselect,
        radix_topk_page_table_transform=flashinfer_paged,
        radix_topk_ragged_transform=lambda s, out, off, n, states, k, det, tie, safe, starts: ragged(
            s, n, off, starts, out
        ),
        get_max_active_clusters=lambda size, occupancy: {8: 30, 16: 7}[size],
    )


@pytest.mark.parametrize("case", SMALL, ids=Case.label)
@pytest.mark.parametrize("name", ["sgl_v2", "ds_fp32", "fi_native", "fi_det"])
def test_prebuilt_peers_get_the_arguments_of_their_own_wrappers(name, case, monkeypatch):
    problem = inputs.make(case, CPU)
    asked: list[str] = []

    def prebuilt(module: str) -> SimpleNamespace:
        asked.append(module)
        return fake_module(problem)

    monkeypatch.setattr(peers, "prebuilt", prebuilt)
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "_installed", lambda package: False)
    peers._sgl_v2.cache_clear()
    if case.mode == "packed" and name in ("sgl_v2", "ds_fp32"):
        with pytest.raises(peers.NotApplicable):
            peers.prepare(name, problem)
        return
    peer = peers.prepare(name, problem)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    peer.run(scores)
    assert peer.check(problem, scores) is None
    assert asked[-1] in ("sgl_v2_pdl_30_7", "ds_fp32_512_true", "ds_fp32_512_false", "fi_topk")
    peer.result()[0, 0] = peer.result()[0, 1]
    assert peer.check(problem, scores) is not None
    peers._sgl_v2.cache_clear()


def test_a_peer_that_writes_beside_the_windows_spoils_no_other(tmp_path, monkeypatch):
    case = Case("ragged", 8, 512, 64)
    monkeypatch.setattr(peers, "prebuilt", lambda module: fake_module(inputs.make(case, CPU)))
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "_installed", lambda package: False)
    peers._sgl_v2.cache_clear()
    run = session(tmp_path, FakeTimer(), peer_names=["sgl_v2", "ds_fp32"])
    run.run([case])
    (result,) = run.record
    assert set(result.peers) == {"sgl_v2", "ds_fp32"}
    assert result.peer_failures == {}
    peers._sgl_v2.cache_clear()


@pytest.mark.parametrize("case", [case for case in SMALL if case.mode != "packed"], ids=Case.label)
def test_an_installed_sglang_is_called_by_its_public_functions(case, monkeypatch):
    from dsa_topk.compat import sglang as same_signatures

    public = ("plan_topk_v2", "topk_transform_ragged_v2", "topk_transform_paged_v2")
    package = SimpleNamespace(**{name: getattr(same_signatures, name) for name in public})
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.dsv4", SimpleNamespace(topk=package))
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "_installed", lambda package: package == "sglang.kernels")
    problem = inputs.make(case, CPU)
    peer = peers.prepare("sgl_v2", problem)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    peer.run(scores)
    assert peer.check(problem, scores) is None


@pytest.mark.parametrize("mode", ["native", "det", "tieS", "tieL"])
@pytest.mark.parametrize("case", SMALL, ids=Case.label)
def test_an_installed_flashinfer_is_called_by_its_public_functions(mode, case, monkeypatch):
    from dsa_topk.compat import flashinfer as same_signatures

    seen = []

    def noted(function):
        def call(*arguments, deterministic, tie_break, **options):
            seen.append((deterministic, tie_break))
            return function(*arguments, deterministic=deterministic, tie_break=tie_break, **options)

        return call

    public = ("top_k_page_table_transform", "top_k_ragged_transform")
    package = SimpleNamespace(**{name: noted(getattr(same_signatures, name)) for name in public})
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "_installed", lambda package: package == "flashinfer")
    problem = inputs.make(case, CPU)
    peer = peers.prepare(f"fi_{mode}", problem)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    peer.run(scores)
    assert peer.check(problem, scores) is None
    assert seen == [{"native": (False, 0), "det": (True, 0), "tieS": (False, 1), "tieL": (False, 2)}[mode]]


@pytest.mark.parametrize("case", SMALL, ids=Case.label)
def test_an_installed_sgl_kernel_is_called_by_its_public_function(case, monkeypatch):
    from dsa_topk.compat import sglang as same_signatures

    seen = []

    def fast_topk_v2(score, lengths, topk, row_starts=None):
        seen.append((topk, row_starts is None))
        return same_signatures.fast_topk_v2(score, lengths, topk, row_starts=row_starts)

    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fast_topk_v2=fast_topk_v2))
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    with pytest.raises(peers.NotApplicable, match="k = 2048 only"):
        peers.prepare("sgl_fast", inputs.make(case, CPU))
    case = replace(case, width=2500, k=2048)  # windows shorter and longer than k
    problem = inputs.make(case, CPU)
    monkeypatch.setattr(peers, "_installed", lambda package: False)
    with pytest.raises(peers.NotApplicable, match="not installed"):
        peers.prepare("sgl_fast", problem)
    monkeypatch.setattr(peers, "_installed", lambda package: package == "sgl_kernel")
    peer = peers.prepare("sgl_fast", problem)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    peer.run(scores)
    assert seen == [(2048, case.mode not in ("ragged", "packed"))]
    assert peer.check(problem, scores) is None  # positions, whatever the form of the problem
    peer.result()[0, 0] = peer.result()[0, 1]
    assert peer.check(problem, scores) is not None


@pytest.mark.parametrize("case", SMALL, ids=Case.label)
def test_torch_topk_is_an_exact_peer(case):
    case = replace(case, width=1024, k=700)  # some rows are shorter than k
    problem = inputs.make(case, CPU)
    (scores,), _ = inputs.ScorePool(CPU).buffers(case)
    peer = peers.prepare("torch", problem)
    peer.run(scores)
    assert peer.check(problem, scores) is None


def test_absent_peers_say_where_they_were_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "folders", lambda: [tmp_path])
    peers.prebuilt.cache_clear()
    with pytest.raises(peers.NotApplicable, match=re.escape(f"nothing.so is not in {tmp_path}")):
        peers.prebuilt("nothing")


def test_peer_names_are_checked():
    assert peers.resolve("none") == []
    assert "sgl_v2" in peers.resolve("auto")
    assert peers.resolve("torch,sgl_v2") == ["torch", "sgl_v2"]
    with pytest.raises(ValueError, match="got 'sglv2'"):
        peers.resolve("sglv2")


def test_adapters_of_check_join(tmp_path, monkeypatch, adapter):
    (tmp_path / "mylib_adapter.py").write_text(
        "from dsa_topk import topk_positions\n"
        "def mine(problem):\n"
        "    return topk_positions(problem.scores, problem.lengths, problem.k, row_starts=problem.row_starts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = session(tmp_path, FakeTimer(), peer_names=peers.resolve("mylib_adapter:mine"))
    run.run(SMALL)
    assert all(result.peers == {"mylib_adapter:mine": 20.0} for result in run.record)
    assert not any(result.peer_failures for result in run.record)
