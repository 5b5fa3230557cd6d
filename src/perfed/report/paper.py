"""A report for papers: figures as files, and the headline table as Markdown or LaTeX."""

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from perfed.core.errors import require_choice
from perfed.evaluation import Gain
from perfed.report.groups import (
    KIND_NAMES,
    KINDS,
    Group,
    axes,
    grouped,
    model_kinds,
    score_name,
    score_scale,
    score_word,
)
from perfed.report.headline import Headline, HeadlineCell, caption, headline
from perfed.report.worse_off import worse_off_text
from perfed.runs.run_dir import RecordedRun

# Told apart by color-blind eyes; markers say the same without color.
COLORS = ("#0072b2", "#c84a00", "#007a5a", "#a0327f", "#806400", "#5a4fcf", "#5a6270")
MARKERS = "osD^Pv*"
_FORMATS = ("png", "svg", "pdf")

# One column of a two-column paper, and the whole width, in inches.
_COLUMN, _WIDE = 3.3, 6.9

STYLE: dict[RcKeyType, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "svg.hashsalt": "perfed",  # the same runs give the same file
}
DATELESS: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def write_figures(
    runs: Sequence[RecordedRun], folder: Path, formats: Sequence[str] = ("png", "svg")
) -> tuple[Path, ...]:
    """Draw curves, clients and gains into a folder.

    `curve-SCORE-AXIS` (scores against rounds, bytes and times, with 95 % intervals over seeds),
    `clients` (box plots) and `gain` (personalized minus global). Each is 6.9 inches wide, and 3.3,
    a paper's column, with `-column` after its name.

    Args:
        runs: the runs.
        folder: where the files go; it is made if it is not there.
        formats: some of `png`, `svg` and `pdf`.

    Returns:
        The files, in the order they were written.

    Raises:
        DataError: the runs cannot be compared.
    """
    for form in formats:
        require_choice("formats", form, _FORMATS)
    groups = grouped(runs)
    folder.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[bool], Figure]] = {}
    for score in groups[0].scores:
        for axis in axes(groups):
            name = f"curve-{score}-{axis.replace('_', '-')}"
            drawings[name] = partial(_curves, groups, score, axis)
    drawings["clients"] = partial(_clients, groups)
    gains = [group.gain() for group in groups]
    if any(gain is not None for gain in gains):
        drawings["gain"] = partial(_gains, groups, gains)
    written = []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A script the font lacks shows as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for name, drawing in drawings.items():
            for column in (False, True):
                figure = drawing(column)
                for form in formats:
                    path = folder / f"{name}{'-column' * column}.{form}"
                    figure.savefig(path, dpi=300, metadata=DATELESS.get(form))
                    written.append(path)
    return tuple(written)


def markdown_table(runs: Sequence[RecordedRun]) -> str:
    """The headline table as Markdown, its caption below."""
    groups = grouped(runs)
    table = headline(groups)
    heads = ["method", "seeds", *(_heading(table, i) for i in range(len(table.columns)))]
    lines = [
        "| " + " | ".join(map(escape_markdown, heads)) + " |",
        "| --- |" + " ---: |" * (len(heads) - 1),
    ]
    for label, seeds, cells in zip(table.labels, table.seeds, table.rows, strict=True):
        row = [escape_markdown(label), str(seeds), *map(_markdown_cell, cells)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + f"\n\n{escape_markdown(_caption(groups))}\n"


def latex_table(runs: Sequence[RecordedRun]) -> str:
    """The headline table as LaTeX; it needs the package booktabs."""
    groups = grouped(runs)
    table = headline(groups)
    spans: list[tuple[str, int]] = []
    for column in table.columns:
        if spans and column.over and spans[-1][0] == column.over:
            spans[-1] = (column.over, spans[-1][1] + 1)
        else:
            spans.append((column.over, 1))
    over, rules, at = [], [], 3
    for name, n in spans:
        over.append(f"\\multicolumn{{{n}}}{{c}}{{{escape_latex(name)}}}" if name else "")
        rules += [f"\\cmidrule(lr){{{at}-{at + n - 1}}}"] * bool(name)
        at += n
    rows = [
        " & ".join([escape_latex(label), str(seeds), *map(_latex_cell, cells)]) + r" \\"
        for label, seeds, cells in zip(table.labels, table.seeds, table.rows, strict=True)
    ]
    names = [escape_latex(column.name) for column in table.columns]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{escape_latex(_caption(groups))}}}",
            f"\\begin{{tabular}}{{lr{'r' * len(table.columns)}}}",
            r"\toprule",
            " & ".join(["", "", *over]) + r" \\",
            "".join(rules),
            " & ".join(["method", "seeds", *names]) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _caption(groups: Sequence[Group]) -> str:
    """What the numbers are, and how many clients are worse off."""
    return f"{caption(groups)} {worse_off_text(groups)}".strip()


def _heading(table: Headline, i: int) -> str:
    over, name = table.columns[i]
    return f"{over.removesuffix(' model').lower()}: {name}" if over else name


def _markdown_cell(cell: HeadlineCell) -> str:
    mean = f"**{cell.mean}**" if cell.best else cell.mean
    return mean if cell.half is None else f"{mean} ± {cell.half}"


def escape_markdown(text: str) -> str:
    """Text that is no markup and stays in its cell."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "{''}",
    "²": r"\textsuperscript{2}", "\N{EN DASH}": "--",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """Text that is no command."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def _latex_cell(cell: HeadlineCell) -> str:
    mean = escape_latex(cell.mean)
    half = "" if cell.half is None else f" $\\pm$ {cell.half}"
    return (f"\\textbf{{{mean}}}" if cell.best else mean) + half


def _panels(
    count: int, column: bool, height: float, labels: Sequence[str]
) -> tuple[Figure, list[Axes]]:
    """Panels one above the other in a column, side by side on a page, and room for a legend."""
    rows, columns = (count, 1) if column else (1, count)
    legend = 0.1 + 0.17 * -(-len(labels) // _legend_columns(labels, column))
    size = (_COLUMN if column else _WIDE, height * rows + legend)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)


def _curves(groups: Sequence[Group], score: str, axis: str, column: bool) -> Figure:
    curves = [(i, g, x) for i, g in enumerate(groups) if (x := g.axis(axis)) is not None]
    labels = [group.label for _, group, _ in curves]
    kinds = model_kinds(groups)
    figure, panels = _panels(len(kinds), column, 1.7 if column else 2.1, labels)
    title, scale = axes(groups)[axis]
    by = score_scale(score)
    for panel, kind in zip(panels, kinds, strict=True):
        for i, group, x in curves:
            if kind not in group.kinds:
                continue
            mean, half = (by * values for values in group.curve(kind, score, "mean"))
            line = _look(i)
            every = max(1, len(x) // 8)
            panel.plot(x / scale, mean, markevery=every, **line)
            if group.seeds > 1:
                low, high = mean - half, mean + half
                if score.endswith("accuracy"):  # which ends there
                    low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
                panel.fill_between(
                    x / scale, low, high, color=line["color"], alpha=0.16, linewidth=0
                )
        panel.set_title(f"{KIND_NAMES[kind]} model", fontsize=8)
        panel.set_xlabel(title)
    panels[0].set_ylabel(score_name(score))
    if column:
        panels[-1].set_ylabel(score_name(score))
        for panel in panels[:-1]:
            panel.set_xlabel("")
    _legend(figure, panels[-1], labels, column)  # all methods have personalized models
    return figure


def _clients(groups: Sequence[Group], column: bool) -> Figure:
    score = groups[0].scores[0]
    height = 0.7 + 0.42 * len(groups)
    figure = Figure(figsize=(_COLUMN if column else _WIDE, height), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    for i, group in enumerate(groups):
        for k, kind in enumerate(KINDS):
            if kind not in group.kinds:
                continue
            values = score_scale(score) * group.clients(kind, score)
            values = values[np.isfinite(values)]
            if not len(values):
                continue
            color = _look(i)["color"]
            panel.boxplot(
                [values],
                positions=[i + (0.2 if k else -0.2)],
                widths=0.3,
                orientation="horizontal",
                whis=(10, 90),
                patch_artist=True,
                manage_ticks=False,
                boxprops={"facecolor": f"{color}59" if k else "white", "edgecolor": color},
                medianprops={"color": color},
                whiskerprops={"color": color},
                capprops={"color": color},
                flierprops={"marker": ".", "markersize": 2, "markeredgecolor": color},
            )
    panel.set_yticks(range(len(groups)), [g.label for g in groups], parse_math=False)
    panel.set_ylim(len(groups) - 0.5, -0.5)
    panel.grid(axis="y", visible=False)
    fills = "white: global, filled: personalized"
    if "global" not in model_kinds(groups):
        fills = "personalized models"
    name = score_name(score)
    panel.set_xlabel(f"{name}\n{fills}" if column else f"{name} of clients; {fills}")
    return figure


def _gains(groups: Sequence[Group], gains: Sequence[Gain | None], column: bool) -> Figure:
    score = groups[0].scores[0]
    known = [(i, gain) for i, gain in enumerate(gains) if gain is not None]
    labels = [groups[i].label for i, _ in known]
    figure, (panel,) = _panels(1, column, 2.0, labels)
    for i, gain in known:
        values = score_scale(score) * gain.clients
        values = np.sort(values[np.isfinite(values)])[::-1]
        # Clients of runs with other numbers of them share one axis.
        part = 100 * (np.arange(len(values)) + 0.5) / max(len(values), 1)
        every = max(1, len(values) // 10)
        panel.plot(part, values, markevery=every, **_look(i))
    panel.set_xlabel("clients, by gain (%)")
    points = " (points)" if score == "accuracy" else ""
    panel.set_ylabel(f"gain in {score_word(score)}{points}")
    _legend(figure, panel, labels, column)
    panel.axhline(0, color="#444444", linewidth=0.8)
    return figure


def _look(i: int) -> dict[str, Any]:
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.3,
        "linestyle": ("-", "--", ":", "-.")[i // len(COLORS) % 4],
    }


def _legend_columns(labels: Sequence[str], column: bool) -> int:
    return max(1, min(len(labels), (48 if column else 105) // (max(map(len, labels)) + 7)))


def _legend(figure: Figure, panel: Axes, labels: Sequence[str], column: bool) -> None:
    """The methods below the panels; a dollar sign in a name starts no formula."""
    columns = _legend_columns(labels, column)
    # A name that begins with an underscore would be left out, so names come after.
    numbers = [str(i) for i in range(len(labels))]
    shown = figure.legend(panel.get_lines(), numbers, loc="outside lower center", ncols=columns)
    for entry, label in zip(shown.get_texts(), labels, strict=True):
        entry.set_parse_math(False)
        entry.set_text(label)
