"""Models in files: parameters, and all it takes to use them, in one safetensors file.

Tensors `params.*` are the parameters; `shift`, `scale` and `clip` (see `Scaling`), where inputs are
scaled alike for all clients or the model is one client's own; `target` (shift and spread of a
regression's targets). The header's metadata hold `perfed`, a JSON text: the model's and the
method's configuration, the inputs' shape and type, the names of classes, symbols and columns.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from perfed.core.errors import DataError, require
from perfed.core.task import Model, Task
from perfed.core.trees import Params, leaf_paths, path_name, split
from perfed.data import Scaling
from perfed.data.federation import decode_predictions
from perfed.data.scaling import SCALING_ARRAYS
from perfed.methods import Method
from perfed.simulation import Experiment
from perfed.simulation.experiment import BatchNorm, shared_leaves

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
        clip: inputs that a client standardizes by its own data are clipped at this many deviations;
            None: they are not.
        labels: the classes' names; None: a regression.
        vocabulary: the symbols, if inputs are positions among them.
        features: the names of the inputs' columns, if they have any.
        label: the name of the label's column, if it has one.
        personal: leaves that stay with their clients beside those of the method.
        batch_norm: what clients share of layers with running statistics.
    """

    model: dict[str, Any]
    method: dict[str, Any]
    rounds: int
    shape: tuple[int, ...]
    dtype: str
    standardize: str
    clip: float | None
    labels: tuple[str, ...] | None
    vocabulary: tuple[str, ...] | None
    features: tuple[str, ...] | None
    label: str | None
    personal: tuple[str, ...] = ()
    batch_norm: BatchNorm = "shared"

    @property
    def outputs(self) -> int:
        """How many numbers the model gives."""
        return 1 if self.labels is None else len(self.labels)


@final
@dataclass(frozen=True)
class SavedModel:
    """A trained model, with what it takes to use it.

    Attributes:
        params: all parameters; of a common model the personal ones are as they were at first.
        uses: what it takes to use them.
        scaling: how inputs are scaled.
        target: shift and spread of a regression's targets.
        model: what the parameters are for.
        extra: what the server sent beside the parameters, for clients that adapt the model.
    """

    params: Params
    uses: Uses
    scaling: Scaling | None
    target: tuple[float, float]
    model: Model
    extra: Params | None = None

    def predict(self, x: Shaped[Any, "examples ..."]) -> np.ndarray:
        """The most likely classes' names, or a regression's targets, for inputs as in files."""
        if self.uses.standardize == "client" and self.scaling is None:
            raise DataError(
                "this is the model of all clients, each of whom scaled its inputs by its own data "
                '(data.standardize = "client"): use a client\'s own model, or make one from rows '
                "with labels by `perfed adapt`"
            )
        return decode_predictions(
            np.asarray(self.task.outputs(self.params, scaled(x, self.scaling, 0))),
            self.uses.labels,
            self.target,
        )

    @property
    def task(self) -> Task:
        """The model, with the loss that it was trained by."""
        return Task(self.model, self.uses.model.get("l2", 0.0))

    def is_shared(self, method: Method) -> tuple[bool, ...]:
        """For each leaf whether all clients have it in common."""
        uses = self.uses
        return shared_leaves(method, self.params, uses.personal, self.task, uses.batch_norm)

    def with_params(self, params: Params, scaling: Scaling | None) -> "SavedModel":
        """Other parameters, for inputs scaled in another way."""
        return replace(self, params=params, scaling=scaling)

    def to_bytes(self) -> bytes:
        """The file's contents."""
        tensors = named_leaves(self.params, "params.") | {"target": np.array(self.target)}
        if self.extra is not None:
            tensors |= named_leaves(self.extra, "extra.")
        if self.scaling is not None:
            tensors |= dict(zip(SCALING_ARRAYS, self.scaling.arrays, strict=True))
        facts = {"format": FORMAT} | self.uses.__dict__
        return save(tensors, {"perfed": json.dumps(facts)})


def scaled(x: Any, scaling: Scaling | None, client: int) -> Any:
    """Inputs as a model sees them."""
    return jnp.asarray(np.asarray(x) if scaling is None else scaling(x, client))


def named_leaves(tree: Params, prefix: str = "") -> dict[str, np.ndarray]:
    """A tree's arrays by their place in it, as `params.0.w`."""
    leaves = jax.tree.leaves(tree)
    names = [path_name(path) for path in leaf_paths(tree)]
    return {prefix + n: np.ascontiguousarray(leaf) for n, leaf in zip(names, leaves, strict=True)}


def saved_model(
    params: Params, experiment: Experiment, config: dict[str, Any], extra: Params | None = None
) -> SavedModel:
    """A run's global model, ready to be written."""
    federation = experiment.federation
    data, scaling = config["data"], federation.scaling
    own_scale = scaling is not None and not scaling.shared
    standardize = data.get("standardize") or ("none" if scaling is None else "unit")
    clip = data.get("clip", "none") if scaling is None else float(scaling.clip[0])
    uses = Uses(
        config["model"],
        config["method"],
        config["rounds"],
        federation.example_shape,
        str(federation.train.x.dtype),
        "client" if own_scale else standardize,
        None if clip in ("none", float("inf")) else clip,
        federation.labels,
        federation.vocabulary,
        federation.features,
        data.get("label"),
        experiment.personal,
        experiment.batch_norm,
    )
    scaling = None if own_scale else scaling
    model = experiment.task.model
    return SavedModel(params, uses, scaling, federation.target, model, extra)


def read_model(
    path: Path, build: Callable[[Uses], Model], build_method: Callable[[Uses], Method]
) -> SavedModel:
    """A model from its file.

    Args:
        path: the file.
        build: makes the model that the parameters are for.
        build_method: makes the method that trained it.
    """
    try:
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a perfed model file: {error}") from None
    facts = json.loads(metadata.get("perfed", "{}"))
    if facts.pop("format", None) != FORMAT:
        raise DataError(f"{path} is not a perfed model file, or one of another version")
    lists = ("shape", "labels", "vocabulary", "features", "personal")
    facts |= {key: None if facts[key] is None else tuple(facts[key]) for key in lists}
    uses = Uses(**facts)
    model: Model = build(uses)
    like = jax.eval_shape(model.init, jax.random.key(0))
    params = _from_tensors(path, tensors, like, "params.")
    extra = None
    if any(name.startswith("extra.") for name in tensors):
        method = build_method(uses)
        is_state = Task(model).is_state
        weights = like if is_state is None else split(like, is_state)[1]
        extra_like = jax.eval_shape(
            lambda p: method.broadcast(method.init_server_state(p)), weights
        )
        extra = _from_tensors(path, tensors, extra_like, "extra.")
    scaling = None
    if SCALING_ARRAYS[0] in tensors:
        scaling = Scaling(*(tensors[name] for name in SCALING_ARRAYS))
    target = (float(tensors["target"][0]), float(tensors["target"][1]))
    return SavedModel(params, uses, scaling, target, model, extra)


def _from_tensors(path: Path, tensors: dict[str, np.ndarray], like: Any, prefix: str) -> Params:
    """A tree of the file's tensors."""
    names = [f"{prefix}{path_name(place)}" for place in leaf_paths(like)]
    missing = [name for name in names if name not in tensors]
    require(not missing, str(path), missing, "parameters are missing from the file")
    leaves = [jnp.asarray(tensors[name]) for name in names]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
