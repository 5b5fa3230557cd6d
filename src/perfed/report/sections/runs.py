"""The sections of the runs themselves: their time, their settings, and their environment."""

import json
from collections.abc import Iterable, Mapping, Sequence

from perfed.report import markup
from perfed.report.groups import Group, flat, unit
from perfed.report.headline import NOTHING
from perfed.report.markup import escaped
from perfed.report.sections.base import PageSection, several_seeds

# Different values of one setting that are listed side by side.
_VALUES = 10


def time_section(groups: Sequence[Group]) -> PageSection | None:
    """What the time was spent on; None if it was not recorded."""
    timings = [group.timing() for group in groups]
    parts = list(dict.fromkeys(part for timing in timings for part in timing))
    if not parts:
        return None
    keys = "".join(
        f'<li class="key"><span class="swatch s{i % 7}"></span>{escaped(part)}</li>'
        for i, part in enumerate(parts)
    )
    totals = [sum(timing.values()) for timing in timings]
    rows = []
    for group, timing, total in zip(groups, timings, totals, strict=True):
        cells = [
            f"{v:.3g} ({100 * v / total if total else 0:.0f} %)"
            for v in (timing.get(part, 0.0) for part in parts)
        ]
        rows.append((group.label, *cells, f"{total:.3g}"))
    note = "Seconds by part" + (", means over seeds." if several_seeds(groups) else ".")
    table = markup.table(("Method", *parts, "total"), rows, note)
    chart = markup.chart(
        "timing", "Stacked bars: seconds by part", note, {"parts": json.dumps(parts)}
    )
    return PageSection(
        "time",
        "Where the time went",
        f'<ul class="legend" aria-label="Parts">{keys}</ul>\n{chart}\n'
        f"{markup.details('The seconds as a table', table)}",
    )


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
    headings = ("Method", "Seed", "Rounds", "Real time", "Folder")
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
    table = _settings_table("environment", columns, "Software, hardware and data of the runs.")
    return PageSection("environment-of-runs", "Environment", table)


def _settings_table(at: str, columns: Mapping[str, Mapping[str, str]], note: str) -> str:
    """Names and values, one column per group; one column where all are alike."""
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    parts = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    keys.sort(key=lambda key: parts.index(key.partition(".")[0]))  # what only some have, too
    differ = {k for k in keys if len({column.get(k) for column in columns.values()}) > 1}
    if len(columns) > 1:
        note += " Marked with ≠: it differs between methods."
    if differ:
        headings = list(columns)
        shared = list(columns.values())
    else:
        headings = ["Value" if len(columns) == 1 else "All methods"]
        shared = list(columns.values())[:1]
    rows = []
    for key in keys:
        mark = '<span aria-hidden="true">≠ </span>' if key in differ else ""
        spoken = '<span class="unseen"> (differs)</span>' if key in differ else ""
        cells = "".join(f"<td>{escaped(column.get(key, NOTHING))}</td>" for column in shared)
        differs = ' class="differs"' if key in differ else ""
        rows.append(f'<tr{differs}><th scope="row">{mark}{escaped(key)}{spoken}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{escaped(heading)}</th>' for heading in headings)
    body = "\n".join(rows)
    return markup.scrolling(
        note,
        f"""<table class="settings" id="{at}"><caption><span>{escaped(note)}</span></caption>
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
        some = list(values)[:_VALUES]
        more = f" and {len(values) - len(some)} more" if len(values) > len(some) else ""
        joined[key] = " · ".join(some) + more
    return joined
