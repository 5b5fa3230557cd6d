"""Per-FedAvg as the authors of pFedMe ran it: another method than Per-FedAvg as published.

In their code of June 2020, which made pFedMe's Table 1, a local step does not go back to w before
the second gradient: it is two plain SGD steps, with alpha on one batch and with beta on the next.
Before scoring, a client takes the same two steps from the global w, the first on a batch of its
*test* rows. Importing this module registers the method and that protocol, by their names.
"""

from typing import ClassVar, final

import jax
from jaxtyping import Array

from perfed.core.errors import FieldError
from perfed.core.objective import Batch, BatchSize, Objective
from perfed.core.random import Purpose
from perfed.core.trees import Params, sgd_step
from perfed.evaluation import ADAPTATIONS
from perfed.methods import (
    ClientState,
    LocalUpdate,
    Method,
    Rate,
    Received,
    RoundContext,
    method,
    register,
)
from perfed.methods.steps import local_sgd, take_steps
from perfed.simulation import ClientRecord, EngineState, Experiment
from perfed.simulation.experiment import DeviceData

TEST_THEN_TRAIN = "test-then-train"


@register
@final
@method("two-step-per-fedavg")
class TwoStepPerFedAvg(Method):
    """Two SGD steps per local step, with alpha and then with beta; w is not restored in between.

    Attributes:
        alpha: the step size of the first of the two steps.
        beta: the step size of the second.
        tau: local steps, of two SGD steps each, per round.
        batch: examples per SGD step.
    """

    step_sizes: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    local_steps: ClassVar[str] = "tau"

    alpha: Rate = 0.03
    beta: Rate = 0.003
    tau: int = 20
    batch: BatchSize = 20

    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """Tau times w <- w - alpha grad f_i(w; D), then w <- w - beta grad f_i(w; D')."""
        first, second = jax.random.split(context.key)
        batches = (
            objective.batches(first, self.tau, self.batch),
            objective.batches(second, self.tau, self.batch),
        )

        def step(w: Params, pair: tuple[Batch, Batch]) -> Params:
            w = sgd_step(w, self.alpha, objective.grad(w, pair[0]))
            return sgd_step(w, self.beta, objective.grad(w, pair[1]))

        return LocalUpdate(take_steps(step, received.params, batches, self.tau)[0])

    def gradient_count(self, size: int) -> int:
        """Two for each local step."""
        return 2 * super().gradient_count(size)


def adapt_on_test_then_train(
    experiment: Experiment,
    data: DeviceData,
    state: EngineState,
    record: ClientRecord,
    client: Array,
) -> Params:
    """`adapt_on = "test-then-train"`: the two steps from w, on a test and on a training batch.

    The protocol of pFedMe's Table 1 for Per-FedAvg. The model is then scored on rows that it was
    adapted on, so its scores compare with that table and nothing else.
    """
    method = experiment.method
    if not isinstance(method, TwoStepPerFedAvg):
        allowed = f"is for the method {TwoStepPerFedAvg.name}, not for {method.name}"
        raise FieldError("adapt_on", TEST_THEN_TRAIN, allowed)
    if experiment.task.is_state is not None:
        allowed = "is for models without running statistics, as those of the paper are"
        raise FieldError("adapt_on", TEST_THEN_TRAIN, allowed)
    w = experiment.received(state, record).params
    key = experiment.client_key(Purpose.PERSONALIZE, state.round, data.number[client])
    steps = ((data.test, method.alpha), (data.train, method.beta))
    for (rows, rate), own_key in zip(steps, jax.random.split(key), strict=True):
        w = local_sgd(
            experiment.objective(rows, client, data.frozen), w, rate, 1, method.batch, own_key
        )
    return w


ADAPTATIONS[TEST_THEN_TRAIN] = adapt_on_test_then_train
