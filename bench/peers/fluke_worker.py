"""fluke's FedAVG: a round is 10 % of 100 clients, one after another, and the mean of their models.

fluke trains whole epochs: its own loader is told to take 400 of a client's 980 examples, which is
10 shuffled batches of 40 a round. In memory, no evaluation, no progress bar, no closing round.
"""

# mypy: ignore-errors

import sys
from contextlib import nullcontext
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import torchmetrics  # noqa: F401  # looks for a real torchvision, so before the stand-in
from torch import nn

from bench.peers import common


class StandIn(ModuleType):
    """Anything that is asked of it is an empty class: fluke imports torchvision, and uses nothing
    of it here; there is not a build of it for every build of PyTorch.
    """  # noqa: D205

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for part in ("", ".datasets", ".datasets.utils", ".models", ".transforms"):
    sys.modules["torchvision" + part] = StandIn("torchvision" + part)

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402


class Network(nn.Sequential):
    """784-80-60-10 with ELU."""

    def __init__(self) -> None:
        a, b, c, d = common.SIZES
        super().__init__(
            nn.Linear(a, b), nn.ELU(), nn.Linear(b, c), nn.ELU(), nn.Linear(c, d)
        )  # fmt: skip


class Loss(nn.CrossEntropyLoss):
    """The mean cross-entropy, counting its calls."""

    calls = 0

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """As it is."""
        Loss.calls += 1
        return super().forward(input, target)


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """Clients with fixed data; SGD; an unweighted mean."""
    settings = FlukeENV()
    settings.set_device("cpu")
    settings.set_inmemory(True)
    settings.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    settings._rich_live_renderer = nullcontext()
    part = (common.TAU * common.BATCH + 0.5) / common.SIZE
    loaders = [
        FastDataLoader(
            torch.from_numpy(a), torch.from_numpy(b), num_labels=10, batch_size=common.BATCH,
            shuffle=True, percentage=part,
        )
        for a, b in zip(x, y, strict=True)
    ]  # fmt: skip
    data = DummyDataContainer(loaders, [None] * common.CLIENTS, None, 10)
    model = Network()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), common.first_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    algorithm = FedAVG(
        common.CLIENTS,
        DataSplitter(data),
        DDict(
            model=model,
            client=DDict(
                batch_size=common.BATCH, local_epochs=1, loss=Loss,
                optimizer=DDict(name="SGD", lr=common.RATE),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            ),
            server=DDict(weighted=False),
        ),
    )  # fmt: skip
    # Every call of `run` would end by sending the model to all clients that ever took part.
    algorithm.finalize = lambda: None

    def rounds(n: int) -> None:
        algorithm.run(n, common.COHORT / common.CLIENTS)

    def weights() -> common.Weights:
        return [p.detach().numpy().copy() for p in algorithm.server.model.parameters()]

    versions = f"{version('fluke-fl')}, torch {torch.__version__}"
    return common.Contestant(versions, rounds, weights, lambda: Loss.calls)


if __name__ == "__main__":
    torch.set_num_threads(common.threads())
    common.serve("fluke", build, torch.get_num_threads())
