"""Several requests in an engine's packed layout: flattened KV, row starts, a page table of shuffled pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsa_topk.demo.indexer import indexer_scores
from dsa_topk.demo.model import Attention, Model
from dsa_topk.demo.text import Text
from dsa_topk.io import Batch, InputError

PAGE_SIZE = 64

#: The default requests: tokens in the context, and how many of them are new in this step (they are the rows).
#: Contexts near and below twice the largest k bring cuts that fall into the plateau of zeros; the long ones are where
#: a selection pays.
REQUESTS = ((704, 64), (3900, 160), (1290, 96), (930, 64), (2605, 128), (617, 48))

_FEWEST_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """One request: its whole context's keys and values, and the queries of its new tokens (the last ones).

    Attributes
    ----------
    name : str
        Which text it was cut from.
    queries : torch.Tensor
        ``[new, heads, dim]`` float32.
    keys, values : torch.Tensor
        ``[tokens, heads, dim]`` float32.
    """

    name: str
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[0]

    @property
    def new(self) -> int:
        return self.queries.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """``[new]`` int32: the causal context of each new token, itself included."""
        return torch.arange(self.tokens - self.new + 1, self.tokens + 1, dtype=torch.int32)


@dataclass(frozen=True)
class EngineBatch:
    """The same requests as one extend step and as one decode step.

    Attributes
    ----------
    requests : sequence of Request
        In the order of the batch.
    extend : Batch
        One row per new token; columns are the flattened KV of all requests. Serves the ragged and the packed paged
        form.
    decode : Batch
        One row per request, its last token; columns are the request's own positions.
    """

    requests: Sequence[Request]
    extend: Batch
    decode: Batch

    def rows_of(self, index: int) -> slice:
        """Return the rows of ``extend`` that belong to request ``index``."""
        first = sum(request.new for request in self.requests[:index])
        return slice(first, first + self.requests[index].new)


def requests_from_texts(
    texts: Sequence[Text], model: Model, progress: Callable[[int, int], None] | None = None
) -> list[Request]:
    """Cut requests from the texts (at least six in all, taken in turn) and run the model over each.

    Parameters
    ----------
    texts : sequence of Text
        Each gives about the same number of requests, from equal parts of it.
    model : Model
        Whose attention is wanted.
    progress : callable, optional
        Told tokens done and tokens in all.

    Raises
    ------
    InputError
        If the texts have too few tokens.
    """
    count = max(len(REQUESTS), len(texts))
    pieces = [len(range(index, count, len(texts))) for index in range(len(texts))]
    plans: list[tuple[str, list[int], int]] = []
    for index in range(count):
        text, piece = index % len(texts), index // len(texts)
        tokens, new = REQUESTS[index % len(REQUESTS)]
        ids = model.tokenize(texts[text].content, pieces[text], piece, tokens)
        if len(ids) >= _FEWEST_TOKENS:
            plans.append((texts[text].name, ids, min(new, len(ids) // 2)))
    if not plans:
        raise InputError(f"the text is too short: cut into {count} requests, none has {_FEWEST_TOKENS} tokens")
    total, done = sum(len(ids) for _, ids, _ in plans), 0
    requests = []
    for name, ids, new in plans:

        def report(tokens: int) -> None:
            nonlocal done
            done += tokens
            if progress is not None:
                progress(done, total)

        found: Attention = model.attend(ids, report)
        requests.append(Request(name, found.queries[-new:].clone(), found.keys, found.values))
    return requests


def pack(requests: Sequence[Request], scores: torch.Tensor | None = None, *, seed: int = 0) -> EngineBatch:
    """Lay requests out as an engine does.

    Parameters
    ----------
    requests : sequence of Request
        At least one.
    scores : torch.Tensor, optional
        ``[rows, tokens]`` float32 indexer scores of all new tokens against the flattened KV; computed when not given.
    seed : int
        Of the shuffle of physical pages.

    Returns
    -------
    EngineBatch
        The columns outside a row's window hold scores of other requests' tokens and of later tokens, as a scoring
        kernel leaves them.
    """
    tokens = torch.tensor([request.tokens for request in requests])
    new = torch.tensor([request.new for request in requests])
    starts = torch.cumsum(tokens, 0) - tokens
    if scores is None:
        scores = indexer_scores(
            torch.cat([request.queries for request in requests]), torch.cat([request.keys for request in requests])
        )
    row_to_batch = torch.repeat_interleave(torch.arange(len(requests)), new)
    row_starts = starts[row_to_batch].int()
    lengths = torch.cat([request.lengths for request in requests])
    page_table = shuffled_pages(tokens, seed)
    extend = Batch(
        scores=scores,
        lengths=lengths,
        row_starts=row_starts,
        out_offsets=row_starts.clone(),  # a ragged result is a row of the flattened KV
        page_table=page_table,
        page_size=PAGE_SIZE,
        row_to_batch=row_to_batch.int(),
    )
    last = torch.cumsum(new, 0) - 1
    widest = int(tokens.max())
    shifted = [torch.roll(scores[row], -int(start))[:widest] for row, start in zip(last.tolist(), starts, strict=True)]
    decode = Batch(
        scores=torch.stack(shifted), lengths=lengths[last].clone(), page_table=page_table.clone(), page_size=PAGE_SIZE
    )
    return EngineBatch(requests, extend, decode)


def shuffled_pages(tokens: torch.Tensor, seed: int) -> torch.Tensor:
    """Give each request pages from a pool twice as large as needed, in random order.

    Returns
    -------
    torch.Tensor
        ``[requests, pages of the longest]`` int32, -1 where a request has no page.
    """
    counts = (tokens + PAGE_SIZE - 1) // PAGE_SIZE
    pool = torch.randperm(2 * int(counts.sum()), generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(tokens), int(counts.max())), -1, dtype=torch.int32)
    taken = 0
    for row, count in enumerate(counts.tolist()):
        table[row, :count] = pool[taken : taken + count]
        taken += count
    return table
