"""What a reproduction comes to: cells beside the printed ones, curves, and whether claims hold."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final, get_args

import numpy as np
from jaxtyping import Float

from perfed.core.errors import ConfigError, DivergedError
from perfed.data import Federation
from perfed.evaluation import ERRORS, SimulationEvaluator
from perfed.papers.reproduction import Claim, Column, Printed, Protocol, Reproduction, Row
from perfed.runs.adapt import load_model
from perfed.runs.batch import Data, Entry, data_of, record_batch
from perfed.runs.config import Config
from perfed.runs.files import read_json, write_whole
from perfed.runs.recording import recorded_config
from perfed.runs.run_dir import MODEL, SUMMARY
from perfed.runs.statistics import Spread, over_seeds
from perfed.runs.summary import summary_bytes
from perfed.training import Progress

_CHOICE = "reproduction.json"

# The first of these that one gap or row comes to is what the whole claim comes to.
Verdict = Literal["does not hold", "not told apart", "holds"]


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
        verdict: whether it holds; seeds that differ too much do not tell.
        ahead: whether all gaps' means, at least, are on the claim's side.
        detail: the numbers.
    """

    claim: Claim
    verdict: Verdict
    ahead: bool
    detail: str


class _Told(NamedTuple):
    """A claim's part, as `Judged` is the whole."""

    verdict: Verdict
    ahead: bool
    detail: str


class _Pair(NamedTuple):
    """What two columns come to, seed by seed.

    Attributes:
        where: at what place of the curves, in words.
        ahead: of the column that is said to be ahead.
        behind: of the other.
    """

    where: str
    ahead: Float[np.ndarray, " seeds"]
    behind: Float[np.ndarray, " seeds"]


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
                other = read_json(place / _rescored_name(protocol))
                values.append(other[column.kind][own][statistic])
            elif protocol.take == "best":
                best = min if score in ERRORS else max
                values.append(best(p[column.kind][own][statistic] for p in summary["history"]))
            else:
                values.append(summary[column.kind][own][statistic])
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
            told = _whole([self._judge(claim, row) for row in rows], "; ")
            found.append(Judged(claim, *told))
        return found

    def _judge(self, claim: Claim, row: Row) -> _Told:
        named = {column.name: column for column in row.columns}
        printed = claim.printed.get(row.name, (None,) * len(claim.of))
        parts = []
        for other, gap_printed in zip(claim.of, printed, strict=True):
            judge = self._judge_reach if claim.reach else self._judge_gap
            told = judge(row, named[claim.ahead], named[other], claim, gap_printed)
            if told is None:
                return _Told("does not hold", False, f"{row.name}: runs failed")
            parts.append(told)
        whole = _whole(parts, ", ")
        return whole._replace(detail=f"{row.name}: {whole.detail}")

    def _judge_gap(
        self, row: Row, one: Column, other: Column, claim: Claim, printed: float | None
    ) -> _Told | None:
        pair = self._pair(row, one, other, claim)
        if pair is None:
            return None
        # Seeds share first models and cohorts, so they are compared seed by seed.
        gap = over_seeds(_sign(claim.score) * (pair.ahead - pair.behind))
        half = "" if np.isnan(gap.half) else f" ± {gap.half:.2g}"
        said = "" if printed is None else f" (printed {printed:+g})"
        text = f"{gap.mean:+.3g}{half}{said} over {other.name}{pair.where}"
        return _Told(_verdict(gap), bool(gap.mean > 0), text)

    def _judge_reach(
        self, row: Row, one: Column, other: Column, claim: Claim, _: float | None
    ) -> _Told | None:
        """In how many seeds the other has not yet come, when `ahead` ends, to where that is."""
        both = [self._curves(row, column, claim.score) for column in (one, other)]
        if both[0] is None or both[1] is None:
            return None
        (ends, levels), (along, values) = both[0], both[1]
        sign = _sign(claim.score)
        there = sign * values >= sign * levels[:, -1:]
        when = np.where(there, along, np.inf).min(axis=1)
        seeds, first = len(when), int((when > ends[:, -1]).sum())
        never = int(np.isinf(when).sum())
        verdict: Verdict = "not told apart"
        if first == seeds:
            verdict = "holds"
        elif 2 * first < seeds:
            verdict = "does not hold"
        said = f" (never reaches it in {never})" if never else ""
        text = f"first in {first} of {seeds} seeds against {other.name}{said}"
        return _Told(verdict, 2 * first > seeds, text)

    def _pair(self, row: Row, one: Column, other: Column, claim: Claim) -> _Pair | None:
        """What two columns come to; of curves, when the first of the two ends."""
        if self.what.x is None:
            protocol = self.what.protocols[0]
            ahead, behind = (self.values(row, c, protocol, claim.score) for c in (one, other))
            return None if ahead is None or behind is None else _Pair("", ahead, behind)
        curves = [self._curves(row, column, claim.score) for column in (one, other)]
        if curves[0] is None or curves[1] is None:
            return None
        (x, y), (other_x, other_y) = curves[0], curves[1]
        if claim.at_own_end:
            return _Pair(" at the end", y[:, -1], other_y[:, -1])
        ends = np.minimum(x[:, -1], other_x[:, -1])
        where = f" at {self.what.x} {ends.mean():.4g}"
        return _Pair(where, _standing(x, y, ends), _standing(other_x, other_y, ends))


def _recorded_as(score: str, summary: dict[str, Any]) -> str:
    """The name of a score in a run: without a penalty its objective is the loss, recorded once."""
    penalty = summary["config"].get("model", {}).get("l2", 0.0)
    return "train_loss" if score == "train_objective" and penalty == 0 else score


def _sign(score: str) -> float:
    return -1.0 if score in ERRORS else 1.0


def _verdict(gap: Spread) -> Verdict:
    """By the interval; one seed has none, and its sign decides."""
    if np.isnan(gap.half):
        return "holds" if gap.mean > 0 else "does not hold"
    if gap.mean - gap.half > 0:
        return "holds"
    return "does not hold" if gap.mean + gap.half < 0 else "not told apart"


def _whole(parts: Sequence[_Told], between: str) -> _Told:
    """What parts come to: the worst of them."""
    verdict = min((part.verdict for part in parts), key=get_args(Verdict).index)
    detail = between.join(part.detail for part in parts)
    return _Told(verdict, all(part.ahead for part in parts), detail)


def _standing(
    x: Float[np.ndarray, "seeds points"],
    y: Float[np.ndarray, "seeds points"],
    ends: Float[np.ndarray, " seeds"],
) -> Float[np.ndarray, " seeds"]:
    """Each seed's last point so far: the server's model does not change before a round ends."""
    last = (x <= ends[:, None]).sum(axis=1) - 1
    return np.take_along_axis(y, last[:, None], axis=1)[:, 0]


def reproduce(
    what: Reproduction,
    seeds: int,
    folder: Path,
    on_progress: Callable[[str, Progress], None],
    say: Callable[[str], None],
) -> Results:
    """Run what is not finished yet, and score it in all the ways that are asked for.

    Raises:
        ConfigError: some data are not there, or a finished run is of other settings; nothing has
            been run.
    """
    entries = what.entries(seeds, folder)
    data: Data = {}
    for entry in entries:
        if entry.finished:
            _check_settings(entry)
        else:
            data_of(Config.checked(entry.values), data)
    failures = record_batch(entries, on_progress, say, data)
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


def _check_settings(entry: Entry) -> None:
    """A finished run is one of the settings that are asked for now."""
    now = json.loads(summary_bytes(Config.checked(entry.values).resolved()))
    differ = _differences(read_json(entry.folder / SUMMARY)["config"], now)
    if differ:
        raise ConfigError(
            f"{entry.name}: {entry.folder} holds a finished run of other settings "
            f"({'; '.join(differ)}); remove it, or name another folder"
        )


def _differences(before: Any, now: Any, at: str = "") -> list[str]:
    """What differs, by name; settings that an older record does not know yet do not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key, value in before.items()
            for line in _differences(value, now.get(key), f"{at}.{key}" if at else key)
        ]
    return [] if before == now else [f"{at} was {before!r}, is {now!r} now"]


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
        start = engine.init()
        round = start.round + config.rounds
        engines.append(engine)
        params, _ = engine.experiment.divided(load_model(place / MODEL).params)
        states.append(start._replace(params=params, round=round))
    assert protocol.adapt_on is not None
    evaluators = [SimulationEvaluator(engine, protocol.adapt_on) for engine in engines]
    found: list[dict[str, Any]] = []
    for evaluation in evaluators[0].evaluate_runs(evaluators, states):
        if isinstance(evaluation, DivergedError):
            raise evaluation
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
