"""The sections of scores: the headline table, and the training curves."""

from collections.abc import Sequence

from perfed.report import markup
from perfed.report.chart_data import POINTS, evenly
from perfed.report.groups import (
    KIND_NAMES,
    Group,
    axes,
    model_kinds,
    score_name,
)
from perfed.report.headline import NOTHING, Headline, HeadlineCell, caption, headline, shown
from perfed.report.markup import escaped
from perfed.report.sections.base import ROWS_SHOWN, PageSection, legend, several_seeds


def headline_section(groups: Sequence[Group]) -> PageSection:
    """The scores after the last round."""
    scores = groups[0].scores
    others = "\n".join(
        f"<h3>{escaped(score_name(s))}</h3>\n"
        f"{_headline_table(headline(groups, s), caption(groups, s))}"
        for s in scores[1:]
    )
    more = f"<details><summary>Other scores</summary>\n{others}\n</details>" if others else ""
    table = _headline_table(headline(groups), caption(groups))
    return PageSection("results", "Results", f"{table}\n{more}")


def _headline_table(table: Headline, note: str) -> str:
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
        f"""<table class="headline"><caption><span>{escaped(note)}</span></caption>
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
    """Scores by round, bytes or time."""
    kinds: dict[str, str] = {kind: KIND_NAMES[kind] for kind in reversed(model_kinds(groups))}
    if len(kinds) > 1:
        kinds["both"] = "Both"
    statistics = {
        "mean": "Mean",
        "weighted": "Mean by size",
        "worst": "Worst",
        "tail": "10th percentile",
    }
    controls = (
        markup.select(
            "curve-axis", "curves", "Against", {k: n for k, (n, _) in axes(groups).items()}
        )
        + markup.select(
            "curve-score", "curves", "Score", {s: score_name(s) for s in groups[0].scores}
        )
        + markup.select("curve-kind", "curves", "Model", kinds)
        + markup.select("curve-statistic", "curves", "Over clients", statistics)
    )
    return PageSection(
        "training",
        "Training curves",
        f"""<div class="controls">{controls}</div>
{legend(groups)}
{markup.chart("curves", "Line chart of the scores against rounds, bytes or time", _note(groups))}
{_curve_table(groups)}""",
    )


def _note(groups: Sequence[Group]) -> str:
    """What the curves show."""
    lines = ["Scores on the clients' held-out data during training."]
    if several_seeds(groups):
        lines.append("Shaded: 95 % interval (Student's t) over seeds; bytes and times are means.")
        if "accuracy" in groups[0].scores:
            lines.append("The shade of an accuracy ends at 0 and 100 %.")
    if any(group.seeds == 1 for group in groups):
        lines.append("A curve without shade is of one seed.")
    if any(len(group.rounds) > POINTS for group in groups):
        lines.append(f"At most {POINTS} of the scored rounds are drawn.")
    missing = [g.label for g in groups if g.axis("simulated_seconds") is None]
    if missing and len(missing) < len(groups):
        lines.append(f"No simulated time: {', '.join(missing)}.")
    if "global" in model_kinds(groups):
        lines.append("Both: dashed lines are global models.")
        personal = [g.label for g in groups if "global" not in g.kinds]
        if personal:
            lines.append(f"No global model: {', '.join(personal)}.")
    return " ".join(lines)


def _curve_table(groups: Sequence[Group]) -> str:
    score = groups[0].scores[0]
    known, kinds = axes(groups), model_kinds(groups)
    thinned = any(len(group.rounds) > ROWS_SHOWN for group in groups)
    rows = []
    for group in groups:
        values = {axis: group.axis(axis) for axis in known}
        curves = [
            group.curve(kind, score, "mean") if kind in group.kinds else None for kind in kinds
        ]
        for k in evenly(len(group.rounds), ROWS_SHOWN):
            costs = [
                NOTHING if (v := values[axis]) is None else f"{v[k] / scale:,.4g}"
                for axis, (_, scale) in list(known.items())[1:]
            ]
            cells = [
                NOTHING
                if curve is None
                else shown(float(curve.mean[k]), score, float(curve.half[k]))
                for curve in curves
            ]
            rows.append((group.label, f"{group.rounds[k]}", *costs, *cells))
    headings = [name for name, _ in known.values()]
    headings += [f"{KIND_NAMES[kind]} {score_name(score)}" for kind in kinds]
    some = f", {ROWS_SHOWN} of them." if thinned else "."
    table = markup.table(("Method", *headings), rows, f"Mean over clients at scored rounds{some}")
    return markup.details("The curves as a table", table)
