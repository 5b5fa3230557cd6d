"""Figures, as files."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfed.core.errors import DataError
from perfed.data.describe import Description
from perfed.evaluation.evaluator import ModelKind

# Up to so many clients have dots; with more, each is a thin column of color.
_DOTS = 60


def label_picture(facts: Description, path: Path) -> None:
    """Which client holds how many training examples of which label.

    Up to 60 clients: a dot for each client and label, its area the number of examples. More: the
    part of each client's examples with each label, as color, clients of like labels side by side.
    """
    labels, names = facts.labels or (), facts.names
    width = float(np.clip(2.5 + 0.16 * len(names), 6, 11))
    height = float(np.clip(1.6 + 0.27 * len(labels), 3, 9))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    counts = facts.counts
    # Names are shown as they are: a dollar sign starts no formula.
    step = -(-len(labels) // 40)
    ticks = range(0, len(labels), step)
    axes.set_yticks(ticks, [_shown(labels[i]) for i in ticks], parse_math=False)
    if len(names) <= _DOTS:
        client, label = np.nonzero(counts)
        cell = 85 * min(width / (len(names) + 6), height / (len(labels) + 3))
        area = np.maximum(counts[client, label] / counts.max() * cell**2, 1.5)
        axes.scatter(client, label, s=area, c="#2a6fb0", alpha=0.85, linewidths=0)
        axes.set_xlim(-0.8, len(names) - 0.2)
        axes.set_ylim(-0.8, len(labels) - 0.2)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
        numbered = names == tuple(str(i) for i in range(len(names)))
        if len(names) <= 25 or not numbered:
            axes.set_xticks(
                range(len(names)),
                [_shown(name) for name in names],
                rotation=90 if max(map(len, names)) > 3 else 0,
                fontsize=8 if len(names) > 25 else None,
                parse_math=False,
            )
        axes.set_title(f"training examples by label (the largest dot: {counts.max()})", fontsize=11)
        axes.set_xlabel("client")
    else:
        mixture = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        order = np.lexsort((-mixture.max(axis=1), mixture.argmax(axis=1)))
        image = axes.imshow(
            mixture[order].T,
            aspect="auto",
            origin="lower",
            cmap="Blues",
            vmin=0,
            vmax=mixture.max(),
            interpolation="nearest",
        )
        figure.colorbar(image, ax=axes, label="part of the client's examples", pad=0.015)
        axes.set_title(f"label mixtures of {len(names)} clients", fontsize=11)
        axes.set_xlabel("clients, ordered by their commonest label")
    axes.set_ylabel("label")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with warnings.catch_warnings():  # a script the font lacks shows as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=150)


def distance_picture(
    matrix: Float[np.ndarray, "clients clients"],
    group: Int[np.ndarray, " clients"],
    names: Sequence[str],
    label: str,
    path: Path,
) -> None:
    """Distances between clients, as color; those of one group side by side, groups marked off."""
    order = np.argsort(group, kind="stable")
    figure = Figure(figsize=(6, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(matrix[np.ix_(order, order)], cmap="Blues", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label, pad=0.015)
    for edge in np.flatnonzero(np.diff(group[order])) + 0.5:
        axes.axhline(edge, color="#b0402a", linewidth=0.8)
        axes.axvline(edge, color="#b0402a", linewidth=0.8)
    if len(names) <= 40:
        ticks = [_shown(names[i]) for i in order]
        axes.set_xticks(range(len(names)), ticks, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(names)), ticks, fontsize=7, parse_math=False)
    groups = len(set(group.tolist()))
    title = f"{len(names)} clients, {groups} group{'s' * (groups != 1)} of similar ones"
    axes.set_title(title, fontsize=11)
    with warnings.catch_warnings():  # a script the font lacks shows as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=150)


# What a curve can be drawn against: the key in a summary's history, and how it is called.
Against = Literal["round", "uplink_bytes", "downlink_bytes", "simulated_seconds"]


def curve_picture(
    summaries: Mapping[str, Mapping[str, Any]],
    path: Path,
    against: Against = "round",
    score: str = "loss",
    kind: ModelKind = "personalized",
) -> None:
    """A score's mean over clients against rounds, bytes or simulated time, one curve a run.

    Args:
        summaries: the contents of each run's `summary.json`, by the name it gets in the picture.
        path: where it goes.
        against: what the score is drawn against.
        score: which score: `accuracy`, `loss`, `r2` or `rmse`.
        kind: which models'.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, summary in summaries.items():
        history = summary["history"]
        if any(point[against] is None for point in history):
            raise DataError(f"{name} has no {against}; give its run a [network]")
        if kind not in history[-1]:
            raise DataError(f"{name} has no {kind} model")
        axes.plot(
            [point[against] for point in history],
            [point[kind][score]["mean"] for point in history],
            label=name,
        )
    axes.set_xlabel(against.replace("_", " "))
    axes.set_ylabel(f"{score} of the {kind} models, mean over clients")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def _shown(label: str) -> str:
    """A name that can be seen, even where it is white space, and is not too long."""
    if not label.strip():
        return repr(label)
    return label if len(label) <= 20 else label[:19] + "\u2026"
