"""Pieces of HTML; all text that comes from runs is escaped here."""

import html
from collections.abc import Iterable, Mapping, Sequence

from perfed.report.chart_data import clipped


def chart(at: str, label: str, note: str, data: Mapping[str, str] | None = None) -> str:
    """A place for a chart, what it shows, and what its script must know."""
    extra = "".join(f' data-{key}="{escaped(value)}"' for key, value in (data or {}).items())
    return (
        f'<figure><div class="chart" id="{at}" role="img" aria-label="{escaped(label)}"{extra}>'
        f"</div>\n"
        f'<figcaption class="note">{escaped(note)}</figcaption></figure>'
    )


def select(at: str, chart: str, label: str, options: Mapping[str, str]) -> str:
    """A choice that redraws a chart."""
    inner = "".join(
        f'<option value="{escaped(key)}">{escaped(clipped(name))}</option>'
        for key, name in options.items()
    )
    return (
        f'<label for="{at}">{label}<select id="{at}" data-chart="{chart}">{inner}</select></label>'
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], note: str, left: int = 1) -> str:
    """A plain table: the first columns are text, the others numbers."""
    heads = "".join(
        f'<th scope="col"{_left(i < left)}>{escaped(heading)}</th>'
        for i, heading in enumerate(headings)
    )
    body = "\n".join(
        f'<tr><th scope="row">{escaped(first)}</th>'
        + "".join(f"<td{_left(i < left)}>{escaped(v)}</td>" for i, v in enumerate(others, 1))
        + "</tr>"
        for first, *others in rows
    )
    return scrolling(
        note,
        f"<table><caption><span>{escaped(note)}</span></caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>",
    )


def _left(left: bool) -> str:
    return ' class="left"' if left else ""


def scrolling(label: str, table: str) -> str:
    """A box that scrolls by itself, by keyboard too, so that the page need not."""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(label)}">\n'
        f"{table}\n</div>"
    )


def details(name: str, body: str) -> str:
    """What is shown only when asked for."""
    return f"<details><summary>{escaped(name)}</summary>\n{body}\n</details>"


def counted(n: int, what: str) -> str:
    """So many of them."""
    return f"{n} {what}{'s' * (n != 1)}"


def escaped(value: str) -> str:
    """Text as HTML that shows it, within a tag's quotes, too."""
    return html.escape(value, quote=True)


def safe_json(text: str) -> str:
    """JSON that cannot end the script element it is in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
