"""Small recorded real scores: a trained model's indexer scores over real text, for tests and the demo.

Made by ``python -m dsa_topk.demo.record``; ``data/README.md`` says from what.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import torch

FILE = "recorded.safetensors"


def load() -> dict[str, torch.Tensor]:
    """Read the recorded tensors (needs the ``safetensors`` package, which the ``tools`` extra brings).

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU:

        ``decode_scores`` : ``[6, 8192]`` float32
            Scores of six tokens over 8192 positions: rows wide enough for k = 2048. No length: the whole row is the
            window.
        ``scores`` : ``[rows, 768]`` float32
            An extend step of two requests, columns are the flattened KV; outside a row's window lie other tokens'
            scores.
        ``lengths``, ``row_starts``, ``row_to_batch`` : ``[rows]`` int32
            The rows' windows and requests.
        ``queries`` : ``[rows, 12, 32]`` float8_e4m3fn
            Of the rows' tokens.
        ``keys``, ``values`` : ``[768, 12, 32]`` float8_e4m3fn
            Of all tokens; rounded to eight bits, unlike the scores.
    """
    from safetensors.torch import load_file

    with as_file(files("dsa_topk.testing") / "data" / FILE) as path:
        return load_file(path)
