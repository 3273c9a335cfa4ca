"""Packs a ``Call`` into the kernels' ``Args``; the layout is read from csrc/args.h, so there is one table only."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import torch

from dsa_topk._call import Call

from .build import CSRC
from .process import Buffer

_TYPES: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}

FORMS = {"positions": 0, "ragged": 1, "paged": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Choice(ctypes.Structure):
    """Same layout as the runner's Choice."""

    _fields_ = [(name, ctypes.c_int32) for name in ("kernel", "dtype", "cluster", "by_score")]


def _struct(name: str, text: str, known: dict[str, type]) -> type[ctypes.Structure]:
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S)
    if found is None:
        raise LookupError(f"csrc/args.h has no struct {name}")
    fields: list[tuple[str, type]] = []
    for statement in re.sub(r"//[^\n]*", "", found.group(1)).split(";"):
        words = re.fullmatch(r"\s*((?:const\s+)?\w+)\s*(\*?)\s*(.+?)\s*", statement, re.S)
        if words is None:
            continue
        base, pointer, names = words.groups()
        kind = ctypes.c_void_p if pointer else known[base.removeprefix("const ")]
        fields += [(n.strip(), kind) for n in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@functools.lru_cache
def args_type(csrc: Path = CSRC) -> type[ctypes.Structure]:
    """``Args`` as a ctypes structure, from the header's text."""
    text = (csrc / "args.h").read_text()
    return _struct("Args", text, {**_TYPES, "IndexVector": _struct("IndexVector", text, _TYPES)})


def pack(
    call: Call,
    *,
    kernel: int,
    cluster: int = 1,
    margin: float = 4.0,
    counters: torch.Tensor | None = None,
    csrc: Path = CSRC,
) -> tuple[bytes, list[Buffer]]:
    """Args and Choice as bytes, and the buffers whose addresses belong into them.

    Fields that the launch fills (``filter_shape``, ``set_page_size``) stay zero here, as in the binding.
    """
    struct: Any = args_type(csrc)
    a = struct()
    buffers: list[Buffer] = []
    rows, width = call.scores.shape

    def pointer(name: str, tensor: torch.Tensor | None, mode: str = "r") -> None:
        if tensor is not None:
            buffers.append(Buffer(getattr(struct, name).offset, tensor, mode))

    pointer("scores", call.scores)
    a.row_stride, a.rows, a.width, a.k = call.scores.stride(0), rows, width, call.k
    a.form = FORMS[call.form]
    for name in ("lengths", "row_starts", "out_offsets", "row_to_batch", "page_table_starts"):
        tensor = getattr(call, name)
        if tensor is not None:
            vector = getattr(a, name)
            vector.stride = tensor.stride(0)
            vector.is64 = int(tensor.dtype == torch.int64)
            buffers.append(Buffer(getattr(struct, name).offset, tensor))
    a.page_size = call.page_size
    if call.page_table is not None:
        pointer("page_table", call.page_table)
        a.table_rows, a.table_width = call.page_table.shape
        a.table_stride = call.page_table.stride(0)
    a.largest = int(call.tie_break == "largest")
    for name in ("out", "out_positions", "out_scores"):
        tensor = getattr(call, name)
        pointer(name, tensor, "w")
        if tensor is not None:
            setattr(a, f"{name}_stride", tensor.stride(0))
    a.margin = margin
    a.prefetch = 4096 if rows % 2 else -4096
    if counters is not None:
        buffers.append(Buffer(struct.counters.offset, counters, "k", keep=2))
    if kernel == kernels(csrc).get("Spread512"):  # as launch.h's split_shape sizes it; zero, and left zero
        blocks = rows * cluster
        words = torch.zeros(4096 + blocks * (4 + 2 * 4096), dtype=torch.int32)
        buffers.append(Buffer(struct.workspace.offset, words, "k", keep=1000 + blocks))
    by_score = int(call.order == "score")
    choice = Choice(kernel=kernel, dtype=DTYPES[call.scores.dtype], cluster=cluster, by_score=by_score)
    return bytes(a) + bytes(choice), buffers


@functools.lru_cache
def kernels(csrc: Path = CSRC) -> dict[str, int]:
    """Names and numbers of csrc/launch.h's ``enum Kernel``, without its count."""
    found = re.search(r"enum Kernel\b[^{]*\{(.*?)\}", (csrc / "launch.h").read_text(), re.S)
    if found is None:
        raise LookupError("csrc/launch.h has no enum Kernel")
    pairs = re.findall(r"k(\w+)\s*=\s*(\d+)", found.group(1))
    return {name: int(number) for name, number in pairs if name != "Kernels"}


@functools.lru_cache
def instances(csrc: Path = CSRC) -> dict[str, tuple[str, str]]:
    """Of each kernel's number, by its name: the configurations that serve it, for 32-bit scores and for 16-bit ones."""
    found = re.findall(r"case k(\w+): f\((.*)\); return true;", (csrc / "launch.h").read_text())
    names = {number: re.findall(r"(\w+)<E>", launch) for number, launch in found}
    return {number: (served[0], served[-1]) for number, served in names.items() if served}


@functools.lru_cache
def held(csrc: Path = CSRC) -> dict[str, tuple[int, int, int]]:
    """Threads, scores a thread and blocks an SM of the configurations that hold a row."""
    found = re.findall(r"using (\w+) = ResidentConfig<E, (\d+), (\d+), (\d+)>;", (csrc / "launch.h").read_text())
    return {name: (int(threads), int(each), int(blocks)) for name, threads, each, blocks in found}


@functools.lru_cache
def paths(csrc: Path = CSRC) -> tuple[str, ...]:
    """Names of csrc/args.h's ``enum Path`` in counter order, without its count."""
    found = re.search(r"enum Path\b[^{]*\{(.*?)\}", (csrc / "args.h").read_text(), re.S)
    if found is None:
        raise LookupError("csrc/args.h has no enum Path")
    pairs = sorted((int(number), name) for name, number in re.findall(r"k(\w+)\s*=\s*(\d+)", found.group(1)))
    return tuple(name for _, name in pairs if name != "Paths")
