"""``python -m dsa_topk.cli``: the same as the ``dsa-topk`` command."""

from dsa_topk.cli import main

main()
