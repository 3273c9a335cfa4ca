"""``python -m dsa_topk.bench``: the benchmark where typer is not installed (a bare GPU machine)."""

import sys

from .app import parse, run

if __name__ == "__main__":
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except ValueError as error:
        sys.exit(f"error: {error}")
