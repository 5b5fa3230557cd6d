"""perfed: personalized federated learning, exactly as published."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perfed.core.jax_setup import prepare as _prepare

if TYPE_CHECKING:
    from perfed.core.errors import CodecError, ConfigError, DataError, DivergedError, FieldError
    from perfed.core.objective import Objective
    from perfed.core.task import Task
    from perfed.data import Federation, FederationWriter, load, store, synthetic
    from perfed.methods import (
        APFL,
        Ditto,
        FedAdam,
        FedALA,
        FedAvg,
        FedAvgM,
        FedBABU,
        FedPer,
        FedProx,
        FedRep,
        FedRoD,
        FedYogi,
        LGFedAvg,
        Local,
        LocalUpdate,
        Method,
        PerFedAvg,
        PFedMe,
        Received,
        RoundContext,
        Scaffold,
        method,
        register,
    )
    from perfed.methods.optimizers import SGD, Adam, AdamW, Yogi
    from perfed.models import (
        CNN,
        GRU,
        LSTM,
        MLP,
        MLR,
        LeNet,
        PFLlibCNN,
        ResNet18,
        Transformer,
        from_equinox,
        from_flax,
        from_keras,
        from_nnx,
        from_torch,
        lora,
    )
    from perfed.models.peft import load_peft, save_peft
    from perfed.pipeline import Clip, Encode, ErrorFeedback, Mean, Pipeline
    from perfed.pipeline.codecs import (
        BFloat16,
        Codec,
        Float16,
        Float32,
        LowPrecision,
        RandomK,
        Sign,
        TopK,
    )
    from perfed.runs.config import Config
    from perfed.runs.presets import fedpaq, qsgd
    from perfed.simulation import (
        Experiment,
        Network,
        Sequential,
        Streamed,
        Vectorized,
        engine_for,
    )
    from perfed.training import Callback, Result, Run, Trainer, TrainOptions, simulate

# Where each public name is; what is not used is not imported.
_PLACES = {
    "core.errors": ("CodecError", "ConfigError", "DataError", "DivergedError", "FieldError"),
    "core.objective": ("Objective",),
    "core.task": ("Task",),
    "data": ("Federation", "FederationWriter", "load", "store", "synthetic"),
    "methods": (
        "APFL", "Ditto", "FedALA", "FedAdam", "FedAvg", "FedAvgM", "FedBABU", "FedPer", "FedProx",
        "FedRep", "FedRoD", "FedYogi", "LGFedAvg", "Local", "LocalUpdate", "Method", "PFedMe",
        "PerFedAvg", "Received", "RoundContext", "Scaffold", "method", "register",
    ),
    "methods.optimizers": ("SGD", "Adam", "AdamW", "Yogi"),
    "models": (
        "CNN", "GRU", "LSTM", "LeNet", "MLP", "MLR", "PFLlibCNN", "ResNet18", "Transformer",
        "from_equinox", "from_flax", "from_keras", "from_nnx", "from_torch", "lora",
    ),
    "models.peft": ("load_peft", "save_peft"),
    "pipeline": ("Clip", "Encode", "ErrorFeedback", "Mean", "Pipeline"),
    "pipeline.codecs": (
        "BFloat16", "Codec", "Float16", "Float32", "LowPrecision", "RandomK", "Sign", "TopK",
    ),
    "runs.config": ("Config",),
    "runs.presets": ("fedpaq", "qsgd"),
    "simulation": (
        "Experiment", "Network", "Sequential", "Streamed", "Vectorized", "engine_for",
    ),
    "training": ("Callback", "Result", "Run", "TrainOptions", "Trainer", "simulate"),
}  # fmt: skip
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

_prepare()  # before JAX starts

__all__ = [
    "APFL",
    "CNN",
    "GRU",
    "LSTM",
    "MLP",
    "MLR",
    "SGD",
    "Adam",
    "AdamW",
    "BFloat16",
    "Callback",
    "Clip",
    "Codec",
    "CodecError",
    "Config",
    "ConfigError",
    "DataError",
    "Ditto",
    "DivergedError",
    "Encode",
    "ErrorFeedback",
    "Experiment",
    "FedALA",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "Federation",
    "FederationWriter",
    "FieldError",
    "Float16",
    "Float32",
    "LGFedAvg",
    "LeNet",
    "Local",
    "LocalUpdate",
    "LowPrecision",
    "Mean",
    "Method",
    "Network",
    "Objective",
    "PFLlibCNN",
    "PFedMe",
    "PerFedAvg",
    "Pipeline",
    "RandomK",
    "Received",
    "ResNet18",
    "Result",
    "RoundContext",
    "Run",
    "Scaffold",
    "Sequential",
    "Sign",
    "Streamed",
    "Task",
    "TopK",
    "TrainOptions",
    "Trainer",
    "Transformer",
    "Vectorized",
    "Yogi",
    "engine_for",
    "fedpaq",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_nnx",
    "from_torch",
    "load",
    "load_peft",
    "lora",
    "method",
    "qsgd",
    "register",
    "save_peft",
    "simulate",
    "store",
    "synthetic",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'perfed' has no attribute {name!r}")
    value = getattr(import_module(f"perfed.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
