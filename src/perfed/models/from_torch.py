"""PyTorch modules as models, unchanged."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import FieldError, require, require_choice
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
from perfed.models.torch_ops import computed_by_jax, load_torchax

InputLayout = Literal["as-is", "channels-last"]


def from_torch(
    module: Any, *, input_layout: InputLayout = "as-is", output: Output = None
) -> FunctionModel:
    """A `torch.nn.Module` as a model, computed by JAX.

    Parameters that require no gradient, and buffers, are neither trained nor sent; the running
    statistics of batch normalization are, see `perfed.Task`. Dropout is on in training only. The
    module itself is never changed.

    Args:
        module: the module, whose weights every run starts from, whatever its seed; or a function
            without arguments that makes one, which is called by the run's seed.
        input_layout: `channels-last` if inputs are images of height, width and channels, as
            perfed's own data have them, which the module wants channels first.
        output: what the model gives of all that the module returns: a key, an attribute, or a
            function; None: all its tensors.

    Returns:
        The model. Its `write_back(params)` is a copy of the module with these weights.
    """
    require_choice("input_layout", input_layout, get_args(InputLayout))
    with extra_needed("from_torch", "torch", "torch", "torchax"):
        import torch

        load_torchax()

    build = None
    if not isinstance(module, torch.nn.Module):
        require(callable(module), "module", module, "must be a torch.nn.Module, or make one")
        build, module = module, _built(module, 0)
    parts = _TorchParts.of(module)
    training, evaluation = _skeleton(module), _skeleton(module).eval()
    if not module.training:
        training.train()  # layers that a training module keeps in evaluation mode stay so
    name = type(module).__name__

    def init(key: PRNGKeyArray) -> Params:
        if build is None:
            return jax.tree.map(jnp.asarray, parts.params)
        return _drawn(build, key, parts)

    def apply(
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None = None,
        frozen: Params | None = None,
    ) -> Any:
        frozen = parts.frozen if frozen is None else frozen
        x = jnp.asarray(x)
        if input_layout == "channels-last" and x.ndim > 2:
            x = jnp.moveaxis(x, -1, 1)
        own = evaluation if key is None else training
        leaves = {**flattened(params), **flattened(frozen), **parts.constants}
        with _conversion_errors(own, x.shape), computed_by_jax(key) as env:
            tensors = {".".join(path): env.j2t_iso(jnp.asarray(v)) for path, v in leaves.items()}
            before = {path: tensors[".".join(path)].jax() for path in flattened(frozen)}
            outputs = torch.func.functional_call(own, tensors, (env.j2t_iso(x),))
            outputs = env.t2j_iso(select_output(outputs, output, name))
        if key is None or not parts.state:
            return outputs
        _check_unchanged(before, tensors, name)
        renewed = {
            path: tensors[".".join(path)].jax() if path in parts.state else leaf
            for path, leaf in flattened(params).items()
        }
        return outputs, nested(renewed)

    def write_back(params: Params) -> Any:
        check_leaves(params, {p: leaf.shape for p, leaf in flattened(parts.params).items()}, name)
        own = copy.deepcopy(module)
        places = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        with torch.no_grad():
            for path, leaf in {**flattened(params), **flattened(parts.frozen)}.items():
                values = np.asarray(jnp.asarray(leaf, jnp.float32))
                places[".".join(path)].copy_(torch.from_numpy(values.copy()))
        return own

    is_state = parts.state.__contains__ if parts.state else None
    return FunctionModel(init, apply, is_state, parts.frozen, write_back)


@final
@dataclass(frozen=True, eq=False)
class _TorchParts:
    """The arrays of a module.

    Attributes:
        params: what is trained, and running statistics.
        state: which of these are running statistics.
        frozen: floats that are neither; None: there are none.
        constants: all others, such as positions.
    """

    params: Params
    state: frozenset[Path]
    frozen: Params | None
    constants: dict[Path, Array]

    @classmethod
    def of(cls, module: Any) -> "_TorchParts":
        """A module's arrays, copied."""
        _check_convertible(module)
        trained: dict[Path, np.ndarray] = {}
        frozen: dict[Path, np.ndarray] = {}
        constants: dict[Path, Array] = {}
        state = _running_statistics(module)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tensors.items():
            path = tuple(name.split("."))
            if tensor.requires_grad or path in state:
                trained[path] = _numpy(tensor)
            elif tensor.is_floating_point():
                # On the host: engines put it on the devices, once.
                frozen[path] = np.asarray(_numpy(tensor), jnp.dtype(str(tensor.dtype)[6:]))
            else:
                constants[path] = jnp.asarray(tensor.detach().cpu().numpy().copy())
        return cls(nested(trained), frozenset(state), nested(frozen) or None, constants)


def _numpy(tensor: Any) -> np.ndarray:
    values: np.ndarray = tensor.detach().cpu().float().numpy().copy()
    return values


def _running_statistics(module: Any) -> set[Path]:
    """The places of the running statistics of normalization layers."""
    from torch.nn.modules.batchnorm import _NormBase

    return {
        (*(name.split(".") if name else ()), buffer)
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
        for buffer in ("running_mean", "running_var")
    }


def _check_convertible(module: Any) -> None:
    """Raise where it is clear without inputs that a module cannot be converted."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    def refuse(place: str, layer: Any, allowed: str) -> None:
        raise FieldError("module", f"{place or 'the module'} ({type(layer).__name__})", allowed)

    for place, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            refuse(place, layer, "is compiled by torch.jit; pass the module that it was made from")
        if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
            refuse(place, layer, "has no shapes yet; pass a batch through the module first")
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.momentum is None:
            refuse(place, layer, "averages over all batches (momentum=None); give a momentum")
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            refuse(place, layer, "has running statistics; use track_running_stats=False")
    for name, tensor in module.named_parameters():
        if not tensor.is_floating_point() and tensor.requires_grad:
            refuse(name, tensor, f"is trained and has type {tensor.dtype}; parameters must be real")


def _skeleton(module: Any) -> Any:
    """A copy of a module without its numbers: they come with each call."""
    import torch

    tensors = [*module.parameters(), *module.buffers()]
    empty = [
        torch.nn.Parameter(t.detach().to("meta"), requires_grad=t.requires_grad)
        if isinstance(t, torch.nn.Parameter)
        else t.detach().to("meta")
        for t in tensors
    ]
    return copy.deepcopy(module, {id(t): e for t, e in zip(tensors, empty, strict=True)})


def _built(build: Callable[[], Any], seed: int) -> Any:
    """The module that a function makes by a seed, and no other random numbers are changed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build()
    allowed = "must be a torch.nn.Module, or a function without arguments that makes one"
    require(isinstance(module, torch.nn.Module), "module", build, allowed)
    return module


def _drawn(build: Callable[[], Any], key: PRNGKeyArray, parts: _TorchParts) -> Params:
    """Fresh parameters by a key, in compiled programs, too."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parts.params)

    def draw(number: Any) -> Params:
        params = _TorchParts.of(_built(build, int(number))).params
        check_leaves(
            params, {p: leaf.shape for p, leaf in flattened(shapes).items()}, "another call"
        )
        return params

    number = jax.random.bits(key)
    if isinstance(number, jax.core.Tracer):
        drawn: Params = jax.pure_callback(draw, shapes, number, vmap_method="sequential")
        return drawn
    return jax.tree.map(jnp.asarray, draw(number))


def _check_unchanged(before: dict[Path, Any], tensors: dict[str, Any], name: str) -> None:
    for path, array in before.items():
        place = ".".join(path)
        if tensors[place].jax() is not array:
            allowed = "changes in training; only running statistics of batch normalization may"
            raise FieldError("module", f"{place} of {name}", allowed)


@contextmanager
def _conversion_errors(module: Any, shape: tuple[int, ...]) -> Iterator[None]:
    """Say what cannot be converted, and what to do about it."""
    from torchax.tensor import OperatorNotFound

    name = type(module).__name__
    by_value = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    try:
        yield
    except OperatorNotFound as error:
        operation = str(error).removeprefix("Operator with name ").split(" ")[0]
        allowed = f"uses {operation}, which cannot be converted; write it by other operations"
        raise FieldError("module", name, allowed) from error
    except by_value as error:
        allowed = (
            f"depends on a tensor's value at {_line_of(error)}; a compiled program needs the same "
            "operations for all values: use torch.where, masks, or shapes instead"
        )
        raise FieldError("module", name, allowed) from error
    except AssertionError as error:
        if "mixed math" not in str(error):
            raise
        plain = ", ".join(_plain_tensors(module)) or f"one made at {_line_of(error)}"
        allowed = f"has tensors that are no buffers: {plain}; use register_buffer"
        raise FieldError("module", name, allowed) from error
    except FieldError:
        raise
    except Exception as error:
        error.add_note(f"in {name}, converted by from_torch, for a batch of shape {shape}")
        if len(shape) == 4:
            error.add_note('images of perfed have channels last: input_layout="channels-last"')
        raise


def _line_of(error: BaseException) -> str:
    """The line of the module's own code that an error comes from."""
    place, step = "an unknown line", error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_name == "forward" and "/torch/" not in code.co_filename:
            place = f"{code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return place


def _plain_tensors(module: Any) -> list[str]:
    import torch

    return [
        f"{name}.{key}".lstrip(".")
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if isinstance(value, torch.Tensor)
    ]
