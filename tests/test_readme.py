"""What the README shows is what happens."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfed

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    result = names["result"]
    assert result.scores["personalized"].accuracy.shape == (20,)
    assert result.scores["personalized"].accuracy.mean() > 0.9
    assert np.shape(names["params"][0]["w"]) == (80, 64)
    assert capsys.readouterr().out


def test_the_error_shown_is_the_one_given() -> None:
    shown = re.findall(r"^error (.*?)(?: \(there are.*)?$", README.read_text(), re.MULTILINE)
    with pytest.raises(perfed.ConfigError) as caught:
        perfed.Config.load(
            README.parent / "examples" / "pfedme-synthetic.toml", ["method.lamb=5", "cohort=0"]
        )
    assert [line.split(" (there are")[0] for line in str(caught.value).splitlines()] == shown


def test_the_links_lead_somewhere() -> None:
    for page in README.parent.glob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
