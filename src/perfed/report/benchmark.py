"""A benchmark as tables, files and words."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tomli_w
from rich import box
from rich.markup import escape
from rich.table import Table

from perfed.evaluation.gains import TIE
from perfed.report.groups import score_name, score_scale, score_word, unit
from perfed.report.headline import NOTHING
from perfed.report.paper import escape_latex, escape_markdown
from perfed.runs.benchmark_results import (
    FEDAVG_MODEL,
    GLOBAL,
    BenchmarkResults,
    MethodResult,
    Recommendation,
    Versus,
)
from perfed.runs.local_run import LOCAL
from perfed.runs.summary import summary_bytes

# The first line of a configuration that a benchmark has written, and may write again.
HEADER = "# Recommended by perfed benchmark"

# A terminal shows so many clients, and names so many in a sentence; the file has all.
_CLIENTS_SHOWN, _CLIENTS_NAMED = 30, 8

Cells = tuple[list[str], list[list[str]]]


def benchmark_cells(results: BenchmarkResults) -> Cells:
    """The table as text: the headings, and a row per method; the best mean is first."""
    good = [m for m in results.methods if m.failure is None]
    with_network = any(m.simulated_seconds is not None for m in good)
    up, up_unit = _unit("uplink_bytes", [max(m.uplink, m.downlink) for m in good])
    simulated, simulated_unit = _unit(
        "simulated_seconds", [m.simulated_seconds or 0.0 for m in good]
    )
    heads = ["method", score_name(results.score), "p10", "hurt (%)", "below Local (%)"]
    heads += [f"up ({up_unit})", f"down ({up_unit})"]
    heads += [f"simulated ({simulated_unit})"] * with_network + ["time (s)"]

    def row(m: MethodResult) -> list[str]:
        if m.failure is not None:
            return [m.method, "failed", *[NOTHING] * (len(heads) - 2)]
        cells = [m.method, _interval(m.mean, m.half, results.score), _score(m.tenth, results.score)]
        cells += [_share(m.hurt), _share(m.below_local)]
        cells += [_cost(m.uplink / up), _cost(m.downlink / up)]
        if with_network:
            time = m.simulated_seconds
            cells.append(NOTHING if time is None else _cost(time / simulated))
        return [*cells, f"{m.seconds:.1f}"]

    return heads, [row(m) for m in ranked(results)]


def ranked(results: BenchmarkResults) -> list[MethodResult]:
    """The methods, the best on held-out data first, those that failed last."""
    return sorted(results.methods, key=lambda m: math.inf if math.isnan(m.mean) else -m.mean)


def benchmark_table(results: BenchmarkResults) -> Table:
    """The table for a terminal."""
    title = f"{results.name}: held-out data, {results.rounds} rounds, {_seeds(results)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 0, 0, 1)
    heads, rows = benchmark_cells(results)
    best = results.recommendation and results.recommendation.method
    for i, heading in enumerate(heads):
        # A unit goes below its name, to fit into 100 columns.
        text = heading.replace(" (", "\n(").replace("below ", "below\n")
        table.add_column(text, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row), style="bold" if row[0] == best else None)
    return table


def benchmark_caption(results: BenchmarkResults) -> str:
    """What the columns are."""
    spread = "one seed" if results.seeds == 1 else "± 95 % interval over seeds (Student's t)"
    return (
        f"{score_name(results.score)}: mean over clients after the last round, on held-out data, "
        f"{spread}; p10: the 10th percentile of clients. hurt: clients whose own model is worse "
        "than the global one; below Local: clients who would be better off alone. up, down: bytes "
        "per client; time: seconds per run. Every method was tuned by "
        f"{_count(results.trials, 'trial')} on a validation part of the clients' training data, "
        "then trained on all of it. Bold: recommended, by validation data."
    )


def benchmark_markdown(results: BenchmarkResults) -> str:
    """The table, what was chosen, and the recommendation."""
    heads, rows = benchmark_cells(results)
    best = results.recommendation and results.recommendation.method
    lines = [
        f"# {escape_markdown(results.name)}",
        "",
        f"{escape_markdown(results.what)} {results.rounds} rounds, {_seeds(results)}.",
        "",
        "| " + " | ".join(map(escape_markdown, heads)) + " |",
        "| --- |" + " ---: |" * (len(heads) - 1),
    ]
    for row in rows:
        cells = [escape_markdown(cell) for cell in row]
        if row[0] == best:
            cells = [f"**{cell}**" for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", escape_markdown(benchmark_caption(results)), "", "## Recommendation", ""]
    lines += [f"- {escape_markdown(line)}" for line in recommendation_lines(results)]
    lines += ["", "## Chosen settings", "", "| method | settings | validation |"]
    lines.append("| --- | --- | ---: |")
    for m in ranked(results):
        chosen = f"failed: {m.failure}" if m.failure else ", ".join(m.settings)
        value = _score(m.validation, results.score)
        lines.append(f"| {escape_markdown(m.method)} | {escape_markdown(chosen)} | {value} |")
    return "\n".join(lines) + "\n"


def benchmark_latex(results: BenchmarkResults) -> str:
    """The table as LaTeX; it needs the package booktabs."""
    heads, rows = benchmark_cells(results)
    best = results.recommendation and results.recommendation.method

    def line(cells: Sequence[str]) -> str:
        texts = [escape_latex(cell).replace("±", r"$\pm$") for cell in cells]
        if cells[0] == best:
            texts = [rf"\textbf{{{text}}}" for text in texts]
        return " & ".join(texts) + r" \\"

    caption = f"{results.what} {results.rounds} rounds, {_seeds(results)}. "
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape_latex(caption + benchmark_caption(results))}}}".replace(
                "±", r"$\pm$"
            ),
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            line(heads),
            r"\midrule",
            *map(line, rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def benchmark_csv(results: BenchmarkResults) -> str:
    """One line per method, in plain numbers; what is not known is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["score", "seeds", *MethodResult._fields])
    for m in ranked(results):
        values = m._replace(settings=" ".join(m.settings))  # type: ignore[arg-type]
        plain = ["" if v is None or _is_nan(v) else v for v in values]
        writer.writerow([results.score, results.seeds, *plain])
    return file.getvalue()


def clients_csv(recommendation: Recommendation) -> str:
    """One line per client: its scores on validation data, and what it gains."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["client", "rows", recommendation.method, "gain_over_local", "gain_over_global"]
    )
    for values in _client_values(recommendation):
        writer.writerow(["" if _is_nan(v) else v for v in values])
    return file.getvalue()


def benchmark_json(results: BenchmarkResults) -> bytes:
    """All of it."""
    found = results.recommendation
    recommended = found and {
        "method": found.method,
        "settings": list(found.point.settings),
        "validation_mean": found.mean,
        "against_local": _versus_json(found.local),
        "against_global": _versus_json(found.common),
        "not_told_apart": list(found.close),
        "text": recommendation_lines(results),
    }
    whole = results._asdict() | {
        "methods": [m._asdict() for m in ranked(results)],
        "recommendation": recommended,
        "folders": list(results.folders),
    }
    return summary_bytes(whole)


def recommended_config(recommendation: Recommendation, results: BenchmarkResults) -> str:
    """A configuration that is ready to run, with the reasons above it."""
    lines = [f"{HEADER}: {results.name}", *(f"# {s}" for s in recommendation_lines(results))]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(recommendation.values)


def recommendation_lines(results: BenchmarkResults) -> list[str]:
    """Which method to take, and how sure that is, in words."""
    found = results.recommendation
    if found is None:
        return ["No method can be recommended: all of them failed."]
    settings = f" ({', '.join(found.point.settings)})" if found.point.settings else ""
    lines = [
        f"Recommended: {found.method}{settings}, the best mean {score_word(found.score)} on "
        f"validation data: {_score(found.mean, found.score)}{_percent(found.score)}, over "
        f"{_count(len(found.names), 'client')}."
    ]
    if found.method == LOCAL:
        lines.append("Every client trains alone: no method that shares a model has a better mean.")
    elif found.method == GLOBAL:
        lines.append("One global model for all: no personalized model has a better mean.")
    lines += _versus_lines(found, found.local, "Local") if found.local else []
    if found.local and not found.local.told_apart:
        lines.append("So training alone, which sends nothing, may do as well on these data.")
    if found.local is None and found.method != LOCAL:
        lines.append(
            "Local was not compared, so it is not known who would be better off training alone."
        )
    if found.common:
        name = found.common.other.replace(FEDAVG_MODEL, "the global model of FedAvg")
        lines += _versus_lines(found, found.common, name)
    if found.close:
        lines.append(f"Not told apart from it: {', '.join(found.close)}.")
    elif len(results.methods) > 1:
        lines.append("It is told apart from all the others.")
    return lines


def client_table(recommendation: Recommendation) -> Table:
    """Who gains, client by client, on validation data; those who lose most are first."""
    found = recommendation
    table = Table(
        title=f"{found.method}, client by client, on validation data",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("client")
    for heading in ("rows", score_name(found.score), "over Local", "over the global model"):
        table.add_column(heading, justify="right")
    lines = sorted(_client_values(found), key=lambda v: math.inf if _is_nan(v[3]) else v[3])
    for name, rows, own, local, common in lines[:_CLIENTS_SHOWN]:
        gains = [NOTHING if _is_nan(v) else _gain(v, found.score) for v in (local, common)]
        table.add_row(escape(name), str(rows), _score(own, found.score), *gains)
    if len(lines) > _CLIENTS_SHOWN:
        table.caption = f"and {len(lines) - _CLIENTS_SHOWN} more, in clients.csv"
    return table


def _versus_lines(found: Recommendation, against: Versus, name: str) -> list[str]:
    """How the recommended method stands to another one, and who gains."""
    score, gain = found.score, against.gain
    points = " points" if score.endswith("accuracy") else ""
    mean = f"{_gain(against.mean, score)}{points}"
    if math.isnan(against.half):
        verdict = f"{mean}, of one client, so there is no interval; not told apart"
    else:
        half = _score(against.half, score)
        verdict = f"{mean} ± {half} (paired 95 % interval over clients)"
        if not against.told_apart:
            verdict += ": not told apart"
        else:
            verdict += ": better" if against.mean > 0 else ": worse"
    lines = [f"Against {name}: {verdict}."]
    text = f"{gain.better} of {_count(gain.defined, 'client')} gain over {name}"
    if not gain.worse:
        return [*lines, f"{text}, and none would be better off with it."]
    order = np.argsort(np.where(np.isfinite(gain.clients), gain.clients, np.inf))
    losers = [found.names[i] for i in order[: gain.worse] if gain.clients[i] < -TIE]
    shown = ", ".join(losers[:_CLIENTS_NAMED])
    more = f" and {len(losers) - _CLIENTS_NAMED} more" if len(losers) > _CLIENTS_NAMED else ""
    how = "alone" if name == "Local" else "with it"
    return [*lines, f"{text}; {gain.worse} would be better off {how}: {shown}{more}."]


def _client_values(found: Recommendation) -> list[tuple[str, int, float, float, float]]:
    """Each client's name, validation rows, score, and gains over Local and the global model."""
    unknown = np.full(len(found.names), np.nan)
    local = unknown if found.local is None else found.local.gain.clients
    common = unknown if found.common is None else found.common.gain.clients
    columns = (found.clients.tolist(), local.tolist(), common.tolist())
    return list(zip(found.names, found.rows, *columns, strict=True))


def _versus_json(against: Versus | None) -> dict[str, Any] | None:
    if against is None:
        return None
    return {
        "other": against.other,
        "mean": against.mean,
        "half": against.half,
        "told_apart": against.told_apart,
        "better": against.gain.better,
        "worse": against.gain.worse,
        "defined": against.gain.defined,
    }


def _unit(axis: str, values: Sequence[float]) -> tuple[float, str]:
    return unit(axis, max([v for v in values if math.isfinite(v)], default=0.0))


def _seeds(results: BenchmarkResults) -> str:
    return _count(results.seeds, "seed")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _percent(score: str) -> str:
    return " %" if score.endswith("accuracy") else ""


def _score(value: float, score: str) -> str:
    if not math.isfinite(value):
        return NOTHING
    return f"{value * score_scale(score):.{1 if score.endswith('accuracy') else 3}f}"


def _interval(mean: float, half: float, score: str) -> str:
    text = _score(mean, score)
    return text if math.isnan(half) else f"{text} ± {_score(half, score)}"


def _gain(value: float, score: str) -> str:
    """With its sign; nothing is no "-0.0"."""
    digits = 1 if score.endswith("accuracy") else 3
    return f"{round(value * score_scale(score), digits) + 0.0:+.{digits}f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{100 * value:.0f}"


def _cost(value: float) -> str:
    return NOTHING if not math.isfinite(value) else f"{value:.3g}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
