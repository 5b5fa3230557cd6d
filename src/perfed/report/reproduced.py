"""The page of a reproduction: its table beside the printed one, its figure, and the claims."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from perfed.evaluation import ERRORS
from perfed.papers.claims import check_claims
from perfed.papers.reproduction import Column, Printed, Protocol, Row
from perfed.papers.results import Cell, Curve, Results, scale_of
from perfed.report.groups import AXIS_NAMES, score_name, unit
from perfed.report.paper import COLORS, DATELESS, MARKERS, STYLE

_WIDTH, _HEIGHT = 3.1, 2.5  # of a plot, in inches
_DASHES = ("-", "--", ":", "-.")


def table_lines(results: Results) -> tuple[list[str], list[list[str]]]:
    """The headings, and one line of cells per row of the table, or per curve of a figure.

    Cells are *paper / here*, and a row of a table says whether the order of its methods agrees.
    """
    what = results.what
    if what.x is not None:
        return _curve_lines(results)
    headings, lines = [""], []
    printed = any(column.printed for column in what.rows[0].columns)
    for protocol in what.protocols:
        scored = f", {protocol.name}" if protocol.name else ""
        headings += [f"{column.name}{scored}" for column in what.rows[0].columns]
        headings += ["order of methods agrees?"] * (protocol.printed and printed)
    for row in what.rows:
        line = [row.name]
        for protocol in what.protocols:
            cells = [results.cell(row, column, protocol) for column in row.columns]
            line += [_shown(what.score[0], cell) for cell in cells]
            line += [_order(results, row, protocol)] * (protocol.printed and printed)
        lines.append(line)
    return headings, lines


def _curve_lines(results: Results) -> tuple[list[str], list[list[str]]]:
    what = results.what
    x = what.x or "round"
    named = [f"{score_name(score)} at the end" for score in what.score]
    headings, lines = ["plot", "curve", AXIS_NAMES[x].lower(), *named], []
    for row in what.rows:
        for column in row.columns:
            curves = [results.curve(row, column, score) for score in what.score]
            cells = [
                "failed" if curve is None else _number(score, curve.mean[-1], curve.half[-1])
                for score, curve in zip(what.score, curves, strict=True)
            ]
            end = "" if curves[0] is None else _amount(x, float(curves[0].x[-1]))
            lines.append([row.name, column.name, end, *cells])
    return headings, lines


def _amount(x: str, value: float) -> str:
    scale, suffix = unit(x, value)
    return f"{value / scale:.4g} {suffix}".strip()


def _number(score: str, mean: float, half: float) -> str:
    digits = 2 if scale_of(score) > 1 else 4
    text = f"{mean:.{digits}f}"
    return text if np.isnan(half) else f"{text} ± {half:.{digits}f}"


def _shown(score: str, cell: Cell) -> str:
    here = "failed" if np.isnan(cell.mean) else _number(score, cell.mean, cell.half)
    return here if cell.printed is None else f"{_printed(cell.printed)} / {here}"


def _printed(printed: Printed) -> str:
    return f"{printed.value:.2f}" + ("" if printed.half is None else f"±{printed.half:.2f}")


def _order(results: Results, row: Row, protocol: Protocol) -> str:
    pairs, agree, wrong = results.order(row, protocol)
    if pairs == 0:
        return ""
    return "yes" if not wrong else f"{agree} of {pairs} pairs: " + "; ".join(wrong)


def terminal_table(results: Results) -> Table:
    """For the terminal: one line per cell, which is narrow enough."""
    what = results.what
    table = Table(box=box.SIMPLE_HEAD, title=what.title, title_justify="left", title_style="bold")
    if what.x is not None:
        headings, lines = _curve_lines(results)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i < 2 else "right")
        for line in lines:
            table.add_row(*line)
        return table
    table.add_column("")
    table.add_column("method")
    for protocol in what.protocols:
        if protocol.printed:
            table.add_column("paper", justify="right")
        table.add_column(f"here{f': {protocol.name}' if protocol.name else ''}", justify="right")
    for row in what.rows:
        for i, column in enumerate(row.columns):
            cells = []
            for protocol in what.protocols:
                cell = results.cell(row, column, protocol)
                if protocol.printed:
                    cells.append("" if cell.printed is None else _printed(cell.printed))
                cells.append(_shown(what.score[0], cell._replace(printed=None)))
            table.add_row("" if i else row.name, column.name, *cells)
    return table


def order_lines(results: Results) -> list[str]:
    """Whether the order of methods agrees with the printed one, row by row."""
    protocol = results.what.protocols[0]
    orders = [(row.name, _order(results, row, protocol)) for row in results.what.rows]
    return [f"order of methods agrees, {name}: {text}" for name, text in orders if text]


def claim_lines(results: Results) -> list[str]:
    """Whether the paper's claims hold here."""
    lines = []
    for claim, verdict, _, detail in check_claims(results):
        source = "" if claim.source == "text" else f" ({claim.source})"
        lines.append(f"{verdict}{source}: {claim.text} ({detail})")
    return lines


def markdown(results: Results, figure: str | None) -> str:
    """The page as Markdown."""
    what = results.what
    parts = [f"# {what.title}", f"{what.paper}. {results.seeds} seed(s), 95 % intervals."]
    headings, lines = table_lines(results)
    rows = [headings, ["---"] + ["---:"] * (len(headings) - 1), *lines]
    parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    if any(column.printed for column in what.rows[0].columns):
        parts.append("Cells: paper / here.")
    if figure is not None:
        parts.append(f"![{what.title}]({figure})")
    claims = claim_lines(results)
    if claims:
        parts.append("## Claims of the paper\n\n" + "\n".join(f"- {line}" for line in claims))
    parts.append(f"## Choices\n\n{what.choices}")
    if results.failures:
        failed = "\n".join(f"- {name}: {why}" for name, why in results.failures.items())
        parts.append(f"## Failed runs\n\n{failed}")
    return "\n\n".join(parts) + "\n"


def draw(results: Results, path: Path) -> list[Path]:
    """The figure in the paper's own axes, or a table's cells as bars; PNG and SVG."""
    with mpl.rc_context(STYLE):
        figure = _curves(results) if results.what.x is not None else _bars(results)
        written = []
        for form in ("png", "svg"):
            file = path.with_suffix(f".{form}")
            figure.savefig(file, dpi=160, metadata=DATELESS.get(form))
            written.append(file)
    return written


def _curves(results: Results) -> Figure:
    what = results.what
    tall = len(what.score) > 1
    wide = min(len(what.rows), 4)
    deep = len(what.score) if tall else -(-len(what.rows) // wide)
    figure = Figure(figsize=(_WIDTH * wide, _HEIGHT * deep + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(what.title, fontsize=9)
    for i, row in enumerate(what.rows):
        for j, score in enumerate(what.score):
            place = j * wide + i if tall else i
            axes = figure.add_subplot(deep, wide, place + 1)
            _plot(axes, results, row, score)
    if _shared(results):
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def _shared(results: Results) -> bool:
    """Whether all plots have the same many curves, for which one legend is enough."""
    columns = {tuple(column.name for column in row.columns) for row in results.what.rows}
    return len(columns) == 1 and len(next(iter(columns))) > 4


def _plot(axes: Axes, results: Results, row: Row, score: str) -> None:
    what = results.what
    x = what.x or "round"
    curves = [(column, results.curve(row, column, score)) for column in row.columns]
    longest = max((float(c.x[-1]) for _, c in curves if c is not None), default=1.0)
    scale, suffix = unit(x, longest)
    for column, curve in curves:
        if curve is None:
            continue
        if what.log_x:  # which has no place for the beginning
            curve = Curve(*(part[curve.x > 0] for part in curve))
        style = _style(column, row.columns)
        axes.plot(curve.x / scale, curve.mean, label=column.name, linewidth=1.3, **style)  # type: ignore[arg-type]
        if np.isfinite(curve.half).all():
            low, high = curve.mean - curve.half, curve.mean + curve.half
            axes.fill_between(curve.x / scale, low, high, color=style["color"], alpha=0.15, lw=0)
    axes.set_title(row.name, fontsize=8)
    name = AXIS_NAMES[x]
    axes.set_xlabel(f"{name} ({suffix})" if suffix else name)
    axes.set_ylabel(score_name(score))
    if what.log_y and score in ERRORS:
        axes.set_yscale("log")
        for place in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            place(lambda value, _: f"{value:g}")
        axes.tick_params(axis="y", which="both", labelsize=6.5)
    elif x == "round":
        # As in the papers: where curves differ, not where they all begin.
        later = [c.mean[c.x >= longest / 10] for _, c in curves if c is not None]
        low, high = min(map(np.min, later), default=0.0), max(map(np.max, later), default=1.0)
        axes.set_ylim(low - (high - low) / 10, high + (high - low) / 10)
    if what.log_x:
        axes.set_xscale("log")
    if not _shared(results):
        axes.legend(fontsize=6.5)


def _style(column: Column, columns: Sequence[Column]) -> dict[str, object]:
    """One color per method; dashes for its codecs, or its global model beside personal ones."""
    families = list(dict.fromkeys(c.method.partition(", ")[0] for c in columns))
    family = column.method.partition(", ")[0]
    kin = [(c.method, c.kind) for c in columns if c.method.partition(", ")[0] == family]
    # The global model, where both are shown, comes first and is the dashed one.
    dashes = _DASHES[: len(kin)] if column.method != family else ("--", "-")[-len(kin) :]
    return {
        "color": COLORS[families.index(family) % len(COLORS)],
        "linestyle": dashes[kin.index((column.method, column.kind)) % len(dashes)],
    }


def _bars(results: Results) -> Figure:
    what = results.what
    columns = what.rows[0].columns
    figure = Figure(figsize=(max(6.4, 1.35 * len(what.rows) + 1.5), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(columns)
    for j, column in enumerate(columns):
        cells = [results.cell(row, column, what.protocols[0]) for row in what.rows]
        at = np.arange(len(cells)) + (j - (len(columns) - 1) / 2) * width
        half = [0.0 if np.isnan(cell.half) else cell.half for cell in cells]
        color = COLORS[j % len(COLORS)]
        axes.bar(at, [c.mean for c in cells], width * 0.92, yerr=half, color=color,
                 label=column.name, error_kw={"linewidth": 0.8})  # fmt: skip
        printed = [np.nan if c.printed is None else c.printed.value for c in cells]
        axes.plot(at, printed, linestyle="", marker=MARKERS[2], markersize=4, color="black",
                  markerfacecolor="white", label="printed" if j == 0 else None)  # fmt: skip
    axes.set_xticks(range(len(what.rows)), [row.name.replace(", ", "\n") for row in what.rows])
    axes.set_ylabel(score_name(what.score[0]))
    finite = [
        value
        for row in what.rows
        for column in columns
        for cell in [results.cell(row, column, what.protocols[0])]
        for value in (cell.mean, cell.printed.value if cell.printed else np.nan)
        if np.isfinite(value)
    ]
    if finite:
        axes.set_ylim(bottom=max(0.0, min(finite) - 8))
    axes.set_title(what.title, fontsize=9)
    axes.legend(ncols=3, fontsize=7)
    return figure
