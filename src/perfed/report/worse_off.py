"""In words: the clients that personalizing, or the whole federation, makes worse off."""

from collections.abc import Sequence

from perfed.evaluation import Gain
from perfed.report.groups import Group, worse_count


def worse_off_text(groups: Sequence[Group]) -> str:
    """How many clients are worse off, for a caption; "" where nothing is known of it."""
    score = groups[0].scores[0]

    def listed(gains: dict[str, Gain | None]) -> str:
        return "; ".join(
            f"{label}: {worse_count(gain, score)}"
            for label, gain in gains.items()
            if gain is not None
        )

    than_global = listed({group.label: group.gain() for group in groups})
    than_alone = listed({group.label: group.gain_over_alone(groups) for group in groups})
    parts = [f"Worse off than with the global model: {than_global}."] if than_global else []
    if than_alone:
        parts.append(f"Worse off than alone: {than_alone}.")
    return " ".join(parts)


def against_local(groups: Sequence[Group]) -> str:
    """Which Local run is meant by "alone", and what to do where there is none."""
    found = {g.label: alone for g in groups if (alone := g.alone(groups)) is not None}
    others = [group.label for group in groups if not group.is_local]
    unknown = [label for label in others if label not in found]
    parts = []
    if found:
        runs = dict.fromkeys(alone.runs for alone in found.values())
        several = sum(group.is_local for group in groups) > 1
        best = " (of several settings of Local, those of the best mean)" if several else ""
        own = "each client's model trained on its own data only"
        parts.append(f"Alone: {own}, by {', '.join(runs)}{best}.")
    if unknown:
        which = "" if len(unknown) == len(others) else f" for {', '.join(unknown)}"
        parts.append(
            f"Who is worse off than alone is not known{which}: there is no run of Local on the "
            'same data. Train one (method.name = "local", with all clients as the cohort) and give '
            "its folder to perfed report as well, or name it in output.local of the run."
        )
    return " ".join(parts)
