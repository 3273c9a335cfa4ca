"""Every argument error of a call, found before anything is allocated or launched.

``check`` stands in front of each eager call, on the host's critical path beside a launch of about 5 us. So it is one
flat function without torch operators, reads each attribute once (40 to 120 ns each), and builds texts only when it
raises. What only serves a refusal, and the exact overlap test, sits below it. ``check_usual`` is in front of ``check``
where even that is too long: it says yes to what engines pass, and nothing to all else.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from dsa_topk._call import FORMS, MAX_K, ORDERS, TIE_BREAKS, Call, Form, Order, TieBreak

MAX_ROWS = 2**31 - 1  # a launch has a block for each row, and no grid is larger
MAX_WIDTH = 2**31 - 1
MAX_PAGE_SIZE = 2**31 - 1

_FLOAT32, _BFLOAT16, _FLOAT16 = torch.float32, torch.bfloat16, torch.float16
_INT32, _INT64, _STRIDED = torch.int32, torch.int64, torch.strided


def check(
    form: Form,
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    *,
    row_starts: Tensor | None = None,
    out_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_batch: Tensor | None = None,
    page_table_starts: Tensor | None = None,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    return_scores: bool = False,
    out: Tensor | None = None,
    out_positions: Tensor | None = None,
) -> Call:
    """Check the arguments of a public function and return them as a `Call` (outputs not yet allocated).

    Fake and meta tensors are checked by everything but their memory. Values of integer tensors are not looked at.

    Raises
    ------
    TypeError
        An argument has the wrong type or dtype.
    ValueError
        An argument has the wrong value, shape, strides, layout or device, or an output overlaps an input or the other.
    """
    # Scores: [R, N], dense, unit last stride. Unpacking .shape is the cheapest test of the number of dimensions.
    if not isinstance(scores, Tensor):
        _refuse_type("scores", scores, "a torch.Tensor [R, N] of float32, bfloat16 or float16")
    dtype = scores.dtype
    if dtype is not _FLOAT32 and dtype is not _BFLOAT16 and dtype is not _FLOAT16:
        raise TypeError(f"scores: expected dtype float32, bfloat16 or float16, got {dtype}")
    if scores.layout is not _STRIDED:
        _refuse_layout("scores", scores)
    try:
        rows, width = scores.shape
    except (ValueError, RuntimeError):
        _refuse_shape("scores", scores, "[R, N]")
    if scores.is_neg():  # the imaginary part of a conjugate; nothing public makes such a view of integers
        _refuse_negative(scores)
    if rows > MAX_ROWS:
        raise ValueError(f"scores: expected fewer than 2**31 rows, got shape {list(scores.shape)}")
    if width > MAX_WIDTH:
        raise ValueError(f"scores: expected fewer than 2**31 columns, got shape {list(scores.shape)}")
    row_stride, column_stride = scores.stride()
    if column_stride != 1 and width > 1:
        _refuse_stride("scores", scores)
    device = scores.device
    vector = (rows,)

    # Numbers and names.
    if type(k) is not int and (not isinstance(k, (int, torch.SymInt)) or isinstance(k, bool)):
        _refuse_type("k", k, f"an int, 1 <= k <= {MAX_K}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: expected 1 <= k <= {MAX_K}, got {k}")
    if order not in ORDERS:
        _refuse_name("order", order, ORDERS)
    if tie_break not in TIE_BREAKS:
        _refuse_name("tie_break", tie_break, TIE_BREAKS)
    if return_scores is not False and return_scores is not True:
        _refuse_type("return_scores", return_scores, "a bool")

    # Integer tensors. What the overlap test needs of a tensor is kept, so that nothing is read from it twice.
    vectors = []
    requests = entries = table_stride = 0
    if lengths is not None:
        vectors.append((lengths, _check_vector("lengths", lengths, vector, device)))
    if row_starts is not None:
        vectors.append((row_starts, _check_vector("row_starts", row_starts, vector, device)))
    if form == "ragged":
        if out_offsets is None:
            _refuse_type("out_offsets", out_offsets, "an int32 or int64 tensor [R]")
        vectors.append((out_offsets, _check_vector("out_offsets", out_offsets, vector, device)))
    elif form == "paged":
        if not isinstance(page_table, Tensor):
            _refuse_type("page_table", page_table, "an int32 tensor [B, T]")
        requests, entries, table_stride = _check_table(page_table, device)
        if type(page_size) is not int and (
            not isinstance(page_size, (int, torch.SymInt)) or isinstance(page_size, bool)
        ):
            _refuse_type("page_size", page_size, "an int, 1 <= page_size < 2**31")
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"page_size: expected 1 <= page_size < 2**31, got {page_size}")
        if row_to_batch is not None:
            vectors.append((row_to_batch, _check_vector("row_to_batch", row_to_batch, vector, device)))
        elif requests < rows:
            raise ValueError(
                f"page_table: expected at least R = {rows} rows, as row_to_batch is None (row i uses table row i), "
                f"got {requests}"
            )
        if page_table_starts is not None:
            vectors.append((page_table_starts, _check_vector("page_table_starts", page_table_starts, vector, device)))
    elif form != "positions":
        _refuse_name("form", form, FORMS)

    call = Call(
        form,
        scores,
        lengths,
        k,
        row_starts,
        out_offsets,
        page_table,
        page_size,
        row_to_batch,
        page_table_starts,
        order,
        tie_break,
        return_scores,
        out,
        out_positions,
    )

    # Outputs.
    if out is None and out_positions is None:
        return call
    out_stride = positions_stride = 0
    if out is not None:
        out_stride = _check_output("out", out, rows, k, device)
    if out_positions is not None:
        if form == "positions":
            raise ValueError("out_positions: topk_positions writes positions to out, got an out_positions as well")
        positions_stride = _check_output("out_positions", out_positions, rows, k, device)
    if type(scores) is not Tensor and not _has_memory(scores):
        return call  # fake: nothing can overlap
    # Only where address ranges meet is the exact test worth its time.
    start = scores.data_ptr()
    spans = [(start, start + ((rows - 1) * row_stride + width) * (4 if dtype is _FLOAT32 else 2))]
    for tensor, size in vectors:
        start = tensor.data_ptr()
        spans.append((start, start + ((rows - 1) * tensor.stride()[0] + 1) * size))
    if page_table is not None:
        start = page_table.data_ptr()
        spans.append((start, start + ((requests - 1) * table_stride + entries) * 4))
    for output, stride in ((out, out_stride), (out_positions, positions_stride)):
        if output is not None:
            low = output.data_ptr()
            high = low + ((rows - 1) * stride + k) * 4
            for start, end in spans:
                if start < high and low < end:
                    _check_overlap(call)
                    break
            spans.append((low, high))
    return call


def check_usual(
    form: Form,
    scores: Tensor,
    lengths: Tensor | None,
    k: int,
    row_starts: Tensor | None,
    out_offsets: Tensor | None,
    page_table: Tensor | None,
    page_size: int,
    row_to_batch: Tensor | None,
    page_table_starts: Tensor | None,
    order: Order,
    tie_break: TieBreak,
    out: Tensor,
) -> tuple[int, int, int, int] | None:
    """Return rows, width, row stride and address of the scores where `check` surely finds nothing, else None.

    Takes what engines pass: plain tensors that are not empty, and an `out`. Refuses nothing: whatever is wrong, rare or
    in doubt gets None, and `check` decides. So it needs no text and no helper, and the exact overlap test is not in it.
    """
    try:
        rows, width = scores.shape
        row_stride, column_stride = scores.stride()
        dtype, device = scores.dtype, scores.device
        if (
            type(scores) is not Tensor
            or (dtype is not _FLOAT32 and dtype is not _BFLOAT16 and dtype is not _FLOAT16)
            or scores.is_neg()
            or (form == "ragged" and out_offsets is None)
            or (form == "paged" and page_table is None)
            or not 0 < rows <= MAX_ROWS
            or not 0 < width <= MAX_WIDTH
            or column_stride != 1
            or type(k) is not int
            or not 1 <= k <= MAX_K
            or order not in ORDERS
            or tie_break not in TIE_BREAKS
            or type(out) is not Tensor
            or out.dtype is not _INT32
            or out.shape != (rows, k)
            or out.device != device
        ):
            return None
        out_stride, column_stride = out.stride()
        if out_stride < k or column_stride != 1:
            return None
        # Only dense tensors have an address. Inputs must lie outside of the range that the outputs take.
        address, low = scores.data_ptr(), out.data_ptr()
        high = low + ((rows - 1) * out_stride + k) * 4
        size = 4 if dtype is _FLOAT32 else 2
        if address < high and low < address + ((rows - 1) * row_stride + width) * size:
            return None
        vector = (rows,)
        if out_offsets is row_starts:  # one tensor, where scores and keys share their columns
            out_offsets = None
        for tensor in (lengths, row_starts, out_offsets, row_to_batch, page_table_starts):
            if tensor is None:
                continue
            dtype = tensor.dtype
            if (
                type(tensor) is not Tensor
                or (dtype is not _INT32 and dtype is not _INT64)
                or tensor.shape != vector
                or tensor.device != device
            ):
                return None
            start, size = tensor.data_ptr(), 4 if dtype is _INT32 else 8
            if start < high and low < start + ((rows - 1) * tensor.stride()[0] + 1) * size:
                return None
        if page_table is not None:
            requests, entries = page_table.shape
            table_stride, column_stride = page_table.stride()
            if (
                type(page_table) is not Tensor
                or page_table.dtype is not _INT32
                or page_table.device != device
                or column_stride != 1
                or (row_to_batch is None and requests < rows)
                or type(page_size) is not int
                or not 1 <= page_size <= MAX_PAGE_SIZE
            ):
                return None
            start = page_table.data_ptr()
            if start < high and low < start + ((requests - 1) * table_stride + entries) * 4:
                return None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return rows, width, row_stride, address


def _check_table(table: Tensor, device: torch.device) -> tuple[int, int, int]:
    """Refuse what is not a dense int32 tensor ``[B, T]`` beside the scores; return B, T and the row stride."""
    if table.dtype is not _INT32:
        raise TypeError(f"page_table: expected dtype int32, got {table.dtype}")
    if table.layout is not _STRIDED:
        _refuse_layout("page_table", table)
    try:
        requests, entries = table.shape
    except (ValueError, RuntimeError):
        _refuse_shape("page_table", table, "[B, T]")
    if table.device != device:
        _refuse_device("page_table", table, device)
    row_stride, column_stride = table.stride()
    if entries > 1 and column_stride != 1:
        _refuse_stride("page_table", table)
    return requests, entries, row_stride


def _check_vector(name: str, tensor: Tensor, shape: tuple[int], device: torch.device) -> int:
    """Refuse what is not a dense int32 or int64 tensor ``[R]`` beside the scores, any stride; return its item size."""
    if not isinstance(tensor, Tensor):
        _refuse_type(name, tensor, "an int32 or int64 tensor [R]")
    dtype = tensor.dtype
    if dtype is not _INT32 and dtype is not _INT64:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {dtype}")
    if tensor.layout is not _STRIDED:
        _refuse_layout(name, tensor)
    if tensor.shape != shape:
        _refuse_shape(name, tensor, f"[R] = {list(shape)}")
    if tensor.device != device:
        _refuse_device(name, tensor, device)
    return 4 if dtype is _INT32 else 8


def _check_output(name: str, tensor: Tensor, rows: int, k: int, device: torch.device) -> int:
    """Refuse what can't take ``[R, k]`` int32 results: rows apart, never on each other; return their stride."""
    if not isinstance(tensor, Tensor):
        _refuse_type(name, tensor, "an int32 tensor [R, k]")
    if tensor.dtype is not _INT32:
        raise TypeError(f"{name}: expected dtype int32, got {tensor.dtype}")
    if tensor.layout is not _STRIDED:
        _refuse_layout(name, tensor)
    if tensor.shape != (rows, k):
        _refuse_shape(name, tensor, f"[R, k] = [{rows}, {k}]")
    if tensor.device != device:
        _refuse_device(name, tensor, device)
    row_stride, column_stride = tensor.stride()
    if k > 1 and column_stride != 1:
        _refuse_stride(name, tensor)
    if rows > 1 and row_stride < k:
        raise ValueError(
            f"{name}: expected rows apart in memory (row stride >= k = {k}), got strides {list(tensor.stride())}"
        )
    return row_stride


def check_out_scores(call: Call, out_scores: Tensor | None) -> None:
    """Check the ``out_scores`` of an out-variant operator (the public functions allocate theirs)."""
    if out_scores is None:
        return
    rows = call.scores.shape[0]
    if out_scores.dtype is not call.scores.dtype:
        raise TypeError(f"out_scores: expected the scores' dtype {call.scores.dtype}, got {out_scores.dtype}")
    if out_scores.shape != (rows, call.k):
        _refuse_shape("out_scores", out_scores, f"[R, k] = [{rows}, {call.k}]")
    if out_scores.device != call.scores.device:
        _refuse_device("out_scores", out_scores, call.scores.device)
    if not out_scores.is_contiguous():
        raise ValueError(f"out_scores: expected a contiguous tensor, got strides {list(out_scores.stride())}")
    for name, tensor in _memory_of(call).items():
        if tensor is not None and overlap(out_scores, tensor):
            raise ValueError(f"out_scores: expected memory of its own, got a tensor that overlaps {name}")


# --- refusals: only reached when a call is wrong, so they may be slow


def _refuse_type(name: str, value: object, expected: str) -> NoReturn:
    came = "None" if value is None else f"{value!r}" if isinstance(value, (bool, float, str)) else ""
    raise TypeError(f"{name}: expected {expected}, got {came or type(value).__name__}")


def _refuse_name(name: str, value: object, allowed: tuple[str, ...]) -> NoReturn:
    if not isinstance(value, str):
        _refuse_type(name, value, f"one of {', '.join(map(repr, allowed))}")
    raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def _refuse_layout(name: str, tensor: Tensor) -> NoReturn:
    raise ValueError(f"{name}: expected a dense (strided) tensor, got one of layout {tensor.layout}")


def _refuse_shape(name: str, tensor: Tensor, expected: str) -> NoReturn:
    came = "a nested tensor" if tensor.is_nested else str(list(tensor.shape))
    raise ValueError(f"{name}: expected shape {expected}, got {came}")


def _refuse_device(name: str, tensor: Tensor, device: torch.device) -> NoReturn:
    raise ValueError(f"{name}: expected a tensor on {device}, where scores is, got one on {tensor.device}")


def _refuse_stride(name: str, tensor: Tensor) -> NoReturn:
    raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got strides {list(tensor.stride())}")


def _refuse_negative(scores: Tensor) -> NoReturn:
    # Its memory holds the opposite of its values: a kernel that reads the bits would be wrong without a word.
    raise ValueError(
        f"scores: expected a tensor whose memory holds its values (resolve_neg() makes one), got a negative view of "
        f"shape {list(scores.shape)}"
    )


# --- overlap: byte-exact, so that disjoint columns of one buffer are legal

# A dense 1-D or 2-D tensor as bytes: `rows` runs of `run` bytes, `step` bytes apart, from address `base`.
_Runs = tuple[int, int, int, int]


def _memory_of(call: Call) -> dict[str, Tensor | None]:
    return {
        "scores": call.scores,
        "lengths": call.lengths,
        "row_starts": call.row_starts,
        "out_offsets": call.out_offsets,
        "page_table": call.page_table,
        "row_to_batch": call.row_to_batch,
        "page_table_starts": call.page_table_starts,
        "out": call.out,
        "out_positions": call.out_positions,
    }


def _check_overlap(call: Call) -> None:
    """Refuse outputs that share a byte with an input or with each other."""
    memory = _memory_of(call)
    for name in ("out", "out_positions"):
        out = memory.pop(name)
        if out is None:
            continue
        for other, tensor in memory.items():
            if tensor is not None and overlap(out, tensor):
                raise ValueError(f"{name}: expected memory of its own, got a tensor that overlaps {other}")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one or two dimensions share a byte. Tensors without memory never do."""
    first, second = _runs(a), _runs(b)
    if first is None or second is None:
        return False
    return _runs_meet(first, second)


def _has_memory(tensor: Tensor) -> bool:
    """False for fake tensors and the like: they dispatch in Python and have no address. Plain subclasses have."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _runs(tensor: Tensor) -> _Runs | None:
    if tensor.is_meta or not _has_memory(tensor):
        return None
    size = tensor.element_size()
    shape, stride = tensor.shape, tensor.stride()
    if len(shape) == 1:
        rows, run, step = shape[0], size, stride[0] * size
    else:
        rows, run, step = shape[0], shape[1] * size, stride[0] * size
    if rows == 0 or run == 0:
        return None
    base = tensor.data_ptr()
    if rows == 1 or step == 0:
        return base, 1, run, run
    if step == run:
        return base, 1, rows * run, rows * run
    return base, rows, run, step


def _runs_meet(a: _Runs, b: _Runs) -> bool:
    a_base, a_rows, a_run, a_step = a
    b_base, b_rows, b_run, b_step = b
    a_end = a_base + (a_rows - 1) * a_step + a_run
    b_end = b_base + (b_rows - 1) * b_step + b_run
    if a_end <= b_base or b_end <= a_base:
        return False
    if a_rows > 1 and b_rows > 1 and a_step == b_step:
        # Row i of a and row j of b are a_base - b_base + (i - j) * step apart, and they meet when that lies in
        # (-a_run, b_run). The smallest i - j that is not too low decides.
        difference = max(-(b_rows - 1), (-a_run - (a_base - b_base)) // a_step + 1)
        return difference < a_rows and a_base - b_base + difference * a_step < b_run
    # Different strides: walk the rows of one that reach into the other, and ask whether each hits a row of the other.
    a_low, a_high = _rows_within(a, b_base, b_end)
    b_low, b_high = _rows_within(b, a_base, a_end)
    if a_high - a_low > b_high - b_low:
        a_low, a_high, b_low, b_high = b_low, b_high, a_low, a_high
        a, b = b, a
    base, _, run, step = a
    for row in range(a_low, a_high):
        start = base + row * step
        low, high = _rows_within(b, start, start + run)
        if low < high:
            return True
    return False


def _rows_within(runs: _Runs, start: int, end: int) -> tuple[int, int]:
    """The half-open range of rows that share a byte with the addresses ``start`` to ``end`` (exclusive)."""
    base, rows, run, step = runs
    low = max(0, (start - run - base) // step + 1)
    high = min(rows, -((base - end) // step))
    return low, high
