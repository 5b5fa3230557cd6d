"""perfed: personalized federated learning, exactly as published."""

from perfed.simulation.devices import prepare as _prepare

_prepare()  # before anything below can start JAX

from perfed.core.errors import CodecError, ConfigError, DataError, DivergedError, FieldError  # noqa: E402
from perfed.core.objective import Objective, Task  # noqa: E402
from perfed.data import Federation, FederationWriter, load, store, synthetic  # noqa: E402
from perfed.methods import FedAvg, Local, Method, PerFedAvg, PFedMe  # noqa: E402
from perfed.models import CNN, GRU, MLP, MLR, from_equinox, from_flax  # noqa: E402
from perfed.pipeline.codecs import (  # noqa: E402
    BFloat16,
    Codec,
    Float16,
    Float32,
    LowPrecision,
    RandomK,
    Sign,
    TopK,
)
from perfed.runs import Config, Result, run, simulate  # noqa: E402
from perfed.runs.presets import fedpaq, qsgd  # noqa: E402
from perfed.simulation import Network, Sequential, Setup, Streamed, Vectorized  # noqa: E402

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "MLR",
    "BFloat16",
    "Codec",
    "CodecError",
    "Config",
    "ConfigError",
    "DataError",
    "DivergedError",
    "FedAvg",
    "Federation",
    "FederationWriter",
    "FieldError",
    "Float16",
    "Float32",
    "Local",
    "LowPrecision",
    "Method",
    "Network",
    "Objective",
    "PFedMe",
    "PerFedAvg",
    "RandomK",
    "Result",
    "Sequential",
    "Setup",
    "Sign",
    "Streamed",
    "Task",
    "TopK",
    "Vectorized",
    "fedpaq",
    "from_equinox",
    "from_flax",
    "load",
    "qsgd",
    "run",
    "simulate",
    "store",
    "synthetic",
]
