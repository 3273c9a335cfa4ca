"""Drop-in modules with other libraries' own signatures over our kernels: change one import, keep the calls.

`dsa_topk.compat.flashinfer`, `dsa_topk.compat.sglang` and `dsa_topk.compat.vllm`. Every result is the canonical one of
the contract, which is stricter than what those libraries promise; ``docs/integrate-*.md`` list what differs.
"""
