"""Cases at true widths fill the device: give memory back after each test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _empty_cache():
    yield
    torch.cuda.empty_cache()
