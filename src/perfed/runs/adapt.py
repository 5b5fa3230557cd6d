"""A client that was not there: a trained model fitted to its own data, offline."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from perfed.data import Dataset, Scaling
from perfed.data.files import one_client
from perfed.data.splits import LEAST, held_out
from perfed.core.errors import DataError, DivergedError, require, require_count
from perfed.evaluation.evaluator import scores_of
from perfed.runs.config import built_method, built_model
from perfed.runs.saved_model import SavedModel, Uses, read_model
from perfed.methods import Method
from perfed.methods.base import Turn
from perfed.core.objective import Examples, Objective, Params, Task
from perfed.simulation.experiment import all_finite

# What `steps` means to each method: how long it works on a client's own data.
_STEPS = {"fedavg": "adapt_steps", "per-fedavg": "adapt_steps", "pfedme": "local_rounds"}


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


def load_model(path: Path) -> SavedModel:
    """A model from its file, ready to predict or to adapt."""
    return read_model(
        path,
        lambda uses: built_model(uses.model, uses.shape, uses.outputs, uses.vocabulary),
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
    """Personalize a model the way its method says, on a client's own rows.

    Args:
        model: the common model.
        pool: the client's rows; those marked as test rows are held out.
        steps: gradient steps (local rounds for pFedMe); None: as in training.
        test_fraction: the part that is held out where no rows are marked.
        seed: of the rows that are held out, and of the batches.
    """
    uses = model.uses
    method = _with_steps(built_method(uses.method, uses.rounds), uses.method["name"], steps)
    require(0 < test_fraction < 1, "test_fraction", test_fraction, "must be between 0 and 1")
    require(0 <= seed < 2**31, "seed", seed, "must be between 0 and 2^31 - 1")
    if len(pool.y) < LEAST:
        raise DataError(f"{len(pool.y)} example(s): two are needed, one to fit and one to score")
    out = pool.test
    if out is None:
        strata = pool.y if pool.labels is not None else np.zeros(len(pool.y), int)
        rng = np.random.default_rng(seed)
        out = held_out(strata, np.zeros(len(pool.y), int), test_fraction, rng)
    scaling = model.scaling
    if uses.standardize == "client":
        scaling = Scaling.fitted("feature", pool.x[~out], np.array([np.sum(~out)]))
    y = pool.y if uses.labels is not None else (pool.y - model.target[0]) / model.target[1]
    y = y.astype(np.int32 if uses.labels is not None else np.float32)
    task = Task(model.model, uses.model.get("l2", 0.0))
    own, test = (_objective(task, pool.x[rows], y[rows], scaling) for rows in (~out, out))
    key = jax.random.key(seed)
    turn = Turn(jnp.int32(uses.rounds), jax.random.fold_in(key, 1))
    w = model.params
    personalize = jax.jit(lambda w: method.personalize(own, w, method.first_memory(w), turn, key))
    theta = personalize(w)

    def scores(params: Params) -> dict[str, float]:
        measure = test.measure(params)
        targets = None if uses.labels is not None else [y[out]]
        named = scores_of(np.array([measure.score], np.float64), targets, model.target[1])
        return {k: float(v[0]) for k, v in named.items()} | {"loss": float(measure.loss)}

    before, after = scores(w), scores(theta)
    if not (all_finite(theta) and np.isfinite(after["loss"])):
        raise DivergedError(
            f"{uses.method['name']} diverged on this client's data: the adapted model is not "
            "finite. Fewer steps may help, or inputs of the scale that the model was trained on"
        )
    fitted = model.with_params(theta, scaling)
    return Adapted(fitted, int(np.sum(~out)), int(np.sum(out)), before, after)


def _objective(task: Task, x: np.ndarray, y: np.ndarray, scaling: Scaling | None) -> Objective:
    arrays = None
    if scaling is not None:
        shift, scale, clip = (jnp.asarray(part[0]) for part in scaling.arrays)
        arrays = (shift, scale, clip)
    return Objective(task, Examples(jnp.asarray(x), jnp.asarray(y), 0, len(y), arrays))


def _with_steps(method: Method, name: str, steps: int | None) -> Method:
    field = _STEPS.get(method.name)
    if field is None:
        raise DataError(f"{name} learns no common model, so there is nothing to adapt")
    if steps is None:
        return method
    require_count("steps", steps)
    assert field in {f.name for f in fields(method)}  # type: ignore[arg-type]
    changed: Any = replace(method, **{field: steps})  # type: ignore[type-var]
    return changed  # type: ignore[no-any-return]
