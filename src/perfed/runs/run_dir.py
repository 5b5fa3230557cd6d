"""The folder of a run: its configuration, environment, results and checkpoints.

- `config.json`: every setting, defaults included.
- `environment.json`: versions, devices, the state of the code, a checksum of the data.
- `metrics.parquet`: one row for each scored round, client and model kind; and one row for each
  round, with neither client nor kind, with what the run had cost by then.
- `summary.json`: the run in one small file.
- `model.safetensors`: the global model, with all it takes to use it (`saved`).
- `clients.safetensors`: the personal models, stacked in the order of `summary.json`'s `names`; or
  `clients/NAME.safetensors`, one a client, each like `model.safetensors`.
- `data.safetensors`: how inputs were scaled for each client, and how many examples of each class
  each has.
- `theory.json`: the result of `perfed diagnose DIR`, if it was run.
- `report.html`: a page to look at, which the command `perfed run` makes last.
- `checkpoints/`: where the run stood; what `perfed resume` goes on from.
- `kept/`: what clients keep between rounds, while a run goes on that does not fit in memory.
- `federation.json`: of a federation, who takes part and on which terms.

Where only a sample of clients is scored (`eval_clients`), all files about clients are about those.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile
from typing import Any, Literal, final

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int
from safetensors.numpy import load_file, save

from perfed.core.errors import ConfigError, DataError
from perfed.core.trees import Params
from perfed.data import Federation
from perfed.data.describe import Description
from perfed.data.scaling import SCALING_ARRAYS
from perfed.evaluation.metrics import score_order
from perfed.runs.files import read_json, write_whole
from perfed.runs.saved_model import named_leaves, saved_model
from perfed.runs.summary import LocalRun, summarize, summary_bytes, with_local_run
from perfed.runs.trackers import forget
from perfed.training import Result

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.parquet"
SUMMARY, MODEL, CLIENTS, DATA = (
    "summary.json", "model.safetensors", "clients.safetensors", "data.safetensors",
)  # fmt: skip
CHECKPOINTS = "checkpoints"
KEPT = "kept"
REPORT = "report.html"
THEORY = "theory.json"
FEDERATION = "federation.json"
VERSIONS = ("perfed", "jax", "jaxlib", "numpy", "pyarrow", "safetensors")

PersonalModels = Literal["stacked", "files", "none"]


def check_vacant(folder: Path, overwrite: bool) -> None:
    """Before anything heavy: results can be written there, and none are lost."""
    if not overwrite and (folder / SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: it holds results already; name another folder, or add --overwrite"
        )
    if not overwrite and (folder / CONFIG).exists():
        raise ConfigError(
            f"--out {folder}: it holds a run that is not finished; go on with it by "
            f"`{_resume(folder)}`, name another folder, or add --overwrite"
        )
    try:
        # Made later, when there is something to put into it; until then, what it will be made in.
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with TemporaryFile(dir=there):
            pass
        for name in (SUMMARY, CONFIG):
            if (folder / name).is_dir():
                raise IsADirectoryError(0, f"{name} is a folder there")
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot write there: {error.strerror}") from None


def begin(folder: Path, config: dict[str, Any], federation: Federation) -> None:
    """Write what is known before the first round."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        # What an earlier run left behind must not pass for this one's.
        for name in (CONFIG, SUMMARY, METRICS, MODEL, CLIENTS, DATA, REPORT, THEORY):
            (folder / name).unlink(missing_ok=True)
        for left in (folder / CHECKPOINTS).glob("*"):
            left.unlink()
        rmtree(folder / KEPT, ignore_errors=True)
        forget(folder)
        write_whole(folder / ENVIRONMENT, summary_bytes(environment(federation)))
        # Last: with it the folder is that of a run.
        write_whole(folder / CONFIG, summary_bytes(config))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within this, no other process can be at work in the folder."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise ConfigError(
            f"{folder}: another process is at work on this run; wait for it, or end it"
        ) from None
    except OSError:
        pass  # some network drives have no locks
    try:
        yield
    finally:
        os.close(place)


def is_federated(folder: Path) -> bool:
    """Whether the run in a folder is a federation's, which `perfed serve` goes on with."""
    return (folder / FEDERATION).exists()


def _resume(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"perfed {'serve --resume' if is_federated(folder) else 'resume'} {folder}"


def finish(
    folder: Path,
    result: Result,
    config: dict[str, Any],
    personal: PersonalModels,
    models: Params | None,
    local: LocalRun | None = None,
) -> list[str]:
    """Write the results; the summary last, so that its presence means that all are there.

    Args:
        folder: the run's.
        result: what came of it.
        config: its settings.
        personal: how personal models are written.
        models: those, of the clients that were scored.
        local: the Local run that it is compared with.
    """
    experiment, federation = result.experiment, result.scored
    extra = experiment.method.broadcast(result.state.server_state)
    common = saved_model(result.global_model, experiment, config, extra)
    written = {
        METRICS: _parquet(result),
        MODEL: common.to_bytes(),
        DATA: _data_bytes(federation),
    }
    if personal == "stacked":
        written[CLIENTS] = save(named_leaves(models), {"names": json.dumps(federation.names)})
    elif personal == "files":
        (folder / "clients").mkdir(exist_ok=True)
        for i, name in enumerate(federation.names):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], models)
            scaling = None if federation.scaling is None else federation.scaling.select([i])
            file = f"clients/{_file_name(name, i)}.safetensors"
            written[file] = common.with_params(own, scaling).to_bytes()
    summary = summarize(result, config)
    written[SUMMARY] = summary_bytes(summary if local is None else with_local_run(summary, local))
    for name, contents in written.items():
        write_whole(folder / name, contents)
    return list(written)


def environment(federation: Federation) -> dict[str, Any]:
    """What a run depends on beside its configuration."""
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()} | {p: version(p) for p in VERSIONS},
        "platform": platform.platform(),
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "command": sys.argv,
        "git": _git(),
        "data_sha256": federation.checksum(),
        "data_caution": federation.caution,
    }


def _git() -> dict[str, Any] | None:
    """The commit of the folder one is in, and whether files differ from it; None outside of git."""

    def said(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = said("status", "--porcelain", "--untracked-files=no")
        return {"commit": said("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _parquet(result: Result) -> bytes:
    """`metrics.parquet`."""
    costs, names = result.costs, result.scored.names
    rounds = len(costs.uplink_bytes)
    marks = dict(zip((e.round for e in result.history), result.train_state.marks, strict=True))
    columns: dict[str, list[Any]] = {
        "round": list(range(rounds)),
        "kind": [None] * rounds,
        "client": [None] * rounds,
        "uplink_bytes": costs.uplink_bytes.tolist(),
        "downlink_bytes": costs.downlink_bytes.tolist(),
        "simulated_seconds": [None] * rounds if costs.seconds is None else costs.seconds.tolist(),
        "seconds": [marks.get(r) for r in range(rounds)],
    }
    scores = list(result.scores["personalized"].values)
    columns |= {name: [None] * rounds for name in scores}
    for evaluation in result.history:
        for kind, own in evaluation.scores.items():
            columns["round"] += [evaluation.round] * len(names)
            columns["kind"] += [kind] * len(names)
            columns["client"] += names
            for name in scores:
                columns[name] += own.values[name].tolist()
    rows = len(columns["round"])
    types = {"round": pa.int32(), "kind": pa.string(), "client": pa.string()}
    types |= {"uplink_bytes": pa.int64(), "downlink_bytes": pa.int64()}
    table = pa.table(
        {
            name: pa.array(values + [None] * (rows - len(values)), types.get(name, pa.float64()))
            for name, values in columns.items()
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def _data_bytes(federation: Federation) -> bytes:
    """`data.safetensors`."""
    facts = Description.of(federation)
    tensors = {
        "train_size": facts.train, "test_size": facts.test,
        "train_counts": facts.counts, "test_counts": facts.test_counts,
        "target": np.array(federation.target),
    }  # fmt: skip
    if federation.scaling is not None:
        tensors |= dict(zip(SCALING_ARRAYS, federation.scaling.arrays, strict=True))
    texts = {k: json.dumps(getattr(federation, k)) for k in ("names", "labels", "vocabulary")}
    return save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, texts)


def _file_name(name: str, i: int) -> str:
    """A client's name where it can be a file's, or else its number."""
    good = name and all(c.isalnum() or c in "-_. " for c in name) and not name.startswith(".")
    return name if good and len(name) < 100 else f"client-{i}"


@final
@dataclass(frozen=True)
class RecordedRun:
    """A run, read from its folder.

    Attributes:
        path: the folder.
        config: every setting.
        environment: what it depended on beside them.
        summary: `summary.json`.
        rounds: the rounds in which clients were scored.
        scores: every client's scores in those rounds, by model kind and name.
        costs: what the run had cost by those rounds: `uplink_bytes`, `downlink_bytes`, `seconds`,
            and `simulated_seconds` if a network was given.
        names: the clients.
        sizes: how many examples each is scored on.
        labels: the classes' names; None: a regression.
        train_counts: how many training examples of each class each client has.
        timing: what the time was spent on.
        theory: `theory.json`, if there is one.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    rounds: Int[np.ndarray, " evaluations"]
    scores: dict[str, dict[str, Float[np.ndarray, "evaluations clients"]]]
    costs: dict[str, Float[np.ndarray, " evaluations"]]
    names: tuple[str, ...]
    sizes: Int[np.ndarray, " clients"]
    labels: tuple[str, ...] | None
    train_counts: Int[np.ndarray, "clients classes"]
    timing: dict[str, float]
    theory: dict[str, Any] | None


def read_run(path: Path) -> RecordedRun:
    """A finished run's folder."""
    if not (path / SUMMARY).is_file():
        said = (
            f"is not finished; go on with it by: {_resume(path)}"
            if (path / CONFIG).exists()
            else f"is not a run folder; make one by: perfed run CONFIG --out {path}"
        )
        raise DataError(f"{path} {said}")
    try:
        config, environment_, summary = (
            json.loads((path / name).read_text(encoding="utf-8"))
            for name in (CONFIG, ENVIRONMENT, SUMMARY)
        )
        table = pq.read_table(path / METRICS)
        data = load_file(path / DATA)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a run: {error}") from None
    names = tuple(summary["names"])
    values = {name: table[name].to_numpy() for name in table.column_names}
    by_client = table["client"].is_valid().to_numpy()
    rounds = np.unique(values["round"][by_client])
    known = set(table.column_names) - {"round", "kind", "client", *_COSTS}
    scores = {
        kind: {
            name: values[name][by_client & (values["kind"] == kind)].reshape(len(rounds), -1)
            for name in sorted(known, key=score_order)
        }
        for kind in ("global", "personalized")
        if (values["kind"] == kind).any()
    }
    whole = ~by_client
    costs = {
        name: values[name][whole].astype(float)[rounds]
        for name in _COSTS
        if table[name].null_count < table.num_rows
    }
    labels = summary["labels"]
    return RecordedRun(
        path, config, environment_, summary, rounds, scores, costs, names,
        data["test_size"], None if labels is None else tuple(labels), data["train_counts"],
        summary["timing"], read_json(path / THEORY) if (path / THEORY).exists() else None,
    )  # fmt: skip


_COSTS = ("uplink_bytes", "downlink_bytes", "simulated_seconds", "seconds")
