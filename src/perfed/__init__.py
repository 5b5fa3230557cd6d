"""perfed: personalised federated learning, exactly as published."""

from perfed.simulation.devices import prepare as _prepare

_prepare()  # before anything below can start JAX

from perfed.data import Federation, load, synthetic  # noqa: E402
from perfed.errors import ConfigError, DataError, DivergedError, FieldError  # noqa: E402
from perfed.experiment import Config, Result, run, simulate  # noqa: E402
from perfed.methods import FedAvg, Local, Method, PerFedAvg, PFedMe  # noqa: E402
from perfed.models import CNN, GRU, MLP, MLR, from_equinox, from_flax  # noqa: E402
from perfed.objective import Objective, Task  # noqa: E402
from perfed.simulation import Sequential, Setup, Vectorised  # noqa: E402

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "MLR",
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FedAvg",
    "Federation",
    "FieldError",
    "Local",
    "Method",
    "Objective",
    "PFedMe",
    "PerFedAvg",
    "Result",
    "Sequential",
    "Setup",
    "Task",
    "Vectorised",
    "from_equinox",
    "from_flax",
    "load",
    "run",
    "simulate",
    "synthetic",
]
