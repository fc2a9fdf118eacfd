"""Settings of every test process."""

import os

import hypothesis
import pytest
import torch

# Two OpenMP threads that spin beside other processes turn a 10 us product into one of 16 ms.
torch.set_num_threads(1)

# The first example of a test may compile; a time limit, per example or for inputs, only measures
# the machine.
hypothesis.settings.register_profile(
    "afore",
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("afore")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_INTERPRETED or torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 or a CUDA device")
    for item in items:
        if item.get_closest_marker("interpreter"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where the kernels of a test marked `interpreter` run."""
    return "cpu" if IS_INTERPRETED else "cuda"
