"""What importing perfed does to JAX, each in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if not k.startswith("PERFED_")} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


COUNT = "import perfed, jax; print(len(jax.devices()))"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell")
def test_one_host_device_a_core() -> None:
    assert int(python(COUNT)) == len(os.sched_getaffinity(0))


def test_the_user_decides() -> None:
    assert python(COUNT, PERFED_DEVICES="3") == "3"
    assert python(COUNT, XLA_FLAGS="--xla_force_host_platform_device_count=5") == "5"
    assert python(f"import jax; jax.config.update('jax_num_cpu_devices', 4); {COUNT}") == "4"


def test_a_jax_that_has_started_is_left_alone() -> None:
    assert python(f"import jax; jax.devices(); {COUNT}") == "1"


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    code = (
        "import perfed\n"
        "data = perfed.load('digits', clients=4)\n"
        "perfed.simulate(data, perfed.MLR(64, 10), perfed.FedAvg(), rounds=1, cohort=2)"
    )
    # Compiled as users have it: the tests may ask for less effort.
    python(code, PERFED_CACHE=str(tmp_path), XLA_FLAGS="")
    assert any(tmp_path.iterdir())


def test_how_hard_the_compiler_tries_is_the_users_to_say() -> None:
    code = "from perfed.simulation.devices import compiler_options; print(compiler_options())"
    effort = "'xla_backend_optimization_level': 1"
    passes = "'xla_disable_hlo_passes': 'cse_barrier_expander'"
    assert python(code, XLA_FLAGS="") == f"{{{effort}, {passes}}}"
    assert python(code, XLA_FLAGS="--xla_backend_optimization_level=3") == f"{{{passes}}}"
    assert python(code, XLA_FLAGS="--xla_disable_hlo_passes=dce") == f"{{{effort}}}"


def test_a_first_model_may_be_a_part_of_another_program() -> None:
    code = (
        "import jax, perfed\n"
        "from perfed import FedAvg, MLR, Experiment, Task\n"
        "setup = Experiment(perfed.load('digits', clients=4), Task(MLR(64, 10)), FedAvg(), 2)\n"
        "alone, part = setup.init_params(), jax.jit(setup.init_params)()\n"
        "print(jax.tree.map(lambda a, b: bool((a == b).all()), alone, part))"
    )
    assert python(code, XLA_FLAGS="") == "{'b': True, 'w': True}"
