"""docs/methods: every page is of a method, is in the list, and has all settings with defaults."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from perfed.methods import find_method

PAGES = sorted(
    page
    for page in (Path(__file__).parent.parent / "docs" / "methods").glob("*.md")
    if page.name != "README.md"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_settings(page: Path) -> None:
    made: Any = find_method(page.stem)()
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", page.read_text(), re.MULTILINE)
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    shown = {name: getattr(value, "name", value) for name, value in values.items()}
    found = {name: None if text == "none" else json.loads(text) for name, text in rows}
    assert found == shown
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_the_links_lead_somewhere() -> None:
    for page in [*PAGES, PAGES[0].parent / "README.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
