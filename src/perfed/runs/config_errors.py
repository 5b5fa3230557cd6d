"""Reading a configuration section by section; an invalid setting is named, with what is allowed."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from perfed.data.catalog import SOURCES
from perfed.data.splits import SPLITS
from perfed.runs.sections import Kind, Section, data_section, data_split

# What is wrong, one line per setting.
Errors = list[str]


def read_section(
    section: type[BaseModel], values: Mapping[str, Any], place: Sequence[str], errors: Errors
) -> Any:
    """A section's settings; None if some are invalid, see `errors`."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        errors += _lines(error, values, place, list(section.model_fields))
        return None


def read_kind(kind: Kind, values: Any, place: Sequence[str], errors: Errors) -> Section | None:
    """A section of a kind, and the sections within it."""
    if isinstance(values, str):
        values = {kind.tag: values}
    if (name := _with_tag(kind.tag, kind.names(), values, place, errors)) is None:
        return None
    section = kind.section(name)
    given, good = dict(values), True
    for key, field in section.model_fields.items():
        nested = key in kind.nested or isinstance(field.default, Section)
        if nested and isinstance(given.get(key), str | dict):
            inner = read_kind(kind.kind_of(name, key), given[key], [*place, key], errors)
            good = good and inner is not None
            given[key] = inner
    found: Section | None = read_section(section, given, place, errors)
    return found if good else None


def read_data(values: Any, errors: Errors) -> Section | None:
    """`[data]`, whose settings depend on its source and its split."""
    if (source := _with_tag("source", list(SOURCES), values, ["data"], errors)) is None:
        return None
    split = data_split(source, values)
    if split is not None and split not in SPLITS:
        errors.append(_unknown("data.split", split, list(SPLITS)))
        return None
    found: Section | None = read_section(data_section(source, split), values, ["data"], errors)
    return found


def _with_tag(
    tag: str, names: Sequence[str], values: Any, place: Sequence[str], errors: Errors
) -> str | None:
    """The name that a section gives; None if it gives none that there is."""
    where = ".".join(place)
    if values is None:
        errors.append(f"{where}: is missing")
    elif not isinstance(values, Mapping):
        errors.append(f"{where} = {values!r}: must be a section")
    elif tag not in values:
        errors.append(f"{where}: {tag} is missing")
    elif not isinstance(values[tag], str) or values[tag] not in names:
        errors.append(_unknown(f"{where}.{tag}", values[tag], names))
    else:
        return str(values[tag])
    return None


def _unknown(where: str, value: Any, names: Sequence[str]) -> str:
    near = get_close_matches(str(value), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{where} = {value!r}: must be one of {', '.join(map(repr, names))}{hint}"


def _lines(
    error: ValidationError, values: Mapping[str, Any], place: Sequence[str], keys: Sequence[str]
) -> Errors:
    """One line for each invalid setting: its name, its value, and what is allowed."""
    reasons: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        key = str(fault["loc"][0]) if fault["loc"] else ""
        name = ".".join([*place, key])
        said = fault["type"] not in ("extra_forbidden", "missing")
        subject = f"{name} = {values.get(key)!r}" if said else name
        reasons.setdefault(subject, []).append(_reason(fault, key, keys))
    return [f"{subject}: {', or '.join(dict.fromkeys(r))}" for subject, r in reasons.items()]


def _reason(fault: Any, key: str, keys: Sequence[str]) -> str:
    match fault["type"]:
        case "extra_forbidden":
            near = get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"no such setting{hint} (there are: {', '.join(keys)})"
        case "missing":
            return "is missing"
        case "model_attributes_type" | "model_type":
            return "must be a section"
        case _:
            return str(fault["msg"]).replace("Input should", "must")
