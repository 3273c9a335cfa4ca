"""The documents say what is so: their commands parse, their Python runs, their links, names and variables exist."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import dsa_topk
from dsa_topk import cli
from dsa_topk.io import TENSOR_NAMES

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
PAGES = sorted(
    {*DOCUMENTS, *(path for folder in ("src", "tests", "requirements") for path in (ROOT / folder).rglob("*.md"))}
)
SOURCES = sorted(
    path
    for folder in ("src", "tests", "tools", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".cu", ".cuh", ".h", ".cpp") and ".emulator" not in path.parts
)
OURS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "contract.md", ROOT / "docs" / "integrate.md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def command_lines(path: Path) -> list[list[str]]:
    """Return the commands of a document, in words."""
    lines = "\n".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(dsa-topk [^`]+)`", path.read_text())  # and those inside sentences
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


COMMANDS = [(path, words) for path in OURS for words in command_lines(path) if words]
EXAMPLES = [(path, code) for path in OURS for code in blocks(path, "python") if "import" in code]


def test_there_is_something_to_test() -> None:
    assert len(COMMANDS) >= 8
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(
    ("path", "words"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_commands_are_ones_that_exist(path: Path, words: list[str]) -> None:
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "dsa-topk":
        group = typer.main.get_command(cli.make_app())
        command = group.commands[arguments[0]]  # type: ignore[attr-defined]
        if arguments[1:]:  # a sentence may name a command alone
            command.make_context(arguments[0], arguments[1:])  # parses; runs nothing
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{re.escape(arguments[0])}:", makefile, re.MULTILINE)
    elif program == "pip":
        extras = re.findall(r"\[(.*?)\]", " ".join(arguments))
        project = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    elif program == "bash":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert program in ("source", "pre-commit")


@pytest.mark.parametrize(("path", "code"), EXAMPLES, ids=lambda value: name(value) if isinstance(value, Path) else None)
def test_examples_run_as_written(path: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        found = (path.parent / file) if file else path
        assert found.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert heading in [title.lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("path", OURS, ids=name)
def test_dotted_names_exist(path: Path) -> None:
    for dotted in sorted(set(re.findall(r"\bdsa_topk(?:\.[A-Za-z_]\w*)+", path.read_text()))):
        if (ROOT / "src" / dotted.replace(".", "/")).exists() or dotted.endswith(".py"):
            continue
        module, _, attribute = dotted.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(dotted), dotted


#: Files that are named although they are not here: the engines' own, and what commands write.
ELSEWHERE = re.compile(r"srt/|benchmarks/results/<|results/<|tests/results/.*\.json$|<gpu>\.json$|NAME\.")
_FILE = r"[\w./*<>-]+\.(?:py|cu|cuh|h|cpp|sh|md|toml|txt|json|safetensors)"
_FOLDER = r"(?:\.ci|src|docs|tests|tools|benchmarks|requirements|csrc)/[\w./*<>-]*"


def named_files(text: str) -> set[str]:
    """Return the files and folders that a page names: in backquotes, or anywhere by their path from the root."""
    quoted = re.findall(
        rf"`({_FILE}|{_FOLDER}|[\w-]+(?:/[\w-]+)*/)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    paths = re.findall(rf"(?<![\w./-])(?={_FOLDER})({_FILE})(?![\w/])", text)  # commands and comments too
    return {file for file in [*quoted, *paths] if not ELSEWHERE.search(file)}


def is_there(file: str, page: Path) -> bool:
    """Whether a page's name for a file leads to one: from the root, the package, its parts, or the page's folder."""
    package = ROOT / "src" / "dsa_topk"
    recorded = ROOT / "benchmarks" / "results" / "nvidia-h200"  # docs/benchmarks.md lists what is in it
    places = (ROOT, page.parent, ROOT / "src", package, package / "csrc", ROOT / "tests", recorded)
    return any(next(place.glob(file), None) if "*" in file else (place / file).exists() for place in places)


def test_a_page_that_names_a_missing_file_is_noticed() -> None:
    text = "See `tools/gone.sh`, `gone.md` and `gone/`.\n```\npython benchmarks/gone.py\n```\n"
    named = named_files(text)
    assert named == {"tools/gone.sh", "gone.md", "gone/", "benchmarks/gone.py"}
    assert not any(is_there(file, ROOT / "README.md") for file in named)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_named_in_the_text_exist(path: Path) -> None:
    missing = sorted(file for file in named_files(path.read_text()) if not is_there(file, path))
    assert not missing


def test_pages_named_in_the_sources_exist() -> None:
    """Comments and messages that send a reader to a page."""
    known = {page.name for page in PAGES}
    for source in SOURCES:
        if source == Path(__file__):  # names missing ones on purpose
            continue
        for page in re.findall(r"[\w./-]*\w\.md\b", source.read_text()):
            assert is_there(page, source) if "/" in page else page in known, f"{name(source)}: {page}"


@pytest.mark.parametrize("function", ["topk_positions", "topk_ragged", "topk_paged"])
def test_the_contract_has_the_signatures(function: str) -> None:
    text = " ".join((ROOT / "docs" / "contract.md").read_text().split())
    signature = re.search(rf"{function}\((.*?)\) ?(?=topk_|```)", text)
    assert signature is not None
    written = [part.strip().partition("=") for part in signature.group(1).split(",") if part.strip() != "*"]
    actual = inspect.signature(getattr(dsa_topk, function)).parameters
    assert {name for name, _, _ in written} == set(actual)
    for parameter, _, default in written:
        if default:
            assert repr(actual[parameter].default).replace("'", '"') == default, parameter
        else:
            assert actual[parameter].default is inspect.Parameter.empty, parameter


def test_the_contract_names_every_tensor_of_a_batch_file() -> None:
    section = (ROOT / "docs" / "contract.md").read_text().partition("## Batch files")[2]
    assert all(f"`{tensor}`" in section for tensor in TENSOR_NAMES)


def test_every_environment_variable_is_in_the_readme() -> None:
    """Those that the sources mention in quotes or backquotes, so that a new one cannot go undocumented.

    Of the tests and tools, those that are read.
    """
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    ours = set(re.findall(r"[\"'`](DSA_TOPK_[A-Z_]+[A-Z])\b", sources))
    read = r"environ(?:\.get\(|\[)\"([A-Z_]+)\""
    elsewhere = {n for path in SOURCES for n in re.findall(read, path.read_text())} - {"CI", "PATH", "PYTHONPATH"}
    ours |= {variable for variable in elsewhere if variable.startswith("DSA_TOPK_")}
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{variable}`" in readme for variable in elsewhere), elsewhere
    documented = set(re.findall(r"^\| `(DSA_TOPK_[A-Z_]+)`", readme, re.MULTILINE))
    assert ours >= documented, "documented but not read"
    assert documented >= ours, "read but not documented"
    engine = set(re.findall(r"[\"'`](SGLANG_[A-Z0-9_]+)\b", sources))
    assert all(variable in (ROOT / "docs" / "integrate.md").read_text() for variable in engine)


def test_every_dependency_has_its_reason_in_the_readme() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    packages = {re.split(r"[\[<>=!]", entry)[0] for entry in re.findall(r'"([^"]+)"', section)} - {"dsa-topk"}
    table = (ROOT / "README.md").read_text().partition("| installed with |")[2].partition("\n\n")[0]
    for package in packages:
        short = package.removeprefix("nvidia-cuda")  # the three compiler wheels share a cell
        assert package in table or short in table, package


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_tables_have_as_many_cells_as_their_heads(path: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) for line in table.splitlines()}
        assert len(counts) == 1, table


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
    assert "persuasion.txt" in (ROOT / "NOTICE").read_text()
