"""Ctrl-C while the ``dsa-topk`` command is still importing torch: a line and exit code 130, no traceback.

Python imports the package before any code of ``dsa_topk.cli`` runs, so this has to begin in ``__init__``. Nothing is
done where the package is imported by anything but the command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130  # exit code


def begin() -> None:
    """If this process is the command: from now on an interrupt ends it at once. There is nothing to clean up yet.

    (A KeyboardInterrupt would not do: raised inside of an import in C code it comes out as another error, or not.)
    """
    if (
        _is_command()
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in the background
    ):
        signal.signal(signal.SIGINT, _end)


def finish() -> None:
    """Interrupts raise KeyboardInterrupt again: the command has begun, and has files to remove."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Whether the interpreter was started with the command's script or module, and not by a process of it."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # what it is until the module is found
        return "dsa_topk.cli" in sys.orig_argv
    return os.path.basename(program) == "dsa-topk" and program in sys.orig_argv


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"dsa-topk: interrupted\n")
    os._exit(INTERRUPTED)
