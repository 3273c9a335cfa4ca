"""Registry of backends: what each can do, which one serves a call, and why.

A backend is a module ``dsa_topk/backends/<name>.py`` with ``name``, ``capabilities``, ``unavailable()``,
``refuses(call)`` and ``run(call)``, and optionally ``describe(...)`` (text for ``explain``: how it would serve such a
call). Modules are imported by name on first use, so a backend costs nothing until somebody asks for it.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from typing import Protocol, cast

# Under another name: importing the submodule backends/torch.py sets `torch` in this namespace.
import torch as _torch

from dsa_topk._call import FORMS, MAX_K, ORDERS, TIE_BREAKS, Call, Form, Order, TieBreak

NAMES = ("cuda", "flashinfer", "sgl-kernel", "torch")
"""Every backend that ``backend=`` accepts beside ``"auto"``."""

_MAX_WARNINGS = 16  # reasons may carry shapes, and a server must not collect them for ever


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can serve. The defaults are the whole contract.

    ``canonical`` says that results are those of the contract bit for bit; ``auto`` picks no other backend.
    ``device_types`` are ``torch.device.type`` names; an empty tuple means any device.
    """

    dtypes: tuple[_torch.dtype, ...] = (_torch.float32, _torch.bfloat16, _torch.float16)
    max_k: int = MAX_K
    forms: tuple[Form, ...] = FORMS
    tie_breaks: tuple[TieBreak, ...] = TIE_BREAKS
    orders: tuple[Order, ...] = ORDERS
    canonical: bool = True
    returns_scores: bool = True
    device_types: tuple[str, ...] = ()
    note: str = ""

    def refuses(
        self,
        *,
        form: Form,
        device_type: str,
        dtype: _torch.dtype,
        k: int,
        order: Order = "position",
        tie_break: TieBreak = "smallest",
        return_scores: bool = False,
    ) -> str | None:
        """Say why a call with these properties is out of reach, or return None when it is not."""
        if self.device_types and device_type not in self.device_types:
            return f"scores on device type {device_type!r}; it serves {_listed(self.device_types)}"
        if dtype not in self.dtypes:
            return f"scores of {dtype}; it serves {_listed(self.dtypes)}"
        if k > self.max_k:
            return f"k = {k}; its largest is {self.max_k}"
        if form not in self.forms:
            return f"the {form!r} form; it serves {_listed(self.forms)}"
        if order not in self.orders:
            return f"order={order!r}; it serves {_listed(self.orders)}"
        if tie_break not in self.tie_breaks:
            return f"tie_break={tie_break!r}; it serves {_listed(self.tie_breaks)}"
        if return_scores and not self.returns_scores:
            return "return_scores=True; it returns indices only"
        return None

    def refuses_call(self, call: Call) -> str | None:
        """`refuses` for a checked call: what most backends need as their own ``refuses``."""
        return self.refuses(
            form=call.form,
            device_type=call.scores.device.type,
            dtype=call.scores.dtype,
            k=call.k,
            order=call.order,
            tie_break=call.tie_break,
            return_scores=call.return_scores,
        )


class Backend(Protocol):
    """What the registry expects of a backend module."""

    name: str
    capabilities: Capabilities

    def unavailable(self) -> str | None:
        """Why this machine can't run the backend, or None. Cheap: called for every call."""

    def refuses(self, call: Call) -> str | None:
        """Why the backend can't serve this call, or None."""

    def run(self, call: Call) -> None:
        """Fill ``call.out`` and, where present, ``call.out_positions`` and ``call.out_scores``."""


class _Absent:
    """Stands in for a backend whose module can't be imported: always unavailable, with the reason."""

    capabilities = Capabilities(dtypes=(), max_k=0, forms=(), tie_breaks=(), orders=(), canonical=False)

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def unavailable(self) -> str | None:
        return self._reason

    def refuses(self, call: Call) -> str | None:
        return self._reason

    def run(self, call: Call) -> None:
        raise RuntimeError(f"backend {self.name!r} is not available: {self._reason}")


_loaded: dict[str, Backend] = {}
_warned: set[str] = set()


def get(name: str) -> Backend:
    """Return the backend called ``name``, importing its module on first use.

    Raises
    ------
    ValueError
        ``name`` is not one of `NAMES`.
    """
    backend = _loaded.get(name)
    if backend is None:
        if name not in NAMES:
            raise ValueError(f"backend: expected 'auto' or one of {_listed(NAMES)}, got {name!r}")
        module = f"dsa_topk.backends.{name.replace('-', '_')}"
        try:
            backend = cast(Backend, importlib.import_module(module))
        except ImportError as error:
            backend = _Absent(name, f"module {module} can't be imported ({error})")
        _loaded[name] = backend
    return backend


def choose(call: Call, requested: str = "auto") -> Backend:
    """Return the backend that serves ``call``.

    ``"auto"`` is ``cuda`` for tensors on a CUDA device that it can serve, else ``torch``; it warns once for each reason
    why a CUDA call had to leave the kernels. A named backend is used or refused, never replaced.

    Raises
    ------
    TypeError, ValueError
        ``requested`` is no backend name, or the named backend does not serve such a call (the text says why).
    RuntimeError
        The named backend can't run on this machine (the text says why).
    """
    if requested == "auto":
        if call.scores.is_cuda:
            cuda = _loaded.get("cuda") or get("cuda")
            reason = cuda.unavailable() or cuda.refuses(call)
            if reason is None:
                return cuda
            _warn_once(reason)
        return _loaded.get("torch") or get("torch")
    if not isinstance(requested, str):
        raise TypeError(f"backend: expected a str, got {type(requested).__name__}")
    backend = get(requested)
    reason = backend.unavailable()
    if reason is not None:
        raise RuntimeError(f"backend={requested!r} is not available on this machine: {reason}")
    reason = backend.refuses(call)
    if reason is not None:
        raise ValueError(f"backend={requested!r} does not serve this call: {reason}")
    return backend


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend a kind of call would use, and what the registry says of each.

    ``backend`` is None when an explicitly requested backend can't serve such a call. ``str()`` gives a readable text.
    """

    requested: str
    call: str
    backend: str | None
    reasons: dict[str, str] = field(default_factory=dict)
    details: str = ""

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        lines = [f"{self.call}, backend={self.requested!r} -> {self.backend or 'refused'}"]
        lines += [f"  {name:<{width}}  {reason}" for name, reason in self.reasons.items()]
        if self.details:
            lines += [f"  {self.backend}: {line}" for line in self.details.splitlines()]
        return "\n".join(lines)


def explain(
    *,
    form: Form = "positions",
    device: _torch.device | str | None = None,
    dtype: _torch.dtype = _torch.float32,
    k: int = 2048,
    order: Order = "position",
    tie_break: TieBreak = "smallest",
    return_scores: bool = False,
    rows: int | None = None,
    width: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """Say which backend a kind of call would use and why, without making any tensor.

    Parameters
    ----------
    form : {"positions", "ragged", "paged"}
        Which public function.
    device : _torch.device or str, optional
        Where the scores would be; default is ``"cuda"`` where torch sees one, else ``"cpu"``.
    dtype, k, order, tie_break, return_scores
        As in the call.
    rows, width : int, optional
        Shape of the scores; a backend that chooses by shape describes its choice when they are given.
    backend : str
        ``"auto"`` or a backend's name.

    Returns
    -------
    Explanation
        ``.backend`` (a name, or None when the requested backend refuses), ``.reasons`` per backend, ``str()``.

    Raises
    ------
    ValueError
        An argument has a value that no call could have.
    """
    if backend != "auto" and backend not in NAMES:
        raise ValueError(f"backend: expected 'auto' or one of {_listed(NAMES)}, got {backend!r}")
    for name, value, allowed in (("form", form, FORMS), ("order", order, ORDERS), ("tie_break", tie_break, TIE_BREAKS)):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {_listed(allowed)}, got {value!r}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: expected 1 <= k <= {MAX_K}, got {k}")
    where = _torch.device(device if device is not None else ("cuda" if _torch.cuda.is_available() else "cpu"))

    problems: dict[str, str | None] = {}
    for name in NAMES:
        candidate = get(name)
        reason = candidate.unavailable()
        if reason is not None:
            problems[name] = f"not available: {reason}"
            continue
        reason = candidate.capabilities.refuses(
            form=form,
            device_type=where.type,
            dtype=dtype,
            k=k,
            order=order,
            tie_break=tie_break,
            return_scores=return_scores,
        )
        problems[name] = None if reason is None else f"refuses {reason}"

    if backend == "auto":
        chosen = "cuda" if where.type == "cuda" and problems["cuda"] is None else "torch"
    else:
        chosen = backend
    served = problems[chosen] is None

    reasons = {}
    for name in NAMES:
        capabilities = get(name).capabilities
        note = f" ({capabilities.note})" if capabilities.note else ""
        if problems[name] is not None:
            reasons[name] = f"{problems[name]}"
        elif name == chosen:
            reasons[name] = f"chosen{note}"
        elif not capabilities.canonical:
            reasons[name] = f"could serve it when named; not canonical, so never chosen by 'auto'{note}"
        else:
            reasons[name] = f"could serve it when named{note}"

    details = ""
    describe = getattr(get(chosen), "describe", None)
    if served and describe is not None:
        details = str(
            describe(
                form=form,
                device=where,
                dtype=dtype,
                k=k,
                order=order,
                tie_break=tie_break,
                return_scores=return_scores,
                rows=rows,
                width=width,
            )
        )
    shape = f"[{'R' if rows is None else rows}, {'N' if width is None else width}]"
    text = f"topk_{form}: scores {shape} {dtype} on {where}, k={k}, order={order!r}, tie_break={tie_break!r}"
    return Explanation(backend, text, chosen if served else None, reasons, details)


def _warn_once(reason: str) -> None:
    if reason in _warned or len(_warned) >= _MAX_WARNINGS:
        return
    _warned.add(reason)
    warnings.warn(
        f"dsa_topk: a call on a CUDA device falls back to the slower torch backend: {reason}",
        RuntimeWarning,
        stacklevel=5,
    )


def _listed(items: tuple[object, ...]) -> str:
    return ", ".join(repr(item) if isinstance(item, str) else str(item) for item in items)
