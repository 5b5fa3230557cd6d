"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.filesize import decimal
from rich.table import Table

from perfed.data.describe import Description
from perfed.evaluation import gain_over
from perfed.report.groups import worse_count
from perfed.report.theory_text import number, verdict
from perfed.runs.adapt import Adapted
from perfed.runs.comparison import ComparisonRow
from perfed.runs.summary import LocalRun
from perfed.runs.sweep import SweepLine
from perfed.theory.advice import Advice
from perfed.training import Result

_STATISTICS = {
    "mean": "mean",
    "weighted": "by size",
    "worst": "worst",
    "p10": "p10",
    "p50": "median",
    "p90": "p90",
}


def result_table(result: Result) -> Table:
    """One run: both model kinds' scores over the clients."""
    some, everyone = result.evaluator.clients, result.experiment.federation.clients
    clients = "all clients" if some is None else f"{len(some):,} of {everyone:,} clients, at random"
    table = _table(f"{result.method.name}, round {result.rounds}, held-out data of {clients}")
    table.add_column("model")
    table.add_column("")
    for heading in _STATISTICS.values():
        table.add_column(heading, justify="right")
    for kind, scores in result.scores.items():
        for i, (name, summary) in enumerate(scores.summary().items()):
            show = _percent if name == "accuracy" else _number
            cells = [show(getattr(summary, field)) for field in _STATISTICS]
            table.add_row("" if i else kind, name, *cells)
    return table


def worse_off_lines(result: Result, local: LocalRun | None) -> list[str]:
    """How many clients are worse off than with the global model, and than alone, where known."""
    own, lines = result.scores["personalized"].values, []
    score = next(iter(own))
    if "global" in result.scores:
        gain = gain_over(own[score], result.scores["global"].values[score], score)
        lines.append(f"worse off than with the global model: {worse_count(gain, score)}")
    if local is not None:
        gain = gain_over(own[score], local.of_clients(result.scored.names, score), score)
        lines.append(f"worse off than alone: {worse_count(gain, score)}")
    return lines


def cost_line(result: Result) -> str:
    """How many bytes the run has sent, and how long that would take over the network."""
    costs = result.costs
    messages = result.traffic.uplink.size
    up, down = (int(part[-1]) for part in (costs.uplink_bytes, costs.downlink_bytes))
    line = (
        f"sent: {decimal(up)} up ({decimal(up // messages)} per message), "
        f"{decimal(down)} down ({decimal(down // messages)} per message)"
    )
    if costs.seconds is None:
        return line
    return f"{line}; {costs.seconds[-1]:.4g} s over the simulated network"


def theory_tables(theory: Mapping[str, Any]) -> list[Table]:
    """The constants and the conditions that `perfed diagnose` found."""
    constants = _table(f"Constants at {theory['at']}")
    for heading in ("", "what it is", "value", "between", "and"):
        constants.add_column(heading, justify="left" if heading in ("", "what it is") else "right")
    for c in theory["constants"]:
        constants.add_row(
            c["name"], c["meaning"], number(c["value"]), number(c["low"]), number(c["high"])
        )
    conditions = _table(f"Conditions for {theory['method']}")
    for heading in ("condition", "here", "limit", "", "from"):
        justify: Any = "right" if heading in ("here", "limit") else "left"
        conditions.add_column(
            heading, justify=justify, no_wrap=heading not in ("condition", "from")
        )
    for c in theory["conditions"]:
        color = "green" if c["holds"] else "red"
        result = f"[{color}]{verdict(c)}[/]"
        conditions.add_row(c["text"], number(c["value"]), number(c["limit"]), result, c["source"])
    return [constants, conditions]


def advice_table(advice: Advice) -> Table:
    """Settings, and why."""
    table = _table("Advice")
    for heading in ("setting", "value", "why"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for reason in advice.reasons:
        table.add_row(reason.setting, str(reason.value), reason.why)
    return table


def comparison_table(rows: Sequence[ComparisonRow]) -> Table:
    """All methods side by side: what each gains over FedAvg and over Local, and who loses."""
    score = next(iter(rows[0].scores.values))
    in_percent = score == "accuracy"
    show, gain = (_percent, _gain) if in_percent else (_number, _difference)
    summaries = {row.label: row.scores.summary()[score] for row in rows}
    scores = {row.label: row.scores.values[score] for row in rows}
    others = ("FedAvg", "Local")
    what = "Accuracy" if in_percent else score.upper()
    table = _table(
        f"{what} on the clients' held-out data{', in %' if in_percent else ''}; "
        "below: clients with a worse one"
    )
    table.padding = (0, 0, 0, 1)  # to fit into 80 columns, as do headings of two lines
    table.add_column("method", no_wrap=True)
    compared = [f"{what}\n{other}" for what in ("vs", "below") for other in others]
    for heading in ("mean", "worst", "p10", *compared, "seconds"):
        table.add_column(heading, justify="right")
    best = max(summary.mean for summary in summaries.values())
    for row in rows:
        own = summaries[row.label]
        gains = [
            "" if row.label == other else gain(own.mean - summaries[other].mean) for other in others
        ]
        values = row.scores.values[score]
        counts = [
            "" if row.label == other else f"{found.worse}/{found.defined}"
            for other in others
            for found in [gain_over(values, scores[other], score)]
        ]
        cells = [show(value) for value in (own.mean, own.worst, own.p10)]
        style = "bold" if own.mean == best else None
        table.add_row(row.label, *cells, *gains, *counts, f"{row.seconds:.1f}", style=style)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def _gain(difference: float) -> str:
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"


def adapted_table(adapted: Adapted) -> Table:
    """A client's scores before and after its model was fitted to it."""
    table = _table(f"{adapted.held_out} held-out rows; fitted to {adapted.examples}")
    table.add_column("")
    for heading in ("common model", "own model"):
        table.add_column(heading, justify="right")
    for name, before in adapted.before.items():
        show = _percent if name == "accuracy" else _number
        table.add_row(name, show(before), show(adapted.after[name]))
    return table


def sweep_table(lines: Sequence[SweepLine], seeds: int) -> Table:
    """The scores of a sweep, one row per point."""
    table = _table(f"Personalized models, mean over clients and {seeds} seed(s), 95 % intervals")
    table.add_column("point")
    for heading in ("validation", "held-out"):
        table.add_column(heading, justify="right")
    for line in lines:
        if line.failure is not None:
            table.add_row(line.label, "failed", "", style="red")
            continue
        style = "bold" if line.test is not None else None
        table.add_row(line.label, _interval(line.validation), _interval(line.test), style=style)
    return table


def _interval(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return ""
    mean, half = pair
    return f"{100 * mean:.2f}" if np.isnan(half) else f"{100 * mean:.2f} ± {100 * half:.2f}"


def _difference(value: float) -> str:
    return f"{value:+.3f}"


def data_table(facts: Description) -> Table:
    """The clients' sizes and labels."""
    table = _table("")
    table.title = None
    for heading in ("", "min", "median", "max", "total"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(what: str, values: np.ndarray, total: str = "", digits: int = 0) -> None:
        cells = [f"{v:.{digits}f}" for v in np.percentile(values, [0, 50, 100])]
        table.add_row(what, *cells, total)

    row("examples to train on", facts.train, str(facts.train.sum()))
    row("examples held out", facts.test, str(facts.test.sum()))
    if facts.labels is not None:
        row("classes per client", facts.classes_held, str(len(facts.labels)))
        row("label distance from all", facts.distance, digits=2)
        row("label distance, train to held out", facts.test_distance, digits=2)
    return table


def catalog_table(entries: Sequence[tuple[str, str, str]], what: str) -> Table:
    """Sources or splits: name, what it is, and where it is."""
    table = _table(what)
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what it is")
    if any(place for _, _, place in entries):
        table.add_column("here")
    for name, summary, place in entries:
        table.add_row(name, summary, *([place] if len(table.columns) > 2 else []))
    return table
