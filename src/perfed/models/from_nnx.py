"""Flax NNX modules as models, unchanged."""

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import FieldError, require
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


def from_nnx(module: Any, *, wrt: Any = None, output: Output = None) -> FunctionModel:
    """A Flax NNX module as a model.

    `nnx.BatchStat` are running statistics, see `perfed.Task`; what is neither trained nor that is
    not sent. In training the module is as after `train()`, its random streams are drawn from the
    key of the batch, and so is dropout; in evaluation it is as after `eval()`. The module itself
    is never changed.

    Args:
        module: the module, whose weights every run starts from, whatever its seed.
        wrt: which variables are trained, a filter of NNX; None: `nnx.Param`.
        output: what the model gives of all that the module returns: a key, an attribute, or a
            function; None: all its arrays.

    Returns:
        The model. Its `write_back(params)` is a copy of the module with these weights.
    """
    with extra_needed("from_nnx", "nnx", "flax"):
        from flax import nnx
    allowed = "must be a flax.nnx.Module; for one of flax.linen there is from_flax"
    require(isinstance(module, nnx.Module), "module", type(module).__name__, allowed)
    name = type(module).__name__
    training, evaluation = nnx.clone(module), nnx.clone(module)
    training.train()
    evaluation.eval()
    graphs = [nnx.split(own)[0] for own in (evaluation, training)]
    parts = _NNXParts.of(nnx, module, nnx.Param if wrt is None else wrt)

    def apply(
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None = None,
        frozen: Params | None = None,
    ) -> Any:
        leaves = flattened(params) | flattened(parts.frozen if frozen is None else frozen)
        leaves |= parts.constants | parts.random(key)
        own = nnx.merge(graphs[key is not None], parts.variables(nnx, leaves))
        outputs = select_output(own(x), output, name)
        if key is None or not parts.state:
            return outputs
        after = {_path(path): _value(v) for path, v in nnx.to_flat_state(nnx.state(own))}
        for path in flattened(parts.frozen):
            if after[path] is not leaves[path]:
                allowed = "changes in training; only an nnx.BatchStat may"
                raise FieldError("module", f"{'.'.join(path)} of {name}", allowed)
        return outputs, nested(
            {p: after[p] if p in parts.state else leaf for p, leaf in flattened(params).items()}
        )

    def write_back(params: Params) -> Any:
        check_leaves(params, {p: leaf.shape for p, leaf in flattened(parts.params).items()}, name)
        leaves = parts.constants | flattened(parts.frozen) | flattened(params) | parts.random(None)
        own = nnx.clone(module)
        nnx.update(own, parts.variables(nnx, jax.tree.map(jnp.copy, leaves)))
        return own

    return FunctionModel(
        lambda key: jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), parts.params),
        apply,
        parts.state.__contains__ if parts.state else None,
        parts.frozen,
        write_back,
    )


@final
@dataclass(frozen=True, eq=False)
class _NNXParts:
    """The variables of an NNX module.

    Attributes:
        originals: all of them, by their place as NNX has it.
        params: what is trained, and running statistics.
        state: which of these are running statistics.
        frozen: floats that are neither; None: there are none.
        constants: all others but keys.
        keys: the keys of its random streams.
    """

    originals: dict[Path, Any]
    params: Params
    state: frozenset[Path]
    frozen: Params | None
    constants: dict[Path, Array]
    keys: dict[Path, Array]

    @classmethod
    def of(cls, nnx: Any, module: Any, wrt: Any) -> "_NNXParts":
        """A module's variables, copied."""
        originals = dict(nnx.to_flat_state(nnx.state(nnx.clone(module))))
        is_trained = nnx.filterlib.to_predicate(wrt)
        params, frozen, constants, keys = ({} for _ in range(4))
        state = set()
        for place, variable in originals.items():
            path, value = _path(place), _value(variable)
            if isinstance(variable, nnx.BatchStat):
                state.add(path)
                params[path] = value
            elif isinstance(variable, nnx.RngKey):
                keys[path] = value
            elif not jnp.issubdtype(value.dtype, jnp.inexact):
                constants[path] = value
            elif is_trained(place, variable):
                params[path] = value
            else:
                frozen[path] = value
        found = nested(params), frozenset(state), nested(frozen) or None
        return cls(originals, *found, constants, keys)

    def random(self, key: PRNGKeyArray | None) -> dict[Path, Array]:
        """The keys of the random streams, by the key of a batch."""
        if key is None or not self.keys:
            return self.keys
        own = jax.random.split(key, len(self.keys))
        return {
            path: jax.random.split(own[i], old.shape) if old.shape else own[i]
            for i, (path, old) in enumerate(self.keys.items())
        }

    def variables(self, nnx: Any, leaves: dict[Path, Array]) -> Any:
        """NNX's state with these values."""
        values = {place: leaves[_path(place)] for place in self.originals}
        return nnx.from_flat_state(
            [
                (
                    place,
                    own.replace(values[place]) if isinstance(own, nnx.Variable) else values[place],
                )
                for place, own in self.originals.items()
            ]
        )


def _path(place: Path) -> Path:
    return tuple(map(str, place))


def _value(variable: Any) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable
