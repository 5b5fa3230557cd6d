"""Apple's pfl: a round is one central iteration of `FederatedAveraging` on its simulated backend.

One model of the process goes from user to user. BENCH_MODE "processes" shares the users out over
as many processes as BENCH_THREADS says, each with one thread, by pfl's own torch.distributed; else
PyTorch gets the threads. pfl does not shuffle a user's data: a user's batches are the same ten,
views of memory, in every round, where the others gather theirs afresh.
"""

# mypy: ignore-errors

import os
import socket
import subprocess
import sys
from typing import Any

THREADS = int(os.environ.get("BENCH_THREADS", "1"))
PROCESSES = THREADS if os.environ.get("BENCH_MODE") == "processes" else 1


def join_others() -> None:
    """Set what pfl reads when it is imported; the first process starts the others."""
    if PROCESSES == 1:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if "PFL_WORKER_RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"127.0.0.1:{port}"] * PROCESSES)
    command = [sys.executable, "-m", "bench.peers.pfl_worker"]
    for rank in range(1, PROCESSES):
        environment = os.environ | {"PFL_WORKER_RANK": str(rank)}
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    os.environ["PFL_WORKER_RANK"] = "0"


join_others()

import numpy as np  # noqa: E402
import pfl.version  # noqa: E402
import torch  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch import nn  # noqa: E402

from bench.peers import common  # noqa: E402


class Network(nn.Sequential):
    """784-80-60-10 with ELU, and what pfl asks of a model."""

    calls = 0

    def __init__(self) -> None:
        a, b, c, d = common.SIZES
        super().__init__(
            nn.Linear(a, b), nn.ELU(), nn.Linear(b, c), nn.ELU(), nn.Linear(c, d)
        )  # fmt: skip

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        self.calls += 1
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, *_: Any) -> dict[str, Any]:
        """Never asked for: nothing is evaluated."""
        raise NotImplementedError


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """Users' data sets made once, so that pfl's cache of batches holds."""
    np.random.seed(0)  # the same users for all processes
    torch.set_num_threads(1 if PROCESSES > 1 else THREADS)
    users = [
        PyTorchTensorDataset((torch.from_numpy(a), torch.from_numpy(b)), user_id=str(i))
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    data = FederatedDataset(
        users.__getitem__, get_user_sampler("minimize_reuse", range(common.CLIENTS))
    )
    network = Network()
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), common.first_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    backend = SimulatedBackend(data, data)
    algorithm = FederatedAveraging()
    # Iteration 0 would evaluate, whatever the frequency.
    algorithm._current_central_iteration = 1
    train = NNTrainHyperParams(
        local_batch_size=common.BATCH,
        local_num_epochs=None,
        local_num_steps=common.TAU,
        local_learning_rate=common.RATE,
    )

    def rounds(n: int) -> None:
        if PROCESSES > 1 and os.environ["PFL_WORKER_RANK"] == "0":
            torch.distributed.broadcast(torch.tensor([n]), 0)
        params = NNAlgorithmParams(
            central_num_iterations=algorithm._current_central_iteration + n,
            evaluation_frequency=1 << 60,
            train_cohort_size=common.COHORT,
            val_cohort_size=None,
        )
        algorithm.run(params, backend, model, train, send_metrics_to_platform=False)

    def weights() -> common.Weights:
        return [p.detach().numpy().copy() for p in network.parameters()]

    def close() -> None:
        if PROCESSES > 1:
            torch.distributed.broadcast(torch.zeros(1, dtype=torch.int64), 0)

    version = f"{pfl.version.__version__}, torch {torch.__version__}"
    counted = (lambda: network.calls) if PROCESSES == 1 else None
    return common.Contestant(version, rounds, weights, counted, close)


def follow() -> None:
    """What the processes but the first do: as many rounds as it says."""
    contestant = build(*common.clients())
    wanted = torch.zeros(1, dtype=torch.int64)
    while True:
        torch.distributed.broadcast(wanted, 0)
        if not wanted.item():
            return
        contestant.rounds(int(wanted))


if __name__ == "__main__":
    if os.environ.get("PFL_WORKER_RANK", "0") != "0":
        follow()
    else:
        common.serve("pfl", build, THREADS)
