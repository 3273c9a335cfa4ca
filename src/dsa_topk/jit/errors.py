"""The two errors that building and loading the CUDA module can raise, with texts that say what to do next."""

from __future__ import annotations

from pathlib import Path


class JitError(RuntimeError):
    """The CUDA module could not be built or loaded.

    Parameters
    ----------
    summary : str
        What failed, in one line.
    first_error : str, optional
        The first error line that the compiler printed.
    command : str, optional
        The full command, ready to be pasted into a shell.
    log : Path, optional
        File with the compiler's whole output.
    hint : str, optional
        What usually helps.
    """

    def __init__(
        self,
        summary: str,
        *,
        first_error: str | None = None,
        command: str | None = None,
        log: Path | None = None,
        hint: str | None = None,
    ) -> None:
        self.summary = summary
        self.first_error = first_error
        self.command = command
        self.log = log
        self.hint = hint
        parts = [summary]
        if first_error:
            parts.append(f"first error: {first_error}")
        if command:
            parts.append(f"command:     {command}")
        if log:
            parts.append(f"full log:    {log}")
        if hint:
            parts.append(f"hint:        {hint}")
        super().__init__("\n  ".join(parts))


class MissingBuildError(JitError):
    """No build for this key is cached and compiling is switched off by ``DSA_TOPK_DISABLE_JIT``.

    Parameters
    ----------
    key : str
        The cache key that was looked for.
    """

    def __init__(self, key: str, *, archs: str, looked_in: str, detail: str | None = None) -> None:
        self.key = key
        super().__init__(
            f"no cached build {key} (looked in {looked_in}) and DSA_TOPK_DISABLE_JIT forbids compiling"
            + (f"; {detail}" if detail else ""),
            hint=(
                f"one of: (1) fill the cache where nvcc exists: `dsa-topk build --arch {archs}` with the same "
                "DSA_TOPK_CACHE_DIR (no GPU needed), for instance in an image layer; (2) unset DSA_TOPK_DISABLE_JIT; "
                '(3) use backend="torch"'
            ),
        )
