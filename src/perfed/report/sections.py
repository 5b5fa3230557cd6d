"""The sections of a report's page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from perfed.report import markup
from perfed.report.chart_data import BARS, BUBBLES, COLUMNS, DOTS, POINTS, ROWS, clipped, evenly
from perfed.report.groups import (
    KIND_NAMES,
    KINDS,
    Group,
    axes,
    count_line,
    flat,
    score_name,
    score_scale,
    score_word,
    unit,
)
from perfed.report.headline import NOTHING, Headline, HeadlineCell, caption, headline, shown
from perfed.report.markup import escaped
from perfed.report.theory_text import bound_line, number, verdict
from perfed.runs.run_dir import RecordedRun

# Rows of a table behind a chart; more are thinned or left out, and the caption says so.
_ROWS = 25
_NAMED = 10


class PageSection(NamedTuple):
    """A part of the page: where links to it lead, its heading, and what is in it."""

    at: str
    name: str
    body: str

    def __str__(self) -> str:
        return (
            f'<section id="{self.at}" aria-labeledby="{self.at}-name">\n'
            f'<h2 id="{self.at}-name">{self.name}</h2>\n{self.body}\n</section>'
        )


def headline_section(groups: Sequence[Group]) -> PageSection:
    """The last round in numbers."""
    scores = groups[0].scores
    others = "\n".join(
        f"<h3>{escaped(score_name(s))}</h3>\n"
        f"{_headline_table(headline(groups, s), caption(groups, s))}"
        for s in scores[1:]
    )
    more = f"<details><summary>Other scores</summary>\n{others}\n</details>" if others else ""
    table = _headline_table(headline(groups), caption(groups))
    return PageSection("results", "Results", f"{table}\n{more}")


def _headline_table(table: Headline, told: str) -> str:
    # Columns that share a heading stand below it; the others reach over both rows.
    overs: dict[str, int] = {}
    for column in table.columns:
        over = column.over or column.name
        overs[over] = overs.get(over, 0) + 1
    upper = "".join(
        f'<th scope="colgroup" colspan="{n}" class="starts">{over}</th>'
        if n > 1
        else f'<th scope="col" rowspan="2" class="starts">{escaped(over)}</th>'
        for over, n in overs.items()
    )
    starts = [
        not c.over or i == 0 or table.columns[i - 1].over != c.over
        for i, c in enumerate(table.columns)
    ]
    lower = "".join(
        f'<th scope="col"{_starting(s)}>{escaped(c.name)}</th>'
        for c, s in zip(table.columns, starts, strict=True)
        if c.over
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escaped(label)}</th><td>{seeds}</td>'
        + "".join(_cell(cell, s) for cell, s in zip(cells, starts, strict=True))
        + "</tr>"
        for label, seeds, cells in zip(table.labels, table.seeds, table.rows, strict=True)
    )
    return markup.scrolling(
        "Results",
        f"""<table class="headline"><caption><span>{escaped(told)}</span></caption>
<thead><tr><th scope="col" rowspan="2" class="left">Method</th>
<th scope="col" rowspan="2">Seeds</th>{upper}</tr>
<tr>{lower}</tr></thead>
<tbody>
{rows}
</tbody></table>""",
    )


def _starting(starts: bool) -> str:
    return ' class="starts"' if starts else ""


def _cell(cell: HeadlineCell, starts: bool) -> str:
    classes = " ".join(["starts"] * starts + ["best"] * cell.best)
    mean = f'<strong>{cell.mean}</strong><span class="unseen"> (best)</span>'
    half = "" if cell.half is None else f" <small>± {cell.half}</small>"
    return f'<td class="{classes}">{mean if cell.best else cell.mean}{half}</td>'


def curve_section(groups: Sequence[Group]) -> PageSection:
    """Scores as training goes on."""
    scores = {score: score_name(score) for score in groups[0].scores}
    kinds = {"personalized": "Personalized", "global": "Global", "both": "Both"}
    over = {
        "mean": "Mean",
        "weighted": "Mean by size",
        "worst": "Worst",
        "tail": "10th percentile",
    }
    controls = (
        markup.select(
            "curve-axis", "curves", "Against", {k: n for k, (n, _) in axes(groups).items()}
        )
        + markup.select("curve-score", "curves", "Score", scores)
        + markup.select("curve-kind", "curves", "Model", kinds)
        + markup.select("curve-statistic", "curves", "Over clients", over)
    )
    told = ["The clients' held-out data, as training goes on."]
    if any(group.seeds > 1 for group in groups):
        told.append("Shaded: 95 % interval (Student's t) over seeds; bytes and times are means.")
        if score_name("accuracy") in scores.values():
            told.append("Shade ends at 0 and 100 %, where accuracy does.")
    if any(group.seeds == 1 for group in groups):
        told.append("A curve without shade is of one seed.")
    if any(len(group.rounds) > POINTS for group in groups):
        told.append(f"At most {POINTS} of the scored rounds are drawn.")
    missing = [g.label for g in groups if g.axis("simulated_seconds") is None]
    if missing and len(missing) < len(groups):
        told.append(f"No simulated time: {', '.join(missing)}.")
    told.append("Both: dashed lines are global models.")
    return PageSection(
        "training",
        "Training curves",
        f"""<div class="controls">{controls}</div>
{_legend(groups)}
{markup.chart("curves", "Line chart of the scores against rounds, bytes or time", " ".join(told))}
{_curve_table(groups)}""",
    )


def _curve_table(groups: Sequence[Group]) -> str:
    score = groups[0].scores[0]
    known = axes(groups)
    thinned = any(len(group.rounds) > _ROWS for group in groups)
    rows = []
    for group in groups:
        values = {axis: group.axis(axis) for axis in known}
        curves = [group.curve(kind, score, "mean") for kind in KINDS]
        for k in evenly(len(group.rounds), _ROWS):
            costs = [
                NOTHING if (v := values[axis]) is None else f"{v[k] / scale:,.4g}"
                for axis, (_, scale) in list(known.items())[1:]
            ]
            cells = []
            for mean, half in curves:
                cells.append(shown(float(mean[k]), score, float(half[k])))
            rows.append((group.label, f"{group.rounds[k]}", *costs, *cells))
    headings = [name for name, _ in known.values()]
    headings += [f"{KIND_NAMES[kind]} {score_name(score)}" for kind in KINDS]
    told = "Mean over clients at scored rounds" + (f", {_ROWS} of them." if thinned else ".")
    return markup.details("The curves as a table", markup.table(("Method", *headings), rows, told))


def distribution_section(groups: Sequence[Group]) -> PageSection:
    """Scores over clients."""
    score = groups[0].scores[0]
    controls = markup.select(
        "box-score", "distribution", "Score", {s: score_name(s) for s in groups[0].scores}
    )
    many = max(len(group.first.names) for group in groups) > DOTS
    told = (
        "After the last round. Box: quartiles "
        "and median; dashed: mean; whiskers: 10th and 90th percentile; dots: clients"
        + (f", {DOTS} of them, evenly by rank, the extremes included." if many else ".")
        + (" A client's score is its mean over seeds." if _seeds(groups) else "")
    )
    rows = []
    for group in groups:
        for kind in KINDS:
            values = group.clients(kind, score)
            values = values[np.isfinite(values)]
            ends = np.percentile(values, [0, 10, 25, 50, 75, 90, 100]) if len(values) else []
            cells = [shown(float(v), score) for v in ends] or [NOTHING] * 7
            rows.append((group.label, KIND_NAMES[kind], *cells))
    headings = ("Method", "Model", "least", "p10", "p25", "median", "p75", "p90", "most")
    table = markup.table(headings, rows, f"{score_name(score)} over clients after the last round.")
    return PageSection(
        "clients",
        "Clients",
        f"""<div class="controls">{controls}</div>
{_legend(groups)}
<ul class="legend" aria-label="Boxes">
<li class="key"><span class="swatch hollow"></span>global model</li>
<li class="key"><span class="swatch filled"></span>personalized</li>
</ul>
{markup.chart("distribution", "Box plots of the clients' scores after the last round", told)}
{markup.details("The boxes as a table", table)}""",
    )


def gain_section(groups: Sequence[Group]) -> PageSection:
    """What personalizing brings each client."""
    score = groups[0].scores[0]
    gains = [group.gain() for group in groups]
    lines = [count_line(gain, score) for gain in gains]
    options = {str(i): group.label for i, group in enumerate(groups)}
    controls = markup.select("gain-group", "gain", "Method", options) if len(groups) > 1 else ""
    many = max(gain.defined for gain in gains) > BARS
    told = (
        f"Personalized minus global {score_word(score)} after the last round, "
        "client by client, the largest gain first. Below zero: personalizing costs this client."
        + (f" {BARS} clients are drawn, evenly by rank." if many else "")
        + (" A client's gain is its mean over seeds." if _seeds(groups) else "")
    )
    counts = "\n".join(
        f"<li><strong>{escaped(group.label)}</strong>: {escaped(line)}.</li>"
        for group, line in zip(groups, lines, strict=True)
    )
    rows = []
    for group, gain in zip(groups, gains, strict=True):
        order = np.argsort(-gain.clients, kind="stable")[: gain.defined]
        kept = order if gain.defined <= 2 * _NAMED else [*order[:_NAMED], *order[-_NAMED:]]
        for i in kept:
            point = f"{round(gain.clients[i] * score_scale(score), 2) + 0.0:+.2f}"  # no "-0.00"
            both = [shown(float(group.clients(kind, score)[i]), score) for kind in KINDS]
            rows.append((group.label, clipped(group.first.names[i]), *both, point))
    few = all(gain.defined <= 2 * _NAMED for gain in gains)
    which = (
        "All clients" if few else f"The {_NAMED} that gain most and the {_NAMED} that gain least"
    )
    headings = ("Method", "Client", *(KIND_NAMES[kind] for kind in KINDS), "Gain")
    table = markup.table(headings, rows, f"{which}, after the last round.", left=2)
    said = {f"line{i}": f"{line}." for i, line in enumerate(lines)}
    return PageSection(
        "gains",
        "Who gains by personalizing",
        f"""<div class="controls">{controls}</div>
<ul class="counts">
{counts}
</ul>
{markup.chart("gain", "Bar chart of every client's gain by personalizing", told, said)}
{markup.details("Who they are", table)}""",
    )


def label_section(run: RecordedRun) -> PageSection | None:
    """Who has which labels; None for a regression."""
    counts = run.train_counts
    if run.labels is None or not counts.any():
        return None
    clients, classes = counts.shape
    if clients <= BUBBLES:
        told = (
            f"Area: a client's training examples with a label; the largest dot is {counts.max()}."
        )
    else:
        told = "Color: the part a label has of a client's training examples."
        if clients > COLUMNS:
            told += f" {COLUMNS} of {clients:,} clients are drawn, evenly."
    if classes > ROWS:
        told += f" The {ROWS - 1} commonest of {classes} labels; all others are one row."
    held = np.count_nonzero(counts, axis=1)
    said = (
        f"{clients:,} clients, {classes} labels. A client holds {held.min()} to {held.max()} "
        f"labels, {np.median(held):g} at the median."
    )
    totals, holders = counts.sum(axis=0), np.count_nonzero(counts, axis=0)
    order = np.argsort(-totals, kind="stable")[: 4 * _ROWS]
    rows = [(clipped(run.labels[i]), f"{totals[i]:,}", f"{holders[i]:,}") for i in order]
    some = f", the {len(rows)} commonest" if len(rows) < classes else ""
    table = markup.table(("Label", "Training examples", "Clients"), rows, f"Labels{some}.")
    chart = markup.chart(
        "labels", "Clients by labels", f"{said} {told}", {"label": f"Clients by labels. {said}"}
    )
    return PageSection(
        "labels-of-clients",
        "Labels of the clients",
        f"{chart}\n{markup.details('As a table', table)}",
    )


def time_section(groups: Sequence[Group]) -> PageSection | None:
    """What the time was spent on; None if nobody kept it."""
    timings = [group.timing() for group in groups]
    parts = list(dict.fromkeys(part for timing in timings for part in timing))
    if not parts:
        return None
    keys = "".join(
        f'<li class="key"><span class="swatch s{i % 7}"></span>{escaped(part)}</li>'
        for i, part in enumerate(parts)
    )
    whole = [sum(timing.values()) for timing in timings]
    rows = []
    for group, timing, total in zip(groups, timings, whole, strict=True):
        cells = [
            f"{v:.3g} ({100 * v / total if total else 0:.0f} %)"
            for v in (timing.get(part, 0.0) for part in parts)
        ]
        rows.append((group.label, *cells, f"{total:.3g}"))
    told = "Seconds by part" + (", means over seeds." if _seeds(groups) else ".")
    table = markup.table(("Method", *parts, "in all"), rows, told)
    chart = markup.chart(
        "timing", "Stacked bars: seconds by part", told, {"parts": json.dumps(parts)}
    )
    return PageSection(
        "time",
        "Where the time went",
        f'<ul class="legend" aria-label="Parts">{keys}</ul>\n{chart}\n'
        f"{markup.details('The seconds as a table', table)}",
    )


def theory_section(groups: Sequence[Group]) -> PageSection | None:
    """What `perfed diagnose` found of the runs, where it was asked."""
    parts = []
    for group in groups:
        for run in group.runs:
            if run.theory is not None:
                parts.append(_theory_of(f"{group.label}, seed {run.config['seed']}", run.theory))
    return PageSection("theory", "Theory", "\n".join(parts)) if parts else None


def _theory_of(name: str, theory: Mapping[str, Any]) -> str:
    conditions = markup.table(
        ("Condition", "From", "What breaking it risks", "Here", "Limit", "Verdict"),
        [
            (c["text"], c["source"], c["risk"], number(c["value"]), number(c["limit"]), verdict(c))
            for c in theory["conditions"]
        ],
        f"Conditions of the theorems for {name}, with constants measured at {theory['at']}."
        + (f" {theory['note']}" if theory["note"] else ""),
        left=3,
    )
    constants = markup.table(
        ("Constant", "What it is", "Value", "Between", "and"),
        [
            (c["name"], c["meaning"], number(c["value"]), number(c["low"]), number(c["high"]))
            for c in theory["constants"]
        ],
        "Measured constants of the papers' assumptions.",
        left=2,
    )
    tables = [constants]
    for bound in theory["bounds"]:
        terms = [(key, number(value)) for key, value in bound["terms"].items()]
        tables.append(markup.table(("Term", "Value"), terms, bound_line(bound)))
    return f"{conditions}\n{markup.details('Constants and bounds', ''.join(tables))}"


def settings_section(groups: Sequence[Group]) -> PageSection:
    """Every setting, and what differs."""
    columns = {group.label: _joined(flat(run.config) for run in group.runs) for group in groups}
    tick = (
        '<label class="check"><input type="checkbox" id="only-differences"> '
        "Only what differs between methods</label>"
        if len(groups) > 1
        else ""
    )
    runs = [
        (
            group.label,
            str(run.config["seed"]),
            f"{run.rounds[-1]}",
            f"{divided:.3g} {name}",
            run.path.name or str(run.path),
        )
        for group in groups
        for run in group.runs
        for seconds in [float(run.costs["seconds"][-1])]
        for scale, name in [unit("seconds", seconds)]
        for divided in [seconds / scale]
    ]
    headings = ("Method", "Seed", "Engine", "Real time", "Folder")
    listed = markup.details(
        "The runs", markup.table(headings, runs, "The runs in this report.", left=1)
    )
    table = _settings_table("settings", columns, "Every setting, defaults included.")
    return PageSection("settings-of-runs", "Settings", f"{tick}\n{table}\n{listed}")


def environment_section(groups: Sequence[Group]) -> PageSection:
    """Versions, devices, code and data."""
    columns = {
        group.label: _joined(flat(run.environment) for run in group.runs) for group in groups
    }
    table = _settings_table("environment", columns, "What the runs depended on beside settings.")
    return PageSection("environment-of-runs", "Environment", table)


def _settings_table(at: str, columns: Mapping[str, Mapping[str, str]], told: str) -> str:
    """Names and values, a column a group; one column where all are alike."""
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    parts = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    keys.sort(key=lambda key: parts.index(key.partition(".")[0]))  # what only some have, too
    differ = {k for k in keys if len({column.get(k) for column in columns.values()}) > 1}
    if len(columns) > 1:
        told += " Marked with ≠: it differs between methods."
    if differ:
        headings = list(columns)
        shared = list(columns.values())
    else:
        headings = ["Value" if len(columns) == 1 else "All methods"]
        shared = list(columns.values())[:1]
    rows = []
    for key in keys:
        mark = '<span aria-hidden="true">≠ </span>' if key in differ else ""
        said = '<span class="unseen"> (differs)</span>' if key in differ else ""
        cells = "".join(f"<td>{escaped(column.get(key, NOTHING))}</td>" for column in shared)
        differs = ' class="differs"' if key in differ else ""
        rows.append(f'<tr{differs}><th scope="row">{mark}{escaped(key)}{said}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{escaped(heading)}</th>' for heading in headings)
    body = "\n".join(rows)
    return markup.scrolling(
        told,
        f"""<table class="settings" id="{at}"><caption><span>{escaped(told)}</span></caption>
<thead><tr><th scope="col">Name</th>{heads}</tr></thead>
<tbody>
{body}
</tbody></table>""",
    )


def _joined(columns: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Values of several runs as one: those that are not alike, side by side."""
    found: dict[str, dict[str, None]] = {}
    for column in columns:
        for key, value in column.items():
            found.setdefault(key, {})[value] = None
    joined = {}
    for key, values in found.items():
        some = list(values)[:_NAMED]
        more = f" and {len(values) - len(some)} more" if len(values) > len(some) else ""
        joined[key] = " · ".join(some) + more
    return joined


def _legend(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return ""
    items = "".join(
        f'<li><button type="button" data-group="{i}" aria-pressed="true">'
        f'<span class="swatch s{i % 7}"></span>{escaped(clipped(group.label))}</button></li>'
        for i, group in enumerate(groups)
    )
    return f'<ul class="legend" aria-label="Methods shown">{items}</ul>'


def _seeds(groups: Sequence[Group]) -> bool:
    return any(group.seeds > 1 for group in groups)
