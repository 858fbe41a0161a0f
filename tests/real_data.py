"""The AFQMC corpus for trials: it lies beside the repository and is not part of it."""

from pathlib import Path

import pytest

AFQMC = Path(__file__).resolve().parents[2] / "shared" / "data" / "afqmc"


def afqmc(name):
    """A file of the corpus; skips the test where the corpus is not to be had."""
    file = AFQMC / name
    if not file.is_file():
        pytest.skip(f"{name} of AFQMC is not in ../shared/data/afqmc")
    return file
