"""``python -m dsa_topk.bench``: the benchmark where typer is not installed (a bare GPU machine)."""

import sys

from .app import parse, run

if __name__ == "__main__":
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)  # as dsa-topk bench: 1 is a wrong result
