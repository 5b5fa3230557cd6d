"""The sections of single clients: their scores, their gains, and their labels."""

from collections.abc import Sequence

import numpy as np

from perfed.evaluation import Gain
from perfed.report import markup
from perfed.report.chart_data import BARS, BUBBLES, COLUMNS, DOTS, ROWS, clipped
from perfed.report.groups import (
    KIND_NAMES,
    KINDS,
    Group,
    count_line,
    model_kinds,
    score_name,
    score_scale,
    score_word,
)
from perfed.report.headline import NOTHING, shown
from perfed.report.markup import escaped
from perfed.report.sections.base import ROWS_SHOWN, PageSection, legend, several_seeds
from perfed.runs.run_dir import RecordedRun

# Clients with the largest, and with the smallest, gain that are listed by name.
_NAMED = 10


def distribution_section(groups: Sequence[Group]) -> PageSection:
    """Scores over clients."""
    score = groups[0].scores[0]
    controls = markup.select(
        "box-score", "distribution", "Score", {s: score_name(s) for s in groups[0].scores}
    )
    many = max(len(group.first.names) for group in groups) > DOTS
    note = (
        "After the last round. Box: quartiles "
        "and median; dashed: mean; whiskers: 10th and 90th percentile; dots: clients"
        + (f", {DOTS} of them, evenly by rank, the extremes included." if many else ".")
        + (" A client's score is its mean over seeds." if several_seeds(groups) else "")
    )
    rows = []
    for group in groups:
        for kind in group.kinds:
            values = group.clients(kind, score)
            values = values[np.isfinite(values)]
            ends = np.percentile(values, [0, 10, 25, 50, 75, 90, 100]) if len(values) else []
            cells = [shown(float(v), score) for v in ends] or [NOTHING] * 7
            rows.append((group.label, KIND_NAMES[kind], *cells))
    common = (
        '<li class="key"><span class="swatch hollow"></span>global model</li>\n'
        if "global" in model_kinds(groups)
        else ""
    )
    headings = ("Method", "Model", "min", "p10", "p25", "median", "p75", "p90", "max")
    table = markup.table(headings, rows, f"{score_name(score)} over clients after the last round.")
    return PageSection(
        "clients",
        "Clients",
        f"""<div class="controls">{controls}</div>
{legend(groups)}
<ul class="legend" aria-label="Boxes">
{common}<li class="key"><span class="swatch filled"></span>personalized</li>
</ul>
{markup.chart("distribution", "Box plots of the clients' scores after the last round", note)}
{markup.details("The boxes as a table", table)}""",
    )


def gain_section(groups: Sequence[Group]) -> PageSection | None:
    """What personalizing brings each client; None if no method has a global model."""
    score = groups[0].scores[0]
    gains = {i: gain for i, group in enumerate(groups) if (gain := group.gain()) is not None}
    if not gains:
        return None
    lines = {i: count_line(gain, score) for i, gain in gains.items()}
    options = {str(i): groups[i].label for i in gains}
    controls = markup.select("gain-group", "gain", "Method", options) if len(groups) > 1 else ""
    many = max(gain.defined for gain in gains.values()) > BARS
    personal = [group.label for i, group in enumerate(groups) if i not in gains]
    note = (
        f"Personalized minus global {score_word(score)} after the last round, "
        "client by client, the largest gain first. Below zero: personalizing costs this client."
        + (f" {BARS} clients are drawn, evenly by rank." if many else "")
        + (" A client's gain is its mean over seeds." if several_seeds(groups) else "")
        + (f" No global model to compare with: {', '.join(personal)}." if personal else "")
    )
    counts = "\n".join(
        f"<li><strong>{escaped(groups[i].label)}</strong>: {escaped(line)}.</li>"
        for i, line in lines.items()
    )
    data = {f"line{i}": f"{line}." for i, line in lines.items()}
    return PageSection(
        "gains",
        "Who gains by personalizing",
        f"""<div class="controls">{controls}</div>
<ul class="counts">
{counts}
</ul>
{markup.chart("gain", "Bar chart of every client's gain by personalizing", note, data)}
{_gain_table(groups, gains)}""",
    )


def _gain_table(groups: Sequence[Group], gains: dict[int, Gain]) -> str:
    score, rows = groups[0].scores[0], []
    for at, gain in gains.items():
        group = groups[at]
        order = np.argsort(-gain.clients, kind="stable")[: gain.defined]
        kept = order if gain.defined <= 2 * _NAMED else [*order[:_NAMED], *order[-_NAMED:]]
        for i in kept:
            points = f"{round(gain.clients[i] * score_scale(score), 2) + 0.0:+.2f}"  # no "-0.00"
            both = [shown(float(group.clients(kind, score)[i]), score) for kind in KINDS]
            rows.append((group.label, clipped(group.first.names[i]), *both, points))
    few = all(gain.defined <= 2 * _NAMED for gain in gains.values())
    which = (
        "All clients" if few else f"The {_NAMED} that gain most and the {_NAMED} that gain least"
    )
    headings = ("Method", "Client", *(KIND_NAMES[kind] for kind in KINDS), "Gain")
    table = markup.table(headings, rows, f"{which}, after the last round.", left=2)
    return markup.details("The gains as a table", table)


def label_section(run: RecordedRun) -> PageSection | None:
    """Who has which labels; None for a regression."""
    counts = run.train_counts
    if run.labels is None or not counts.any():
        return None
    clients, classes = counts.shape
    if clients <= BUBBLES:
        note = (
            f"Area: a client's training examples with a label; the largest dot is {counts.max()}."
        )
    else:
        note = "Color: the part a label has of a client's training examples."
        if clients > COLUMNS:
            note += f" {COLUMNS} of {clients:,} clients are drawn, evenly."
    if classes > ROWS:
        note += f" The {ROWS - 1} commonest of {classes} labels; all others are one row."
    per_client = np.count_nonzero(counts, axis=1)
    facts = (
        f"{clients:,} clients, {classes} labels. A client holds {per_client.min()} to "
        f"{per_client.max()} labels, {np.median(per_client):g} at the median."
    )
    totals, holders = counts.sum(axis=0), np.count_nonzero(counts, axis=0)
    order = np.argsort(-totals, kind="stable")[: 4 * ROWS_SHOWN]
    rows = [(clipped(run.labels[i]), f"{totals[i]:,}", f"{holders[i]:,}") for i in order]
    some = f", the {len(rows)} commonest" if len(rows) < classes else ""
    table = markup.table(("Label", "Training examples", "Clients"), rows, f"Labels{some}.")
    chart = markup.chart(
        "labels", "Clients by labels", f"{facts} {note}", {"label": f"Clients by labels. {facts}"}
    )
    return PageSection(
        "labels-of-clients",
        "Labels of the clients",
        f"{chart}\n{markup.details('The labels as a table', table)}",
    )
