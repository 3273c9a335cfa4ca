"""Batch files: what is read back, what is refused and how, and that a write is whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dsa_topk.io import Batch, InputError, atomic_path, read_batch, read_tensors, write_tensors


def full_batch() -> Batch:
    return Batch(
        scores=torch.arange(12, dtype=torch.float32).reshape(2, 6),
        lengths=torch.tensor([6, 3], dtype=torch.int32),
        row_starts=torch.tensor([0, 2]),
        out_offsets=torch.tensor([10, 20], dtype=torch.int32),
        page_table=torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        page_size=4,
        row_to_batch=torch.tensor([1, 0]),
        page_table_starts=torch.tensor([0, 1], dtype=torch.int32),
    )


def write_and_fail(path: Path, error: BaseException | type[BaseException], *, force: bool = False) -> None:
    with atomic_path(path, force=force) as temporary:
        temporary.write_bytes(b"half")
        raise error


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_batch_comes_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    batch = full_batch()
    batch.scores[0, :3] = torch.tensor([float("nan"), -0.0, float("-inf")])
    write_tensors(tmp_path / f"a{suffix}", batch.tensors())
    back = read_batch(tmp_path / f"a{suffix}")
    assert torch.equal(back.scores.view(torch.int32), batch.scores.view(torch.int32))
    assert back.page_size == 4
    for name, tensor in batch.tensors().items():
        if name not in ("scores", "page_size"):
            found = getattr(back, name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_scores_keep_their_type_in_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tensors(tmp_path / "a.safetensors", {"scores": torch.ones(1, 2, dtype=dtype)})
    assert read_batch(tmp_path / "a.safetensors").scores.dtype == dtype


def test_big_endian_arrays_are_read_by_value(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", scores=np.ones((1, 2), dtype=">f4"), lengths=np.array([2], dtype=">i4"))
    back = read_batch(tmp_path / "a.npz")
    assert back.lengths is not None
    assert back.lengths.tolist() == [2]
    assert back.scores.tolist() == [[1.0, 1.0]]


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    shared = torch.arange(6, dtype=torch.int32)
    tensors = {"lengths": shared, "row_starts": shared, "out_offsets": shared[2:]}
    write_tensors(tmp_path / "a.safetensors", tensors)
    back = read_tensors(tmp_path / "a.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_other_tensors_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"scores": torch.ones(1, 2), "note": torch.ones(5, dtype=torch.uint8)})
    assert read_batch(tmp_path / "a.safetensors").lengths is None


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        (full_batch(), "paged"),
        (Batch(torch.ones(1, 1), out_offsets=torch.zeros(1, dtype=torch.int32)), "ragged"),
        (Batch(torch.ones(1, 1)), "positions"),
    ],
)
def test_the_form_follows_from_the_tensors(batch: Batch, form: str) -> None:
    assert batch.form() == form


def test_a_form_without_its_tensors_is_refused_by_name() -> None:
    batch = full_batch()
    batch.page_size = None
    with pytest.raises(InputError, match=r"'page_size'.*missing"):
        batch.kwargs("paged")
    with pytest.raises(InputError, match=r"'out_offsets'.*missing"):
        Batch(torch.ones(1, 1)).kwargs("ragged")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("scores", torch.ones(2, 3, dtype=torch.float64)),
        ("scores", torch.ones(2, 3, dtype=torch.int32)),
        ("scores", torch.ones(3)),
        ("lengths", torch.full((2,), float("nan"))),
        ("lengths", torch.ones(2, dtype=torch.bool)),
        ("lengths", torch.ones(2, 1, dtype=torch.int32)),
        ("row_starts", torch.ones(2, dtype=torch.int16)),
        ("page_table", torch.ones(2, 2, dtype=torch.int64)),
        ("page_table", torch.full((2, 2), float("nan"))),
        ("page_size", torch.ones(2, dtype=torch.int32)),
        ("page_size", torch.tensor(float("nan"))),
    ],
)
def test_wrong_dtypes_and_ranks_are_refused_by_name(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    write_tensors(tmp_path / "a.safetensors", {"scores": torch.ones(2, 3), name: tensor})
    with pytest.raises(InputError, match=rf"a\.safetensors: tensor '{name}' must be .*, got "):
        read_batch(tmp_path / "a.safetensors")


def test_missing_scores_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"lengths": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(InputError, match="'scores' is missing"):
        read_batch(tmp_path / "a.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize(
    "keep", [0, 1, 7, 8, 60, -1], ids=lambda keep: f"first {keep}"
)  # each part of a header, and the data
def test_truncated_files_are_refused(tmp_path: Path, suffix: str, keep: int) -> None:
    path = tmp_path / f"a{suffix}"
    write_tensors(path, full_batch().tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"is empty|broken or truncated") as caught:
        read_batch(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_files_of_noise_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(InputError, match="broken or truncated"):
        read_batch(path)


def test_pickles_in_an_npz_are_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(ran),)

    np.savez(tmp_path / "a.npz", scores=np.array([Trap()], dtype=object))
    with pytest.raises(InputError):
        read_batch(tmp_path / "a.npz")
    assert not ran.exists()


def test_a_bare_array_under_the_name_of_an_npz_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.ones((2, 2)))
    with pytest.raises(InputError, match="bare array"):
        read_batch(tmp_path / "a.npz")


def test_texts_in_an_npz_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", scores=np.array([["a", "b"]]))
    with pytest.raises(InputError, match="'scores' has the unusable dtype"):
        read_batch(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "why"), [("absent.npz", "cannot be read"), ("a.txt", "unknown kind"), ("d.npz", "cannot be read")]
)
def test_unreadable_paths_say_why(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "d.npz").mkdir()
    with pytest.raises(InputError, match=why):
        read_tensors(tmp_path / name)


def test_an_existing_file_stays_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        write_tensors(path, {"scores": torch.ones(1, 1)})
    assert path.read_bytes() == b"mine"
    write_tensors(path, {"scores": torch.ones(1, 1)}, force=True)
    assert read_batch(path).scores.tolist() == [[1.0]]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    temporary = atomic_path(path)
    temporary.__enter__().write_bytes(b"ours")
    path.write_bytes(b"theirs")
    with pytest.raises(InputError, match="appeared"):
        temporary.__exit__(None, None, None)
    assert path.read_bytes() == b"theirs"
    assert listing(tmp_path) == ["a.npz"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_write_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_fail(tmp_path / "a.npz", error)
    assert listing(tmp_path) == []


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"old")
    with pytest.raises(RuntimeError):
        write_and_fail(tmp_path / "a.npz", RuntimeError, force=True)
    assert (tmp_path / "a.npz").read_bytes() == b"old"
    assert listing(tmp_path) == ["a.npz"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: No space left"):
        write_and_fail(tmp_path / "a.npz", OSError(28, "No space left on device"))
    assert listing(tmp_path) == []


def test_npz_refuses_bfloat16_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="npz cannot hold the bfloat16"):
        write_tensors(tmp_path / "a.npz", {"scores": torch.ones(1, 1, dtype=torch.bfloat16)})
    assert listing(tmp_path) == []


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_outputs_have_the_rights_of_ordinary_files(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / f"a{suffix}", {"scores": torch.ones(1, 1)})
    assert (tmp_path / f"a{suffix}").stat().st_mode == (tmp_path / "plain").stat().st_mode
