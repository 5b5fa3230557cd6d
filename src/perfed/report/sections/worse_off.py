"""The section of clients that personalizing, or the whole federation, makes worse off."""

from collections.abc import Sequence

from perfed.evaluation import TIE, Gain
from perfed.report import markup
from perfed.report.groups import Group, model_kinds, point, score_word
from perfed.report.headline import NOTHING
from perfed.report.markup import escaped
from perfed.report.sections.base import PageSection, several_seeds
from perfed.report.worse_off import against_local


def worse_off_section(groups: Sequence[Group]) -> PageSection | None:
    """How many clients are worse off than with the global model, and than alone.

    None if all are runs of Local, which have neither to compare with.
    """
    if all(group.is_local for group in groups):
        return None
    score = groups[0].scores[0]
    much = f"by more than {point(score)}"
    has_global = "global" in model_kinds(groups)
    compared = any(group.alone(groups) is not None for group in groups)
    others = [group for group in groups if not group.is_local]
    headings = ["Method"]
    headings += ["Worse than the global model", much] if has_global else []
    headings += ["Worse than alone", much] if compared else []
    rows = []
    for group in others:
        cells = _counts(group.gain()) if has_global else []
        cells += _counts(group.gain_over_alone(groups)) if compared else []
        rows.append((group.label, *cells))
    note = (
        f"Clients whose personalized model has a worse {score_word(score)} after the last round, "
        f"on their held-out data. A difference of up to {TIE:.6f} is a tie, and a tie is not "
        "worse." + (" A client's score is its mean over seeds." if several_seeds(groups) else "")
    )
    table = markup.table(headings, rows, note) if len(headings) > 1 else ""
    local = f'<p class="note">{escaped(against_local(groups))}</p>'
    return PageSection("worse-off", "Clients worse off", f"{table}\n{local}".strip())


def _counts(gain: Gain | None) -> list[str]:
    """How many are worse off, with their share, and how many by much."""
    if gain is None or not gain.defined:
        return [NOTHING, NOTHING]
    share = f"{100 * gain.share_worse:.0f}\N{NO-BREAK SPACE}%"
    return [f"{gain.worse} of {gain.defined} ({share})", f"{gain.much_worse}"]
