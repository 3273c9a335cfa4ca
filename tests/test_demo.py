"""The demo's parts: text, model, indexer scores, packing, worth, recorded scores, pictures and files."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from dsa_topk.demo import batch as packing
from dsa_topk.demo import pictures, run, worth
from dsa_topk.demo.indexer import SEED, WEIGHTS, indexer_scores
from dsa_topk.demo.model import HEAD_DIM, HEADS, WINDOW, Model, ModelMissing
from dsa_topk.demo.record import recorded_batch
from dsa_topk.demo.text import MAX_FILES, Text, cut, load_texts, read_text
from dsa_topk.io import InputError, read_batch, read_tensors
from dsa_topk.testing import check_selection, recorded


def made_up(tokens: int, new: int, seed: int = 0) -> packing.Request:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, HEADS, HEAD_DIM, generator=generator) for count in (new, tokens, tokens)]
    return packing.Request("made up", *draw)


@pytest.fixture(scope="module")
def model() -> Model:
    try:
        return Model()
    except ModelMissing as error:
        pytest.skip(str(error))


# Text


def test_the_shipped_text_is_the_one_whose_source_is_stated() -> None:
    folder = files("dsa_topk.demo") / "data"
    data = (folder / "persuasion.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() in (folder / "README.md").read_text()
    assert load_texts()[0].content == data.decode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x7fELF\0\0", "is a binary file"),
        ("text".encode("utf-16"), "is UTF-16"),
        ("caf\xe9 au lait".encode("latin-1"), "is not UTF-8 text .*0xe9 at offset 3"),
    ],
)
def test_unusable_texts_say_why(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(InputError, match=rf"a\.txt: {why}"):
        read_text(tmp_path / "a.txt")


def test_missing_texts_and_too_many_texts_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(InputError, match=f"at most {MAX_FILES} files"):
        load_texts([tmp_path / "absent.txt"] * (MAX_FILES + 1))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword")
    assert read_text(tmp_path / "a.txt") == "word"


def test_pieces_start_at_words_and_do_not_overlap() -> None:
    content = "alpha beta gamma delta epsilon"
    pieces = [cut(content, 3, piece, most=100) for piece in range(3)]
    assert content.endswith(pieces[2])
    assert [piece.split()[0] for piece in pieces] == ["alpha", "gamma", "epsilon"]
    assert sum(map(len, pieces)) <= len(content)
    assert cut(content, 1, 0, most=5) == "alpha"


# Model (skipped where its package is not installed)


def test_hooked_projections_are_the_models_own_attention(model: Model) -> None:
    """The softmax of the recorded products is the probabilities that the model itself computes."""
    tokens = model.tokenize("The quick brown fox jumps over the lazy dog while it rains in the night.", 1, 0, 100)
    found = model.attend(tokens)
    own = type(model.network).from_pretrained(model.network.name_or_path, attn_implementation="eager").eval()
    ids = torch.tensor([[model.tokenizer.cls_token_id, *tokens, model.tokenizer.sep_token_id]])
    with torch.inference_mode():
        attentions = own(input_ids=ids, output_attentions=True).attentions
    theirs = attentions[model.layer][0, :, 1:-1, 1:-1]
    theirs = theirs / theirs.sum(-1, keepdim=True)
    ours = (torch.einsum("qhd,khd->hqk", found.queries, found.keys) / HEAD_DIM**0.5).softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_windows_are_independent_and_cover_every_token(model: Model) -> None:
    inner = WINDOW - 2
    tokens = model.tokenize(load_texts()[0].content, 1, 0, inner + 30)
    assert len(tokens) == inner + 30
    seen: list[int] = []
    found = model.attend(tokens, seen.append)
    alone = model.attend(tokens[inner:])
    assert len(found) == inner + 30
    assert sum(seen) == inner + 30
    torch.testing.assert_close(found.keys[inner:], alone.keys, rtol=1e-3, atol=1e-4)


def test_requests_come_from_every_text(model: Model) -> None:
    words = load_texts()[0].content
    texts = [Text("one", words[:3000]), Text("two", words[3000:6000])]
    requests = packing.requests_from_texts(texts, model)
    assert {request.name for request in requests} == {"one", "two"}
    assert all(0 < request.new <= request.tokens // 2 for request in requests)


def test_a_text_of_a_few_words_is_refused(model: Model) -> None:
    with pytest.raises(InputError, match="too short"):
        packing.requests_from_texts([Text("short", "A few words.")], model)


# Indexer


def test_the_weights_are_the_documented_draw() -> None:
    draw = torch.randn(HEADS, generator=torch.Generator().manual_seed(SEED))
    assert [round(weight, 2) for weight in draw.tolist()] == list(WEIGHTS)
    assert min(WEIGHTS) < 0 < max(WEIGHTS)


def test_scores_follow_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsa_topk.demo.indexer._ELEMENTS_AT_ONCE", 7 * HEADS)  # so that rows come in several chunks
    request = made_up(tokens=7, new=3)
    scores = indexer_scores(request.queries, request.keys)
    for row in range(3):
        for token in range(7):
            products = (request.queries[row] * request.keys[token]).sum(-1).clamp_min(0)
            assert scores[row, token].item() == pytest.approx(
                sum(w * p for w, p in zip(WEIGHTS, products.tolist(), strict=True)), abs=1e-4
            )


# Packing


def test_the_packed_layout_is_an_engines() -> None:
    requests = [made_up(70, 3, 1), made_up(200, 5, 2)]
    packed = packing.pack(requests)
    extend, decode = packed.extend, packed.decode
    assert extend.scores.shape == (8, 270)
    assert extend.lengths is not None and extend.lengths.tolist() == [68, 69, 70, 196, 197, 198, 199, 200]  # noqa: PT018
    assert extend.row_starts is not None and extend.row_starts.tolist() == [0] * 3 + [70] * 5  # noqa: PT018
    assert decode.scores.shape == (2, 200)
    torch.testing.assert_close(decode.scores[1], extend.scores[7, 70:270])
    torch.testing.assert_close(decode.scores[0, :70], extend.scores[2, :70])
    assert packed.rows_of(1) == slice(3, 8)


def test_pages_are_shuffled_distinct_and_enough() -> None:
    table = packing.shuffled_pages(torch.tensor([1, 64, 65, 640]), seed=0)
    assert (table >= 0).sum(1).tolist() == [1, 1, 2, 10]
    used = table[table >= 0]
    assert len(used.unique()) == len(used)
    assert used.tolist() != sorted(used.tolist())


# Worth


def test_selecting_everything_is_worth_everything() -> None:
    request = made_up(40, 4)
    weights, output = worth.dense(request.queries, request, request.lengths.long())
    everything = torch.arange(40).expand(4, 40)
    mass, error = worth.restricted(weights, output, request.values, everything)
    torch.testing.assert_close(mass, torch.ones(4))
    assert error.max() < 1e-5


def test_restricted_attention_is_softmax_over_the_chosen_tokens() -> None:
    request = made_up(40, 1)
    chosen = torch.tensor([[3, 17, 29]])
    weights, output = worth.dense(request.queries, request, request.lengths.long())
    mass, error = worth.restricted(weights, output, request.values, chosen)
    logits = torch.einsum("hd,thd->ht", request.queries[0], request.keys[chosen[0]]) / HEAD_DIM**0.5
    direct = torch.einsum("ht,thd->hd", logits.softmax(-1), request.values[chosen[0]])
    assert error.item() == pytest.approx(((direct - output[0]).norm() / output[0].norm()).item(), rel=1e-4)
    assert mass.item() == pytest.approx(weights[0][:, chosen[0]].sum(-1).mean().item(), rel=1e-5)


def test_dense_attention_is_causal() -> None:
    request = made_up(40, 4)
    weights, _ = worth.dense(request.queries, request, request.lengths.long())
    assert weights[0, :, 37:].abs().max() == 0


def test_rows_without_a_choice_are_left_out_of_the_means() -> None:
    request = made_up(40, 4)
    positions = torch.arange(38, dtype=torch.int32).expand(4, 38)
    assert worth.compare([request], positions, 38).rows == 2  # windows 37, 38, 39, 40
    assert worth.compare([request], torch.zeros(4, 40, dtype=torch.int32), 40).indexer is None


def test_ties_are_counted_only_where_they_decide() -> None:
    scores = torch.tensor([[9.0, 1, 1, 0], [9, 8, 1, 1], [5, 5, 1, 0], [9, 1, 1, 1]])
    lengths = torch.tensor([4, 4, 4, 2])
    assert worth.decided_by_ties(scores, None, lengths, 2).tolist() == [True, False, False, False]
    assert worth.zero_share(scores, None, lengths) == pytest.approx(2 / 14)


# Recorded scores


def test_recorded_scores_are_small_and_real() -> None:
    path = files("dsa_topk.testing") / "data" / recorded.FILE
    assert len(path.read_bytes()) < 1_000_000
    tensors = recorded.load()
    assert tensors["decode_scores"].shape == (6, 8192)
    for name in ("scores", "decode_scores"):
        assert tensors[name].dtype == torch.float32
        assert tensors[name].isfinite().all()
        assert (tensors[name] < 0).any()
        assert 0.2 < (tensors[name] == 0).float().mean() < 0.6  # the plateau that makes them worth recording


def test_recorded_scores_agree_with_the_recorded_queries_and_keys() -> None:
    """Up to the eight-bit rounding of queries and keys, so a stale file is noticed."""
    tensors = recorded.load()
    again = indexer_scores(tensors["queries"].float(), tensors["keys"].float())
    assert torch.corrcoef(torch.stack([again.flatten(), tensors["scores"].flatten()]))[0, 1] > 0.99


# The whole


@pytest.fixture(scope="module")
def result() -> run.Result:
    return run.run(recorded_batch(), (64, 256), backend="torch")


def test_every_layout_selects_the_same_tokens(result: run.Result) -> None:
    extend = result.batch.extend
    assert extend.row_starts is not None and extend.page_table is not None and extend.row_to_batch is not None  # noqa: PT018
    for item in result.selections:
        positions = item.positions.long()
        valid = positions >= 0
        ragged = torch.where(valid, positions + extend.row_starts[:, None], -1)
        assert torch.equal(item.indices["ragged"].long(), ragged)
        pages = extend.page_table.long()[extend.row_to_batch.long()].gather(
            1, positions.clamp_min(0) // packing.PAGE_SIZE
        )
        paged = torch.where(valid, pages * packing.PAGE_SIZE + positions % packing.PAGE_SIZE, -1)
        assert torch.equal(item.indices["paged"].long(), paged)
        last = [result.batch.rows_of(index).stop - 1 for index in range(len(result.batch.requests))]
        assert torch.equal(item.indices["decode"], item.indices["paged"][last])


def test_the_selection_beats_the_latest_tokens_and_not_the_best(result: run.Result) -> None:
    for item in result.selections:
        compared = item.comparison
        assert compared.indexer is not None and compared.best is not None and compared.latest is not None  # noqa: PT018
        assert compared.latest.mass < compared.indexer.mass <= compared.best.mass < 1


def test_a_wrong_result_stops_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    import dsa_topk

    right = dsa_topk.topk_paged

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        found = right(*arguments, **options)  # type: ignore[call-overload]
        found[0, 0] += 1
        return found

    monkeypatch.setattr(dsa_topk, "topk_paged", wrong)
    with pytest.raises(run.CheckFailed, match="row 0"):
        run.run(recorded_batch(), (64,), backend="torch")


def test_files_hold_what_was_selected(result: run.Result, tmp_path: Path) -> None:
    names = [path.name for path in run.write(result, tmp_path / "new" / "out", title="t")]
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(names)
    source = read_batch(tmp_path / "new" / "out" / "batch.safetensors")
    indices = read_tensors(tmp_path / "new" / "out" / "indices.safetensors")["paged_k256"]
    verdict = check_selection(source.scores, source.lengths, 256, indices, form="paged", **source.kwargs("paged"))
    assert verdict, verdict.reason
    for name in ("coverage.png", "selection.png"):
        assert (tmp_path / "new" / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_a_failed_picture_leaves_no_files(result: run.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(pictures, "selection", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        run.write(result, tmp_path / "out", title="t")
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_a_batch_without_a_choice_are_drawn(tmp_path: Path) -> None:
    tiny = run.run(packing.pack([made_up(20, 4)]), (64,), backend="torch")
    assert tiny.selections[0].comparison.rows == 0
    pictures.coverage(tiny, tmp_path / "a.png", "a $title")
    pictures.selection(tiny, tmp_path / "b.png", "b" * 300)
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))


def test_the_selection_picture_counts_every_selected_position_once() -> None:
    request = made_up(400, 2)
    positions = torch.tensor([[0, 1, 2, 399], [5, -1, -1, -1]], dtype=torch.int32)
    share, size = pictures.binned(positions, request)
    assert (share * size).sum(1).tolist() == [4, 1]
