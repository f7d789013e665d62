"""Makes `harness` and `models` importable and keeps the parent process out of the ranks' way."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("fullshard", deadline=None)  # a busy machine is no failure
settings.load_profile("fullshard")


def pytest_report_header() -> str:
    """Which part of the tests that repeat themselves runs."""
    import rotation

    return rotation.header()
