"""The CUDA emulator itself: each feature computes what the hardware would, each kind of fault is reported."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from emulator.build import build, compiler
from emulator.process import Buffer, EmulationError, Options, Process
from emulator.selftest_cases import CASES, Args, ints, run

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++")

SEEDS = range(36)  # each of the 12 (schedule, latency) pairs is drawn about three times


@pytest.fixture(scope="module", params=["plain", "sanitized"])
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    p = Process(build("selftest", sanitize=request.param == "sanitized"))
    yield p
    p.close()


@pytest.mark.parametrize("case", CASES)
def test_features(process: Process, case: str) -> None:
    for seed in SEEDS:
        assert CASES[case](process, Options(seed=seed)), f"seed {seed}"


def test_blocks_that_wait_for_blocks_need_to_be_resident(process: Process) -> None:
    x, out = ints(1, 4), torch.empty(8, dtype=torch.int32)
    run(process, "chain", x, out, torch.zeros(8, dtype=torch.int32), rows=8, options=Options(resident=8))
    assert torch.equal(out, torch.arange(8, dtype=torch.int32))
    # one after another in random order: some seed starts a block before the one it waits for
    outcomes = set()
    for seed in range(8):
        workspace = torch.zeros(9 + seed, dtype=torch.int32)
        try:
            run(process, "chain", x, out, workspace, rows=8, options=Options(resident=1, seed=seed))
        except EmulationError as error:
            outcomes.add(str(error).partition(":")[0])
    assert outcomes == {"livelock"}


def bits(values: list[int]) -> list[int]:
    return [v & 0xFFFFFFFF for v in values]


def to_uint_rz(v: int, low: int, high: int) -> int:
    f = struct.unpack("f", struct.pack("i", v))[0]
    if f != f:
        return 0
    return int(max(low, min(high, int(f) if abs(f) < 2**40 else (high if f > 0 else low))))


def test_intrinsics(process: Process) -> None:
    special = [0, 1, -1, 3, 7, 8, 5, 2**31 - 1, -(2**31)]
    special += [0x7FC00000, 0x4F800000, -0x31000000, 0x4B7FFFFF, 0x3F7FFFFF, -0x40800000, 1103101952]  # as floats
    v = special + ints(16).tolist()
    out = torch.empty(28, 32, dtype=torch.int32)
    run(process, "intrinsics", torch.tensor(v, dtype=torch.int32), out.view(-1))
    u = bits(v)
    lanes = range(32)
    signed = lambda x: x - 2**32 if x >= 2**31 else x  # noqa: E731
    low, high = sum(((v[i] & 2) != 0) << i for i in range(16)), sum(((v[i] & 4) != 0) << i for i in range(16, 32))
    want = [
        [v[5]] * 32,
        [v[i - 3] if i >= 3 else v[i] for i in lanes],
        [v[i + 7] if i + 7 < 32 else v[i] for i in lanes],
        [v[i ^ 9] for i in lanes],
        [v[(i & ~7) | 1] for i in lanes],
        [sum((x & 1) << i for i, x in enumerate(v))] * 32,
        [1] * 32,
        [0] * 32,
        [sum(((x & 3) == (v[i] & 3)) << j for j, x in enumerate(v)) for i in lanes],
        [sum(v)] * 32,
        [min(v)] * 32,
        [max(u)] * 32,
        [low] * 16 + [high] * 16,
        [v[i ^ 1] for i in lanes],
        [x.bit_count() for x in u],
        [(x & -x).bit_length() for x in u],
        [32 - x.bit_length() for x in u],
        [int(f"{x:032b}"[::-1], 2) for x in u],
        [((x >> 8) & 255) | ((x >> 24) << 8) | (0x03 << 16) | (0x01 << 24) for x in u],
        [((0x80000001 << 32 | x) << 5 >> 32) for x in u],
        [x * 0xDEADBEEF >> 32 for x in u],
        [to_uint_rz(x, 0, 2**32 - 1) for x in v],
        [to_uint_rz(x, -(2**31), 2**31 - 1) for x in v],
        [min(x, 7) for x in u],
        [max(x, -5) for x in v],
        [sum(x & 1 for x in v)] * 32,
        [0] * 32,
        [1] * 32,
    ]
    for row, expected in enumerate(want):
        assert out[row].tolist() == [signed(x) for x in bits(expected)], f"intrinsic {row}"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (1, r"gave up|livelock|deadlock"),
        (3, r"divergent barrier.*selftest"),
        (
            4,
            r"deadlock.*named barrier selftest.*__syncthreads selftest|deadlock.*__syncthreads selftest.*named barrier",
        ),
        (5, r"deadlock.*mbarrier_wait parity 0 selftest.*1 of 2 arrivals"),
        (6, r"not initialised"),
        (7, r"lane 0 is not in its own mask"),
        (8, r"livelock.*spins at selftest"),
        (9, r"shared memory|heap-buffer-overflow"),
        (10, r"outside of the elements of buffer 1|use-after-poison|heap-buffer-overflow"),
        (11, r"modified input buffer 0"),
        (12, r"exits with a bulk copy|not there any more|has exited"),
        (13, r"source is not 16-byte aligned"),
        (15, r"without an arrival"),
        (16, r"died with status"),
    ],
)
def test_faults_are_reported(process: Process, fault: int, words: str) -> None:
    x, out = ints(1, 128), torch.empty(128, dtype=torch.int32)
    a = Args(n=128, rows=1, threshold=fault)
    options = Options(seed=fault, max_switches=2_000_000)
    with pytest.raises(EmulationError, match=f"(?s){words}"):
        process.launch("faults", bytes(a), [Buffer(Args.input.offset, x), Buffer(Args.out.offset, out, "w")], options)


def test_a_launch_after_a_fault_is_clean(process: Process) -> None:
    out = torch.empty(128, dtype=torch.int32)
    run(process, "faults", ints(1, 128), out, threshold=0)
    assert out[0] == 4711


@pytest.mark.parametrize("width", [127, 128, 125])
def test_reading_past_an_element_needs_the_sanitizer(width: int) -> None:
    p = Process(build("selftest", sanitize=True))
    storage = ints(4, 160)
    row = storage[1:2, 3 : 3 + width]
    with pytest.raises(EmulationError, match="use-after-poison"):
        run(p, "faults", row, torch.empty(128, dtype=torch.int32), threshold=14)
    p.close()


def test_rows_far_apart_are_reserved_not_allocated(process: Process) -> None:
    # two rows 6 GB apart: only the rows are backed by memory, so a row offset in 32 bits hits nothing
    far = torch.empty_strided((2, 64), (3 << 29, 1), dtype=torch.int32)
    far.copy_(ints(2, 64))
    out = torch.empty(64, dtype=torch.int32)
    run(process, "faults", far, out, threshold=0)
    assert out[0] == 4711


def test_a_block_of_512_threads_is_fast_enough() -> None:
    p = Process(build("selftest"))
    x = ints(8, 8192)
    out = torch.empty_like(x)
    stats = run(p, "compact", x, out, rows=8, threshold=500)
    assert stats.collectives >= 8 * 64 * 5 * 128
    p.close()
