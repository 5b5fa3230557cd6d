"""docs/data.md: its examples work, and its tables have all settings with their defaults."""

import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from perfed import DataError
from perfed.data import SOURCES, SPLITS, load
from perfed.data.catalog import settings_of
from perfed.data.scaling import DEFAULT_CLIP, Standardize
from perfed.runs.config import DataConfig

TEXT = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
VISITS = "hospital,age,dose,pressure,diagnosis\n" + "".join(
    f"{hospital},{age},{age / 2},120,{'ill' if age % 2 else 'well'}\n"
    for hospital in ("north", "south")
    for age in range(30, 50)
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def table_rows() -> dict[str, str]:
    """The rows of all tables, by their first cell where it is one name."""
    return dict(re.findall(r"^\| `([\w-]+)`[^|]* \| (.*) \|$", TEXT, re.MULTILINE))


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_configurations_are_valid(tmp_path: Path, block: str) -> None:
    """Those whose data are here also give a federation."""
    file = tmp_path / "run.toml"
    file.write_text(block)
    config = DataConfig.load(file)
    if config.data.settings()["source"] == "digits":
        assert config.build_federation().clients == 100


def test_the_examples_of_own_files_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    header, *rows = VISITS.splitlines(keepends=True)
    Path("visits.csv").write_text(VISITS)
    os.mkdir("hospitals")
    for name in ("north", "south"):
        own = [
            row.partition(",")[2]
            for row in (header, *rows)
            if row == header or row.startswith(name)
        ]
        Path("hospitals", f"{name}.csv").write_text("".join(own))
    for source, changes in (("folder", []), ("table", ['data.path="visits.csv"'])):
        block = next(block for block in blocks("toml") if f'source = "{source}"' in block)
        Path("run.toml").write_text(block)
        federation = DataConfig.load(Path("run.toml"), changes).build_federation()
        assert federation.names == ("north", "south")
        assert federation.labels == ("ill", "well")
        assert federation.features == ("age", "dose", "pressure")
    Path("hospitals", "south.csv").write_text("age,diagnosis\n30,ill\n,well\n")
    (shown,) = blocks("text")
    with pytest.raises(DataError) as caught:
        load("folder", root="hospitals", label="diagnosis", features=("age",))
    assert shown == f"error data: {caught.value}\n"


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_examples_run(block: str) -> None:
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["federation"].clients in (4, 100)


def test_the_tables_have_all_settings() -> None:
    rows = table_rows()
    shown = {None: "all", False: "false", "none": "`none`"}
    for name, split in SPLITS.items():
        for setting, (_, default) in settings_of(split).items():
            assert f"`{setting}` (" in rows[name], f"{name}: {setting}"
            if setting != "a":
                assert f"`{setting}` ({shown.get(default, default)}" in rows[name]
    assert set(get_args(Standardize)) <= set(rows)
    assert f"standard deviations (default {DEFAULT_CLIP:g})" in TEXT
    sources = set(re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| .*? \|", TEXT, re.M))))
    named = sources | set(re.findall(r'source = "([\w-]+)"', TEXT))
    assert set(SOURCES) <= named
