"""The ``dsa-topk`` command: one module per command; every expected failure is one line on stderr."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dsa_topk import _start

if TYPE_CHECKING:
    import typer

#: The commands, in the order that ``--help`` lists them; each is a module here with ``register(app)``.
COMMANDS = ("info", "demo", "select", "build", "check", "fuzz", "bench")

USAGE = 2  # the exit code of everything that the user can put right


class CliError(Exception):
    """A failure to report in one line, with the exit code to leave with."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 a check failed, 2 wrong use or unusable input, 130 interrupted."""
    for name in ("typer", "rich"):
        if importlib.util.find_spec(name) is None:
            _fail(
                f"the command line needs the package {name!r}; install it with: pip install '.[tools]' in the checkout"
            )
    signal.signal(signal.SIGTERM, _stop)  # so that a killed command still removes its temporary files
    try:
        sys.exit(run(arguments))
    except BrokenPipeError:
        # The reader of our output (head, less) has gone. The interpreter would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        _start.finish()
        return _run(arguments)
    except KeyboardInterrupt:
        return _report("interrupted", _start.INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> int:
    """Run the command line; expected failures are reported, interrupts raised."""
    import typer

    from dsa_topk.io import InputError

    command = typer.main.get_command(make_app())
    try:
        code = command.main(
            args=None if arguments is None else list(arguments), prog_name="dsa-topk", standalone_mode=False
        )
        if code == _start.INTERRUPTED:  # typer has already turned Ctrl-C into this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Abort:
        raise KeyboardInterrupt from None
    except CliError as error:
        return _report(str(error), error.code)
    except InputError as error:
        return _report(str(error), USAGE)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("numpy", "safetensors", "matplotlib"):
            raise
        return _report(f"needs the package {package!r}; install it with: pip install '.[tools]' in the checkout", USAGE)
    except Exception as error:
        # typer's own errors of usage (unknown option, wrong value): their classes are not public, their method is.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if not describe().strip():  # no command: the help is printed already, and there is nothing to add
            return USAGE
        hint = getattr(getattr(error, "ctx", None), "command_path", "dsa-topk")
        return _report(f"{describe()} (see {hint} --help)", USAGE)


def make_app() -> typer.Typer:
    """Return the application with all commands."""
    import typer

    app = typer.Typer(
        name="dsa-topk",
        help="Exact, canonical and fast top-k index selection for DeepSeek Sparse Attention.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            from dsa_topk._version import __version__

            typer.echo(__version__)
            raise typer.Exit

    for name in COMMANDS:
        if importlib.util.find_spec(f"{__name__}.{name}") is None:
            continue
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


def _report(message: str, code: int) -> int:
    print("dsa-topk: " + " ".join(message.split()), file=sys.stderr)
    return code


def _fail(message: str) -> NoReturn:
    sys.exit(_report(message, USAGE))


def _stop(number: int, frame: FrameType | None) -> Any:
    sys.exit(128 + number)
