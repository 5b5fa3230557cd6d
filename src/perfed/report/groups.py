"""Runs grouped over seeds, and their scores and costs."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final, get_args

import numpy as np
from jaxtyping import Float, Int

from perfed.core.errors import DataError
from perfed.evaluation import ERRORS, Gain, ModelKind, by_name, gain_over
from perfed.runs.local_run import LOCAL
from perfed.runs.run_dir import RecordedRun
from perfed.runs.statistics import Spread, over_seeds

KINDS: tuple[ModelKind, ...] = get_args(ModelKind)
KIND_NAMES: dict[str, str] = {"global": "Global", "personalized": "Personalized"}
SCORE_NAMES = {
    "accuracy": "Accuracy", "r2": "R²", "rmse": "RMSE", "loss": "Loss",
    "train_accuracy": "Training accuracy", "train_r2": "Training R²",
    "train_rmse": "Training RMSE", "train_loss": "Training loss",
    "train_objective": "Training objective",
}  # fmt: skip

# What a curve can be drawn against, in this order; only "round" and those recorded are offered.
AXIS_NAMES = {
    "round": "Rounds",
    "uplink_bytes": "Sent by clients",
    "simulated_seconds": "Simulated time",
    "seconds": "Real time",
}

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_SECONDS = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "h"), (180, 60, "min"), (0.0, 1, "s"))

# What a run spends time on, in the order it does.
PARTS = ("data", "compiling", "rounds", "scoring", "recording")

# Longer names of settings are replaced by a number.
_LABEL = 48


class Alone(NamedTuple):
    """Every client's headline score alone, which a group of runs is compared with.

    Attributes:
        runs: the Local runs that have them, by name.
        clients: the scores, means over seeds; NaN where one is not defined.
    """

    runs: str
    clients: Float[np.ndarray, " clients"]


@final
@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: the method's name, with the settings that tell it from others of this name.
        runs: the runs, by seed.
    """

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def first(self) -> RecordedRun:
        """The run with the least seed: names, sizes and settings are those of all."""
        return self.runs[0]

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.runs)

    @property
    def kinds(self) -> tuple[ModelKind, ...]:
        """The models that were scored; no `global` where the method has no global model."""
        return tuple(kind for kind in KINDS if kind in self.first.scores)

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores' names; the first is the headline."""
        return tuple(self.first.scores["personalized"])

    @property
    def adapt_on(self) -> str:
        """The data that personal models are made from."""
        return str(self.first.config.get("adapt_on", "train"))

    @property
    def rounds(self) -> Int[np.ndarray, " evaluations"]:
        """The rounds at which every run was scored."""
        common = set(self.first.rounds.tolist())
        for run in self.runs[1:]:
            common &= set(run.rounds.tolist())
        return np.array(sorted(common), dtype=np.int64)

    def _at(self, run: RecordedRun) -> Int[np.ndarray, " evaluations"]:
        return np.searchsorted(run.rounds, self.rounds)

    def curve(self, kind: str, score: str, statistic: str) -> Spread:
        """A statistic over clients at every common round, over seeds."""
        values = [
            over_clients(run.scores[kind][score][self._at(run)], run.sizes, score)[statistic]
            for run in self.runs
        ]
        return over_seeds(np.stack(values))

    def last(self, kind: str, score: str, statistic: str) -> Spread:
        """A statistic over clients after the last round, over seeds."""
        values = [
            over_clients(run.scores[kind][score][-1:], run.sizes, score)[statistic][0]
            for run in self.runs
        ]
        return over_seeds(np.stack(values))

    def axis(self, axis: str) -> Float[np.ndarray, " evaluations"] | None:
        """What a curve is drawn against, a mean over seeds; None: it was not recorded."""
        if axis == "round":
            return self.rounds.astype(float)
        if not all(axis in run.costs for run in self.runs):
            return None
        return over_seeds(np.stack([run.costs[axis][self._at(run)] for run in self.runs])).mean

    def cost(self, cost: str) -> Spread | None:
        """What the whole run has cost, over seeds; None: it was not recorded."""
        if not all(cost in run.costs for run in self.runs):
            return None
        return over_seeds(np.array([run.costs[cost][-1] for run in self.runs], dtype=float))

    def clients(self, kind: str, score: str) -> Float[np.ndarray, " clients"]:
        """Every client's score after the last round, a mean over seeds."""
        return over_seeds(np.stack([run.scores[kind][score][-1] for run in self.runs])).mean

    def gain(self) -> Gain | None:
        """What personalizing brings every client in the headline score; None: no global model."""
        if "global" not in self.kinds:
            return None
        score = self.scores[0]
        return gain_over(self.clients("personalized", score), self.clients("global", score), score)

    @property
    def is_local(self) -> bool:
        """Whether these are runs of Local."""
        return bool(self.first.config["method"]["name"] == LOCAL)

    def alone(self, groups: Sequence["Group"]) -> Alone | None:
        """What its clients score alone: by the best Local among the groups, or by summaries.

        None for Local itself, and where no Local run of the same data is known.
        """
        if self.is_local:
            return None
        score = self.scores[0]
        sign = -1.0 if score in ERRORS else 1.0
        same = [g for g in groups if g.is_local and g.data == self.data]
        if same:
            # The strongest one, so that a poorly tuned Local flatters nobody.
            best = max(same, key=lambda g: sign * float(g.last("personalized", score, "mean").mean))
            scores = best.clients("personalized", score)
            return Alone(best.label, by_name(scores, best.first.names, self.first.names))
        told = [(run.summary.get("worse_off") or {}).get("than_local") for run in self.runs]
        known: list[dict[str, Any]] = [own for own in told if own is not None]
        if len(known) < len(told):
            return None
        names = self.first.names
        every = np.stack([by_name(own["scores"], names, names) for own in known])
        runs = dict.fromkeys(str(own["run"]) for own in known)
        return Alone(", ".join(runs), over_seeds(every).mean)

    def gain_over_alone(self, groups: Sequence["Group"]) -> Gain | None:
        """What the federation brings every client in the headline score; None: not known."""
        alone = self.alone(groups)
        if alone is None:
            return None
        score = self.scores[0]
        return gain_over(self.clients("personalized", score), alone.clients, score)

    @property
    def data(self) -> str | None:
        """The checksum of the data."""
        return self.first.environment.get("data_sha256")

    def timing(self) -> dict[str, float]:
        """Where the time went, in seconds by part, a mean over seeds."""
        found = dict.fromkeys(part for run in self.runs for part in run.timing)
        parts = [p for p in PARTS if p in found] + [p for p in found if p not in PARTS]
        return {p: float(np.mean([run.timing.get(p, 0.0) for run in self.runs])) for p in parts}


def grouped(runs: Sequence[RecordedRun]) -> tuple[Group, ...]:
    """Runs that differ only in their seed together, in the order they were given.

    Raises:
        DataError: there are no runs, or they cannot be compared: they have other scores, they are
            the same run twice, or runs of one group have other clients or other last rounds.
    """
    if not runs:
        raise DataError("a report needs at least one run directory")
    together: dict[str, list[RecordedRun]] = {}
    for run in runs:
        settings = _settings(run.config)
        together.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    sets = [
        sorted(members, key=lambda run: int(run.config["seed"])) for members in together.values()
    ]
    for members in sets:
        _check(members)
    first = runs[0]
    for run in runs:
        names = [list(one.scores["personalized"]) for one in (first, run)]
        if names[0] != names[1]:
            raise DataError(
                f"{first.path} is scored by {', '.join(names[0])}, {run.path} by "
                f"{', '.join(names[1])}: report them separately"
            )
    labels = _labels([_settings(members[0].config) for members in sets])
    return tuple(Group(label, tuple(m)) for label, m in zip(labels, sets, strict=True))


def model_kinds(groups: Sequence[Group]) -> tuple[ModelKind, ...]:
    """The models that were scored in some group."""
    return tuple(kind for kind in KINDS if any(kind in group.kinds for group in groups))


def _check(members: Sequence[RecordedRun]) -> None:
    """Runs of one group are of the same clients and length, each with its own seed."""
    seen: dict[int, RecordedRun] = {}
    first = members[0]
    for run in members:
        seed = int(run.config["seed"])
        if seed in seen:
            raise DataError(
                f"{seen[seed].path} and {run.path} have the same settings and the same seed, "
                f"{seed}: give one of them"
            )
        seen[seed] = run
        if run.names != first.names or not np.array_equal(run.sizes, first.sizes):
            raise DataError(
                f"{first.path} and {run.path} have the same settings, but other clients"
            )
        if run.rounds[-1] != first.rounds[-1]:
            raise DataError(
                f"{first.path} ends at round {first.rounds[-1]}, {run.path} at round "
                f"{run.rounds[-1]}: resume the shorter one"
            )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What tells runs apart: not their seed, and not the Local run each is compared with."""
    settings = {k: v for k, v in config.items() if k != "seed"}
    if "output" in settings:
        settings["output"] = {k: v for k, v in settings["output"].items() if k != "local"}
    return settings


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each configuration: its method, and what tells it from others of that method."""
    flats = [flat(config) for config in configs]
    names = [str(config["method"]["name"]) for config in configs]
    labels = []
    for name, own in zip(names, flats, strict=True):
        alike = [f for n, f in zip(names, flats, strict=True) if n == name]
        keys = [k for k in dict.fromkeys(k for f in alike for k in f) if k != "seed"]
        telling = [k for k in keys if len({f.get(k) for f in alike}) > 1]
        text = ", ".join(f"{k.removeprefix('method.')}={own.get(k, 'none')}" for k in telling)
        labels.append(f"{name} ({text})" if text else name)
    for i, label in enumerate(labels):
        if len(label) > _LABEL or labels.count(label) > 1:
            labels[i] = f"{names[i]} #{1 + names[:i].count(names[i])}"
    return labels


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and the values as text."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        elif isinstance(value, str):
            found[name] = value
        elif value is None:
            found[name] = "none"
        else:
            found[name] = json.dumps(value, ensure_ascii=False, default=str)
    return found


def statistics(score: str) -> dict[str, str]:
    """The statistics over clients, by how they are called; of errors, the bad tail is the upper."""
    tail = {"p90": "p90"} if score in ERRORS else {"p10": "p10"}
    return {"mean": "mean", "weighted": "by size", "worst": "worst"} | tail


def over_clients(
    values: Float[np.ndarray, "evaluations clients"], sizes: Int[np.ndarray, " clients"], score: str
) -> dict[str, Float[np.ndarray, " evaluations"]]:
    """The statistics of `Summary` for each evaluation, over clients whose score is defined."""
    weights = np.where(np.isfinite(values), sizes, 0)
    values = np.where(np.isfinite(values), values, np.nan)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # no client has a score: NaN
        return {
            "mean": np.nanmean(values, axis=1),
            "weighted": np.nansum(values * weights, axis=1) / weights.sum(axis=1),
            "worst": (np.nanmax if score in ERRORS else np.nanmin)(values, axis=1),
            "p10": np.nanpercentile(values, 10, axis=1),
            "p90": np.nanpercentile(values, 90, axis=1),
        }


def unit(axis: str, largest: float) -> tuple[float, str]:
    """What to divide by, and the unit's name ("" for rounds), for values up to the largest."""
    if axis == "round":
        return 1.0, ""
    if axis.endswith("bytes"):
        return next((s, name) for s, name in _BYTES if largest >= s or s == 1.0)
    return next((float(s), name) for least, s, name in _SECONDS if largest >= least)


def axes(groups: Sequence[Group]) -> dict[str, tuple[str, float]]:
    """The axes that some group has: what each is called, with its unit, and what to divide by."""
    found = {}
    for axis, name in AXIS_NAMES.items():
        values = [v for group in groups if (v := group.axis(axis)) is not None]
        if values:
            scale, suffix = unit(axis, max(float(v.max()) for v in values))
            found[axis] = (f"{name} ({suffix})" if suffix else name, scale)
    return found


def score_name(score: str) -> str:
    """What a score is called, with its unit."""
    name = SCORE_NAMES.get(score, score)
    return f"{name} (%)" if score.endswith("accuracy") else name


def score_word(score: str) -> str:
    """What a score is called within a sentence."""
    return SCORE_NAMES[score].lower() if score.endswith("accuracy") else score_name(score)


def score_scale(score: str) -> float:
    """What a score is multiplied by to be shown."""
    return 100.0 if score.endswith("accuracy") else 1.0


def worse_count(gain: Gain, score: str) -> str:
    """How many clients lose, their share, and how many lose much."""
    if not gain.defined:
        return "no client has both scores"
    text = f"{gain.worse} of {gain.defined} client{'s' * (gain.defined != 1)}"
    if not gain.worse:
        return text
    return f"{text} ({100 * gain.share_worse:.0f} %), {gain.much_worse} by more than {point(score)}"


def point(score: str) -> str:
    """`POINT` of a score, in words."""
    return "1 point" if score == "accuracy" else "0.01"


def count_line(gain: Gain, score: str) -> str:
    """Who gains and who loses, in a sentence."""
    if not gain.defined:
        return "no client has this score for both models"
    line = (
        f"{gain.better} of {gain.defined} client{'s' * (gain.defined != 1)} "
        f"gain{'s' * (gain.better == 1)}; "
    )
    if gain.worse:
        line += f"{gain.worse} lose{'s' * (gain.worse == 1)}, "
        line += f"{gain.much_worse} more than {point(score)}"
    else:
        line += "none loses"
    unknown = len(gain.clients) - gain.defined
    return line if not unknown else f"{line}; of {unknown} the score is not defined"
