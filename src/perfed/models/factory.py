"""Models from functions of the user's own, named in a configuration.

`[model] name = "python"`, `factory = "package.module:function"`; all other settings are the
function's arguments. Naming one runs code: where a name comes from elsewhere, from a server or
with a model's file, it must be allowed first (`perfed.runs.factories`).
"""

import inspect
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import jax.numpy as jnp
import numpy as np

from perfed.core.errors import FieldError
from perfed.core.task import Model
from perfed.models.from_equinox import from_equinox
from perfed.models.from_flax import from_flax
from perfed.models.from_keras import from_keras
from perfed.models.from_nnx import from_nnx
from perfed.models.from_torch import from_torch

PYTHON = "python"
_OURS = ("name", "factory", "l2")


def python_model(
    settings: Mapping[str, Any], shape: tuple[int, ...], outputs: int, symbols: int
) -> Model:
    """The model that a function makes, the same object for the same settings.

    Args:
        settings: the section.
        shape: of one input.
        outputs: how many outputs the data call for.
        symbols: how many symbols there are, where inputs are texts; else 0.
    """
    given = {key: value for key, value in settings.items() if key not in _OURS}
    # Runs whose models are one object are computed together.
    return _made(settings["factory"], json.dumps(given, sort_keys=True), shape, outputs, symbols)


@cache
def _made(factory: str, written: str, shape: tuple[int, ...], outputs: int, symbols: int) -> Model:
    function, given = find_factory(factory), json.loads(written)
    from_data = {"example_shape": shape, "classes": outputs, "symbols": symbols}
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in from_data.items() if key in parameters} | given
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise FieldError("factory", factory, f"does not take these settings: {error}") from None

    def build() -> Any:
        with _fixed_draws():
            return function(**given)

    dtype = jnp.int32 if symbols else jnp.float32
    return _as_model(build, lambda: function(**given), jnp.zeros((2, *shape), dtype), factory)


def find_factory(factory: str) -> Callable[..., Any]:
    """The function of a name, imported from installed packages or the current folder."""
    module_name, _, name = factory.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # at the end: an installed package of the same name is found first
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise
        allowed = (
            f"there is no module {missing}; install its package, or run this where {missing}.py is"
        )
        raise FieldError("factory", factory, allowed) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise FieldError("factory", factory, f"{module_name} has no function {name}")
    found: Callable[..., Any] = function
    return found


def _as_model(
    build: Callable[[], Any], draw: Callable[[], Any], example: Any, factory: str
) -> Model:
    """What a function makes as a model, by its library; none is imported here that is not yet."""
    made = build()
    if _is_one(made, "torch.nn", "Module"):
        return from_torch(draw)  # whose weights are drawn by the run's seed
    if _is_one(made, "keras", "Model"):
        return from_keras(made)
    if _is_one(made, "flax.nnx", "Module"):
        return from_nnx(made)
    if _is_one(made, "flax.linen", "Module"):
        return from_flax(made, example)
    if _is_one(made, "equinox", "Module"):
        return from_equinox(lambda key: made)
    if callable(getattr(made, "init", None)) and callable(getattr(made, "apply", None)):
        model: Model = made
        return model
    allowed = (
        f"returns a {type(made).__name__}; it must return a model, or a module of PyTorch, Keras, "
        "Flax or Equinox"
    )
    raise FieldError("factory", factory, allowed)


def _is_one(made: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(made, kind)


@contextmanager
def _fixed_draws() -> Iterator[None]:
    """Within, random numbers of Python, NumPy and PyTorch are the same in every process."""
    python, numpy = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")
    state = None if torch is None else torch.random.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    if torch is not None:
        torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.random.set_rng_state(state)
