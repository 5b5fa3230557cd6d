"""What a training run ends with."""

from dataclasses import dataclass
from typing import Any, final, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from perfed.core.errors import DataError, require, require_choice
from perfed.core.trees import Params, row
from perfed.data import Federation
from perfed.data.federation import decode_predictions
from perfed.evaluation import Evaluation, Evaluator, ModelKind, Scores, SimulationEvaluator
from perfed.methods import Method
from perfed.simulation import EngineState, Experiment, Traffic
from perfed.simulation.engine import Clients
from perfed.training.state import Costs, TrainState


@final
@dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
        rounds: how many rounds it ran.
        seconds: how long it took, compiling and scoring included.
        train_state: where it ended, and the scores and messages on the way.
        evaluator: what scored the clients.
        round_seconds: how long each round would have taken over the network; None: none was given.
    """

    rounds: int
    seconds: float
    train_state: TrainState
    evaluator: Evaluator
    round_seconds: Float[np.ndarray, " rounds"] | None = None

    @property
    def experiment(self) -> Experiment:
        """What was trained."""
        return self.evaluator.experiment

    @property
    def method(self) -> Method:
        """The method that ran."""
        return self.experiment.method

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.experiment.seed

    @property
    def history(self) -> tuple[Evaluation, ...]:
        """The scores of all clients, from round 0 to the last."""
        return self.train_state.history

    @property
    def state(self) -> EngineState:
        """The last state: shared parameters, the method's server state, what clients keep."""
        return self.train_state.engine

    @property
    def traffic(self) -> Traffic:
        """The bytes of every message of every round."""
        return self.train_state.traffic

    @property
    def costs(self) -> Costs:
        """Bytes and simulated time after 0, 1, 2, ... rounds."""
        return Costs.of(self.traffic, self.round_seconds)

    @property
    def scores(self) -> dict[ModelKind, Scores]:
        """The scores of all clients after the last round."""
        return self.history[-1].scores

    @property
    def global_model(self) -> Params:
        """The global model's parameters (`Experiment.common_model`)."""
        return self.experiment.common_model(self.state)

    @property
    def scored(self) -> Federation:
        """The data of the clients that were scored."""
        return self.evaluator.scored()

    def personal_models(self, clients: Clients | None = None) -> Params:
        """Clients' own parameters, stacked in the order asked for (None: all clients)."""
        if not isinstance(self.evaluator, SimulationEvaluator):
            raise DataError("personal models stay with their clients, who have them in files")
        return self.evaluator.personal_models(self.state, clients)

    def personal_model(self, client: int) -> Params:
        """One client's own parameters."""
        return row(self.personal_models([client]), 0)

    def personal_module(self, client: int) -> Any:
        """One client's own model, as a module of the library that the model came from."""
        model = self.experiment.task.model
        write_back = getattr(model, "write_back", None)
        if write_back is None:
            raise DataError(
                f"{type(model).__name__} did not come from another library's module "
                "(perfed.from_torch, from_keras, from_nnx, from_flax, from_equinox); "
                "personal_model(client) has the parameters"
            )
        return write_back(self.personal_model(client))

    def predict(
        self, client: int, x: Shaped[Any, "examples ..."], kind: ModelKind = "personalized"
    ) -> np.ndarray:
        """A client's predictions for inputs, given as they were before any scaling.

        Args:
            client: whose model, and whose scaling.
            x: inputs, along the first axis.
            kind: the client's own model, or the `global` one.

        Returns:
            The names of the most likely classes, or the targets of a regression, in their own unit.
        """
        require_choice("kind", kind, get_args(ModelKind))
        federation, x = self.experiment.federation, np.asarray(x)
        last = federation.clients - 1
        require(0 <= client <= last, "client", client, f"must be between 0 and {last}")
        shape = federation.example_shape
        allowed = f"must be some inputs of shape {shape}"
        require(x.shape[1:] == shape, "x", f"an array of shape {x.shape}", allowed)
        params = self.personal_model(client) if kind == "personalized" else self.global_model
        inputs = jnp.asarray(federation.scale(x, client))
        task = self.experiment.task
        outputs = task.scored(task.outputs(params, inputs))
        return decode_predictions(np.asarray(outputs), federation.labels, federation.target)
