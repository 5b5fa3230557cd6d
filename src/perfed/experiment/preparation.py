"""`data.safetensors`: what is done to inputs, and what outputs mean; a model is no use without it.

Tensors `shift` and `scale` ((x - shift) * scale; one row, or one a client) and `target` (shift and
spread of a regression's targets). The header's metadata hold, as JSON, `names` (clients), `labels`
(classes) and `vocabulary`.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from perfed.data import Federation, Scaling

FILE = "data.safetensors"
_TEXTS = ("names", "labels", "vocabulary")


def preparation_bytes(federation: Federation) -> bytes:
    """The file's contents."""
    tensors = {"target": np.array(federation.target)}
    if federation.scaling is not None:
        tensors |= {"shift": federation.scaling.shift, "scale": federation.scaling.scale}
    return save(tensors, {key: json.dumps(getattr(federation, key)) for key in _TEXTS})


def read_scaling(path: Path) -> Scaling | None:
    """The scaling a run used."""
    with safe_open(path, "np") as file:
        if "shift" not in list(file.keys()):
            return None
        return Scaling(file.get_tensor("shift"), file.get_tensor("scale"))


def read_texts(path: Path) -> dict[str, list[str] | None]:
    """The names of clients, classes and symbols."""
    with safe_open(path, "np") as file:
        return {key: json.loads(text) for key, text in file.metadata().items()}
