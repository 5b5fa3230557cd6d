"""A client that was not there: a trained model fitted to its own data, offline."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from perfed.core.errors import DataError, DivergedError, require, require_count
from perfed.core.objective import Examples, Objective
from perfed.core.task import Model, Task
from perfed.core.trees import Params, all_finite, combine, matching, partition, split
from perfed.data import Dataset, Scaling
from perfed.data.files import one_client
from perfed.data.splits import MIN_EXAMPLES, hold_out_mask
from perfed.evaluation.metrics import named_scores
from perfed.methods import Method, Received, RoundContext
from perfed.methods.heads import resolve_heads
from perfed.runs.config import build_method, build_model
from perfed.runs.factories import check_factories
from perfed.runs.saved_model import SavedModel, Uses, read_model
from perfed.simulation.round import with_state


@final
@dataclass(frozen=True)
class Adapted:
    """A model fitted to a client.

    Attributes:
        model: the client's own, ready to be saved and used.
        examples: how many examples it was fitted to.
        held_out: how many it was scored on.
        before: the common model's scores on those.
        after: its own scores on them.
    """

    model: SavedModel
    examples: int
    held_out: int
    before: dict[str, float]
    after: dict[str, float]


def load_model(path: Path, factories: Collection[str] = ()) -> SavedModel:
    """A model from its file, ready to predict or to adapt.

    Args:
        path: the file.
        factories: functions that the file may name as what makes its model, `[model] factory`; no
            other is run.
    """

    def build(uses: Uses) -> Model:
        check_factories(uses.model, factories, f"{path}")
        return build_model(uses.model, uses.shape, uses.outputs, uses.vocabulary)

    return read_model(
        path,
        build,
        lambda uses: build_method(uses.method, uses.rounds),
    )


def client_rows(uses: Uses, path: Path, label: str | None = None, labeled: bool = True) -> Dataset:
    """One client's rows from a file, which must have the inputs and the labels the model knows.

    Args:
        uses: what the model takes.
        path: a .csv, .parquet or .npz file.
        label: the column with the label; None: as in training.
        labeled: whether there must be one.
    """
    name = label or uses.label or "label"
    pool = one_client(path, name if labeled else None, uses.features, uses.labels)
    if pool.x.shape[1:] != uses.shape:
        raise DataError(
            f"{path}: inputs have the shape {pool.x.shape[1:]}, but the model takes {uses.shape}"
        )
    return pool


def adapt(
    model: SavedModel,
    pool: Dataset,
    steps: int | None = None,
    test_fraction: float = 0.25,
    seed: int = 0,
) -> Adapted:
    """Personalize a model by its method, on a client's own rows.

    Args:
        model: the common model.
        pool: the client's rows; those marked as test rows are held out.
        steps: gradient steps (local rounds for pFedMe); None: as in training.
        test_fraction: the part that is held out where no rows are marked.
        seed: of the rows that are held out, and of the batches.
    """
    uses = model.uses
    method = resolve_heads(build_method(uses.method, uses.rounds), model.task.head, model.params)
    method = _with_steps(method, model.is_shared(method), model.params, steps)
    require(0 < test_fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
    require(0 <= seed < 2**31, "seed", seed, "must be between 0 and 2^31 - 1")
    if len(pool.y) < MIN_EXAMPLES:
        raise DataError(f"{len(pool.y)} example(s): two are needed, one to fit and one to score")
    out = pool.test
    if out is None:
        strata = pool.y if pool.labels is not None else np.zeros(len(pool.y), int)
        rng = np.random.default_rng(seed)
        out = hold_out_mask(strata, np.zeros(len(pool.y), int), test_fraction, rng)
    scaling = model.scaling
    if uses.standardize == "client":
        clip = np.inf if uses.clip is None else uses.clip
        scaling = Scaling.fit("feature", pool.x[~out], np.array([np.sum(~out)]), clip=clip)
    y = pool.y if uses.labels is not None else (pool.y - model.target[0]) / model.target[1]
    y = y.astype(np.int32 if uses.labels is not None else np.float32)
    task = model.task
    model_state = None if task.is_state is None else split(model.params, task.is_state)[0]
    own, test = (
        _objective(task, pool.x[rows], y[rows], scaling, model_state) for rows in (~out, out)
    )
    start = model.params
    theta = _personalize(method, model, own, jax.random.key(seed))

    def scores(params: Params) -> dict[str, float]:
        measure = test.measure(params)
        targets = None if uses.labels is not None else [y[out]]
        named = named_scores(np.array([measure.score], np.float64), targets, model.target[1])
        return {k: float(v[0]) for k, v in named.items()} | {"loss": float(measure.loss)}

    before, after = scores(start), scores(theta)
    if not (all_finite(theta) and np.isfinite(after["loss"])):
        raise DivergedError(
            f"{uses.method['name']} diverged on this client's data: the adapted model is not "
            "finite. Fewer steps may help, or inputs of the scale that the model was trained on"
        )
    fitted = model.with_params(theta, scaling)
    return Adapted(fitted, int(np.sum(~out)), int(np.sum(out)), before, after)


def _objective(
    task: Task, x: np.ndarray, y: np.ndarray, scaling: Scaling | None, model_state: Params | None
) -> Objective:
    arrays = None
    if scaling is not None:
        shift, scale, clip = (jnp.asarray(part[0]) for part in scaling.arrays)
        arrays = (shift, scale, clip)
    examples = Examples(jnp.asarray(x), jnp.asarray(y), 0, len(y), arrays)
    return Objective(task, examples, model_state=model_state)


def _personalize(method: Method, model: SavedModel, own: Objective, key: PRNGKeyArray) -> Params:
    """The model of a client that was not there, as its method makes it.

    Where leaves are personal, or the method personalizes by what a client keeps, the client first
    makes these its own by a local update, from the shared leaves.
    """
    shared = model.is_shared(method)
    context = RoundContext(jnp.int32(model.uses.rounds), key, jax.random.fold_in(key, 1), 1, 1)
    state_keys = jax.random.split(jax.random.fold_in(key, 2))

    def weights_of(params: Params) -> Params:
        is_state = own.task.is_state
        return params if is_state is None else split(params, is_state)[1]

    def personalize(received: Received) -> Params:
        objective, before = own, received.params
        received = received._replace(params=weights_of(received.params))
        state = method.init_client_state(received.params)
        if _begins_with_update(method, shared, model.params):
            update = method.local_update(objective, received, state, context)
            trained = with_state(objective, method, update.params, state_keys[0], method.step_count)
            common, _ = partition(before, shared)
            _, own_leaves = partition(trained, shared)
            whole = combine(common, own_leaves)
            received = received._replace(params=weights_of(whole))
            if objective.model_state is not None:
                objective = replace(objective, model_state=matching(objective.model_state, whole))
            state = update.client_state
        fitted = method.personalize(objective, received, state, context)
        return with_state(objective, method, fitted, state_keys[1], method.adapt_count)

    return jax.jit(personalize)(Received(model.params, model.extra))


def _begins_with_update(method: Method, shared: tuple[bool, ...], params: Params) -> bool:
    """Whether a client must have made a local update before it can personalize."""
    keeps = jax.eval_shape(method.init_client_state, params) is not None
    personalizes = type(method).personalize is not Method.personalize
    adapts = bool(method.adapt_work) and method.adapt_count > 0
    return not all(shared) or (keeps and personalizes and not adapts)


def _with_steps(
    method: Method, shared: tuple[bool, ...], params: Params, steps: int | None
) -> Method:
    """The method with so many steps on the client's own data."""
    if not any(shared):
        raise DataError(f"{method.name} learns no common model, so there is nothing to adapt")
    if steps is None:
        return method
    require_count("steps", steps)
    begins = _begins_with_update(method, shared, params)
    field = method.adapt_work or (method.local_steps if begins else "")
    if not field:
        raise DataError(
            f"steps: {method.name} does not adapt its model to a client; leave --steps out"
        )
    changed: Method = replace(method, **{field: steps})  # type: ignore[type-var]
    return changed
