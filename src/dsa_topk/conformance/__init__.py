"""The suite, the runner and the fuzzer behind ``dsa-topk check`` and ``dsa-topk fuzz``."""
