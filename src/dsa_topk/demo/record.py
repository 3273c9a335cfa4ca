"""Make the recorded scores (``python -m dsa_topk.demo.record``), and turn them back into a demo's batch."""

from __future__ import annotations

from pathlib import Path

import torch

import dsa_topk.testing.recorded as recorded
from dsa_topk.demo.batch import EngineBatch, Request, pack
from dsa_topk.demo.indexer import indexer_scores
from dsa_topk.demo.model import Model
from dsa_topk.demo.text import load_texts
from dsa_topk.io import write_tensors

#: Tokens and new tokens of the two recorded requests: 768 tokens in all keep the file below 1 MB, and the first is
#: longer than the largest k.
REQUESTS = ((560, 14), (208, 10))

WIDE_ROWS, WIDE_TOKENS = 6, 8192

_PIECES = 3


def make() -> dict[str, torch.Tensor]:
    """Run the model over the shipped novel and return the tensors that ``recorded.load`` documents."""
    text, model = load_texts()[0], Model()
    requests = []
    for piece, (tokens, new) in enumerate(REQUESTS):
        found = model.attend(model.tokenize(text.content, _PIECES, piece, tokens))
        requests.append(Request(text.name, found.queries[-new:], found.keys, found.values))
    extend = pack(requests).extend
    wide = model.attend(model.tokenize(text.content, _PIECES, _PIECES - 1, WIDE_TOKENS))
    assert extend.lengths is not None
    assert extend.row_starts is not None
    assert extend.row_to_batch is not None
    eight = torch.float8_e4m3fn
    return {
        "decode_scores": indexer_scores(wide.queries[-WIDE_ROWS:], wide.keys),
        "scores": extend.scores,
        "lengths": extend.lengths,
        "row_starts": extend.row_starts,
        "row_to_batch": extend.row_to_batch,
        "queries": torch.cat([request.queries for request in requests]).to(eight),
        "keys": torch.cat([request.keys for request in requests]).to(eight),
        "values": torch.cat([request.values for request in requests]).to(eight),
    }


def recorded_batch() -> EngineBatch:
    """Return the recorded requests as a packed batch, with the recorded scores."""
    tensors = recorded.load()
    rows = torch.bincount(tensors["row_to_batch"].long()).tolist()
    starts = tensors["row_starts"].unique().tolist()
    queries = tensors["queries"].float().split(rows)
    tokens = [end - start for start, end in zip(starts, [*starts[1:], tensors["keys"].shape[0]], strict=True)]
    keys, values = tensors["keys"].float().split(tokens), tensors["values"].float().split(tokens)
    requests = [Request("recorded", *parts) for parts in zip(queries, keys, values, strict=True)]
    return pack(requests, tensors["scores"])


def main() -> None:
    """Write the recorded scores over the shipped file."""
    path = Path(recorded.__file__).parent / "data" / recorded.FILE
    note = {"source": "Jane Austen, Persuasion; all-MiniLM-L6-v2, last layer; see README.md"}
    write_tensors(path, make(), force=True, metadata=note)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
