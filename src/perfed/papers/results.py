"""What a reproduction comes to: cells beside the printed ones, curves, and whether claims hold."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float

from perfed.data import Federation
from perfed.errors import ConfigError
from perfed.evaluation import ERRORS, Evaluator
from perfed.experiment.adapt import load_model
from perfed.experiment.config import Config
from perfed.experiment.entries import Data, data_of, record_entries
from perfed.experiment.files import read_json, write_whole
from perfed.experiment.recording import recorded_config
from perfed.experiment.rundir import MODEL, SUMMARY
from perfed.experiment.simulate import Progress
from perfed.experiment.statistics import over_seeds
from perfed.papers.reproduction import Claim, Column, Printed, Protocol, Reproduction, Row

_CHOICE = "reproduction.json"


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


class Judged(NamedTuple):
    """A claim, whether it holds here, and by what.

    Attributes:
        claim: the claim.
        holds: whether it does.
        detail: the numbers.
    """

    claim: Claim
    holds: bool
    detail: str


@final
@dataclass(frozen=True)
class Results:
    """What a reproduction comes to.

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
        self, row: Row, column: Column, protocol: Protocol
    ) -> Float[np.ndarray, " seeds"] | None:
        """Each seed's; None if a run failed."""
        score, statistic = self.what.score[0], self.what.statistic
        summaries = self.summaries(row, column.method)
        if summaries is None:
            return None
        values = []
        for seed, summary in enumerate(summaries):
            if protocol.adapt_on not in (None, summary["config"]["adapt_on"]):
                place = self.what.place(self.folder, row.name, column.method, seed)
                other = read_json(place / _rescored_name(protocol))
                values.append(other[column.kind][score][statistic])
            elif protocol.take == "best":
                best = min if score in ERRORS else max
                values.append(best(p[column.kind][score][statistic] for p in summary["history"]))
            else:
                values.append(summary[column.kind][score][statistic])
        return scale_of(score) * np.array(values)

    def curve(self, row: Row, column: Column, score: str) -> Curve | None:
        """A curve of the figure; None if its runs failed."""
        found = self._curves(row, column, score)
        if found is None:
            return None
        spread = over_seeds(found[1])
        return Curve(found[0].mean(axis=0), spread.mean, spread.half)

    def _curves(
        self, row: Row, column: Column, score: str
    ) -> tuple[Float[np.ndarray, "seeds points"], Float[np.ndarray, "seeds points"]] | None:
        """Each seed's."""
        summaries = self.summaries(row, column.method)
        if summaries is None:
            return None
        x, statistic = self.what.x or "round", self.what.statistic
        along = np.array([[p[x] for p in s["history"]] for s in summaries], float)
        values = np.array(
            [[p[column.kind][score][statistic] for p in s["history"]] for s in summaries]
        )
        return along, scale_of(score) * values

    def order(self, row: Row, protocol: Protocol) -> tuple[int, int, list[str]]:
        """How many pairs of columns the paper tells apart, how many agree here, and those not."""
        cells = {c.name: self.cell(row, c, protocol) for c in row.columns}
        known = {name: cell for name, cell in cells.items() if cell.printed is not None}
        told, wrong = 0, []
        for better, one in known.items():
            for worse, other in known.items():
                assert one.printed is not None
                assert other.printed is not None
                apart = (one.printed.half or 0) + (other.printed.half or 0)
                if one.printed.value - other.printed.value > apart:
                    told += 1
                    if not one.mean > other.mean:
                        wrong.append(f"{better} is not above {worse}")
        return told, told - len(wrong), wrong

    def judged(self) -> list[Judged]:
        """Whether the claims hold."""
        found = []
        for claim in self.what.claims:
            rows = [row for row in self.what.rows if claim.row in ("", row.name)]
            verdicts = [self._judge(claim, row) for row in rows]
            holds = all(good for good, _ in verdicts)
            found.append(Judged(claim, holds, "; ".join(text for _, text in verdicts)))
        return found

    def _judge(self, claim: Claim, row: Row) -> tuple[bool, str]:
        named = {column.name: column for column in row.columns}
        sign = -1.0 if claim.score in ERRORS else 1.0
        printed = claim.printed.get(row.name, (None,) * len(claim.of))
        parts, good = [], True
        for other, gap_printed in zip(claim.of, printed, strict=True):
            pair = self._pair(row, named[claim.ahead], named[other], claim)
            if pair is None:
                return False, f"{row.name}: runs failed"
            where, ahead, behind = pair
            # Seeds share first models and cohorts, so they are compared seed by seed.
            gap = over_seeds(sign * (ahead - behind))
            good &= bool(gap.mean > 0)
            half = "" if np.isnan(gap.half) else f" ± {gap.half:.2g}"
            said = "" if gap_printed is None else f" (printed {gap_printed:+g})"
            parts.append(f"{gap.mean:+.3g}{half}{said} over {other}{where}")
        return good, f"{row.name}: {', '.join(parts)}"

    def _pair(
        self, row: Row, one: Column, other: Column, claim: Claim
    ) -> tuple[str, Float[np.ndarray, " seeds"], Float[np.ndarray, " seeds"]] | None:
        """What two columns come to, by seed, and where: curves when the first of the two ends."""
        if self.what.x is None:
            protocol = self.what.protocols[0]
            both = [self.values(row, column, protocol) for column in (one, other)]
            return None if both[0] is None or both[1] is None else ("", both[0], both[1])
        curves = [self._curves(row, column, claim.score) for column in (one, other)]
        if curves[0] is None or curves[1] is None:
            return None
        if claim.at_own_end:
            return " at the end", curves[0][1][:, -1], curves[1][1][:, -1]
        along = [x.mean(axis=0) for x, _ in (curves[0], curves[1])]
        end = min(x[-1] for x in along)
        found = [
            np.array([np.interp(end, x, y) for y in values])
            for x, (_, values) in zip(along, (curves[0], curves[1]), strict=True)
        ]
        return f" at {self.what.x} {end:.4g}", found[0], found[1]


def reproduce(
    what: Reproduction,
    seeds: int,
    folder: Path,
    on_progress: Callable[[str, Progress], None],
    say: Callable[[str], None],
) -> Results:
    """Run what is not finished yet, and score it in all the ways that are asked for.

    Raises:
        ConfigError: some data are not there; nothing has been run.
    """
    entries = what.entries(seeds, folder)
    data: Data = {}
    for entry in entries:
        if not entry.finished:
            data_of(Config.checked(entry.values), data)
    failures = record_entries(entries, on_progress, say, data)
    for protocol in what.protocols:
        if protocol.adapt_on is not None:
            _rescore(what, seeds, folder, protocol, say, data)
    return Results(what, seeds, folder, failures)


def check_folder(folder: Path, what: Reproduction, seeds: int) -> None:
    """The folder says what it is of, so that something else does not go on in it."""
    path = folder / _CHOICE
    runs = {entry.name: entry.values for entry in what.entries(seeds, folder)}
    said = json.loads(json.dumps(runs))
    if path.exists():
        before = read_json(path)
        if any(before.get(name, values) != values for name, values in said.items()):
            raise ConfigError(f"{folder} holds another reproduction; name another one by --out")
        said = before | said
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(said, indent=1).encode())


def _rescored_name(protocol: Protocol) -> str:
    return f"adapted-on-{protocol.adapt_on}.json"


def _rescore(
    what: Reproduction,
    seeds: int,
    folder: Path,
    protocol: Protocol,
    say: Callable[[str], None],
    data: Data,
) -> None:
    """Score finished runs' models once more, adapted on other data."""
    for row in what.rows:
        for method, values in row.runs.items():
            places = [what.place(folder, row.name, method, seed) for seed in range(seeds)]
            todo = [
                place
                for place in places
                if (place / SUMMARY).exists() and not (place / _rescored_name(protocol)).exists()
            ]
            config = Config.checked(values)
            if not todo or config.adapt_on == protocol.adapt_on:
                continue
            assert protocol.adapt_on is not None
            say(f"{row.name}: {method}, adapted on {protocol.adapt_on} data")
            scores = _scores(todo, data_of(config, data), protocol)
            for place, summary in zip(todo, scores, strict=True):
                write_whole(place / _rescored_name(protocol), json.dumps(summary).encode())


def _scores(
    places: Sequence[Path], federation: Federation, protocol: Protocol
) -> list[dict[str, Any]]:
    engines, states = [], []
    for place in places:
        config = recorded_config(place)
        engine = config.build(federation)
        start = engine.start()
        round = start.round + config.rounds
        engines.append(engine)
        states.append(start._replace(w=load_model(place / MODEL).params, round=round))
    assert protocol.adapt_on is not None
    evaluators = [Evaluator(engine, protocol.adapt_on) for engine in engines]
    score = engines[0].each_client_of_all(evaluators[0].score)
    found: list[dict[str, Any]] = []
    scored = score([engine.setup for engine in engines], states, None)
    for evaluator, state, own in zip(evaluators, states, scored, strict=True):
        evaluation = evaluator.evaluation(int(state.round), own)
        found.append(
            {
                str(kind): {
                    name: {"mean": s.mean, "weighted": s.weighted, "worst": s.worst}
                    for name, s in scores.summary().items()
                }
                for kind, scores in evaluation.scores.items()
            }
        )
    return found
