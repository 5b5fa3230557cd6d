"""What the page's charts draw, as plain numbers and text: small, whatever the size of the runs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from perfed.report.groups import (
    Group,
    axes,
    score_name,
    score_scale,
    statistics,
)
from perfed.runs.run_dir import RecordedRun

# What is drawn at most; a page of thousands of clients stays a few MB.
POINTS = 200  # of a curve
DOTS = 150  # clients of a box
BARS = 400  # clients of a gain chart
COLUMNS, ROWS = 400, 60  # clients and labels of the label picture
BUBBLES = 60  # up to so many clients, the label picture has a dot for each client and label

_NAME = 60


def chart_data(groups: Sequence[Group]) -> dict[str, Any]:
    """All charts' data."""
    known = axes(groups)
    scores = groups[0].scores
    return {
        "axes": [{"key": key, "name": name} for key, (name, _) in known.items()],
        "scores": [
            {"key": s, "name": score_name(s), "percent": s.endswith("accuracy")} for s in scores
        ],
        "statistics": {s: list(statistics(s)) for s in scores},
        "groups": [
            {
                "name": clipped(group.label),
                "seeds": group.seeds,
                "x": {key: _axis(group, key, scale) for key, (_, scale) in known.items()},
                "curves": {
                    s: {kind: _curves(group, kind, s) for kind in group.kinds} for s in scores
                },
                "boxes": {s: {kind: _box(group, kind, s) for kind in group.kinds} for s in scores},
                "gain": _gain(group),
                "timing": {part: _short(v) for part, v in group.timing().items()},
            }
            for group in groups
        ],
        "labels": label_data(groups[0].first),
    }


def evenly(n: int, most: int) -> Int[np.ndarray, " kept"]:
    """At most so many of n places, evenly spaced, the first and the last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))


def clipped(name: str) -> str:
    """A name that can be seen, even where it is white space, and is not too long."""
    if not name.strip():
        return repr(name)
    return name if len(name) <= _NAME else name[: _NAME - 1] + "\N{HORIZONTAL ELLIPSIS}"


def label_data(run: RecordedRun) -> dict[str, Any] | None:
    """Which client has how many training examples of which label; None for a regression.

    Up to 60 clients: the numbers. More: the part each label has of a client's examples, clients of
    like labels side by side. Of many labels the commonest are kept, the others are one row.
    """
    counts = run.train_counts
    if run.labels is None or not counts.any():
        return None
    labels = [clipped(label) for label in run.labels]
    if len(labels) > ROWS:
        common = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[: ROWS - 1])
        rest = counts.sum(axis=1) - counts[:, common].sum(axis=1)
        counts = np.column_stack([counts[:, common], rest])
        labels = [labels[i] for i in common] + [f"{len(run.labels) - len(common)} others"]
    few = len(run.names) <= BUBBLES
    if few:
        order = np.arange(len(run.names))
        values = counts.astype(float)
    else:
        values = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        order = np.lexsort((-values.max(axis=1), values.argmax(axis=1)))
    kept = order[evenly(len(order), COLUMNS)]
    return {
        "few": few,
        "names": [clipped(run.names[i]) for i in kept],
        "labels": labels,
        "values": [[_short(v, 3 if not few else 9) for v in row] for row in values[kept].T],
    }


def _axis(group: Group, axis: str, scale: float) -> list[float | None] | None:
    values = group.axis(axis)
    return None if values is None else _list(values[_kept(group)] / scale)


def _kept(group: Group) -> Int[np.ndarray, " kept"]:
    return evenly(len(group.rounds), POINTS)


def _curves(group: Group, kind: str, score: str) -> dict[str, Any]:
    """Each statistic's curve, and half its interval if there are several seeds."""
    found: dict[str, Any] = {}
    for statistic in statistics(score):
        mean, half = (
            v[_kept(group)] * score_scale(score) for v in group.curve(kind, score, statistic)
        )
        found[statistic] = [_list(mean), _list(half) if group.seeds > 1 else None]
    return found


def _box(group: Group, kind: str, score: str) -> dict[str, Any] | None:
    """Percentiles 10, 25, 50, 75, 90, the mean, and some clients: their values and names."""
    values = group.clients(kind, score) * score_scale(score)
    order = _ordered(values)
    if not len(order):
        return None
    kept = order[evenly(len(order), DOTS)]
    return {
        "percentiles": _list(np.percentile(values[order], [10, 25, 50, 75, 90])),
        "mean": _short(float(values[order].mean())),
        "values": _list(values[kept]),
        "names": [clipped(group.first.names[i]) for i in kept],
    }


def _gain(group: Group) -> dict[str, Any] | None:
    """Clients' gains, the largest first: their ranks, values and names."""
    found = group.gain()
    if found is None:
        return None
    gain = found.clients * score_scale(group.scores[0])
    order = _ordered(gain)[::-1]
    kept = evenly(len(order), BARS) if len(order) else order
    return {
        "ranks": [int(i) + 1 for i in kept],
        "values": _list(gain[order[kept]]),
        "names": [clipped(group.first.names[i]) for i in order[kept]],
    }


def _ordered(values: Float[np.ndarray, " clients"]) -> Int[np.ndarray, " defined"]:
    """The clients with a value, the least first."""
    order = np.argsort(values, kind="stable")
    return np.compress(np.isfinite(values[order]), order)


def _list(values: Float[np.ndarray, " n"]) -> list[float | None]:
    return [_short(float(v)) for v in values]


def _short(value: float, digits: int = 6) -> float | None:
    """A number of few digits; JSON has no NaN."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
