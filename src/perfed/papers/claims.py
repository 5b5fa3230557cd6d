"""Whether what a paper claims holds here."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float

from perfed.evaluation import ERRORS
from perfed.papers.reproduction import Claim, Column, Row
from perfed.papers.results import Results
from perfed.runs.statistics import Spread, over_seeds

# The first of these that one gap or row has is that of the whole claim.
Verdict = Literal["does not hold", "inconclusive", "holds"]


class CheckedClaim(NamedTuple):
    """A claim, and whether it holds here.

    Attributes:
        claim: the claim.
        verdict: whether it holds; inconclusive where seeds differ too much.
        ahead: whether the mean of every gap, at least, is on the claim's side.
        detail: the numbers.
    """

    claim: Claim
    verdict: Verdict
    ahead: bool
    detail: str


class _Finding(NamedTuple):
    """A part of a claim: as `CheckedClaim`."""

    verdict: Verdict
    ahead: bool
    detail: str


class _Pair(NamedTuple):
    """The scores of two columns, seed by seed.

    Attributes:
        where: at what place of the curves, in words.
        ahead: of the column that is claimed to be ahead.
        behind: of the other.
    """

    where: str
    ahead: Float[np.ndarray, " seeds"]
    behind: Float[np.ndarray, " seeds"]


def check_claims(results: Results) -> list[CheckedClaim]:
    """Whether each claim holds."""
    found = []
    for claim in results.what.claims:
        rows = [row for row in results.what.rows if claim.row in ("", row.name)]
        whole = _worst([_check_row(results, claim, row) for row in rows], "; ")
        found.append(CheckedClaim(claim, *whole))
    return found


def _check_row(results: Results, claim: Claim, row: Row) -> _Finding:
    columns = {column.name: column for column in row.columns}
    printed = claim.printed.get(row.name, (None,) * len(claim.of))
    parts = []
    for other, gap_printed in zip(claim.of, printed, strict=True):
        pair = (columns[claim.ahead], columns[other])
        if claim.reach:
            finding = _check_reach(results, row, *pair, claim)
        else:
            finding = _check_gap(results, row, *pair, claim, gap_printed)
        if finding is None:
            return _Finding("does not hold", False, f"{row.name}: runs failed")
        parts.append(finding)
    whole = _worst(parts, ", ")
    return whole._replace(detail=f"{row.name}: {whole.detail}")


def _check_gap(
    results: Results, row: Row, one: Column, other: Column, claim: Claim, printed: float | None
) -> _Finding | None:
    pair = _pair(results, row, one, other, claim)
    if pair is None:
        return None
    # Seeds share first models and cohorts, so they are compared seed by seed.
    gap = over_seeds(_sign(claim.score) * (pair.ahead - pair.behind))
    half = "" if np.isnan(gap.half) else f" ± {gap.half:.2g}"
    note = "" if printed is None else f" (printed {printed:+g})"
    text = f"{gap.mean:+.3g}{half}{note} over {other.name}{pair.where}"
    return _Finding(_verdict(gap), bool(gap.mean > 0), text)


def _check_reach(
    results: Results, row: Row, one: Column, other: Column, claim: Claim
) -> _Finding | None:
    """In how many seeds the other has not yet come, when `ahead` ends, to where that is."""
    both = [results.curves(row, column, claim.score) for column in (one, other)]
    if both[0] is None or both[1] is None:
        return None
    (ends, levels), (along, values) = both[0], both[1]
    sign = _sign(claim.score)
    there = sign * values >= sign * levels[:, -1:]
    when = np.where(there, along, np.inf).min(axis=1)
    seeds, first = len(when), int((when > ends[:, -1]).sum())
    never = int(np.isinf(when).sum())
    verdict: Verdict = "inconclusive"
    if first == seeds:
        verdict = "holds"
    elif 2 * first < seeds:
        verdict = "does not hold"
    note = f" (never reaches it in {never})" if never else ""
    text = f"first in {first} of {seeds} seeds against {other.name}{note}"
    return _Finding(verdict, 2 * first > seeds, text)


def _pair(results: Results, row: Row, one: Column, other: Column, claim: Claim) -> _Pair | None:
    """The scores of two columns; of curves, those where the first of the two ends."""
    what = results.what
    if what.x is None:
        protocol = what.protocols[0]
        ahead, behind = (results.values(row, c, protocol, claim.score) for c in (one, other))
        return None if ahead is None or behind is None else _Pair("", ahead, behind)
    curves = [results.curves(row, column, claim.score) for column in (one, other)]
    if curves[0] is None or curves[1] is None:
        return None
    (x, y), (other_x, other_y) = curves[0], curves[1]
    if claim.at_own_end:
        return _Pair(" at the end", y[:, -1], other_y[:, -1])
    ends = np.minimum(x[:, -1], other_x[:, -1])
    where = f" at {what.x} {ends.mean():.4g}"
    return _Pair(where, _scores_at(x, y, ends), _scores_at(other_x, other_y, ends))


def _sign(score: str) -> float:
    return -1.0 if score in ERRORS else 1.0


def _verdict(gap: Spread) -> Verdict:
    """By the interval; one seed has none, and its sign decides."""
    if np.isnan(gap.half):
        return "holds" if gap.mean > 0 else "does not hold"
    if gap.mean - gap.half > 0:
        return "holds"
    return "does not hold" if gap.mean + gap.half < 0 else "inconclusive"


def _worst(parts: Sequence[_Finding], between: str) -> _Finding:
    """The whole of several parts: the worst verdict, and all details."""
    verdict = min((part.verdict for part in parts), key=get_args(Verdict).index)
    detail = between.join(part.detail for part in parts)
    return _Finding(verdict, all(part.ahead for part in parts), detail)


def _scores_at(
    x: Float[np.ndarray, "seeds points"],
    y: Float[np.ndarray, "seeds points"],
    ends: Float[np.ndarray, " seeds"],
) -> Float[np.ndarray, " seeds"]:
    """Each seed's last point so far: the server's model does not change before a round ends."""
    last = (x <= ends[:, None]).sum(axis=1) - 1
    return np.take_along_axis(y, last[:, None], axis=1)[:, 0]
