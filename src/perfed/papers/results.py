"""The results of a reproduction: cells beside the printed ones, and curves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float

from perfed.evaluation import ERRORS
from perfed.papers.reproduction import Column, Printed, Protocol, Reproduction, Row
from perfed.runs.files import read_json
from perfed.runs.run_dir import SUMMARY
from perfed.runs.statistics import over_seeds


def scale_of(score: str) -> float:
    """Accuracies are in percent, as the papers print them."""
    return 100.0 if score.endswith("accuracy") else 1.0


class Cell(NamedTuple):
    """One number, here and in the paper.

    Attributes:
        mean: over seeds; NaN if its runs failed.
        half: half of its 95 % interval.
        printed: the paper's, if it has one.
    """

    mean: float
    half: float
    printed: Printed | None


class Curve(NamedTuple):
    """A score on the way, mean over seeds and half of the 95 % intervals."""

    x: Float[np.ndarray, " points"]
    mean: Float[np.ndarray, " points"]
    half: Float[np.ndarray, " points"]


@final
@dataclass(frozen=True)
class Results:
    """The results of a reproduction.

    Attributes:
        what: the reproduction.
        seeds: how many seeds there were.
        folder: where its runs are.
        failures: why some runs failed, by name.
    """

    what: Reproduction
    seeds: int
    folder: Path
    failures: dict[str, str]

    def summaries(self, row: Row, method: str) -> list[dict[str, Any]] | None:
        """The summaries of a method's runs; None if one failed."""
        places = [self.what.place(self.folder, row.name, method, s) for s in range(self.seeds)]
        if not all((place / SUMMARY).exists() for place in places):
            return None
        return [read_json(place / SUMMARY) for place in places]

    def cell(self, row: Row, column: Column, protocol: Protocol) -> Cell:
        """A number of the table."""
        printed = column.printed.get(row.name) if protocol.printed else None
        values = self.values(row, column, protocol)
        if values is None:
            return Cell(np.nan, np.nan, printed)
        spread = over_seeds(values)
        return Cell(float(spread.mean), float(spread.half), printed)

    def values(
        self, row: Row, column: Column, protocol: Protocol, score: str | None = None
    ) -> Float[np.ndarray, " seeds"] | None:
        """Each seed's, by the table's score unless another is named; None if a run failed."""
        score, statistic = score or self.what.score[0], self.what.statistic
        summaries = self.summaries(row, column.method)
        if summaries is None:
            return None
        values = []
        for seed, summary in enumerate(summaries):
            own = _recorded_as(score, summary)
            if protocol.adapt_on not in (None, summary["config"]["adapt_on"]):
                place = self.what.place(self.folder, row.name, column.method, seed)
                other = read_json(place / rescored_name(protocol))
                values.append(other[column.kind][own][statistic])
            elif protocol.take == "best":
                best = min if score in ERRORS else max
                values.append(best(p[column.kind][own][statistic] for p in summary["history"]))
            else:
                values.append(summary[column.kind][own][statistic])
        return scale_of(score) * np.array(values)

    def curve(self, row: Row, column: Column, score: str) -> Curve | None:
        """A curve of the figure; None if its runs failed."""
        found = self.curves(row, column, score)
        if found is None:
            return None
        spread = over_seeds(found[1])
        return Curve(found[0].mean(axis=0), spread.mean, spread.half)

    def curves(
        self, row: Row, column: Column, score: str
    ) -> tuple[Float[np.ndarray, "seeds points"], Float[np.ndarray, "seeds points"]] | None:
        """Each seed's curve; None if a run failed."""
        summaries = self.summaries(row, column.method)
        if summaries is None:
            return None
        x, statistic = self.what.x or "round", self.what.statistic
        along = np.array([[p[x] for p in s["history"]] for s in summaries], float)
        names = [_recorded_as(score, summary) for summary in summaries]
        values = np.array(
            [
                [p[column.kind][own][statistic] for p in summary["history"]]
                for own, summary in zip(names, summaries, strict=True)
            ]
        )
        return along, scale_of(score) * values

    def order(self, row: Row, protocol: Protocol) -> tuple[int, int, list[str]]:
        """How many pairs of columns the paper tells apart, how many agree here, and those not."""
        cells = {c.name: self.cell(row, c, protocol) for c in row.columns}
        known = {name: cell for name, cell in cells.items() if cell.printed is not None}
        pairs, wrong = 0, []
        for better, one in known.items():
            for worse, other in known.items():
                assert one.printed is not None
                assert other.printed is not None
                apart = (one.printed.half or 0) + (other.printed.half or 0)
                if one.printed.value - other.printed.value > apart:
                    pairs += 1
                    if not one.mean > other.mean:
                        wrong.append(f"{better} is not above {worse}")
        return pairs, pairs - len(wrong), wrong


def rescored_name(protocol: Protocol) -> str:
    """The file in a run's folder that has its scores by another protocol."""
    return f"adapted-on-{protocol.adapt_on}.json"


def _recorded_as(score: str, summary: dict[str, Any]) -> str:
    """The name of a score in a run: without a penalty its objective is the loss, recorded once."""
    penalty = summary["config"].get("model", {}).get("l2", 0.0)
    return "train_loss" if score == "train_objective" and penalty == 0 else score
