"""What the sections of a report's page have in common."""

from collections.abc import Sequence
from typing import NamedTuple

from perfed.report.chart_data import clipped
from perfed.report.groups import Group
from perfed.report.markup import escaped

# Rows of a table behind a chart; more are thinned or left out, and the caption says so.
ROWS_SHOWN = 25


class PageSection(NamedTuple):
    """A part of the page: its anchor, its heading, and its HTML."""

    anchor: str
    name: str
    body: str

    def __str__(self) -> str:
        return (
            f'<section id="{self.anchor}" aria-labelledby="{self.anchor}-name">\n'
            f'<h2 id="{self.anchor}-name">{self.name}</h2>\n{self.body}\n</section>'
        )


def legend(groups: Sequence[Group]) -> str:
    """Buttons that show and hide methods; nothing for a single one."""
    if len(groups) == 1:
        return ""
    items = "".join(
        f'<li><button type="button" data-group="{i}" aria-pressed="true">'
        f'<span class="swatch s{i % 7}"></span>{escaped(clipped(group.label))}</button></li>'
        for i, group in enumerate(groups)
    )
    return f'<ul class="legend" aria-label="Methods shown">{items}</ul>'


def several_seeds(groups: Sequence[Group]) -> bool:
    """Whether some method has more than one seed."""
    return any(group.seeds > 1 for group in groups)
