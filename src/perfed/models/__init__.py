"""Built-in models, and adapters for those of other libraries, one file per library.

A model is anything with `init(key) -> params` and `apply(params, x) -> outputs`.
"""

from collections.abc import Callable

from perfed.core.task import Model
from perfed.models.cnn import CNN
from perfed.models.factory import PYTHON, python_model
from perfed.models.from_equinox import from_equinox
from perfed.models.from_flax import from_flax
from perfed.models.from_keras import from_keras
from perfed.models.from_nnx import from_nnx
from perfed.models.from_torch import from_torch
from perfed.models.function_model import FunctionModel
from perfed.models.gru import GRU
from perfed.models.lenet import LeNet
from perfed.models.lora import LoRA, lora
from perfed.models.lstm import LSTM
from perfed.models.mlp import MLP, MLR
from perfed.models.pfllib_cnn import PFLlibCNN
from perfed.models.resnet import ResNet18
from perfed.models.transformer import Transformer

MODELS: dict[str, Callable[..., Model]] = {
    "mlr": MLR,
    "linear": MLR,
    "mlp": MLP,
    "cnn": CNN,
    "pfllib-cnn": PFLlibCNN,
    "lenet": LeNet,
    "resnet18": ResNet18,
    "gru": GRU,
    "lstm": LSTM,
    "transformer": Transformer,
}

__all__ = [
    "CNN",
    "GRU",
    "LSTM",
    "MLP",
    "MLR",
    "MODELS",
    "PYTHON",
    "FunctionModel",
    "LeNet",
    "LoRA",
    "PFLlibCNN",
    "ResNet18",
    "Transformer",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_nnx",
    "from_torch",
    "lora",
    "python_model",
]
