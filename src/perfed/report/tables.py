"""Tables for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from perfed.evaluation import Scores
from perfed.experiment.comparison import Row
from perfed.experiment.simulate import Result

_STATISTICS = {
    "mean": "mean",
    "weighted": "by size",
    "worst": "worst",
    "p10": "p10",
    "p50": "median",
    "p90": "p90",
}


def result_table(result: Result) -> Table:
    """One run: both model kinds' accuracy and loss over the clients."""
    table = _table(f"{result.method.name}, round {result.rounds}, held-out data of all clients")
    table.add_column("model")
    table.add_column("")
    for heading in _STATISTICS.values():
        table.add_column(heading, justify="right")
    for kind, scores in result.scores.items():
        for name, summary in scores.summary().items():
            show = _percent if name == "accuracy" else _number
            cells = [show(getattr(summary, field)) for field in _STATISTICS]
            table.add_row(kind if name == "accuracy" else "", name, *cells)
    return table


def comparison_table(rows: Sequence[Row]) -> Table:
    """All methods side by side, with what each gains over FedAvg and over Local, in points."""
    means = {row.label: _mean(row.scores) for row in rows}
    table = _table("Accuracy on the clients' held-out data, in %")
    table.add_column("method", no_wrap=True)
    for heading in ("mean", "worst", "p10", "vs FedAvg", "vs Local", "seconds"):
        table.add_column(heading, justify="right")
    best = max(means.values())
    for row in rows:
        accuracy = row.scores.summary()["accuracy"]
        gains = [
            "" if row.label == other else _gain(accuracy.mean - means[other])
            for other in ("FedAvg", "Local")
        ]
        cells = [_percent(v) for v in (accuracy.mean, accuracy.worst, accuracy.p10)]
        style = "bold" if accuracy.mean == best else None
        table.add_row(row.label, *cells, *gains, f"{row.seconds:.1f}", style=style)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _mean(scores: Scores) -> float:
    return float(scores.accuracy.mean())


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _gain(difference: float) -> str:
    return f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0: no "-0.0"
