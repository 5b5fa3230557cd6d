"""The examples in the docstrings of the public API."""

import doctest
import inspect
from typing import Any

import pytest

import perfed
from perfed.methods import registry

# A line of output may be longer than a line of code.
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples() -> dict[str, doctest.DocTest]:
    """Those of every public name, its methods included, by where they stand."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: dict[str, doctest.DocTest] = {}
    for name in perfed.__all__:
        value: Any = getattr(perfed, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            found |= {test.name: test for test in finder.find(value, name) if test.examples}
    return found


EXAMPLES = examples()


def test_the_main_names_have_examples() -> None:
    assert {"simulate", "load", "Config", "Pipeline", "Codec", "fedpaq", "register"} <= set(
        EXAMPLES
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_true(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What an example registers is known to it alone.
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    lines: list[str] = []
    failed, tried = runner.run(EXAMPLES[name], out=lines.append)
    assert tried
    assert not failed, "".join(lines)
