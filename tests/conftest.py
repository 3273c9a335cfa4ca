"""What every test file gets: fixed seeds, the ``gpu`` marker's skips, and where a test runs."""

from __future__ import annotations

import os
import random
import signal

import pytest
import torch
from hypothesis import settings

from gpu_helpers import CPU, GPU, Target

# Shared machines are slow now and then: no deadline. CI must not fail on another day's random examples.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

NO_GPU = None if torch.cuda.is_available() else "needs a CUDA GPU (torch.cuda.is_available() is False)"

# A shell that starts the tests in the background has SIGINT ignored, and children would inherit that: the tests of what
# an interrupt does need it as it is in the foreground.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU, under their names: pytest folds equal reasons into one line."""
    if NO_GPU is not None and item.get_closest_marker("gpu") is not None:
        pytest.skip(f"{item.nodeid.partition('[')[0]}: {NO_GPU}")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The device that tests of no particular backend use: the first GPU where there is one."""
    return torch.device("cuda", 0) if NO_GPU is None else torch.device("cpu")


@pytest.fixture(params=[pytest.param(CPU, id="torch"), pytest.param(GPU, id="cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Target:
    """Run a GPU test twice: on the kernels, and in small sizes on the reference, which tries the test itself."""
    return request.param
