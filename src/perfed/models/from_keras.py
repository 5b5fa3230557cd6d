"""Keras models as models, unchanged."""

import copy
import re
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import ConfigError, FieldError, require
from perfed.core.trees import Params, Path
from perfed.models.extras import (
    Output,
    check_leaves,
    extra_needed,
    flattened,
    nested,
    select_output,
)
from perfed.models.function_model import FunctionModel


def from_keras(model: Any, output: Output = None) -> FunctionModel:
    """A Keras model as a model; Keras must compute by JAX (`KERAS_BACKEND=jax`).

    Variables that are not trainable are neither trained nor sent, as those of frozen layers or
    under the adapters of `enable_lora`; the running statistics of batch normalization are, see
    `perfed.Task`. Dropout is on in training only. The model itself is never changed.

    Args:
        model: the model, which is built; every run starts from its weights, whatever its seed.
        output: what is given of all that the Keras model returns: a key, an attribute, or a
            function; None: all its tensors.

    Returns:
        The model. Its `write_back(params)` is a copy of the Keras model with these weights.
    """
    with extra_needed("from_keras", "keras", "keras"):
        import keras
    _check_convertible(keras, model)
    parts, name = _KerasParts.of(keras, model), type(model).__name__

    def apply(
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None = None,
        frozen: Params | None = None,
    ) -> Any:
        leaves = flattened(params) | flattened(parts.frozen if frozen is None else frozen)
        values = [leaves[place] for place in parts.trained]
        others = [leaves[at] if isinstance(at, tuple) else at for at in parts.others]
        if key is not None:
            seeds = zip(parts.seeds, jax.random.split(key, len(parts.seeds) or 1), strict=False)
            for i, own in seeds:
                others[i] = jax.random.bits(own, others[i].shape, others[i].dtype)
        outputs, after = model.stateless_call(values, others, x, training=key is not None)
        outputs = select_output(outputs, output, name)
        if key is None or not parts.state:
            return outputs
        renewed = dict(leaves)
        for place, old, new in zip(parts.others, others, after, strict=True):
            if isinstance(place, tuple) and place in parts.state:
                renewed[place] = new
            elif isinstance(place, tuple) and new is not old:
                allowed = "changes in training; only statistics of batch normalization may"
                raise FieldError("model", f"{'.'.join(place)} of {name}", allowed)
        return outputs, nested({path: renewed[path] for path in flattened(params)})

    def write_back(params: Params) -> Any:
        check_leaves(params, {p: leaf.shape for p, leaf in flattened(parts.params).items()}, name)
        own, leaves = _copied(keras, model), flattened(params) | flattened(parts.frozen)
        for variable, place in zip(own.trainable_variables, parts.trained, strict=True):
            variable.assign(jnp.array(leaves[place]))
        for variable, at in zip(own.non_trainable_variables, parts.others, strict=True):
            variable.assign(jnp.array(leaves[at] if isinstance(at, tuple) else at))
        return own

    return FunctionModel(
        # Copies again: so do programs here.
        lambda key: jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), parts.params),
        apply,
        parts.state.__contains__ if parts.state else None,
        parts.frozen,
        write_back,
    )


@final
@dataclass(frozen=True, eq=False)
class _KerasParts:
    """The variables of a Keras model.

    Attributes:
        params: what is trained, and running statistics.
        state: which of these are running statistics.
        frozen: floats that are neither; None: there are none.
        trained: the places of the trainable variables, in Keras's order.
        others: the places of the others, in Keras's order, or their values: seeds and counters.
        seeds: which of the others are seeds.
    """

    params: Params
    state: frozenset[Path]
    frozen: Params | None
    trained: list[Path]
    others: list[Path | Array]
    seeds: list[int]

    @classmethod
    def of(cls, keras: Any, model: Any) -> "_KerasParts":
        """A model's variables."""
        statistics = _running_statistics(keras, model)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        paths = _places(model, variables)
        trained = [paths[id(v)] for v in model.trainable_variables]
        # Copies: Keras's own training reuses the memory of variables.
        params = {paths[id(v)]: jnp.array(v.value) for v in model.trainable_variables}
        frozen: dict[Path, Array] = {}
        others: list[Path | Array] = []
        seeds, state = [], set()
        for i, variable in enumerate(model.non_trainable_variables):
            place, value = paths[id(variable)], jnp.array(variable.value)
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                if variable.path.endswith("seed_generator_state"):
                    seeds.append(i)
                others.append(value)
                continue
            others.append(place)
            if id(variable) in statistics:
                state.add(place)
                params[place] = value
            else:
                frozen[place] = value
        found = nested(params), frozenset(state), nested(frozen) or None
        return cls(*found, trained, others, seeds)


def _check_convertible(keras: Any, model: Any) -> None:
    backend = keras.config.backend()
    if backend != "jax":
        raise ConfigError(
            f"from_keras: Keras computes by {backend} here; set the environment variable "
            "KERAS_BACKEND=jax before keras is imported, for the first time, anywhere"
        )
    allowed = "must be a keras.Model"
    require(isinstance(model, keras.Model), "model", type(model).__name__, allowed)
    allowed = "has no variables yet; call it on a batch first, or give it an Input"
    require(model.built, "model", type(model).__name__, allowed)
    for variable in model.trainable_variables:
        if variable.regularizer is not None:
            allowed = "has a regularizer, which is not in the loss here; use l2 of perfed.Task"
            raise FieldError("model", variable.path, allowed)


def _running_statistics(keras: Any, model: Any) -> set[int]:
    """Which variables are running statistics of batch normalization that is trained."""
    return {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for variable in (layer.moving_mean, layer.moving_variance)
    }


def _places(model: Any, variables: list[Any]) -> dict[int, Path]:
    """The variables' places, as in `("dense", "kernel")`.

    Keras numbers layers without names of their own by all that its process has made: `dense_7`.
    They are numbered anew here, so that they are the same in every process.
    """
    automatic = {}
    for layer in model._flatten_layers():
        base = re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", type(layer).__name__)
        match = re.fullmatch(rf"({base.lower()})(_\d+)?", layer.name)
        if match is not None:
            automatic[layer.name] = match[1]
    numbers: dict[Path, dict[str, str]] = {}
    places: dict[int, Path] = {}
    for variable in variables:
        keys = variable.path.split("/")
        if keys[0] == model.name and len(keys) > 2:
            keys = keys[1:]
        place: Path = ()
        for key in keys:
            names = numbers.setdefault(place, {})
            if key in automatic and key not in names:
                base = automatic[key]
                used = sum(automatic.get(other) == base for other in names)
                names[key] = f"{base}_{used}" if used else base
            place = (*place, names.get(key, key))
        places[id(variable)] = place
    if len(set(places.values())) < len(places):
        double = next(p for p in places.values() if list(places.values()).count(p) > 1)
        allowed = "is the place of two variables; give the layers names of their own"
        raise FieldError("model", "/".join(double), allowed)
    return places


def _copied(keras: Any, model: Any) -> Any:
    """Another model like this one."""
    try:
        own = keras.models.clone_model(model)
    except (TypeError, ValueError, NotImplementedError):
        own = None
    shapes = [v.shape for v in model.variables]
    try:
        if own is None or [v.shape for v in own.variables] != shapes:
            own = copy.deepcopy(model)
    except (TypeError, ValueError) as error:
        allowed = (
            "cannot be copied by Keras: give the class a get_config and decorate it with "
            "keras.saving.register_keras_serializable(), or use the parameters themselves "
            "(result.personal_model)"
        )
        raise FieldError("model", type(model).__name__, allowed) from error
    return own
