"""Settings of every test process."""

import hypothesis
import torch

# Two OpenMP threads that spin beside other processes turn a 10 us product into one of 16 ms.
torch.set_num_threads(1)

# The first example of a test may compile; a time limit per example only measures the machine.
hypothesis.settings.register_profile("afore", deadline=None, max_examples=60)
hypothesis.settings.load_profile("afore")
