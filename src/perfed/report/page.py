"""A report of runs: one page of HTML that opens without a network."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files

import numpy as np
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from perfed.report import markup, sections
from perfed.report.chart_data import chart_data
from perfed.report.groups import Group, grouped, score_word
from perfed.report.headline import adaptation, shown
from perfed.report.markup import escaped
from perfed.runs.run_dir import RecordedRun

_THEME = """
(() => {
  let name = null;
  try { name = localStorage.getItem("perfed-theme"); } catch { /* nothing is remembered */ }
  if (name !== "light" && name !== "dark") {
    name = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  document.documentElement.dataset.theme = name;
})();
"""


def report_page(runs: Sequence[RecordedRun], title: str) -> str:
    """The whole page, with its scripts and styles in it.

    Args:
        runs: runs of one kind of task; those that differ only in their seed become one row.
        title: the page's heading.

    Raises:
        DataError: the runs cannot be compared.
    """
    groups = grouped(runs)
    scripts = [_THEME, get_plotlyjs().replace("\r\n", "\n"), _own("page.js")]
    data = json.dumps(chart_data(groups), separators=(",", ":"), allow_nan=False)
    links, body = _sections(groups)
    return f"""<!DOCTYPE html>
<html lang="en-US">
{_head(title, scripts)}
<body>
<a class="skip" href="#main">Skip to the results</a>
<header class="top"><div class="wrap">
<div class="title"><h1>{escaped(title)}</h1>
<button type="button" id="theme">Dark colors</button></div>
{_facts(groups)}
<p class="lead">{escaped(lead(groups))}</p>
{_notices(groups)}
<nav aria-label="Sections"><ul>
{links}
</ul></nav>
</div></header>
<main id="main" class="wrap" tabindex="-1">
<noscript><p class="notice">The charts need JavaScript; the tables do not.</p>
</noscript>
{body}
</main>
<footer class="wrap"><p>Made by perfed {escaped(version("perfed"))} from
{markup.counted(len(runs), "run")}. This page needs no network.</p></footer>
<script type="application/json" id="chart-data">{markup.safe_json(data)}</script>
<script>{scripts[1]}</script>
<script>{scripts[2]}</script>
</body>
</html>
"""


def _head(title: str, scripts: Sequence[str]) -> str:
    """The head; the first of the scripts is in it."""
    # Only these scripts run, and nothing is fetched, whatever a name in the runs says.
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    return f"""<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<link rel="icon" href="data:,">
<style>
{_own("page.css")}</style>
<script>{scripts[0]}</script>
</head>"""


def _sections(groups: Sequence[Group]) -> tuple[str, str]:
    """Links to the sections, and the sections."""
    clients, gains = sections.distribution_section(groups), sections.gain_section(groups)
    parts = [
        sections.headline_section(groups),
        sections.worse_off_section(groups),
        sections.curve_section(groups),
        clients,
        gains,
        sections.label_section(groups[0].first),
        sections.time_section(groups),
        sections.theory_section(groups),
        sections.settings_section(groups),
        sections.environment_section(groups),
    ]
    present = [part for part in parts if part is not None]
    links = "\n".join(f'<li><a href="#{part.anchor}">{part.name}</a></li>' for part in present)
    body = "\n".join(map(str, present))
    # These two are side by side where there is room.
    pair = f'<div class="pair">\n{clients}\n{gains}\n</div>'
    return links, body.replace(f"{clients}\n{gains}", pair)


def lead(groups: Sequence[Group]) -> str:
    """The result in a sentence or two: after the last round, and no more than the seeds allow."""
    score = groups[0].scores[0]
    name = score_word(score)
    spreads = [group.last("personalized", score, "mean") for group in groups]
    means = np.array([float(s.mean) for s in spreads])
    if not np.isfinite(means).any():
        return f"No client's {name} is defined."
    best = int(np.nanargmax(means))
    best_mean = shown(means[best], score, float(spreads[best].half))
    seeds = groups[best].seeds
    over = f" over {seeds} seeds" if seeds > 1 else ""
    text = f"{groups[best].label}, mean {name} {best_mean}{over} with personalized models"
    if "global" in groups[best].kinds:
        common = float(groups[best].last("global", score, "mean").mean)
        text += f", {shown(common, score)} with the global one"
    text += "."
    if len(groups) == 1:
        return f"After the last round: {text}"
    text = f"Highest after the last round: {text}"
    if any(group.seeds == 1 for group in groups):
        return f"{text} With one seed, differences between methods may be chance."
    low = means[best] - float(spreads[best].half)
    near = [
        group.label
        for i, group in enumerate(groups)
        if i != best and means[i] + float(spreads[i].half) >= low
    ]
    return f"{text} Its interval overlaps that of {' and '.join(near)}." if near else text


def _facts(groups: Sequence[Group]) -> str:
    first = groups[0].first
    data = first.config.get("data", {})
    clients = {
        (len(run.names), int(run.summary.get("clients", len(run.names))))
        for run in (group.first for group in groups)
    }
    facts = {
        "Data": ", ".join(str(data[k]) for k in ("source", "split") if data.get(k)),
        "Clients": " or ".join(
            f"{n:,}" if n == everyone else f"{n:,} of {everyone:,}, at random"
            for n, everyone in sorted(clients)
        ),
        "Labels": "" if first.labels is None else f"{len(first.labels):,}",
        "Held-out examples": f"{int(first.sizes.sum()):,}",
        "Model": str(first.config.get("model", {}).get("name", "")),
        "Rounds": " or ".join(f"{n:,}" for n in sorted({int(g.rounds[-1]) for g in groups})),
        "Methods": str(len(groups)),
        "Seeds": " or ".join(map(str, sorted({g.seeds for g in groups}))),
    }
    rows = (f"<div><dt>{k}</dt><dd>{escaped(v)}</dd></div>" for k, v in facts.items() if v)
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _notices(groups: Sequence[Group]) -> str:
    """What a reader must know before comparing."""
    notices = []
    adapt_on = {group.adapt_on for group in groups}
    if adapt_on != {"train"}:
        what = "Adapted on the data that are scored"
        if "test" not in adapt_on:
            what = "Not adapted on training data alone"
        notices.append(f"{what}. {adaptation(groups)}")
    notices += dict.fromkeys(
        caution for g in groups if (caution := g.first.environment.get("data_caution"))
    )
    data = {json.dumps(g.first.environment.get("data_sha256"), default=str) for g in groups}
    names = {g.first.names for g in groups}
    if len(data) > 1 or len(names) > 1:
        notices.append("The methods were not all run on the same data: compare them with care.")
    return "\n".join(f'<p class="notice">{escaped(notice)}</p>' for notice in notices)


def _own(name: str) -> str:
    return files("perfed.report").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
