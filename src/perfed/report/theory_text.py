"""The theory in words, for the terminal, the page and files."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

import tomli_w

from perfed.theory.advice import Advice


def number(value: float | None) -> str:
    """A number; `unbounded` for None."""
    return "unbounded" if value is None else f"{value:.4g}"


def verdict(condition: Mapping[str, Any]) -> str:
    """Whether a condition holds, and by what factor."""
    factor = condition["factor"]
    if condition["limit"] == 0:
        return "not met"
    if condition["holds"]:
        return f"holds ({_times(1 / factor)})" if factor else "holds"
    return "broken" if factor is None else f"broken ({_times(factor)})"


def bound_line(bound: Mapping[str, Any]) -> str:
    """What the terms of a bound are."""
    unknown = "; the theorem multiplies them by constants it does not give"
    note = f" ({bound['note']})" if bound["note"] else ""
    return (
        f"Terms of the bound of {bound['source']} on {bound['bounded']}, for this run"
        f"{unknown if bound['hidden'] else ''}{note}."
    )


def distance_line(theory: Mapping[str, Any]) -> str:
    """How much the clients' labels differ."""
    found, group = theory["distance"], theory["group"]
    distance = found["value"]
    mean = sum(distance) / len(distance)
    low, high = (sum(found[end]) / len(distance) for end in ("low", "high"))
    between = "" if low == high else f", between {low:.3g} and {high:.3g}"
    what = "labels" if found["on"] == "labels" else "examples"
    count = len(set(group))
    groups = f"{count} groups of similar clients" if count > 1 else "no groups stand out"
    line = (
        f"clients' {what} are {mean:.3g} from the average ones on average{between}, "
        f"{max(distance):.3g} at most ({found['method']}; Per-FedAvg, 4.1); {groups}"
    )
    if found["method"] != "total variation":
        return line
    return (
        f"{line}. This is of labels alone, and no more than the distance in Per-FedAvg's (14a), "
        "which is of whole examples: clients alike in labels may differ in all else"
    )


def advice_file(advice: Advice, source: str) -> str:
    """The advised configuration as a TOML file, with the reasoning above it."""
    lines = [f"Advised for {source}:"]
    lines += [f"{one.setting} = {one.value}: {one.why}" for one in advice.reasons]
    comment = "\n".join(
        f"# {part}" for line in lines for part in wrap(line, 96, subsequent_indent="    ")
    )
    return f"{comment}\n\n{tomli_w.dumps(advice.values)}"


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 else f"{factor:.2g}x"
