"""Two host devices whatever the machine, and no compiled programs from earlier runs."""

import gc
import os
import shutil
import tempfile

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PERFED_DEVICES"] = "2"
os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

# What a test compiles, the others of the same session need not compile again; nor those of other
# sessions, where one is named for them (`mutants.py`).
_SHARED = os.environ.get("PERFED_TESTS_CACHE")
_BEGAN_HERE = "PYTEST_XDIST_WORKER" not in os.environ and _SHARED is None
if _SHARED is not None:
    os.environ["PERFED_CACHE"] = _SHARED
elif _BEGAN_HERE:
    os.environ["PERFED_CACHE"] = tempfile.mkdtemp(prefix="perfed-tests-")


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end; looking for garbage in it costs 5 % of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave no compiled programs behind."""
    if _BEGAN_HERE:
        shutil.rmtree(os.environ["PERFED_CACHE"], ignore_errors=True)
