"""Where the real data sets are, for the tests that need them."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"

# Read once: tests change the variable.
REAL = Path(os.environ.get("PERFED_DATA") or _BESIDE)

needs_real_data = pytest.mark.skipif(
    not (REAL / "mnist").is_dir(),
    reason="no real data: set PERFED_DATA to a folder with mnist/, cifar10/ and shakespeare/",
)
