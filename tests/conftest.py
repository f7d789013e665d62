"""Makes `harness` and `models` importable and keeps the parent process out of the ranks' way."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


def pytest_report_header() -> str:
    """Which part of the tests that repeat themselves runs."""
    import rotation

    return rotation.header()
