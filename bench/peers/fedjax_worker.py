"""FedJAX's `federated_averaging`: a round is one `apply`, ten clients one after another.

BENCH_MODE is its backend: "jit", a compiled step called from Python, or "pmap", which gives each
host device a client at a time. Its own in-memory data, sampler and shuffled batches.
"""

# mypy: ignore-errors

import os
from importlib.metadata import version
from typing import Any

THREADS = int(os.environ.get("BENCH_THREADS", "1"))
MODE = os.environ.get("BENCH_MODE", "jit")
if MODE == "pmap":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={THREADS}"
    # FedJAX takes a device's part of an array for a client's; this JAX would leave it an axis of 1.
    os.environ["JAX_PMAP_NO_RANK_REDUCTION"] = "0"
elif THREADS == 1:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import fedjax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from bench.peers import common  # noqa: E402


def loss(w: Any, batch: Any, _: Any) -> Any:
    """The mean cross-entropy of the ELU network."""
    out = batch["x"]
    for a, b in zip(w[:-2:2], w[1:-2:2], strict=True):
        out = jax.nn.elu(out @ a.T + b)
    chances = jax.nn.log_softmax(out @ w[-2].T + w[-1])
    return -jnp.mean(jnp.take_along_axis(chances, batch["y"][:, None], 1))


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """SGD on both sides; the server's with rate 1 makes the mean of the clients' models."""
    fedjax.set_for_each_client_backend(MODE)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(common.RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(
            batch_size=common.BATCH, num_epochs=None, num_steps=common.TAU
        ),
    )
    data = fedjax.InMemoryFederatedData(
        {
            str(i): {"x": a, "y": b.astype(np.int32)}
            for i, (a, b) in enumerate(zip(x, y, strict=True))
        }
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, common.COHORT, seed=0)
    state = algorithm.init([jnp.asarray(w) for w in common.first_weights()])

    def rounds(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state)

    def weights() -> common.Weights:
        return [np.asarray(w) for w in state.params]

    versions = f"{version('fedjax')}, JAX {jax.__version__}"
    return common.Contestant(versions, rounds, weights)


if __name__ == "__main__":
    common.serve("fedjax", build, THREADS)
