"""What is wrong with a configuration: the setting, its value, and what is allowed, in words."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from perfed.data import SOURCES, SPLITS

# Sections in which a first key (name, source) chooses among several.
_CHOICES = ("data", "model", "method", "codec", "downlink", "inner")


def faults(error: ValidationError, values: dict[str, Any], config: type[BaseModel]) -> list[str]:
    """One line for each setting at fault: its name, its value, and what is allowed."""
    reasons: dict[str, list[str]] = {}
    for fault in error.errors():
        path, keys = _place(fault, values, config)
        value: Any = values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        name = ".".join(path)
        said = fault["type"] not in ("extra_forbidden", "missing", "union_tag_not_found")
        subject = f"{name} = {value!r}" if said else name
        reasons.setdefault(subject, []).append(_reason(fault, path[-1], keys))
    return [f"{subject}: {', or '.join(dict.fromkeys(r))}" for subject, r in reasons.items()]


def _place(
    fault: Any, values: dict[str, Any], config: type[BaseModel]
) -> tuple[list[str], list[str]]:
    """Where a fault is, as the user writes it, and the settings there are in that place."""
    path = [str(part) for part in fault["loc"]]
    if fault["type"] == "union_tag_invalid":
        if path == ["data"]:
            source = values["data"]["source"]
            known = isinstance(source, str) and source in SOURCES
            return ["data", "split" if known else "source"], list(SPLITS if known else SOURCES)
        place, _ = _without_choices(path)
        return [*place, fault["ctx"]["discriminator"].strip("'")], []
    place, choices = _without_choices(path)
    return place, _keys_of(config, place[:-1], choices)


def _without_choices(path: list[str]) -> tuple[list[str], list[str]]:
    """A path as the user sees it: after a section with a choice stands what was chosen."""
    kept, choices = path[:1], []
    for before, part in pairwise(path):
        if before in _CHOICES and before == kept[-1]:
            choices.append(part)
        else:
            kept.append(part)
    # What follows a setting is which of its types did not fit.
    return kept[: 3 if kept[1:2] in (["downlink"], ["inner"]) else 2], choices


def _reason(fault: Any, key: str, keys: Sequence[str]) -> str:
    match fault["type"]:
        case "extra_forbidden":
            near = get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"no such setting{hint} (there are: {', '.join(keys)})"
        case "missing":
            return "is missing"
        case "union_tag_not_found":
            tag = "source" if key == "data" else fault["ctx"]["discriminator"].strip("'")
            return f"must say its {tag}"
        case "union_tag_invalid":
            choices = ", ".join(f"'{choice}'" for choice in keys)
            return f"must be one of {choices or fault['ctx']['expected_tags']}"
        case "model_attributes_type":
            return "must be a section"
        case _:
            return str(fault["msg"]).replace("Input should", "must")


def _keys_of(config: type[BaseModel], path: list[str], choices: list[str]) -> list[str]:
    """The settings there are in a place."""
    here, choices = config, list(choices)
    for name in path:
        if name not in here.model_fields:
            return []
        options = _options(here.model_fields[name].annotation)
        chosen = choices.pop(0) if choices else None
        fitting = [option for option in options if chosen in (None, option.__name__)]
        if not fitting:
            return []
        here = fitting[0]
    return list(here.model_fields)


def _options(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [option for part in get_args(annotation) for option in _options(part)]
