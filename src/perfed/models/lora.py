"""Low-rank adapters on any model (LoRA; Hu et al., ICLR 2022): the model's own leaves are frozen.

A matrix W becomes W + (alpha / rank) B A. Only A and B are trained and sent. With `freeze_a` only B
is, as in FFA-LoRA (Sun et al., ICLR 2024), where the mean of clients' products is the product of
their means; with `personal = ["*.lora_B"]` each client keeps its own B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, Shaped

from perfed.core.errors import FieldError, require, require_count
from perfed.core.rewriting import low_rank_sum
from perfed.core.task import Model, Task
from perfed.core.trees import Params, Path, is_any_named, leaf_paths, path_name

Chosen = Callable[[Path], bool] | Sequence[str]


class Matrix(NamedTuple):
    """A matrix that has an adapter.

    Attributes:
        path: its place.
        shape: its shape.
        input_first: whether it is (inputs, outputs), as a kernel of Flax and Keras, or (outputs,
            inputs), as a weight of PyTorch and of the built-in models.
    """

    path: Path
    shape: tuple[int, int]
    input_first: bool

    def init(self, key: PRNGKeyArray, rank: int) -> Array:
        """A fresh A, uniform in +-1/sqrt(inputs) as PEFT has it; B begins at zero."""
        bound = self.inputs**-0.5
        return jax.random.uniform(key, (rank, self.inputs), minval=-bound, maxval=bound)

    @property
    def inputs(self) -> int:
        """How many inputs it takes."""
        return self.shape[0 if self.input_first else 1]

    @property
    def outputs(self) -> int:
        """How many outputs it gives."""
        return self.shape[1 if self.input_first else 0]

    def adapted(self, w: Array, a: Array, b: Array, scale: float) -> Array:
        """W + scale B A."""
        if self.input_first:
            return low_rank_sum(w, a.T, b.T, scale)
        return low_rank_sum(w, b, a, scale)


@final
@dataclass(frozen=True, eq=False)
class LoRA:
    """A model whose matrices have adapters; made by `lora`.

    Its parameters are those of the model, with `lora_A` and `lora_B` in the place of each matrix
    that has an adapter and nothing in that of a frozen leaf.

    Attributes:
        model: the model.
        matrices: for each of its leaves what has an adapter there; None: the leaf is as it was.
        rank: the adapters' rank.
        alpha: their scale, relative to the rank.
        start: the model's leaves; None: those that are drawn anew for each run, trained whole.
        structure: the tree that the leaves are of.
        frozen: what is not trained.
    """

    model: Model
    matrices: tuple[Matrix | None, ...]
    rank: int
    alpha: float
    start: tuple[Any, ...]
    structure: Any
    frozen: Any

    @property
    def is_random(self) -> bool:
        """Whether the model draws random numbers in training."""
        return Task(self.model).is_random

    @property
    def head(self) -> tuple[str, ...] | None:
        """The model's head, with the adapters in it."""
        return Task(self.model).head

    @property
    def freezes_a(self) -> bool:
        """Whether B alone is trained."""
        return any(a is not None for a in self.frozen["lora_A"])

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh adapters, and the leaves that are trained whole as they are at first."""
        keys = jax.random.split(key, len(self.start))
        found: list[Any] = list(self.start)
        for i, (matrix, fixed) in enumerate(zip(self.matrices, self.frozen["lora_A"], strict=True)):
            if matrix is not None:
                found[i] = {"lora_B": jnp.zeros((matrix.outputs, self.rank))}
                if fixed is None:
                    found[i]["lora_A"] = matrix.init(keys[i], self.rank)
        return jax.tree.unflatten(self.structure, found)

    def apply(
        self,
        params: Params,
        x: Shaped[Array, "b ..."],
        key: PRNGKeyArray | None = None,
        frozen: Any = None,
    ) -> Any:
        """The model's outputs with its matrices adapted."""
        frozen = self.frozen if frozen is None else frozen
        whole = self.merged(params, frozen)
        return self.model.apply(whole, x, **Task(self.model).options(key, frozen["model"]))

    def merged(self, params: Params, frozen: Any = None) -> Params:
        """The parameters of the model itself, with the adapters in them."""
        frozen, scale = self.frozen if frozen is None else frozen, self.alpha / self.rank
        found: list[Any] = []
        for own, w, a, matrix in zip(
            self.structure.flatten_up_to(params),
            frozen["base"],
            frozen["lora_A"],
            self.matrices,
            strict=True,
        ):
            if matrix is None:
                found.append(w if own is None else own)
            else:
                a = own["lora_A"] if a is None else a
                found.append(matrix.adapted(w, a, own["lora_B"], scale))
        return jax.tree.unflatten(self.structure, found)

    def write_back(self, params: Params) -> Any:
        """A module of the user's own library, with the adapters in its matrices."""
        back = getattr(self.model, "write_back", None)
        allowed = "has no module to write to; `merged` gives its parameters"
        require(back is not None, "model", type(self.model).__name__, allowed)
        assert back is not None
        return back(self.merged(params))

    def trained(self, params: Params) -> dict[Path, Array]:
        """The leaves that are trained whole, by their places."""
        parts = self.structure.flatten_up_to(params)
        places = leaf_paths(jax.tree.unflatten(self.structure, range(len(parts))))
        return {
            place: own
            for place, own, w in zip(places, parts, self.frozen["base"], strict=True)
            if w is None
        }

    def with_adapters(
        self, params: Params, adapters: dict[Path, Any], trained: dict[Path, Any]
    ) -> Params:
        """The parameters with these A and B, and with these leaves."""
        parts = self.structure.flatten_up_to(params)
        places = leaf_paths(jax.tree.unflatten(self.structure, range(len(parts))))
        found: list[Any] = []
        for place, own in zip(places, parts, strict=True):
            if place in adapters:
                pair = dict(
                    zip(("lora_A", "lora_B"), map(jnp.asarray, adapters[place]), strict=True)
                )
                found.append({name: pair[name] for name in own})
            else:
                found.append(jnp.asarray(trained[place]) if place in trained else own)
        return jax.tree.unflatten(self.structure, found)

    def adapters(self, params: Params) -> dict[Path, tuple[Array, Array]]:
        """A and B of every matrix, by its place."""
        parts = self.structure.flatten_up_to(params)
        return {
            matrix.path: (own["lora_A"] if a is None else a, own["lora_B"])
            for own, a, matrix in zip(parts, self.frozen["lora_A"], self.matrices, strict=True)
            if matrix is not None
        }


def lora(
    model: Model,
    target: Chosen,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    params: Params | None = None,
    train: Chosen = (),
    freeze_a: bool = False,
    seed: int = 0,
) -> LoRA:
    """A model whose matrices have low-rank adapters, which alone are trained.

    Example:
        >>> import perfed
        >>> network = perfed.MLP(inputs=64, classes=10, hidden=(32,))
        >>> model = perfed.lora(network, target=["0"], train=["1"], rank=2)
        >>> [leaf.shape for leaf in jax.tree.leaves(model.init(jax.random.key(0)))]
        [(2, 64), (32, 2), (10,), (10, 32)]

    Args:
        model: the model.
        target: which matrices: names of leaves, the starts of names, or patterns (`*.query.*`); or
            a function of a leaf's place.
        rank: the adapters' rank.
        alpha: their scale, relative to the rank.
        params: the model's parameters; None: fresh ones, by `seed`.
        train: leaves that are trained whole, such as a new head; chosen likewise.
        freeze_a: train B alone; A is drawn by `seed`.
        seed: of what is drawn once for all runs.
    """
    require_count("rank", rank)
    require(0 < alpha < float("inf"), "alpha", alpha, "must be a number greater than 0")
    task = Task(model)
    allowed = "keeps running statistics; adapters are for models that have none, or frozen ones"
    require(task.is_state is None, "model", type(model).__name__, allowed)
    first, drawn = jax.random.split(jax.random.key(seed))
    leaves, structure = jax.tree.flatten(model.init(first) if params is None else params)
    paths = leaf_paths(jax.tree.unflatten(structure, leaves))
    matrices = _matrices(paths, leaves, target)
    whole = [
        _chooses(train, path) and own is None for path, own in zip(paths, matrices, strict=True)
    ]
    keys = jax.random.split(drawn, len(leaves))
    fixed = [
        np.asarray(own.init(key, rank)) if freeze_a and own is not None else None
        for own, key in zip(matrices, keys, strict=True)
    ]
    # On the host: the engine puts one copy on the devices.
    base = [None if own else np.asarray(leaf) for own, leaf in zip(whole, leaves, strict=True)]
    start = tuple(
        np.asarray(leaf) if own else None for own, leaf in zip(whole, leaves, strict=True)
    )
    frozen = {"base": base, "lora_A": fixed, "model": task.frozen}
    return LoRA(model, matrices, rank, alpha, start, structure, frozen)


def _matrices(
    paths: Sequence[Path], leaves: Sequence[Any], target: Chosen
) -> tuple[Matrix | None, ...]:
    """For each leaf what has an adapter there."""
    found: list[Matrix | None] = []
    for path, leaf in zip(paths, leaves, strict=True):
        # A bias beside a matrix that is named by the part of the tree that both are in.
        beside = np.ndim(leaf) < 2 and not callable(target) and path_name(path) not in target
        if beside or not _chooses(target, path):
            found.append(None)
            continue
        allowed = f"has the shape {np.shape(leaf)}; adapters are for matrices"
        require(np.ndim(leaf) == 2, "target", path_name(path), allowed)
        found.append(Matrix(path, np.shape(leaf), path[-1:] == ("kernel",)))
    if not any(found):
        names = (path_name(p) for p, leaf in zip(paths, leaves, strict=True) if np.ndim(leaf) == 2)
        raise FieldError("target", target, f"chooses no matrix; there are {', '.join(names)}")
    return tuple(found)


def _chooses(chosen: Chosen, path: Path) -> bool:
    if callable(chosen):
        return bool(chosen(path))
    return is_any_named(path, tuple(chosen))
