"""tools/peers/check_adapters.py on the CPU: its arguments, refusals and promises, with the peers' kernels played by the
reference; and tools/gpu_conformance.sh with the commands played by a script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dsa_topk
from dsa_topk import _plan, cli
from dsa_topk.bench import peers
from dsa_topk.conformance import adapters
from dsa_topk.conformance.cases.common import wrap
from dsa_topk.conformance.problem import Problem
from dsa_topk.conformance.runner import Outcome, run_problem
from dsa_topk.conformance.suite import specs

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
NAMES = ("sgl_v2", "ds_fp32", "fi_native", "fi_det", "fi_tie_small")
SCRIPT = ROOT / "tools" / "gpu_conformance.sh"

Spoil = Callable[[torch.Tensor], None]


class Kernels:
    """The prebuilt objects' entry points, answered by the reference in descending order of position: peers promise no
    order. ``spoil(out)`` plants a fault."""

    def __init__(self, spoil: Spoil = lambda out: None, tie_break: str | None = None) -> None:
        self.spoil = spoil
        self.tie_break = tie_break
        self.calls: Counter[str] = Counter()

    def answer(self, name: str, out: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor, tie=1, **more) -> None:
        assert lengths.dtype == torch.int32
        assert lengths.is_contiguous()
        assert out.dtype == torch.int32
        assert out.is_contiguous()
        assert bool((lengths >= 0).all())
        self.calls[name] += 1
        call = dsa_topk.topk_paged if "page_table" in more else dsa_topk.topk_ragged
        rule = self.tie_break or {0: "largest", 1: "smallest"}[tie]
        ours = call(scores, lengths, out.shape[1], tie_break=rule, backend="torch", **more)
        filled = (ours != -1).sum(1, keepdim=True)
        slot = torch.arange(out.shape[1]).expand_as(ours)
        turned = torch.where(slot < filled, filled - 1 - slot, slot)
        out.copy_(ours.gather(1, turned))
        self.spoil(out)

    def module(self, name: str) -> SimpleNamespace:
        answer = self.answer

        def sgl_ragged(s, n, starts, offsets, out):
            if s.stride(0) % 4:
                raise RuntimeError("score_stride must be a multiple of 4 (16-byte vectorized load)")
            answer("ragged", out, s, n, out_offsets=offsets, row_starts=starts)
            for row, start in enumerate([] if starts is None else starts.tolist()):
                s[row, start - start % 4 : start] = -torch.inf  # as the kernel does

        def sgl_paged(s, n, table, out, page, plan, raw):
            assert page & (page - 1) == 0
            assert raw is None
            answer("paged", out, s, n, page_table=table, page_size=page)

        def deepselect(s, values, out, begin, end, offsets, table, page, k, storage, fill, value_fill, abort):
            assert (values, begin, k, fill, abort) == (None, None, out.shape[1], -1, False)
            if table is None:
                answer("ragged", out, s, end, out_offsets=offsets)
            elif table.shape[1] * page < s.shape[1]:
                raise RuntimeError("num_pages * page_size >= vocab_size")
            else:
                answer("paged", out, s, end, page_table=table, page_size=page)

        def fi_ragged(s, out, offsets, n, states, k, det, tie, safe, starts):
            if not s.is_contiguous():
                raise RuntimeError("input must be contiguous")
            answer(f"ragged det={det} tie={tie}", out, s, n, tie, out_offsets=offsets, row_starts=starts)

        def fi_paged(s, out, table, batch, n, states, k, det, tie, page, safe, starts, first, raw):
            assert not (page > 1 and starts is not None and first is None)
            assert batch is not None or table.shape[0] == s.shape[0]
            more = {"row_to_batch": batch, "row_starts": starts, "page_table_starts": first}
            answer(f"paged det={det} tie={tie}", out, s, n, tie, page_table=table, page_size=page, **more)

        return SimpleNamespace(
            topk_plan=lambda lengths, plan, threshold: None,
            topk_transform_paged=sgl_paged,
            topk_transform_ragged=sgl_ragged,
            topk=deepselect,
            radix_topk_page_table_transform=fi_paged,
            radix_topk_ragged_transform=fi_ragged,
            get_max_active_clusters=lambda size, occupancy: {8: 30, 16: 7}[size],
        )


@pytest.fixture
def play(monkeypatch):
    """``play(name, kernels)``: the adapter with its peer's kernels replaced."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "_installed", lambda package: False)
    peers._sgl_v2.cache_clear()

    def use(name: str, kernels: Kernels) -> adapters.Adapter:
        monkeypatch.setattr(peers, "prebuilt", kernels.module)
        return adapters.get(f"tools.peers.check_adapters:{name}")

    yield use
    peers._sgl_v2.cache_clear()


def scores(rows: int = 3, width: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def outcome(adapter: adapters.Adapter, problem: Problem) -> Outcome:
    return run_problem(adapter, problem)


@pytest.mark.parametrize("name", NAMES)
def test_a_right_peer_is_exact_or_refuses(name, play):
    # Every 13th of the thousand problems: the larger cases in all forms, in a few seconds.
    kernels = Kernels()
    adapter = play(name, kernels)
    found: Counter[str] = Counter()
    for spec in specs("quick", CPU)[::13]:
        problem = spec.build()
        result = outcome(adapter, problem)
        assert result.status in ("exact", "unsupported"), f"{spec.case} {spec.name}: {result.status}: {result.reason}"
        found[f"{result.status} {problem.form}"] += 1
    for form in ("positions", "ragged", "paged"):
        assert found[f"exact {form}"] >= 1, found


def test_flashinfer_modes_reach_its_kernels(play):
    problem = wrap(scores(), 200, 32, "paged")
    for name, wanted in (("fi_native", "False tie=0"), ("fi_det", "True tie=0"), ("fi_tie_small", "True tie=1")):
        kernels = Kernels()
        assert outcome(play(name, kernels), problem).status == "exact"
        assert dict(kernels.calls) == {f"paged det={wanted}": 1}


@pytest.mark.parametrize("starts", [None, 5])
def test_positions_of_sglang_take_its_decode_kernel_where_they_can(starts, play):
    kernels = Kernels()
    problem = wrap(scores(), 200, 32, "positions", starts=starts)
    assert outcome(play("sgl_v2", kernels), problem).status == "exact"
    assert set(kernels.calls) == {"paged" if starts is None else "ragged"}


def test_sgl_kernel_goes_through_its_package(play, monkeypatch):
    def fast_topk_v2(score, lengths, topk, row_starts=None):
        out = lengths.new_empty(len(lengths), topk)
        kernels.answer("fast", out, score, lengths, out_offsets=torch.zeros_like(lengths), row_starts=row_starts)
        return out

    kernels = Kernels()
    adapter = play("sgl_fast", kernels)
    monkeypatch.setattr(peers, "_installed", lambda package: package == "sgl_kernel")
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fast_topk_v2=fast_topk_v2))
    assert outcome(adapter, wrap(scores(3, 2500), 2200, 2048, starts=7)).status == "exact"
    assert outcome(adapter, wrap(scores(3, 2500), 2200, 512)).status == "unsupported"
    assert outcome(adapter, wrap(scores(3, 2500), 2600, 2048)).reason.endswith("(its callers' duty)")
    assert dict(kernels.calls) == {"fast": 1}
    kernels = Kernels(doubles)
    assert outcome(adapter, wrap(scores(3, 2500), 2200, 2048)).status == "invalid"


def doubles(out: torch.Tensor) -> None:
    out[1, 3] = out[1, 4]


def forgets(out: torch.Tensor) -> None:
    out[0] = 0x5A5A5A5A


@pytest.mark.parametrize("damage", [doubles, forgets])
@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_a_slot_selected_twice_or_left_unwritten_is_found(name, form, damage, play):
    k = 1500 if name == "ds_fp32" and form == "ragged" else 32  # the one that is built
    problem = wrap(scores(), 200, k, form)
    assert outcome(play(name, Kernels(damage)), problem).status == "invalid"


@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
def test_minus_one_among_the_selected_is_not_taken_for_position_0(form, play):
    problem = wrap(scores(), 200, 32, form)
    problem.scores[:, 0] = 9.0  # position 0 is selected in every row, and the last that the kernels here write

    def loses(out: torch.Tensor) -> None:
        out[1, 31] = -1

    assert outcome(play("fi_tie_small", Kernels(loses)), problem).status == "invalid"


@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
def test_the_tie_rule_is_asked_only_of_who_promises_it(form, play):
    problem = wrap(torch.zeros(2, 256), 200, 32, form)
    against = Kernels(tie_break="largest")
    assert outcome(play("fi_det", against), problem).status == "exact"
    assert outcome(play("fi_tie_small", against), problem).status == "wrong"
    assert outcome(play("fi_tie_small", Kernels()), problem).status == "exact"


def test_deterministic_calls_that_differ_are_found(play):
    turn = iter(range(100))

    def changes(out: torch.Tensor) -> None:
        if next(turn) % 2:
            out.copy_(out.flip(1))

    problem = wrap(scores(), 200, 32, repeats=2)
    found = outcome(play("fi_det", Kernels(changes)), problem)
    assert found.status == "error"
    assert "NotRepeatableError" in found.reason
    assert outcome(play("fi_native", Kernels(changes)), problem).status == "exact"


def test_sglang_writes_into_a_copy_of_the_same_layout(play):
    frame = torch.full((3, 268), 7.0)
    frame[:, 4:260] = scores()
    kernels = Kernels()
    problem = wrap(frame[:, 4:260], 200, 32, "ragged", starts=[3, 5, 6])
    assert outcome(play("sgl_v2", kernels), problem).status == "exact"  # "modified" if it had written into ours
    assert kernels.calls == {"ragged": 1}


REFUSALS = {
    "sgl_v2, k": ("sgl_v2", lambda: wrap(scores(), 200, 2049), "k above 2048"),
    "sgl_v2, dtype": ("sgl_v2", lambda: wrap(scores().half(), 200, 32), "float16"),
    "sgl_v2, row pitch": ("sgl_v2", lambda: wrap(scores(3, 255), 200, 32), "unaligned rows"),
    "sgl_v2, address": ("sgl_v2", lambda: wrap(scores(1, 257)[:, 1:], 200, 32), "unaligned rows"),
    "sgl_v2, packed": ("sgl_v2", lambda: wrap(scores(), 200, 32, "paged", starts=4), "row starts"),
    "sgl_v2, negative length": ("sgl_v2", lambda: wrap(scores(), [-1, 5, 9], 32), "windows that leave"),
    "sgl_v2, page size": ("sgl_v2", lambda: wrap(scores(), 200, 32, "paged", page_size=100), "power of two"),
    "sgl_v2, overlap": (
        "sgl_v2",
        lambda: wrap(scores(1, 512).as_strided((3, 256), (4, 1)), 200, 32, "ragged", starts=1),
        "overlapping rows",
    ),
    "ds_fp32, k": ("ds_fp32", lambda: wrap(scores(), 200, 4097), "k above 4096"),
    "ds_fp32, starts": ("ds_fp32", lambda: wrap(scores(), 200, 2000, "ragged", starts=4), "row starts"),
    "ds_fp32, row pitch": ("ds_fp32", lambda: wrap(scores(3, 260), 200, 32), "128-byte lines"),
    "ds_fp32, small k": ("ds_fp32", lambda: wrap(scores(), 200, 32, "ragged"), "k <= 1024"),
    "fi_native, stride": ("fi_native", lambda: wrap(scores()[:, :200], 200, 32), "contiguous"),
    "fi_native, lengths": ("fi_native", lambda: wrap(scores(), 257, 32), "windows that leave"),
    "fi_tie_small, rule": ("fi_tie_small", lambda: wrap(scores(), 200, 32, tie_break="largest"), "tie_break"),
    "fi_tie_small, order": ("fi_tie_small", lambda: wrap(scores(), 200, 32, order="score"), "order"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_peer_does_not_take_is_not_supported(case, play):
    name, build, reason = REFUSALS[case]
    kernels = Kernels()
    found = outcome(play(name, kernels), build())
    assert (found.status, not kernels.calls) == ("unsupported", True)
    assert reason in found.reason


def test_flashinfer_is_not_sent_pages_that_its_documentation_excludes(play):
    problem = wrap(scores(), 200, 32, "paged")
    table = problem.shape.page_table
    assert table is not None
    table[:, 3] = -5  # reached by the windows: tokens 192 to 199
    assert "page-table entries" in outcome(play("fi_native", Kernels()), problem).reason
    shorter = replace(problem, shape=replace(problem.shape, lengths=torch.full((3,), 192)))
    assert outcome(play("fi_native", Kernels()), shorter).status == "exact"


def test_beyond_the_documentation_only_on_request(play, monkeypatch):
    problem = wrap(scores(3, 255), 200, 32)
    kernels = Kernels()
    monkeypatch.setenv("PEERS_BEYOND_DOCS", "1")
    assert outcome(play("sgl_v2", kernels), problem).status == "exact"
    assert kernels.calls == {"paged": 1}


def test_objects_that_are_not_built_are_an_error_not_a_refusal(play, monkeypatch, tmp_path):
    adapter = play("fi_native", Kernels())
    monkeypatch.undo()
    monkeypatch.setattr(peers, "_need_cuda", lambda problem: None)
    monkeypatch.setattr(peers, "folders", lambda: [tmp_path])
    peers.prebuilt.cache_clear()
    found = outcome(adapter, wrap(scores(), 200, 32))
    assert found.status == "error"
    assert "fi_topk.so is not in" in found.reason


def test_the_documented_command_works(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    command = "check --backend tools.peers.check_adapters:sgl_v2 --suite fault:B23 --device cpu"
    assert cli.run([*command.split(), "--json", str(tmp_path / "r.json"), "--save", str(tmp_path)]) == 0
    (report,) = json.loads((tmp_path / "r.json").read_text())["reports"]
    assert set(report["counts"]) == {"unsupported"}  # no GPU here
    assert "needs a CUDA device" in {record["reason"] for record in report["records"]}
    for page in ("tools/peers/check_adapters.py", "docs/conformance.md"):
        assert "--backend tools.peers.check_adapters:sgl_v2" in (ROOT / page).read_text()


# ------------------------------------------------------------------------------------------ tools/gpu_conformance.sh

# Plays python: commands of dsa-topk leave a result and an exit code by name, everything else is the real one.
ACTOR = """#!/usr/bin/env bash
name=$(sed -n 's/.*--backend [^ ]*check_adapters:\\([^ ]*\\).*/\\1/p; s/.*--backend \\(cuda[^ ]*\\).*/\\1/p' <<<"$*")
[[ $* == *" fuzz "* ]] && name=fuzz-$(sed 's/.*--seed \\([0-9]*\\).*/\\1/' <<<"$*")
[[ $1 == - ]] && exec REAL "$@"
echo "$name" >>"CALLS"
[[ $name == HANGS ]] && sleep 60
json=$(sed 's/.*--json \\([^ ]*\\).*/\\1/' <<<"$*")
[[ $name == CRASHES ]] && kill -SEGV $$
[[ $* == *" --json "* ]] && echo '{"kind": "x", "command": ["'"$name"'"], "reports": [{"backend": "'"$name"'",
  "mode": "set", "problems": 2, "rows": 3, "counts": {"exact": 2}}]}' >"$json"
echo "last words of $name"
[[ $name == FAILS ]] && exit 1
exit 0
"""


def play_script(folder: Path, hangs: str = "-", crashes: str = "-", fails: str = "-") -> tuple[int, str, list[str]]:
    """Exit code, output and the names of the commands that ran."""
    actor, calls = folder / "python", folder / "calls"
    text = ACTOR.replace("REAL", sys.executable).replace("CALLS", str(calls))
    actor.write_text(text.replace("HANGS", hangs).replace("CRASHES", crashes).replace("FAILS", fails))
    actor.chmod(0o755)
    settings = {"OUT": str(folder / "out"), "PYTHON": str(actor), "MINUTES": "1", "PEER_LIMIT": "1", "CHECK_LIMIT": "9"}
    done = subprocess.run([SCRIPT], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr, calls.read_text().split()


def test_the_script_runs_every_kernel_and_peer(tmp_path):
    code, text, calls = play_script(tmp_path)
    assert code == 0, text
    shared = _plan.SEVERAL | _plan.SPREAD
    kernels = [f"cuda-{name}" for name in _plan.KERNELS if name not in shared]
    clusters = [f"cuda-{name}-{size}" for name in _plan.KERNELS if name in _plan.SEVERAL for size in (2, 7)]
    clusters += [f"cuda-{name}-5" for name in _plan.KERNELS if name in _plan.SPREAD]
    ours = ["cuda", *kernels, *clusters]
    assert sorted(calls) == sorted([*ours, *NAMES, "fuzz-1", "fuzz-2"])
    for name in (*kernels, *clusters):
        adapters.get(name)
    merged = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("check-*.json")}
    assert {report["backend"] for report in merged["check-cuda"]["reports"]} == set(ours)
    assert {report["backend"] for report in merged["check-peers"]["reports"]} == set(NAMES)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["check-cuda.json", "check-peers.json", "conformance.log", "fuzz-1.json", "fuzz-2.json"]


def test_no_peer_stops_the_script_or_counts(tmp_path):
    code, text, calls = play_script(tmp_path, hangs="ds_fp32", crashes="sgl_v2", fails="fi_det")
    assert code == 0, text
    assert len(calls) == len(set(calls)) >= 14
    for name, status in (("peer-ds_fp32", 124), ("peer-sgl_v2", 139), ("peer-fi_det", 1), ("peer-fi_native", 0)):
        assert re.search(f"== {name}: exit code {status} ", text), text
    merged = json.loads((tmp_path / "out" / "check-peers.json").read_text())
    assert merged["exit_codes"] == {"ds_fp32": 124, "fi_det": 1, "fi_native": 0, "fi_tie_small": 0, "sgl_v2": 139}
    assert len(merged["reports"]) == 3


@pytest.mark.parametrize("fails", ["fuzz-2", "cuda", "cuda-Cluster512-7"])
def test_what_fails_of_ours_is_the_exit_code(fails, tmp_path):
    code, text, _ = play_script(tmp_path, fails=fails)
    assert code == 1
    assert f"== not right: {'' if fails.startswith('fuzz') else 'ours-'}{fails}" in text
