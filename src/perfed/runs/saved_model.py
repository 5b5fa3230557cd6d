"""Models in files: parameters, and all it takes to use them, in one safetensors file.

Tensors `params.*` are the parameters; `shift` and `scale` ((x - shift) * scale), where inputs are
scaled alike for all clients or the model is one client's own; `target` (shift and spread of a
regression's targets). The header's metadata hold `perfed`, a JSON text: the model's and the
method's configuration, the inputs' shape and type, the names of classes, symbols and columns.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from perfed.data import Federation, Scaling
from perfed.data.scaling import SCALING
from perfed.core.errors import DataError, require
from perfed.core.objective import Model, Params

FORMAT = "perfed-model-1"


@final
@dataclass(frozen=True)
class Uses:
    """What it takes to use a model's parameters.

    Attributes:
        model: the model's configuration, `[model]`.
        method: the method's, `[method]`.
        rounds: how many rounds it was trained for.
        shape: of one input.
        dtype: of inputs before scaling.
        standardize: how inputs are scaled: `client` by each client's own data.
        labels: the classes' names; None: a regression.
        vocabulary: the symbols, if inputs are positions among them.
        features: the names of the inputs' columns, if they have any.
        label: the name of the label's column, if it has one.
    """

    model: dict[str, Any]
    method: dict[str, Any]
    rounds: int
    shape: tuple[int, ...]
    dtype: str
    standardize: str
    labels: tuple[str, ...] | None
    vocabulary: tuple[str, ...] | None
    features: tuple[str, ...] | None
    label: str | None

    @property
    def outputs(self) -> int:
        """How many numbers the model gives."""
        return 1 if self.labels is None else len(self.labels)


@final
@dataclass(frozen=True)
class SavedModel:
    """A trained model, with what it takes to use it."""

    params: Params
    uses: Uses
    scaling: Scaling | None
    target: tuple[float, float]
    model: Model

    def predict(self, x: Shaped[Any, "examples ..."]) -> np.ndarray:
        """The most likely classes' names, or a regression's targets, for inputs as in files."""
        if self.uses.standardize == "client" and self.scaling is None:
            raise DataError(
                "this is the model of all clients, each of whom scaled its inputs by its own data "
                '(data.standardize = "client"): use a client\'s own model, or make one from rows '
                "with labels by `perfed adapt`"
            )
        return named_outputs(
            self.model, self.params, scaled(x, self.scaling, 0), self.uses.labels, self.target
        )

    def with_params(self, params: Params, scaling: Scaling | None) -> "SavedModel":
        """Other parameters, for inputs scaled in another way."""
        return replace(self, params=params, scaling=scaling)

    def to_bytes(self) -> bytes:
        """The file's contents."""
        tensors = named_leaves(self.params, "params.") | {"target": np.array(self.target)}
        if self.scaling is not None:
            tensors |= dict(zip(SCALING, self.scaling.arrays, strict=True))
        facts = {"format": FORMAT} | self.uses.__dict__
        return save(tensors, {"perfed": json.dumps(facts)})


def scaled(x: Any, scaling: Scaling | None, client: int) -> Any:
    """Inputs as a model sees them."""
    return jnp.asarray(np.asarray(x) if scaling is None else scaling(x, client))


def named_outputs(
    model: Model,
    params: Params,
    x: Float[Any, "examples ..."],
    labels: tuple[str, ...] | None,
    target: tuple[float, float],
) -> np.ndarray:
    """What a model says of scaled inputs, in the words or the unit of its data."""
    outputs = np.asarray(model.apply(params, x))
    if labels is None:
        return np.asarray(outputs.reshape(len(outputs)) * target[1] + target[0])
    names = np.array(labels, dtype=object)
    return np.asarray(names[outputs.argmax(axis=1)], dtype=str)


def named_leaves(tree: Params, prefix: str = "") -> dict[str, np.ndarray]:
    """A tree's arrays by their place in it, as `params.0.w`."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        place = jax.tree_util.keystr(path, simple=True, separator=".") or "w"
        found[prefix + place] = np.ascontiguousarray(leaf)
    return found


def saved_model(
    params: Params, model: Model, federation: Federation, config: dict[str, Any]
) -> SavedModel:
    """A run's global model, ready to be written."""
    data, scaling = config["data"], federation.scaling
    own_scale = scaling is not None and not scaling.shared
    standardize = data.get("standardize") or ("none" if scaling is None else "unit")
    uses = Uses(
        config["model"],
        config["method"],
        config["rounds"],
        federation.example_shape,
        str(federation.train.x.dtype),
        "client" if own_scale else standardize,
        federation.labels,
        federation.vocabulary,
        federation.features,
        data.get("label"),
    )
    return SavedModel(params, uses, None if own_scale else scaling, federation.target, model)


def read_model(path: Path, build: Any) -> SavedModel:
    """A model from its file; `build(uses)` makes the model that the parameters are for."""
    try:
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; check the path") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no model file of perfed: {error}") from None
    facts = json.loads(metadata.get("perfed", "{}"))
    if facts.pop("format", None) != FORMAT:
        raise DataError(f"{path} is no model file of perfed, or one of another version")
    lists = ("shape", "labels", "vocabulary", "features")
    facts |= {key: None if facts[key] is None else tuple(facts[key]) for key in lists}
    uses = Uses(**facts)
    model: Model = build(uses)
    like = jax.eval_shape(model.init, jax.random.key(0))
    names = list(named_leaves(jax.tree.map(lambda leaf: np.empty(leaf.shape), like), "params."))
    missing = [name for name in names if name not in tensors]
    require(not missing, str(path), missing, "parameters are missing from the file")
    params = jax.tree.unflatten(
        jax.tree.structure(like), [jnp.asarray(tensors[name]) for name in names]
    )
    scaling = Scaling(*(tensors[k] for k in SCALING)) if SCALING[0] in tensors else None
    target = (float(tensors["target"][0]), float(tensors["target"][1]))
    return SavedModel(params, uses, scaling, target, model)
