"""An experiment at one client: its own data as a federation of one, and what it computes."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, final

import jax
import jax.numpy as jnp

from perfed.core.trees import Params
from perfed.data import Dataset, Federation
from perfed.data.files import client_files
from perfed.data.splits import NaturalSplit
from perfed.evaluation import SimulationEvaluator
from perfed.federation.protocol.config_checks import check_data
from perfed.federation.protocol.errors import ClientDataError
from perfed.methods import Received
from perfed.runs.config import Config
from perfed.runs.factories import check_factories
from perfed.runs.saved_model import saved_model
from perfed.simulation import ClientRecord, EngineState, Experiment, Sequential
from perfed.simulation.experiment import DeviceData, Variables
from perfed.simulation.round import Trained, train_client

# The settings of `[data]` that a client follows. The others say where a simulation finds its files.
_READ_SETTINGS: Final = ("label", "features", "task", "labels", "part")
_PREPARE_SETTINGS: Final = ("test_from", "test_fraction", "standardize", "clip", "seed")


@final
@dataclass(frozen=True)
class LocalExperiment:
    """An experiment with one client.

    Attributes:
        config: the configuration that the server sent.
        experiment: the same, of this client's data and with its number.
    """

    config: Config
    experiment: Experiment

    @classmethod
    def load(
        cls, settings: dict[str, Any], data: Path, name: str, factories: tuple[str, ...] = ()
    ) -> Self:
        """From the server's configuration and the client's own file.

        Args:
            settings: the configuration.
            data: the file.
            name: the client's name.
            factories: functions that the configuration may name as what makes the model.
        """
        config = Config.checked(settings)
        check_factories(config.model.settings(), factories, "the server's configuration")
        check_data(config)
        try:
            federation = config.scored(read_client_file(config, data, name))
        except Exception as error:
            raise ClientDataError(str(error) or type(error).__name__) from error
        return cls(config, config.build_experiment(federation, cohort=1))

    @cached_property
    def first_state(self) -> EngineState:
        """The state before the first round."""
        return self.experiment.init_state()

    @cached_property
    def extra_shape(self) -> Any:
        """The shapes of what the server sends beside the parameters."""
        return jax.eval_shape(self.experiment.method.broadcast, self.first_state.server_state)

    @cached_property
    def evaluator(self) -> SimulationEvaluator:
        """Scores the client's models."""
        config = self.config
        engine = Sequential(self.experiment)
        return SimulationEvaluator(engine, config.adapt_on, True, config.eval_training)

    def train(self, received: Received, record: ClientRecord, round: int) -> Trained:
        """The result of a local update."""
        variables, number = self.experiment.variables(), jnp.int32(round)
        trained: Trained = self._train(variables, self._data, received, record, number)
        return trained

    def model_file(self, params: Params) -> bytes:
        """The client's own model as a file."""
        common = saved_model(params, self.experiment, self.config.resolved())
        return common.with_params(params, self.experiment.federation.scaling).to_bytes()

    @cached_property
    def _data(self) -> DeviceData:
        return self.experiment.device_data()

    @cached_property
    def _train(self) -> Any:
        @jax.jit
        def train(
            variables: Variables, data: DeviceData, received: Received, record: ClientRecord, k: Any
        ) -> Trained:
            experiment = self.experiment.with_variables(variables)
            return train_client(experiment, data, received, record, k, 0)

        return train


def read_client_file(config: Config, file: Path, name: str) -> Federation:
    """A client's own file, read as the configuration says: a federation of one."""
    settings = config.data.settings()
    reading = {key: settings[key] for key in _READ_SETTINGS if key in settings}
    preparing = {key: settings[key] for key in _PREPARE_SETTINGS if key in settings}
    dataset: Dataset = client_files([file], **reading)
    federation = dataset.federation(NaturalSplit(), **preparing)
    return replace(federation, names=(name or file.stem,))
