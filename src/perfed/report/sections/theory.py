"""The section of theory."""

from collections.abc import Mapping, Sequence
from typing import Any

from perfed.report import markup
from perfed.report.groups import Group
from perfed.report.sections.base import PageSection
from perfed.report.theory_text import bound_line, number, verdict


def theory_section(groups: Sequence[Group]) -> PageSection | None:
    """What `perfed diagnose` wrote into the runs' folders; None if it was not run."""
    parts = []
    for group in groups:
        for run in group.runs:
            if run.theory is not None:
                parts.append(_theory_of(f"{group.label}, seed {run.config['seed']}", run.theory))
    return PageSection("theory", "Theory", "\n".join(parts)) if parts else None


def _theory_of(name: str, theory: Mapping[str, Any]) -> str:
    conditions = markup.table(
        ("Condition", "From", "What breaking it risks", "Here", "Limit", "Verdict"),
        [
            (c["text"], c["source"], c["risk"], number(c["value"]), number(c["limit"]), verdict(c))
            for c in theory["conditions"]
        ],
        f"Conditions of the theorems for {name}, with constants measured at {theory['at']}."
        + (f" {theory['note']}" if theory["note"] else ""),
        left=3,
    )
    constants = markup.table(
        ("Constant", "What it is", "Value", "Between", "and"),
        [
            (c["name"], c["meaning"], number(c["value"]), number(c["low"]), number(c["high"]))
            for c in theory["constants"]
        ],
        "Measured constants of the papers' assumptions.",
        left=2,
    )
    tables = [constants]
    for bound in theory["bounds"]:
        terms = [(key, number(value)) for key, value in bound["terms"].items()]
        tables.append(markup.table(("Term", "Value"), terms, bound_line(bound)))
    return f"{conditions}\n{markup.details('Constants and bounds', ''.join(tables))}"
