"""Exact, canonical and fast top-k index selection for DeepSeek Sparse Attention.

``topk_positions``, ``topk_ragged`` and ``topk_paged`` select; ``explain`` says which backend would serve a call.
Importing this package imports torch and nothing heavier.
"""

from dsa_topk import _start
from dsa_topk._version import __version__

_start.begin()  # before torch is imported, which takes a second

from dsa_topk.api import topk_paged, topk_positions, topk_ragged  # noqa: E402
from dsa_topk.backends import explain  # noqa: E402

__all__ = ["__version__", "explain", "topk_paged", "topk_positions", "topk_ragged"]
