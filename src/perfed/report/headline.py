"""The headline table, as cells: what a page, Markdown and LaTeX write each in its own way."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from perfed.evaluation import ERRORS
from perfed.report.groups import (
    AXIS_NAMES,
    KIND_NAMES,
    Group,
    model_kinds,
    score_name,
    score_scale,
    statistics,
    unit,
)
from perfed.runs.statistics import Spread

NOTHING = "\N{EN DASH}"


class HeadlineCell(NamedTuple):
    """A number as text, half its interval (None: one seed), and whether it is the best."""

    mean: str
    half: str | None = None
    best: bool = False


class HeadlineColumn(NamedTuple):
    """A column: the heading it shares with its neighbors ("": none), and its own."""

    over: str
    name: str


@final
@dataclass(frozen=True)
class Headline:
    """The table: one row per group, after the last round, on held-out data.

    Attributes:
        columns: their headings.
        labels: the rows' names.
        seeds: how many seeds each row has.
        rows: the cells.
    """

    columns: tuple[HeadlineColumn, ...]
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[tuple[HeadlineCell, ...], ...]


def headline(groups: Sequence[Group], score: str | None = None) -> Headline:
    """The table of one score (None: the first) and the costs."""
    score = score or groups[0].scores[0]
    scale, less = score_scale(score), score in ERRORS
    show = _score_text(score)
    columns: list[HeadlineColumn] = []
    cells: list[list[HeadlineCell]] = []
    for kind in model_kinds(groups):
        for statistic, name in statistics(score).items():
            columns.append(HeadlineColumn(f"{KIND_NAMES[kind]} model", name))
            spreads = [g.last(kind, score, statistic) if kind in g.kinds else None for g in groups]
            cells.append(_cells(spreads, scale, show, less, always=True))
    for cost in list(AXIS_NAMES)[1:]:
        costs = [group.cost(cost) for group in groups]
        known = [float(c.mean) for c in costs if c is not None]
        if known:
            divide, suffix = unit(cost, max(known))
            columns.append(HeadlineColumn("", f"{AXIS_NAMES[cost]} ({suffix})"))
            cells.append(_cells(costs, 1 / divide, _cost_text, True))
    return Headline(
        tuple(columns),
        tuple(group.label for group in groups),
        tuple(group.seeds for group in groups),
        tuple(zip(*cells, strict=True)),
    )


def caption(groups: Sequence[Group], score: str | None = None) -> str:
    """What the table's numbers are: which round, which data, which models, how they adapted."""
    score = score or groups[0].scores[0]
    tail = "the 90th" if score in ERRORS else "the 10th"
    lasts = sorted({int(group.rounds[-1]) for group in groups})
    ends = f"round {lasts[0]}" if len(lasts) == 1 else "each run's last round"
    seeds = {group.seeds for group in groups}
    if seeds == {1}:
        spread = "One seed per method, so there is no interval."
    else:
        spread = "Means and 95 % intervals (Student's t) over seeds."
        if 1 in seeds:
            spread += " A row of one seed has no interval."
    bold = " Bold: the best of its column." if len(groups) > 1 else ""
    if bold and seeds != {1}:
        bold = " Bold: the best mean of its column; intervals may overlap."
    kinds = model_kinds(groups)
    personal = [g.label for g in groups if g.kinds != kinds]
    missing = f" No global model: {', '.join(personal)}." if personal else ""
    return (
        f"{score_name(score)} after the last round ({ends}), not the best one, on the clients' "
        f"held-out data. {adaptation(groups)}{missing} Over clients: the plain mean, the mean by "
        f"held-out examples, the worst client and {tail} percentile. {spread}{bold}"
    )


def adaptation(groups: Sequence[Group]) -> str:
    """Which models were scored, and what personal ones were made from."""
    model = "Personalized: each client's own model, made from "
    if "global" in model_kinds(groups):
        model = f"Global: the server's model as it is. {model}"
    by_data: dict[str, list[str]] = {}
    for group in groups:
        by_data.setdefault(group.adapt_on, []).append(group.label)
    if len(by_data) == 1:
        return f"{model}{_adapted_on(next(iter(by_data)))}."
    parts = [
        f"of {', '.join(labels)}: {_adapted_on(adapt_on)}"
        for adapt_on, labels in by_data.items()
        if adapt_on != "train"
    ]
    own = ["its training data"] * ("train" in by_data)
    return f"{model}{'; '.join([*own, *parts])}."


def _adapted_on(adapt_on: str) -> str:
    if adapt_on == "train":
        return "its training data (adapt_on = train)"
    if adapt_on == "test":
        return "the very data it is scored on (adapt_on = test)"
    return f"not its training data alone (adapt_on = {adapt_on})"


def shown(value: float, score: str, half: float = math.nan) -> str:
    """A score as text, with half its interval if there is one, and its unit."""
    show, scale = _score_text(score), score_scale(score)
    text = show(value * scale)
    if math.isfinite(half) and text != NOTHING:
        text = f"{text}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{show(half * scale)}"
    return f"{text}\N{NO-BREAK SPACE}%" if score == "accuracy" and text != NOTHING else text


def _cells(
    spreads: Sequence[Spread | None],
    scale: float,
    show: Callable[[float], str],
    less: bool,
    always: bool = False,
) -> list[HeadlineCell]:
    """A column; with something to beat, the best is bold, and so is what reads the same."""
    means = [math.nan if s is None else float(s.mean) * scale for s in spreads]
    known = [m for m in means if math.isfinite(m)]
    # Where all read the same there is no best.
    beaten = len({show(m) for m in known}) > 1
    best = show(min(known) if less else max(known)) if beaten else None
    cells = []
    for mean, spread in zip(means, spreads, strict=True):
        half = math.nan if spread is None else float(spread.half) * scale
        # Bytes are often the same for all seeds: then an interval of width 0 would be noise.
        wide = math.isfinite(half) and (always or half > 0)
        interval = _like(show(mean), half) if wide else None
        cells.append(HeadlineCell(show(mean), interval, best is not None and show(mean) == best))
    return cells


def _like(mean: str, half: float) -> str:
    """Half an interval, with as many decimals as its mean."""
    return f"{half:,.{len(mean.partition('.')[2])}f}" if "e" not in mean else f"{half:.2g}"


def _score_text(score: str) -> Callable[[float], str]:
    digits = 1 if score == "accuracy" else 3

    def show(value: float) -> str:
        if not math.isfinite(value):
            return NOTHING
        return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"

    return show


def _cost_text(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}"
