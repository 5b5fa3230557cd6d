"""A table or figure of a paper, read from a file: what is run, and what the paper prints.

A file has a `[base]` like a run's configuration, `[[row]]`s (of a table, or the plots of a figure)
and `[[method]]`s (of every row, or a row's own), each with settings on top of it. A `[[column]]`
(or a curve) is a score of a method's runs; several columns may show one method.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, final, get_args

from perfed.core.errors import ConfigError, require_choice
from perfed.evaluation import ModelKind
from perfed.methods.registry import find_method
from perfed.runs.batch import Entry
from perfed.runs.config import Config, overridden

Take = Literal["last", "best"]
X = Literal["round", "simulated_seconds", "uplink_bytes"]
Source = Literal["text", "table", "figure", "ours"]


class Printed(NamedTuple):
    """A number of the paper.

    Attributes:
        value: the number.
        half: half of its interval, or its standard deviation: what the paper prints after ±.
    """

    value: float
    half: float | None


class Protocol(NamedTuple):
    """A way to score the same runs.

    Attributes:
        name: what it is called.
        adapt_on: the data that personal models are made from.
        take: the last round's score, or the best of the scored ones.
        printed: whether it is the paper's, with which its numbers are to be compared.
    """

    name: str
    adapt_on: str | None
    take: Take
    printed: bool


class Column(NamedTuple):
    """A score of a method's runs.

    Attributes:
        name: its heading, or the curve's name.
        method: the method.
        kind: which models.
        printed: the paper's numbers, by row.
    """

    name: str
    method: str
    kind: ModelKind
    printed: dict[str, Printed]


class Row(NamedTuple):
    """A row of a table, or a plot of a figure.

    Attributes:
        name: its heading.
        runs: the settings of each method's runs, by method.
        columns: what is shown of them.
    """

    name: str
    runs: dict[str, dict[str, Any]]
    columns: tuple[Column, ...]


class Claim(NamedTuple):
    """A claim of the paper: one column is ahead of others.

    Attributes:
        text: in words.
        row: where; "" means in every row.
        ahead: the column that is ahead.
        of: the others.
        score: by which score.
        printed: by how much, in each row, where the text says so.
        at_own_end: whether curves are compared where each ends, not where the first of them does.
        reach: whether curves are compared by when they reach the score that `ahead` ends with.
        source: where it is from: the paper's text, a table, a figure, or ourselves.
    """

    text: str
    row: str
    ahead: str
    of: tuple[str, ...]
    score: str
    printed: dict[str, tuple[float, ...]]
    at_own_end: bool
    reach: bool
    source: Source


@final
@dataclass(frozen=True)
class Reproduction:
    """A table or figure of a paper.

    Attributes:
        name: what the command calls it.
        title: what it is.
        paper: where it is from.
        choices: what the paper leaves open, and what is chosen here.
        score: the score that is shown, in a figure one or several.
        statistic: over clients.
        x: what a figure is drawn against; None: it is a table.
        log_x: whether that axis is logarithmic.
        log_y: whether the axis of losses is.
        seeds: how many seeds, unless one asks otherwise.
        protocols: the ways it is scored; the first is the paper's.
        rows: rows or plots.
        claims: what the paper claims.
    """

    name: str
    title: str
    paper: str
    choices: str
    score: tuple[str, ...]
    statistic: str
    x: X | None
    log_x: bool
    log_y: bool
    seeds: int
    protocols: tuple[Protocol, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]

    @classmethod
    def read(cls, name: str, quick: bool = False) -> Self:
        """One of those that come with the package."""
        require_choice("NAME", name, names())
        text = files("perfed.papers").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        return cls.of(name, tomllib.loads(text), quick)

    @classmethod
    def of(cls, name: str, values: dict[str, Any], quick: bool) -> Self:
        """Read from the contents of a file."""
        for module in values.get("modules", []):  # methods that only this file has
            import_module(f"perfed.papers.{module}")
        small = values.get("quick", {}) if quick else {}
        row_names = small.get("rows")
        rows = [
            _row(row, values, small.get("settings", []))
            for row in values["row"]
            if row_names is None or row["name"] in row_names
        ]
        title = values["title"]
        if quick:
            title += f" (quick: {small['says']})"
        protocols = [_protocol(p) for p in values.get("protocol", [{"name": "", "printed": True}])]
        _check_best(protocols, rows)
        shown = {row.name for row in rows}
        claims = [
            _claim(c, values)
            for c in values.get("claim", [])
            if c.get("row", "") in {"", *shown} and not (quick and c.get("full_only", False))
        ]
        return cls(
            name,
            title,
            values["paper"],
            values["choices"].strip(),
            tuple(values["score"]),
            values.get("statistic", "mean"),
            values.get("x"),
            values.get("log_x", False),
            values.get("log_y", False),
            small.get("seeds", values.get("seeds", 5)),
            tuple(protocols),
            tuple(rows),
            tuple(claims),
        )

    def entries(self, seeds: int, folder: Path) -> list[Entry]:
        """All runs.

        Raises:
            ConfigError: two of them would be recorded in one folder, or one cannot be run.
        """
        found: dict[Path, Entry] = {}
        for row in self.rows:
            for (method, values), seed in product(row.runs.items(), range(seeds)):
                whole = values | {"seed": seed}
                Config.checked(whole)
                at = self.place(folder, row.name, method, seed)
                entry = Entry(f"{row.name}: {method} (seed {seed})", at, whole)
                if at in found:
                    raise ConfigError(f"{entry.name} and {found[at].name} are both named {at}")
                found[at] = entry
        return list(found.values())

    def place(self, folder: Path, row: str, method: str, seed: int) -> Path:
        """Where a run is recorded."""
        return folder / "runs" / _file_name(row) / _file_name(method) / f"seed-{seed}"


def names() -> list[str]:
    """Those that come with the package."""
    found = [path.name for path in files("perfed.papers").iterdir()]
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def _protocol(values: dict[str, Any]) -> Protocol:
    return Protocol(
        values["name"],
        values.get("adapt_on"),
        values.get("take", "last"),
        values.get("printed", False),
    )


def _check_best(protocols: Sequence[Protocol], rows: Sequence[Row]) -> None:
    """Only last models are kept, so that only they can be scored once more."""
    for protocol, row in product(protocols, rows):
        for method, values in row.runs.items():
            own = values.get("adapt_on", "train")
            if protocol.take == "best" and protocol.adapt_on not in (None, own):
                raise ConfigError(
                    f'protocol {protocol.name}: take = "best" needs every scored round adapted on '
                    f"{protocol.adapt_on} data; {row.name}: {method} adapts on {own} data"
                )


def _claim(claim: dict[str, Any], values: dict[str, Any]) -> Claim:
    source, reach = claim.get("source", "text"), claim.get("reach", False)
    require_choice("claim.source", source, get_args(Source))
    if reach and (claim.get("at_own_end", False) or "x" not in values):
        raise ConfigError(
            f"claim {claim['text']}: reach is for figures, and not for curves compared at_own_end"
        )
    return Claim(
        claim["text"],
        claim.get("row", ""),
        claim["ahead"],
        tuple(claim["of"]),
        claim.get("score", values["score"][0]),
        {row: tuple(gaps) for row, gaps in claim.get("printed", {}).items()},
        claim.get("at_own_end", False),
        reach,
        source,
    )


def _row(row: dict[str, Any], values: dict[str, Any], quick: Sequence[str]) -> Row:
    methods = row.get("method", values.get("method", []))
    columns = row.get("column", values.get("column", []))
    runs = {}
    for method in methods:
        if method["name"] in runs:
            raise ConfigError(f"{row['name']}: two methods are named {method['name']}")
        own = method.get("row", {}).get(row["name"], [])
        settings = [*row.get("settings", []), *method.get("settings", []), *own]
        # A table of runs keeps no personal models: there would be gigabytes of them.
        output = ["output.personal_models=none"]
        runs[method["name"]] = overridden(values["base"], [*settings, *output, *quick])
    shown = []
    for column in columns or [{"name": m["name"], "method": m["name"]} for m in methods]:
        printed = {
            at: Printed(float(pair[0]), float(pair[1]) if len(pair) > 1 else None)
            for at, pair in column.get("printed", {}).items()
        }
        kind = column.get("kind", values.get("kind", "personalized"))
        if column["method"] not in runs:
            raise ConfigError(f"column {column['name']}: there is no method {column['method']}")
        used = runs[column["method"]]
        personal = used.get("personal") or not find_method(used["method"]["name"]).has_global_model
        if kind == "global" and personal:
            raise ConfigError(
                f'column {column["name"]}: kind = "global", but {column["method"]} has no global '
                "model"
            )
        shown.append(Column(column["name"], column["method"], kind, printed))
    return Row(row["name"], runs, tuple(shown))


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in text)
