"""Fixtures for all tests: worker processes that serve the whole session."""

import torch

pytest_plugins = ["hybridcp.testing.plugin"]

# The first call of a vectorised function picks its code for this processor. From several threads
# at once that has been seen to give a float64 exp with the error of a fast approximation.
torch.set_num_threads(1)
for _dtype in (torch.float32, torch.float64):
    torch.ones(1 << 16, dtype=_dtype).exp_()


def pytest_addoption(parser):
    parser.addoption(
        "--count",
        type=int,
        default=2000,
        help="random combinations of options that tests/attention/test_product.py tries",
    )
