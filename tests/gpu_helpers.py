"""What the GPU tests share: where a test runs, the launches that it forces, calls and their outputs, guarded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from dsa_topk import _plan
from dsa_topk.testing import CallShape, shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLUSTERS = (2, 3, 4, 7, 8, 16)  # the smallest, odd ones, the largest portable one, the largest of all
POISON = {4: 0x5A5A5A5A, 2: 0x5A5A}

Test = Callable[..., None]


def on_gpu(test: Test) -> Test:
    """Only on a GPU."""
    return pytest.mark.gpu(test)


def on_two_gpus(test: Test) -> Test:
    """Only where there are two GPUs."""
    return pytest.mark.gpu(pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")(test))


@dataclass(frozen=True)
class Target:
    """Where a test runs. On ``torch`` sizes are small: there the test is tried, not the kernels."""

    backend: str
    device: str

    @property
    def small(self) -> bool:
        """Whether the machine is a CPU."""
        return self.device == "cpu"

    def plans(self, rows: int, width: int, k: int) -> list[_plan.Plan | None]:
        """The backend's own choice (None), then each kernel forced, cluster kernels with each of `CLUSTERS`."""
        if self.small:
            return [None, None]
        return [None, *forced_plans(rows, width, k)]


CPU = Target("torch", "cpu")
GPU = Target("cuda", "cuda")


@functools.lru_cache(maxsize=8)
def device_limits(index: int) -> _plan.DeviceLimits:
    """What the device can do, as the backend has probed it."""
    from dsa_topk.backends import cuda

    return cuda._load(index)[1]


def forced_plans(rows: int, width: int, k: int) -> list[_plan.Plan]:
    """Each kernel of csrc/launch.h; those that spread a row over a cluster with each size that the device can run."""
    limits = device_limits(torch.cuda.current_device())
    usual = _plan.choose(rows, width, k, limits)
    plans = []
    for kernel in _plan.KERNELS:
        sizes = [1]
        if kernel in _plan.SEVERAL:
            sizes = [c for c in CLUSTERS if limits.clusters[c] > 0]
        elif kernel in _plan.SPREAD:
            sizes = [5]
        plans += [dataclasses.replace(usual, kernel=kernel, cluster=size) for size in sizes]
    return plans


@contextlib.contextmanager
def launched_as(plan: _plan.Plan | None) -> Iterator[None]:
    """Force ``plan`` inside the block; None leaves the choice to the backend."""
    if plan is None:
        yield
        return
    from dsa_topk.backends import cuda

    with cuda.use_plan(plan):
        yield


@dataclass(frozen=True)
class Mode:
    """The switches of a call."""

    order: str = "position"
    tie_break: str = "smallest"
    return_scores: bool = False
    positions: bool = False  # ask for out_positions, where the form has them


MODES = [
    Mode(order, tie, both, both)
    for order in ("position", "score")
    for tie in ("smallest", "largest")
    for both in (False, True)
]


@dataclass
class Outputs:
    """What a call wrote."""

    out: torch.Tensor
    positions: torch.Tensor | None
    scores: torch.Tensor | None

    def differs(self, other: Outputs) -> torch.Tensor:
        """Whether any bit differs: a bool on the device, so that nothing waits."""
        pairs = [(self.out, other.out), (self.positions, other.positions), (self.scores, other.scores)]
        found = torch.zeros((), dtype=torch.bool, device=self.out.device)
        for mine, theirs in pairs:
            if mine is not None and theirs is not None:
                found = found | (bits(mine) != bits(theirs)).any()
        return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: NaN equals itself, and the zeros differ."""
    return (
        tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        if tensor.is_floating_point()
        else tensor
    )


def select(target: Target, shape: CallShape, scores: torch.Tensor, mode: Mode) -> Outputs:
    """One call through the public function."""
    extra = {}
    positions = None
    if mode.positions and shape.form != "positions":
        positions = extra["out_positions"] = torch.full(
            (shape.rows, shape.k), -7, dtype=torch.int32, device=scores.device
        )
    result = shape.call(
        scores,
        order=mode.order,
        tie_break=mode.tie_break,
        return_scores=mode.return_scores,
        backend=target.backend,
        **extra,
    )
    out, returned = result if mode.return_scores else (result, None)
    return Outputs(out, positions, returned)


def verify(shape: CallShape, scores: torch.Tensor, mode: Mode, outputs: Outputs, context: object = "") -> None:
    """Fail unless the outputs meet the contract."""
    verdict = shape.check(
        scores,
        outputs.out,
        order=mode.order,
        tie_break=mode.tie_break,
        positions=outputs.positions,
        returned_scores=outputs.scores,
    )
    assert verdict.ok, (
        f"{shape.name}, k={shape.k}, width={shape.width}, {mode}, {context}: {verdict.reason} [{verdict.bad_rows} rows]"
    )


@functools.lru_cache(maxsize=4096)
def shape_of(
    name: str,
    rows: int,
    width: int,
    k: int,
    device: str,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int32,
    page_size: int = 64,
) -> CallShape:
    """A named call shape, made once."""
    return shapes.make(
        name, rows=rows, width=width, k=k, device=device, seed=seed, index_dtype=index_dtype, page_size=page_size
    )


@dataclass
class Verdicts:
    """Flags that stay on the device until all calls are queued, each with what it is about."""

    flags: list[torch.Tensor] = field(default_factory=list)
    about: list[str] = field(default_factory=list)

    def add(self, bad: torch.Tensor, about: str) -> None:
        """``bad`` is a bool on the device."""
        self.flags.append(bad)
        self.about.append(about)

    def settle(self) -> None:
        """Wait once, and fail with all that is bad."""
        bad = torch.stack(self.flags).tolist() if self.flags else []
        wrong = [about for flag, about in zip(bad, self.about, strict=True) if flag]
        assert not wrong, f"{len(wrong)} of {len(bad)} differ: " + "; ".join(wrong[:5])


class Frame:
    """A tensor in the middle of poisoned memory: rows before and behind it, columns left and right of every row."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str, pad: int = 33) -> None:
        self._poison = POISON[dtype.itemsize]
        integer = torch.int32 if dtype.itemsize == 4 else torch.int16
        self._whole = torch.full((rows + 2, columns + 2 * pad), self._poison, dtype=integer, device=device)
        self._pad = pad
        self.tensor = self._inside(self._whole).view(dtype)

    def _inside(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[1:-1, self._pad : -self._pad]

    def intact(self) -> bool:
        """Whether every guard still holds the poison."""
        copy = self._whole.clone()
        self._inside(copy).fill_(self._poison)
        return bool((copy == self._poison).all())

    def contents(self) -> torch.Tensor:
        """A copy of everything, guards included, as integers."""
        return self._whole.clone()

    def unchanged_since(self, contents: torch.Tensor) -> bool:
        """Whether not one bit differs from an earlier `contents`."""
        return torch.equal(self._whole, contents)
