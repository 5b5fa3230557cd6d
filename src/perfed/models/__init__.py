"""Built-in models, and adapters for those of other libraries, one file per library.

A model is anything with `init(key) -> params` and `apply(params, x) -> outputs`.
"""

from perfed.models.cnn import CNN
from perfed.models.factory import PYTHON, python_model
from perfed.models.from_equinox import from_equinox
from perfed.models.from_flax import from_flax
from perfed.models.from_keras import from_keras
from perfed.models.from_nnx import from_nnx
from perfed.models.from_torch import from_torch
from perfed.models.function_model import FunctionModel
from perfed.models.gru import GRU
from perfed.models.mlp import MLP, MLR

MODELS: dict[str, type[MLR] | type[MLP] | type[CNN] | type[GRU]] = {
    "mlr": MLR,
    "linear": MLR,
    "mlp": MLP,
    "cnn": CNN,
    "gru": GRU,
}

__all__ = [
    "CNN",
    "GRU",
    "MLP",
    "MLR",
    "MODELS",
    "PYTHON",
    "FunctionModel",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_nnx",
    "from_torch",
    "python_model",
]
