"""What the README shows is what happens."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    result = names["result"]
    assert result.scores["personalized"].accuracy.shape == (20,)  # type: ignore[attr-defined]
    assert result.scores["personalized"].accuracy.mean() > 0.9  # type: ignore[attr-defined]
    assert np.shape(names["params"][0]["w"]) == (80, 64)  # type: ignore[index]
    assert capsys.readouterr().out


def test_the_links_lead_somewhere() -> None:
    for page in README.parent.glob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
