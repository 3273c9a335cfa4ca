"""Batches in files: read the inputs of one selection call, write its results (safetensors and npz)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ._files import staged

Form = Literal["positions", "ragged", "paged"]

#: The tensors of a batch file, with their shapes; any other tensor in the file is ignored.
TENSOR_NAMES = {
    "scores": "[R, N] float32, bfloat16 or float16",
    "lengths": "[R] int32 or int64",
    "row_starts": "[R] int32 or int64",
    "out_offsets": "[R] int32 or int64",
    "page_table": "[B, T] int32",
    "page_size": "one int32 or int64",
    "row_to_batch": "[R] int32 or int64",
    "page_table_starts": "[R] int32 or int64",
}

SUFFIXES = (".safetensors", ".npz")


class InputError(ValueError):
    """A file that the user named cannot be used; the message is one line that says which and why."""


@dataclass
class Batch:
    """The tensors of one selection call, as they lie in a batch file.

    Attributes
    ----------
    scores : torch.Tensor
        ``[R, N]`` float32, bfloat16 or float16; the only one that every file must have.
    lengths, row_starts, out_offsets, row_to_batch, page_table_starts : torch.Tensor or None
        ``[R]`` int32 or int64, as in the public functions.
    page_table : torch.Tensor or None
        ``[B, T]`` int32.
    page_size : int or None
        Score positions per page.
    """

    scores: torch.Tensor
    lengths: torch.Tensor | None = None
    row_starts: torch.Tensor | None = None
    out_offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int | None = None
    row_to_batch: torch.Tensor | None = None
    page_table_starts: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors under their file names, without the absent ones."""
        found: dict[str, torch.Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                found[field.name] = value
            elif value is not None:
                found[field.name] = torch.tensor(value, dtype=torch.int64)
        return found

    def form(self) -> Form:
        """Return the form the tensors are for: paged if there is a page table, else ragged if there are offsets."""
        if self.page_table is not None:
            return "paged"
        return "ragged" if self.out_offsets is not None else "positions"

    def kwargs(self, form: Form) -> dict[str, Any]:
        """Return the keyword arguments of the form's public function.

        Raises
        ------
        InputError
            If a tensor that the form needs is not there.
        """
        needed = {"positions": (), "ragged": ("out_offsets",), "paged": ("page_table", "page_size")}[form]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise InputError(
                f"form {form} needs the tensor {missing[0]!r} ({TENSOR_NAMES[missing[0]]}), which is missing"
            )
        chosen: dict[str, Any] = {name: getattr(self, name) for name in needed}
        chosen["row_starts"] = self.row_starts
        if form == "paged":
            chosen |= {"row_to_batch": self.row_to_batch, "page_table_starts": self.page_table_starts}
        return chosen


def read_batch(path: str | os.PathLike[str]) -> Batch:
    """Read a batch file.

    Parameters
    ----------
    path : path
        A ``.safetensors`` or ``.npz`` file with the tensors of :data:`TENSOR_NAMES`.

    Returns
    -------
    Batch
        On the CPU. Only dtypes and ranks are checked here: the public functions check how the tensors fit together.

    Raises
    ------
    InputError
        If the file is missing, broken or truncated, has no scores, or holds a tensor of another dtype or rank.
    """
    tensors = read_tensors(path, only=frozenset(TENSOR_NAMES))
    if "scores" not in tensors:
        raise InputError(f"{path}: tensor 'scores' is missing (a batch needs it: {TENSOR_NAMES['scores']})")
    for name, tensor in tensors.items():
        _check_kind(path, name, tensor)
    page_size = tensors.pop("page_size", None)
    return Batch(**tensors, page_size=None if page_size is None else int(page_size.reshape(()).item()))


def _check_kind(path: str | os.PathLike[str], name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose dtype or rank is not the documented one."""
    floats, integers = (torch.float32, torch.bfloat16, torch.float16), (torch.int32, torch.int64)
    ranks: tuple[int, ...] = {"scores": (2,), "page_table": (2,), "page_size": (0, 1)}.get(name, (1,))
    dtypes = floats if name == "scores" else (torch.int32,) if name == "page_table" else integers
    if tensor.dtype not in dtypes or tensor.dim() not in ranks or (name == "page_size" and tensor.numel() != 1):
        came = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        raise InputError(f"{path}: tensor {name!r} must be {TENSOR_NAMES[name]}, got {came}")


def read_tensors(path: str | os.PathLike[str], *, only: frozenset[str] | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors of a ``.safetensors`` or ``.npz`` file, all or those named in ``only``.

    Raises
    ------
    InputError
        If the file is missing, of another kind, broken or truncated.
    """
    path = Path(path)
    _require_suffix(path)
    try:
        with path.open("rb") as file:  # the plain reasons (missing, a folder, no permission) in the system's words
            empty = not file.read(1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise InputError(f"{path}: is empty")
    try:
        return _read_safetensors(path, only) if path.suffix == ".safetensors" else _read_npz(path, only)
    except (InputError, ImportError):
        raise
    except MemoryError as error:
        raise InputError(f"{path}: does not fit into memory") from error
    except Exception as error:  # the parsers' own exceptions are many; a broken file is all that they can mean here
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not a readable {path.suffix[1:]} file (broken or truncated): {detail}") from error


def _read_safetensors(path: Path, only: frozenset[str] | None) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if only is None or name in only}  # noqa: SIM118


def _read_npz(path: Path, only: frozenset[str] | None) -> dict[str, torch.Tensor]:
    import numpy as np

    found: dict[str, torch.Tensor] = {}
    loaded = np.load(path, allow_pickle=False)  # a pickle in an untrusted file would be code execution
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise InputError(f"{path}: holds one bare array; an .npz with named arrays is needed")
    with loaded as file:
        for name in file.files:
            if only is not None and name not in only:
                continue
            array = file[name]
            if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                raise InputError(f"{path}: tensor {name!r} has the unusable dtype {array.dtype}")
            native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
            found[name] = torch.from_numpy(native)
    return found


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    force: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a ``.safetensors`` or ``.npz`` file: the whole file, or nothing.

    Parameters
    ----------
    path : path
        Where; the suffix chooses the format. npz has no bfloat16 and no metadata.
    tensors : mapping of str to torch.Tensor
        On any device.
    force : bool
        Replace an existing file. Without it one is left as it is.
    metadata : mapping of str to str, optional
        Notes kept in a safetensors header.

    Raises
    ------
    InputError
        If the file exists and ``force`` is not given, the format cannot hold a dtype, or it cannot be written.
    """
    path = Path(path)
    _require_suffix(path)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    stored: set[int] = set()
    for name, tensor in plain.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in stored:
            plain[name] = tensor.clone()  # safetensors refuses tensors that share memory
        stored.add(storage)
    if path.suffix == ".npz":
        for name, tensor in plain.items():
            if tensor.dtype == torch.bfloat16:
                raise InputError(f"{path}: npz cannot hold the bfloat16 tensor {name!r}; write a .safetensors file")
    with atomic_path(path, force=force) as temporary:
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import save_file

            try:
                save_file(plain, temporary, metadata=dict(metadata or {}) or None)
            except SafetensorError as error:  # its wrapping of a full disk and the like
                raise OSError(None, str(error)) from error
        else:
            import numpy as np

            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in plain.items()}
            with temporary.open("wb") as file:  # given a name, numpy would append its own suffix
                np.savez(file, **arrays)


def require_writable(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raise InputError when ``path`` cannot become the output: asked before long work, and again when it is written."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already (--force replaces it)")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """Give a temporary path beside ``path`` to write to; publish it when the block ends, remove it when it fails.

    Raises
    ------
    InputError
        If ``path`` exists and ``force`` is not given (also when it appears meanwhile), or on a system error while
        writing.
    """
    path = Path(path)
    require_writable(path, force=force)
    try:
        with staged(path, None if force else _publish_new) as temporary:
            yield temporary
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _publish_new(temporary: Path, path: Path) -> None:
    """Give the finished file its name unless that name is taken: a link fails where a rename would overwrite."""
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise InputError(f"{path}: appeared while it was being written (--force replaces it)") from error
    except OSError:  # a file system without hard links
        require_writable(path, force=False)
        temporary.replace(path)


def _require_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown kind of file; expected a name that ends in {' or '.join(SUFFIXES)}")
