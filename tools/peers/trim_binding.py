"""Cuts the CUB entry points out of FlashInfer's top-k binding, so that the module links without cub_topk.cu.

usage: trim_binding.py SOURCE TARGET
"""

import re
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:3])
statements = re.split(r"(?<=;)\n", source.read_text())  # declarations and exports are all statements that end a line
kept = [text for text in statements if not re.search(r"\bcub_topk\w*\s*[(,]", text)]
if len(kept) == len(statements) or not any("radix_topk" in text for text in kept):
    sys.exit(f"{source}: not the binding this script knows (nothing cut, or nothing left)")
target.write_text("\n".join(kept))
