"""Models of other libraries: the examples run and learn, and docs/models.md says what is so."""

import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed import Config
from perfed.data.catalog import settings_of
from perfed.models import MODELS
from perfed.runs.sections import FROM_DATA

ROOT = Path(__file__).parent.parent
EXAMPLES, PAGE = ROOT / "examples", (ROOT / "docs" / "models.md").read_text()
# A run of few rounds already beats this; chance is 10 %.
FEW, ENOUGH = 3, 0.25


def by_torch(module: Any, x: np.ndarray) -> Any:
    import torch

    with torch.no_grad():
        outputs = module(torch.from_numpy(np.moveaxis(x, -1, 1).copy()))
    return getattr(outputs, "logits", outputs).numpy()


def by_jax(module: Any, x: np.ndarray) -> Any:
    return module(x)


# What an example needs, with the extra that has it, and what its module computes.
CASES: dict[str, tuple[str, tuple[str, ...], Callable[[Any, np.ndarray], Any]]] = {
    "torch_model": ("torch", ("torch", "torchax"), by_torch),
    "keras_model": ("keras", ("keras",), by_jax),
    "nnx_model": ("nnx", ("flax.nnx",), by_jax),
    "lora": ("peft", ("torchax", "peft", "transformers"), by_torch),
}


def example(name: str) -> Any:
    """An example as a module; skips the test where its libraries are not installed."""
    extra, packages, _ = CASES[name]
    for package in packages:
        pytest.importorskip(package, reason=f'needs "perfed[{extra}]"')
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(name: str, result: Any, own: Any, client: int) -> None:
    """The module that an example gives is the client's personal model, on raw held-out rows."""
    federation = result.experiment.federation
    x, y = federation.test.client(client)
    scaled = np.asarray(federation.scale(x, client), np.float32)
    outputs = np.asarray(CASES[name][2](own, scaled))
    task = result.experiment.task
    expected = np.asarray(task.scored(task.outputs(result.personal_model(client), scaled)))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    others = task.scored(task.outputs(result.personal_model(client + 1), scaled))
    assert np.abs(outputs - np.asarray(others)).max() > 1e-3, "each client has its own"
    accuracy = result.scores["personalized"].accuracy[client]
    assert np.mean(outputs.argmax(1) == y) == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "name",
    [
        "torch_model",
        pytest.param("keras_model", marks=pytest.mark.slow),
        pytest.param("nnx_model", marks=pytest.mark.slow),
        # Quick tests of the same things are in test_peft_local.py.
        pytest.param("lora", marks=pytest.mark.slow),
    ],
)
def test_an_example_with_few_rounds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    result, own = module.main(rounds=FEW)
    check(name, result, own, module.CLIENT)
    accuracy = result.scores["personalized"].accuracy.mean()
    assert accuracy > ENOUGH
    said = capsys.readouterr().out
    assert f"{accuracy:.1%}" in said
    assert f"client {module.CLIENT}" in said


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [
    ("torch_model", 0.85), ("keras_model", 0.85), ("nnx_model", 0.8), ("lora", 0.7),
])  # fmt: skip
def test_an_example_as_it_is(name: str, least: float) -> None:
    module = example(name)
    result, own = module.main()
    check(name, result, own, module.CLIENT)
    assert result.scores["personalized"].accuracy.mean() > least
    before = result.history[0].scores["personalized"].accuracy.mean()
    assert result.scores["personalized"].accuracy.mean() > before


@pytest.mark.parametrize("name", CASES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_the_page_has_all_built_in_models() -> None:
    part = PAGE.split("## Built-in models")[1].split("\n## ")[0]
    rows: dict[str, set[str]] = {}
    for names, settings in re.findall(r"^\| (`[^|]*) \|.*\|([^|]*)\|$", part, re.MULTILINE):
        for name in re.findall(r"`(.*?)`", names):
            rows[name] = set(re.findall(r"`(.*?)`", settings))
    assert rows == {
        name: set(settings_of(model)) - set(FROM_DATA) for name, model in MODELS.items()
    }


def test_the_page_has_the_messages_that_are_given() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "perfed" / "models").glob("*.py"))
    source = re.sub(r"\"\s*f?\"", "", source)  # strings over several lines
    part = PAGE.split("| message | do this |")[1].split("\n## ")[0]
    messages = re.findall(r"`([^`]*)`", "".join(re.findall(r"^\|([^|]*)\|", part, re.MULTILINE)))
    assert len(messages) > 10
    for message in messages:
        for piece in message.removeprefix("uses aten::...").split("..."):
            assert piece.strip() in source, message


def test_the_configuration_on_the_page_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "digits.toml"
    file.write_text(block)
    assert Config.load(file).batch_norm == "personal"


@pytest.mark.slow
def test_the_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchax", reason='needs "perfed[torch]"')
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["result"].scores["personalized"].accuracy.mean() > 0.7
    mine, own = names["mine"].state_dict(), names["params"]
    np.testing.assert_array_equal(mine["head.2.weight"], own["head"]["2"]["weight"])
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
