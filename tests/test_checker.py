"""The checker accepts what the contract says and catches planted wrong references, in every form where they apply."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from dsa_topk.testing import CallShape, check_selection, distributions, shapes
from dsa_topk.testing.keys import order_keys

INT32_MIN, INT64_MIN, INT64_MAX = -(2**31), -(2**63), 2**63 - 1
STALE = 0x5A5A5A5A


# ---- an oracle in plain Python, row by row, for small inputs -------------------------------------------------------


def clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def pick(tensor: torch.Tensor | None, i: int, default: int) -> int:
    return default if tensor is None else int(tensor[i])


def window(shape: CallShape, i: int) -> tuple[int, int]:
    start = clamp(pick(shape.row_starts, i, 0), 0, shape.width)
    count = clamp(pick(shape.lengths, i, shape.width), 0, shape.width - start)
    if shape.form == "paged":
        batches, entries = shape.page_table.shape
        b, first = pick(shape.row_to_batch, i, i), pick(shape.page_table_starts, i, 0)
        if not (0 <= b < batches and 0 <= first <= entries):
            return start, 0
        count = min(count, (entries - first) * shape.page_size)
    return start, count


def stored(shape: CallShape, i: int, p: int) -> int:
    value = p
    if shape.form == "ragged":
        value = p + int(shape.out_offsets[i])
    if shape.form == "paged":
        b, first = pick(shape.row_to_batch, i, i), pick(shape.page_table_starts, i, 0)
        page = int(shape.page_table[b, first + p // shape.page_size])
        value = page * shape.page_size + p % shape.page_size
    return (value + 2**31) % 2**32 - 2**31


def select(values: list[float], k: int, order: str, tie_break: str) -> list[int]:
    sign = 1 if tie_break == "smallest" else -1

    def rank(p: int) -> tuple[bool, float, int]:
        return (math.isnan(values[p]), 0.0 if math.isnan(values[p]) else -values[p], sign * p)

    chosen = sorted(range(len(values)), key=rank)[:k]
    return sorted(chosen) if order == "position" else chosen


@dataclass
class Answer:
    """Outputs of a call, to be broken."""

    out: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor


def oracle(shape: CallShape, scores: torch.Tensor, order: str = "position", tie_break: str = "smallest") -> Answer:
    out = torch.full((shape.rows, shape.k), -1, dtype=torch.int32)
    positions = out.clone()
    picked = torch.full((shape.rows, shape.k), -math.inf, dtype=scores.dtype)
    for i in range(shape.rows):
        start, count = window(shape, i)
        chosen = select(scores[i, start : start + count].double().tolist(), shape.k, order, tie_break)
        m = len(chosen)
        positions[i, :m] = torch.tensor(chosen, dtype=torch.int32)
        out[i, :m] = torch.tensor([stored(shape, i, p) for p in chosen], dtype=torch.int64).to(torch.int32)
        picked[i, :m] = scores[i, start + torch.tensor(chosen, dtype=torch.int64)]
    return Answer(out, positions, picked)


def verdicts(shape: CallShape, scores: torch.Tensor, answer: Answer, *, mode: str = "canonical", **flags: str):
    """The checker's answers with and without the positions and the scores."""
    yield shape.check(scores, answer.out, mode=mode, **flags)
    yield shape.check(scores, answer.out, mode=mode, positions=answer.positions, **flags)
    yield shape.check(scores, answer.out, mode=mode, returned_scores=answer.scores, **flags)
    yield shape.check(scores, answer.out, mode=mode, positions=answer.positions, returned_scores=answer.scores, **flags)


# ---- right answers are accepted ------------------------------------------------------------------------------------

# Every distribution once and every shape with each order and tie rule: the checker treats them apart from each other.


@pytest.mark.parametrize("name", distributions.NAMES)
def test_accepts_the_oracle_on_every_distribution(name: str) -> None:
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        scores = distributions.make(name, 6, 150, dtype=dtype, k=40, seed=number)
        shape = shapes.make("mixed", rows=6, width=150, k=40, seed=number)
        for order in ("position", "score"):
            for tie_break in ("smallest", "largest"):
                answer = oracle(shape, scores, order, tie_break)
                for verdict in verdicts(shape, scores, answer, order=order, tie_break=tie_break):
                    verdict.raise_if_bad()


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("mode", ["canonical", "set"])
def test_accepts_the_oracle_on_every_shape(name: str, mode: str) -> None:
    for distribution in ("half_zeros", "all_equal", "nan_both_signs"):
        for page_size in (1, 3, 64):
            shape = shapes.make(name, rows=9, width=131, k=20, page_size=page_size, index_dtype=torch.int64)
            scores = distributions.make(distribution, 9, 131, k=20)
            for order in ("position", "score"):
                for tie_break in ("smallest", "largest"):
                    answer = oracle(shape, scores, order, tie_break)
                    for verdict in verdicts(shape, scores, answer, mode=mode, order=order, tie_break=tie_break):
                        verdict.raise_if_bad()


def test_set_mode_accepts_any_order_and_any_ties() -> None:
    for name in shapes.NAMES:
        shape = shapes.make(name, rows=6, width=90, k=20, page_size=4)
        scores = distributions.make("half_zeros", 6, 90)
        answer = oracle(shape, scores, "score", "largest")
        assert not shape.check(scores, answer.out)
        for verdict in verdicts(shape, scores, answer, mode="set"):
            verdict.raise_if_bad()


def test_clamps_at_integer_extremes() -> None:
    scores = torch.randn(8, 50)
    ends = torch.tensor([INT64_MIN, INT64_MAX, -1, 0, 2**32 + 3, 2**31, INT32_MIN, 49])
    table = torch.randint(0, 2**31, (3, 6), dtype=torch.int64).to(torch.int32)
    for form, extra in (
        ("positions", {"row_starts": ends.flip(0)}),
        ("ragged", {"row_starts": ends.roll(3), "out_offsets": ends}),
        (
            "paged",
            {"page_table": table, "page_size": 2**31 - 1, "row_to_batch": ends, "page_table_starts": ends.roll(1)},
        ),
        ("paged", {"page_table": table, "page_size": 7, "row_to_batch": ends % 3, "page_table_starts": ends.roll(5)}),
    ):
        shape = CallShape("extremes", form, 8, 50, 20, lengths=ends, **extra)
        answer = oracle(shape, scores)
        for mode in ("canonical", "set"):
            for verdict in verdicts(shape, scores, answer, mode=mode):
                verdict.raise_if_bad()


def test_empty_calls() -> None:
    table = torch.zeros((0, 4), dtype=torch.int32)
    for rows, width, k in ((0, 10, 3), (4, 0, 3), (0, 0, 1)):
        scores = torch.zeros(rows, width)
        out = torch.full((rows, k), -1, dtype=torch.int32)
        owner = torch.zeros(rows, dtype=torch.int32)
        assert check_selection(scores, None, k, out)
        assert check_selection(scores, None, k, out, form="ragged", out_offsets=owner)
        assert check_selection(scores, None, k, out, form="paged", page_table=table, row_to_batch=owner, mode="set")
        if rows:
            verdict = check_selection(scores, None, k, torch.zeros_like(out))
            assert (verdict.ok, verdict.kind, verdict.row, verdict.slot) == (False, "padding", 0, 0)


def test_a_ragged_offset_may_make_a_selected_value_minus_one() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0]])
    shape = CallShape("minus one", "ragged", 1, 3, 4, out_offsets=torch.tensor([-1]))
    assert shape.check(scores, torch.tensor([[-1, 0, 1, -1]], dtype=torch.int32))
    assert not shape.check(scores, torch.tensor([[-1, 0, 1, -2]], dtype=torch.int32))


def test_ambiguous_tables_are_judged_by_value() -> None:
    """Pages that repeat store the same value for two positions: no inversion can tell them apart, counting can."""
    scores = torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, 0.0]])
    shape = CallShape("repeat", "paged", 1, 6, 3, page_table=torch.tensor([[9, 9, 4]], dtype=torch.int32), page_size=2)
    right = torch.tensor([[18, 18, 8]], dtype=torch.int32)  # positions 0, 2, 4
    for mode in ("canonical", "set"):
        assert shape.check(scores, right, mode=mode)
        assert not shape.check(scores, torch.tensor([[18, 19, 8]], dtype=torch.int32), mode=mode)
    assert shape.check(scores, right.flip(1), mode="set")
    assert shape.check(scores, torch.tensor([[18, 8, 8]], dtype=torch.int32), mode="set").kind == "duplicate"


def test_keys_order_scores_as_the_contract_does() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        scores = patterns.view(dtype)
        keys, exact = order_keys(scores).long(), scores.double()
        nan = exact.isnan()
        assert keys[nan].unique().numel() == 1
        assert keys[nan].max() < keys[~nan].min()
        by_key, by_value = keys[~nan].sort()[0], exact[~nan][keys[~nan].argsort(stable=True)]
        assert bool(((by_key[1:] > by_key[:-1]) == (by_value[1:] > by_value[:-1])).all())
        assert bool((by_value[1:] >= by_value[:-1]).all())
    special = torch.tensor([math.nan, -math.inf, -3e38, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, math.inf])
    keys = order_keys(special).tolist()
    assert keys[4] == keys[5]
    assert keys[:5] + keys[6:] == sorted(set(keys))


# ---- wrong answers are caught --------------------------------------------------------------------------------------


@dataclass
class Trap:
    """Scores and shape on which a wrong reference is set loose."""

    shape: CallShape
    scores: torch.Tensor
    tie_break: str = "smallest"
    order: str = "position"


def reselect(trap: Trap, change: Callable[[torch.Tensor], torch.Tensor], **flags: str) -> Answer:
    """The oracle's answer on changed scores, with the real scores' values."""
    answer = oracle(trap.shape, change(trap.scores), **flags)
    return regather(trap, answer.positions)


def regather(trap: Trap, positions: torch.Tensor) -> Answer:
    """Outputs that a backend which selects ``positions`` would write."""
    shape, scores = trap.shape, trap.scores
    out = torch.full_like(positions, -1)
    picked = torch.full(positions.shape, -math.inf, dtype=scores.dtype)
    for i in range(shape.rows):
        start, count = window(shape, i)
        for j, p in enumerate(positions[i].tolist()):
            if p >= 0:
                legal = p < count
                out[i, j] = torch.tensor(stored(shape, i, p) if legal else p, dtype=torch.int64).to(torch.int32)
                picked[i, j] = scores[i, min(start + p, shape.width - 1)]
    return Answer(out, positions, picked)


def truncated_candidates(trap: Trap) -> Answer:
    """Only the first 48 of the candidates reach the final selection (the tie buffer is full)."""
    short = replace(trap.shape, lengths=torch.full((trap.shape.rows,), 48))
    return regather(trap, oracle(short, trap.scores).positions)


def coarse_key(trap: Trap) -> Answer:
    """Ranks by float16."""
    return reselect(trap, lambda s: s.half().float())


def nan_highest(trap: Trap) -> Answer:
    return reselect(trap, lambda s: torch.where(s.isnan(), math.inf, s))


def negative_zero_lower(trap: Trap) -> Answer:
    return reselect(trap, lambda s: torch.where((s == 0) & torch.signbit(s), -1e-45, s))


def infinity_dropped(trap: Trap) -> Answer:
    """Takes a legal -inf for filler: those slots stay -1."""
    answer = oracle(trap.shape, trap.scores)
    dead = answer.scores == -math.inf
    return Answer(
        answer.out.masked_fill(dead, -1),
        answer.positions.masked_fill(dead, -1),
        answer.scores.masked_fill(dead, -math.inf),
    )


def window_one_early(trap: Trap) -> Answer:
    """Each row sees one column less at the end."""
    lengths = torch.tensor([window(trap.shape, i)[1] - 1 for i in range(trap.shape.rows)])
    return regather(trap, oracle(replace(trap.shape, lengths=lengths), trap.scores).positions)


def window_one_late(trap: Trap) -> Answer:
    """Scores are read one column to the right."""
    return reselect(trap, lambda s: s.roll(-1, 1))


def other_tie_rule(trap: Trap) -> Answer:
    return oracle(trap.shape, trap.scores, tie_break="largest" if trap.tie_break == "smallest" else "smallest")


def ties_by_arrival(trap: Trap) -> Answer:
    """Ties at the k-th place taken from the middle."""
    positions = oracle(trap.shape, trap.scores).positions
    for i in range(trap.shape.rows):
        start, count = window(trap.shape, i)
        if count > trap.shape.k:
            free = sorted(set(range(count)) - set(positions[i].tolist()))
            worst = min(positions[i].tolist(), key=lambda p, i=i, start=start: float(trap.scores[i, start + p]))
            tied = [p for p in free if trap.scores[i, start + p] == trap.scores[i, start + worst]]
            chosen = set(positions[i].tolist()) - {worst} | {tied[len(tied) // 2]}
            positions[i] = torch.tensor(sorted(chosen), dtype=torch.int32)
    return regather(trap, positions)


def duplicate(trap: Trap) -> Answer:
    positions = oracle(trap.shape, trap.scores).positions
    positions[:, 5] = torch.where(positions[:, 5] >= 0, positions[:, 4], positions[:, 5])
    return regather(trap, positions)


def unsorted(trap: Trap) -> Answer:
    """The right set, two neighbours swapped."""
    positions = oracle(trap.shape, trap.scores, order=trap.order).positions
    live = positions[:, 3] >= 0
    positions[live] = positions[live][:, [0, 1, 3, 2, *range(4, trap.shape.k)]]
    return regather(trap, positions)


def score_order_when_position_asked(trap: Trap) -> Answer:
    return oracle(trap.shape, trap.scores, order="score")


def padding_zero(trap: Trap) -> Answer:
    answer = oracle(trap.shape, trap.scores)
    pad = answer.positions < 0
    return Answer(answer.out.masked_fill(pad, 0), answer.positions, answer.scores)


def padding_moved(trap: Trap) -> Answer:
    """The offset (or anything) added to the padding -1."""
    answer = oracle(trap.shape, trap.scores)
    return Answer(torch.where(answer.positions < 0, answer.out + 7, answer.out), answer.positions, answer.scores)


def stale_slot(trap: Trap) -> Answer:
    """One slot was never written."""
    answer = oracle(trap.shape, trap.scores)
    answer.out[2, 1] = answer.positions[2, 1] = STALE
    return answer


def cut_ties(trap: Trap) -> Answer:
    """At most 12 tied candidates are kept; the slots that they leave empty hold -1."""
    answer = oracle(trap.shape, trap.scores)
    at_zero = (answer.scores == 0) & (answer.positions >= 0)
    lost = at_zero & (at_zero.cumsum(1) > 12)
    return Answer(answer.out.masked_fill(lost, -1), answer.positions.masked_fill(lost, -1), answer.scores)


def rows_swapped(trap: Trap) -> Answer:
    answer = oracle(trap.shape, trap.scores)
    order = [1, 0, *range(2, trap.shape.rows)]
    return Answer(answer.out[order], answer.positions[order], answer.scores[order])


def row_zero_everywhere(trap: Trap) -> Answer:
    """A row index that wrapped: every row holds row 0's answer."""
    answer = oracle(trap.shape, trap.scores)
    rows = torch.zeros(trap.shape.rows, dtype=torch.long)
    return Answer(answer.out[rows], answer.positions[rows], answer.scores[rows])


def mapping_off(trap: Trap) -> Answer:
    """Stored values one off (a wrong offset, a wrong place in the page)."""
    answer = oracle(trap.shape, trap.scores)
    return Answer(torch.where(answer.positions >= 0, answer.out + 1, answer.out), answer.positions, answer.scores)


def page_off(trap: Trap) -> Answer:
    """Values of the neighbouring page."""
    answer = oracle(trap.shape, trap.scores)
    moved = answer.out + trap.shape.page_size
    return Answer(torch.where(answer.positions >= 0, moved, answer.out), answer.positions, answer.scores)


def unmapped(trap: Trap) -> Answer:
    """The form's mapping was forgotten: bare positions."""
    answer = oracle(trap.shape, trap.scores)
    return Answer(answer.positions.clone(), answer.positions, answer.scores)


def absolute_columns(trap: Trap) -> Answer:
    """Columns instead of positions relative to the window."""
    answer = oracle(trap.shape, trap.scores)
    starts = torch.tensor([[window(trap.shape, i)[0]] for i in range(trap.shape.rows)], dtype=torch.int32)
    moved = torch.where(answer.positions >= 0, answer.positions + starts, answer.positions)
    return Answer(moved if trap.shape.form == "positions" else answer.out + starts, moved, answer.scores)


def negative_length_read(trap: Trap) -> Answer:
    """A negative length read as unsigned: the row is filled."""
    lengths = torch.where(trap.shape.lengths < 0, trap.shape.width, trap.shape.lengths)
    return oracle(replace(trap.shape, lengths=lengths), trap.scores)


PLANTS: list[tuple[Callable[[Trap], Answer], str, bool]] = [
    # (wrong reference, distribution that exposes it, also an offence in set mode)
    (truncated_candidates, "normal", True),
    (coarse_key, "narrow", True),
    (nan_highest, "nan_both_signs", True),
    (negative_zero_lower, "mixed_zeros", False),
    (infinity_dropped, "infinities", True),
    (window_one_early, "ascending", True),
    (window_one_late, "normal", True),
    (other_tie_rule, "half_zeros", False),
    (ties_by_arrival, "half_zeros", False),
    (duplicate, "normal", True),
    (unsorted, "normal", False),
    (score_order_when_position_asked, "normal", False),
    (stale_slot, "normal", True),
    (cut_ties, "plateau", True),
    (rows_swapped, "normal", True),
    (row_zero_everywhere, "normal", True),
]


def trap_for(form: str, distribution: str, lengths: list[int] | None = None) -> Trap:
    rows, width, k = 6, 200, 64 if distribution != "half_zeros" else 130
    starts = torch.tensor([0, 1, 2, 3, 5, 7])
    length = torch.tensor(lengths or [180, 175, 190, 181, 170, 160])
    extra: dict[str, torch.Tensor | int] = {}
    if form == "ragged":
        extra["out_offsets"] = torch.tensor([11, -4, 2000, 5, 70000, 9])
    if form == "paged":
        extra["page_table"] = torch.randperm(6 * 34, generator=torch.Generator().manual_seed(4)).view(6, 34).int() + 40
        extra["page_size"] = 7
        extra["page_table_starts"] = torch.tensor([0, 1, 2, 3, 4, 5])
    shape = CallShape("trap", form, rows, width, k, lengths=length, row_starts=starts, **extra)
    return Trap(shape, distributions.make(distribution, rows, width, k=k, seed=3))


FORMS = ("positions", "ragged", "paged")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("plant", "distribution", "in_set"), PLANTS, ids=lambda p: getattr(p, "__name__", None))
def test_catches(plant: Callable[[Trap], Answer], distribution: str, in_set: bool, form: str) -> None:
    trap = trap_for(form, distribution)
    answer = plant(trap)
    for verdict in verdicts(trap.shape, trap.scores, answer):
        assert not verdict.ok
        assert verdict.row is not None
        assert verdict.slot is not None
        assert verdict.bad_rows >= 1
        assert f"row {verdict.row} slot {verdict.slot}" in verdict.reason
    for verdict in verdicts(trap.shape, trap.scores, answer, mode="set"):
        assert verdict.ok == (not in_set), verdict.reason


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plant", [padding_zero, padding_moved])
def test_catches_wrong_padding(plant: Callable[[Trap], Answer], form: str) -> None:
    trap = trap_for(form, "normal", [180, 20, 64, 65, 0, -3])
    for mode in ("canonical", "set"):
        verdict = trap.shape.check(trap.scores, plant(trap).out, mode=mode)
        assert (verdict.kind, verdict.row, verdict.slot, verdict.bad_rows) == ("padding", 1, 20, 3)


@pytest.mark.parametrize("form", FORMS)
def test_catches_a_negative_length_read_as_unsigned(form: str) -> None:
    trap = trap_for(form, "normal", [180, 20, 64, 65, -4, INT32_MIN])
    verdict = trap.shape.check(trap.scores, negative_length_read(trap).out)
    assert (verdict.kind, verdict.row, verdict.slot, verdict.bad_rows) == ("padding", 4, 0, 2)


@pytest.mark.parametrize(
    ("plant", "forms"),
    [
        (mapping_off, ("ragged", "paged")),
        (page_off, ("paged",)),
        (unmapped, ("ragged", "paged")),
        (absolute_columns, FORMS),
    ],
)
def test_catches_wrong_stored_values(plant: Callable[[Trap], Answer], forms: tuple[str, ...]) -> None:
    for form in forms:
        trap = trap_for(form, "normal")
        answer = plant(trap)
        for mode in ("canonical", "set"):
            for verdict in verdicts(trap.shape, trap.scores, answer, mode=mode):
                assert not verdict.ok, (form, mode)


@pytest.mark.parametrize("form", FORMS)
def test_catches_wrong_score_order(form: str) -> None:
    trap = trap_for(form, "half_zeros")
    for tie_break in ("smallest", "largest"):
        trap.order = "score"
        swapped = unsorted(trap)
        other = oracle(trap.shape, trap.scores, "score", "largest" if tie_break == "smallest" else "smallest")
        by_position = oracle(trap.shape, trap.scores, "position", tie_break)
        for answer in (swapped, other, by_position):
            for verdict in verdicts(trap.shape, trap.scores, answer, order="score", tie_break=tie_break):
                assert not verdict.ok


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["canonical", "set"])
def test_catches_wrong_returned_scores(form: str, mode: str) -> None:
    trap = trap_for(form, "mixed_zeros", [180, 20, 64, 65, 3, 0])
    answer = oracle(trap.shape, trap.scores)

    def judged(scores: torch.Tensor) -> list[str]:
        known = trap.shape.check(trap.scores, answer.out, positions=answer.positions, returned_scores=scores, mode=mode)
        return [trap.shape.check(trap.scores, answer.out, returned_scores=scores, mode=mode).kind, known.kind]

    assert judged(answer.scores) == ["ok", "ok"]
    sign_lost = torch.where(answer.scores == 0, 0.0, answer.scores)
    assert judged(sign_lost) == ["scores", "scores"]
    assert judged(answer.scores.masked_fill(answer.positions < 0, 0.0)) == ["scores", "scores"]
    shifted = answer.scores.clone()
    shifted[0] = shifted[0].roll(1)
    assert judged(shifted) == ["scores", "scores"]


def test_catches_a_lost_nan_payload() -> None:
    scores = torch.tensor([[0x7FC01234, 0x3F800000]], dtype=torch.int32).view(torch.float32)
    out = torch.tensor([[0, 1]], dtype=torch.int32)
    assert check_selection(scores, None, 2, out, returned_scores=scores)
    quiet = torch.tensor([[math.nan, 1.0]])
    assert check_selection(scores, None, 2, out, returned_scores=quiet).kind == "scores"


def test_positions_must_agree_with_the_stored_values() -> None:
    for form in FORMS:
        trap = trap_for(form, "normal")
        answer = oracle(trap.shape, trap.scores)
        other = oracle(trap.shape, -trap.scores)
        assert not trap.shape.check(trap.scores, answer.out, positions=other.positions)
        assert not trap.shape.check(trap.scores, other.out, positions=answer.positions)


def test_wrong_shapes_and_types_are_verdicts_not_crashes() -> None:
    scores = torch.randn(4, 9)
    for out in (torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 3).int()):
        verdict = check_selection(scores, None, 3, out)
        assert (verdict.ok, verdict.kind) == (False, "shape")


def test_impossible_descriptions_raise() -> None:
    scores, out = torch.randn(2, 9), torch.zeros(2, 3, dtype=torch.int32)
    for flags, name in (
        ({"order": "value"}, "order"),
        ({"tie_break": "first"}, "tie_break"),
        ({"mode": "loose"}, "mode"),
        ({"form": "packed"}, "form"),
        ({"form": "ragged"}, "out_offsets"),
        ({"form": "paged"}, "page_table"),
    ):
        with pytest.raises(ValueError, match=name):
            check_selection(scores, None, 3, out, **flags)


def test_reasons_carry_the_numbers() -> None:
    scores = torch.tensor([[0.0, 9.0, 5.0, 7.0, 7.0]])

    def why(*slots: int) -> str:
        return check_selection(scores, None, len(slots), torch.tensor([slots], dtype=torch.int32)).reason

    assert "position 1 with score 9.0 ranks higher and is missing (1 such" in why(2, 3, 4)
    assert "position 3 with the same score comes first under tie_break='smallest'" in why(1, 4)
    assert "slot 1: holds 5, which is not one of the row's 5 candidates (positions 0 to 4)" in why(1, 5)
    assert "slot 1: holds 1 again, already selected in slot 0" in why(1, 1)
    assert "slot 1: holds 1 after position 3: positions must ascend" in why(3, 1)
    assert "slot 5: holds 0, expected -1: the row has 5 candidates" in why(0, 1, 2, 3, 4, 0)
    verdict = check_selection(scores.expand(3, 5), None, 1, torch.tensor([[1], [0], [0]], dtype=torch.int32))
    with pytest.raises(AssertionError, match="2 of 3 rows are wrong"):
        verdict.raise_if_bad()


def test_rows_are_checked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa_topk.testing import checker

    monkeypatch.setitem(checker._CHUNK_ELEMENTS, "cpu", 500)
    trap = trap_for("positions", "normal")
    answer = oracle(trap.shape, trap.scores)
    assert trap.shape.check(trap.scores, answer.out)
    answer.out[4, 9] = 199
    answer.out[5, 9] = 199
    verdict = trap.shape.check(trap.scores, answer.out)
    assert (verdict.row, verdict.slot, verdict.bad_rows, verdict.rows) == (4, 9, 2, 6)


def test_imports_nothing_from_the_code_under_test() -> None:
    from pathlib import Path

    import dsa_topk.testing

    for source in Path(dsa_topk.testing.__file__).parent.glob("*.py"):
        if source.name != "recorded.py":  # data made by the demo
            text = source.read_text()
            assert "reference" not in text.replace("imports the reference", ""), source
            assert "import backends" not in text, source
