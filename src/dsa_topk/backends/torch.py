"""The reference as a backend: any device, the whole contract, no speed goal."""

from __future__ import annotations

from dsa_topk import reference
from dsa_topk._call import Call
from dsa_topk.backends import Capabilities

name = "torch"
capabilities = Capabilities(note="the reference: exact on any device, no speed goal")


def unavailable() -> str | None:
    """Never: torch is what the package itself needs."""
    return None


def refuses(call: Call) -> str | None:
    """Never: the reference is the contract."""
    return None


def run(call: Call) -> None:
    """Fill the outputs of ``call`` by `dsa_topk.reference.select`."""
    reference.select(call)
