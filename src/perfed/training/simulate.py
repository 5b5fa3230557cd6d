"""`simulate`: a whole run in one call."""

from collections.abc import Callable
from typing import Any

from perfed.core.objective import Sampling
from perfed.core.task import Model, Precision, Task
from perfed.data import Federation
from perfed.methods import Method
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import Codec, Float32
from perfed.simulation import Experiment, Network, Weighting, engine_for
from perfed.simulation.experiment import BatchNorm
from perfed.training.callbacks import OnProgress
from perfed.training.result import Result
from perfed.training.trainer import Run, Trainer, TrainOptions


def simulate(
    federation: Federation,
    model: Model,
    method: Method,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    eval_every: int | None = None,
    eval_clients: int | None = None,
    adapt_on: str = "train",
    l2: float = 0.0,
    loss: Callable[..., Any] | None = None,
    output: str | int | Callable[[Any], Any] | None = None,
    precision: Precision = "float32",
    weighting: Weighting = "uniform",
    sampling: Sampling = "replacement",
    codec: Codec | None = None,
    error_feedback: bool = False,
    pipeline: Pipeline | None = None,
    downlink: Codec | None = None,
    personal: tuple[str, ...] = (),
    batch_norm: BatchNorm = "shared",
    network: Network | None = None,
    devices: int | None = None,
    chunk: int | None = None,
    on_progress: OnProgress | None = None,
) -> Result:
    """Train a method on a federation and score every client.

    Example:
        >>> import perfed
        >>> result = perfed.simulate(
        ...     perfed.load("digits", clients=4, split="iid"),
        ...     perfed.MLR(inputs=64, classes=10),
        ...     perfed.FedAvg(lr=0.1),
        ...     rounds=2,
        ...     cohort=2,
        ... )
        >>> result.scores["personalized"].accuracy.shape  # a value for each client
        (4,)
        >>> sorted(result.personal_model(client=3))  # that client's own parameters
        ['b', 'w']

    Args:
        federation: all clients' data.
        model: what is trained; anything with `init` and `apply`.
        method: how.
        rounds: global rounds.
        cohort: clients per round.
        seed: the seed of everything random in the run.
        eval_every: score every so many rounds; None: only before the first and after the last.
        eval_clients: score a sample of so many clients, always the same; None: all.
        adapt_on: the data personal models are made from: "train", or "test" (see docs).
        l2: the weight of the penalty (l2/2) |w|^2 in every client's loss.
        loss: the losses of a batch, from the model's outputs and the labels (`Task`).
        output: which output is scored, where the model has several (`Task`).
        precision: of matrix products (`Task`).
        weighting: how the cohort is averaged (`Experiment`).
        sampling: how batches are drawn (`Objective.batches`).
        codec: how clients' deltas are written; None: as float32.
        error_feedback: whether clients keep what messages leave out, and send it later.
        pipeline: all stages from a client's delta to the mean, instead of the two before.
        downlink: how the server's model is written; None: as float32.
        personal: leaves of the model that stay with their clients, by name.
        batch_norm: what clients share of layers with running statistics (`Experiment`).
        network: what messages and computations cost in time; None: not computed.
        devices: how many devices; None: all.
        chunk: at most so many clients at once on a device; None: chosen by memory.
        on_progress: called as the run goes on.
    """
    experiment = Experiment(
        federation,
        Task(model, l2, loss, precision, output),
        method,
        cohort,
        seed,
        weighting,
        sampling,
        pipeline or Pipeline.of(codec, error_feedback),
        downlink or Float32(),
        personal,
        batch_norm,
    )
    options = TrainOptions(rounds, eval_every, eval_clients, adapt_on=adapt_on)
    engine = engine_for(experiment, devices, chunk)
    return Trainer(options, on_progress).train(Run(engine, network=network))
