"""What `theory.json` says, in words: for the terminal and the page alike."""

from collections.abc import Mapping
from typing import Any


def number(value: float | None) -> str:
    """A number; what has no bound is said to have none."""
    return "unbounded" if value is None else f"{value:.4g}"


def verdict(condition: Mapping[str, Any]) -> str:
    """Whether a condition holds, and by what factor."""
    factor = condition["factor"]
    if condition["holds"]:
        return f"holds ({_times(1 / factor)})" if factor else "holds"
    return "broken" if factor is None else f"broken ({_times(factor)})"


def bound_line(theory: Mapping[str, Any]) -> str:
    """What the terms of a bound are."""
    hidden = theory["terms_hide_a_factor"]
    unknown = "; the theorem multiplies them by constants it does not give" if hidden else ""
    return f"Terms of the bound of {theory['theorem']} for this run{unknown}."


def distance_line(theory: Mapping[str, Any]) -> str:
    """How much the clients' labels differ."""
    distance, group = theory["label_distance"], theory["group"]
    mean = sum(distance) / len(distance)
    count = len(set(group))
    told = f"{count} groups of similar clients" if count > 1 else "no groups stand out"
    return (
        f"labels of clients are {mean:.3g} from the average one on average, {max(distance):.3g} at "
        f"most (total variation, 0 to 1; Per-FedAvg, 4.1); {told}"
    )


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 else f"{factor:.2g}x"
