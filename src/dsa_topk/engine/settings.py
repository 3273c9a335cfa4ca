"""Environment settings of the engine layer: one frozen object, every value checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dsa_topk._call import TieBreak

PageTableChoice = Literal["auto", "compact", "wide"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. An engine's own variables keep name and meaning; ours begin with ``DSA_TOPK_``.

    An empty value counts as unset. A value that is not listed raises ValueError at the first call that reads it.

    Attributes
    ----------
    fuse : bool
        ``SGLANG_DSA_FUSE_TOPK`` (default on). Off: ``topk_transform`` returns window-relative positions, as with
        ``force_unfused_topk=True``.
    use_topk_v2 : bool
        ``SGLANG_OPT_USE_TOPK_V2`` (default on). Off: decode goes through ``page_table_1`` where the metadata has one,
        the layout of the kernel that this switch returns to in SGLang. The selection is the same either way.
    flashinfer_deterministic : bool
        ``SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC`` (default off), read by the ``flashinfer`` backend only.
    flashinfer_tie_break : int
        ``SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK``: unset 0 (any), ``small`` 1, ``large`` 2; ``flashinfer`` backend only.
    tie_break : {"smallest", "largest"}
        ``DSA_TOPK_TIE_BREAK`` (default ``smallest``): the rule of the ``cuda`` and ``torch`` backends.
    page_table : {"auto", "compact", "wide"}
        ``DSA_TOPK_PAGE_TABLE``: which table PAGED calls read where the metadata has both. ``auto`` takes
        ``real_page_table`` for decode and ``page_table_1`` for packed rows.
    """

    fuse: bool = True
    use_topk_v2: bool = True
    flashinfer_deterministic: bool = False
    flashinfer_tie_break: int = 0
    tie_break: TieBreak = "smallest"
    page_table: PageTableChoice = "auto"

    @classmethod
    def from_env(cls) -> Settings:
        """Read the environment.

        Raises
        ------
        ValueError
            A variable has a value that is not one of its own; the text names it.
        """
        # Read at every call, so that a change takes effect; parsed once per set of values. `in` first, because get() of
        # an unset variable raises and catches KeyError inside, at twice the price.
        environ = os.environ
        values = tuple([environ[name] if name in environ else "" for name in _NAMES])  # noqa: SIM401
        if torch.compiler.is_compiling():  # a trace would guard on the memory's content
            return _parse(values)
        settings = _parsed.get(values)
        if settings is None:
            settings = _parsed[values] = _parse(values)
        return settings


_NAMES = (
    "SGLANG_DSA_FUSE_TOPK",
    "SGLANG_OPT_USE_TOPK_V2",
    "SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC",
    "SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK",
    "DSA_TOPK_TIE_BREAK",
    "DSA_TOPK_PAGE_TABLE",
)


_parsed: dict[tuple[str, ...], Settings] = {}


def _parse(values: tuple[str, ...]) -> Settings:
    fuse, use_topk_v2, deterministic, flashinfer_tie_break, tie_break, page_table = (
        _choice(name, value, choices) for name, value, choices in zip(_NAMES, values, _CHOICES, strict=True)
    )
    return Settings(fuse, use_topk_v2, deterministic, flashinfer_tie_break, tie_break, page_table)


def _choice(name: str, value: str, choices: dict[str, Any]) -> Any:
    text = value.strip().lower()
    if text not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise ValueError(f"{name}: expected one of {known}, or unset; got {value!r}")
    return choices[text]


def _flag(default: bool) -> dict[str, Any]:
    """Choices of a switch: SGLang's words for true and false, and on and off; empty is unset."""
    yes, no = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off")
    words = dict.fromkeys(yes, True) | dict.fromkeys(no, False)
    return {"": default} | words


_CHOICES: tuple[dict[str, Any], ...] = (
    _flag(True),
    _flag(True),
    _flag(False),
    {"": 0, "small": 1, "large": 2},
    {"": "smallest", "smallest": "smallest", "largest": "largest"},
    {"": "auto", "auto": "auto", "compact": "compact", "wide": "wide"},
)
