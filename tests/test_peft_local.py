"""Adapters of a language model in a local folder: trained here, read and written as PEFT does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfed import (
    AdamW,
    DataError,
    FedAvg,
    Federation,
    Task,
    from_torch,
    load_peft,
    lora,
    save_peft,
    simulate,
)
from perfed.core.errors import FieldError
from perfed.models import from_equinox

SYMBOLS, LENGTH, CLASSES = 20, 8, 3
TARGETS = ["q_proj", "v_proj"]
X = np.random.default_rng(1).integers(1, SYMBOLS, (5, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("torchax", reason='needs "perfed[torch]"')
    return pytest.importorskip("torch", reason='needs "perfed[torch]"')


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason='needs "perfed[peft]"')


@pytest.fixture(scope="module")
def folder(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, as it would be after a download."""
    transformers = pytest.importorskip("transformers", reason='needs "perfed[peft]"')
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=LENGTH,
        num_labels=CLASSES, initializer_range=0.5, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, use_cache=False,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("base")
    transformers.LlamaForSequenceClassification(config).save_pretrained(place)
    assert (place / "model.safetensors").exists()
    return place


def base(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()


def adapted(folder: Path, **options: Any) -> Any:
    model = from_torch(base(folder), output="logits")
    targets = [f"*.{name}" for name in TARGETS]
    return lora(model, targets, rank=2, alpha=6.0, train=["score"], **options)


def texts() -> Federation:
    """Three clients; the class of a text is its first symbol modulo the number of classes."""
    rng = np.random.default_rng(0)

    def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.integers(1, SYMBOLS, (n, LENGTH)).astype(np.int32)
        return x, x[:, 0] % CLASSES

    return Federation.from_arrays([rows(24)] * 3, [rows(6)] * 3, classes=CLASSES)


def by_torch(torch: Any, module: Any) -> np.ndarray:
    with torch.no_grad():
        outputs: np.ndarray = module(torch.from_numpy(X).long()).logits.numpy()
    return outputs


def by_peft(torch: Any, peft: Any, folder: Path, adapters: Path) -> np.ndarray:
    return by_torch(torch, peft.PeftModel.from_pretrained(base(folder), str(adapters)).eval())


def moved(params: Any) -> Any:
    """The parameters elsewhere, so that B is not zero."""
    return jax.tree.map(lambda leaf: leaf + 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape),
                        params)  # fmt: skip


@pytest.mark.slow
def test_trained_here_and_read_by_peft(torch: Any, peft: Any, folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    method = FedAvg(lr=0.05, tau=4, batch=8, optimizer=AdamW())
    result = simulate(texts(), model, method, rounds=1, cohort=3)
    params = result.personal_model(2)
    save_peft(model, params, tmp_path, base=str(folder))

    own = np.asarray(Task(model).outputs(params, jnp.asarray(X)))
    np.testing.assert_allclose(by_peft(torch, peft, folder, tmp_path), own, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_torch(torch, result.personal_module(2)), own, atol=1e-5)
    # It has learned something, in every matrix, or nothing would be shown.
    assert np.abs(own - by_torch(torch, base(folder))).max() > 0.1
    assert all(np.abs(b).max() > 1e-3 for _, b in model.adapters(params).values())
    # 2 adapters of 2 * (16 + 16) numbers, the head, and 7 bytes around each message.
    assert set(result.traffic.uplink.ravel().tolist()) == {7 + 4 * (2 * 2 * 32 + 3 * 16)}

    again = load_peft(model, model.init(jax.random.key(9)), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_frozen_a_is_written_too(torch: Any, peft: Any, folder: Path, tmp_path: Path) -> None:
    model = adapted(folder, freeze_a=True)
    params = moved(model.init(jax.random.key(0)))
    save_peft(model, params, tmp_path)
    own = model.apply(params, X)
    np.testing.assert_allclose(by_peft(torch, peft, folder, tmp_path), own, rtol=1e-5, atol=1e-5)
    other = adapted(folder, freeze_a=True, seed=1)
    with pytest.raises(DataError, match="which is frozen"):
        load_peft(other, other.init(jax.random.key(0)), tmp_path)


def test_made_by_peft_and_read_here(torch: Any, peft: Any, folder: Path, tmp_path: Path) -> None:
    """Both ways in: the adapters that PEFT writes, and the module that PEFT has made."""
    settings = peft.LoraConfig(
        r=2, lora_alpha=6.0, target_modules=TARGETS, modules_to_save=["score"],
        init_lora_weights=False,
    )  # fmt: skip
    module = peft.get_peft_model(base(folder), settings).eval()
    expected = by_torch(torch, module)
    module.save_pretrained(str(tmp_path / "by-peft"))

    model = adapted(folder)
    params = load_peft(model, model.init(jax.random.key(0)), tmp_path / "by-peft")
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-5, atol=1e-5)

    whole = from_torch(module, output="logits")
    own = whole.init(jax.random.key(0))
    assert len(jax.tree.leaves(own)) == 2 * len(TARGETS) + 1
    own = moved(own)
    assert whole.write_back is not None
    whole.write_back(own).save_pretrained(str(tmp_path / "by-both"))
    found = by_peft(torch, peft, folder, tmp_path / "by-both")
    np.testing.assert_allclose(found, whole.apply(own, X), rtol=1e-5, atol=1e-5)
    assert np.abs(found - expected).max() > 1e-2


def test_adapters_that_do_not_fit_are_refused(peft: Any, folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    params = model.init(jax.random.key(0))
    with pytest.raises(DataError, match="has no adapters of PEFT"):
        load_peft(model, params, tmp_path)
    save_peft(model, params, tmp_path)
    bigger = lora(model.model, ["*.q_proj", "*.v_proj"], rank=4, alpha=6.0)
    with pytest.raises(DataError, match="r = 2, but the model has 4"):
        load_peft(bigger, bigger.init(jax.random.key(0)), tmp_path)
    others = lora(model.model, ["*.q_proj"], rank=2, alpha=6.0)
    with pytest.raises(DataError, match=r"the same modules as target"):
        load_peft(others, others.init(jax.random.key(0)), tmp_path)


def kinds(torch: Any, **options: Any) -> Any:
    """A module with all kinds of layers that can be adapted, each of them square."""
    pytest.importorskip("transformers", reason='needs "perfed[peft]"')
    from transformers.pytorch_utils import Conv1D

    class Kinds(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, tied: bool = False) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(SYMBOLS, SYMBOLS)
            self.mix = Conv1D(SYMBOLS, SYMBOLS)
            self.attend = torch.nn.MultiheadAttention(SYMBOLS, 2, batch_first=True)
            self.project = torch.nn.Linear(SYMBOLS, SYMBOLS)
            self.free = torch.nn.Parameter(torch.ones(SYMBOLS, SYMBOLS))
            if tied:
                self.project.weight = self.embed.weight
            torch.nn.init.normal_(self.mix.weight)

        def forward(self, x: Any) -> Any:
            h = torch.tanh(self.mix(self.embed(x)))
            h = h + self.attend(h, h, h, need_weights=False)[0]
            return self.project(torch.tanh(h) @ self.free).mean(1)

    torch.manual_seed(0)
    return Kinds(**options).eval()


KINDS = ["embed", "mix", "project"]


def same_as_peft(torch: Any, module: Any, model: Any, params: Any) -> None:
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(X).long()).numpy()
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-4, atol=1e-5)


def test_conv1d_and_embeddings_are_written(torch: Any, peft: Any, tmp_path: Path) -> None:
    """GPT-2's kind of layer has its weight as inputs by outputs, and embeddings as rows."""
    model = lora(from_torch(kinds(torch)), [f"{kind}.weight" for kind in KINDS], rank=2)
    params = moved(model.init(jax.random.key(0)))
    save_peft(model, params, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"]
    by_them = peft.PeftModel.from_pretrained(kinds(torch), str(tmp_path))
    same_as_peft(torch, by_them, model, params)
    again = load_peft(model, model.init(jax.random.key(9)), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_conv1d_and_embeddings_are_read(
    torch: Any, peft: Any, tmp_path: Path, use_rslora: bool
) -> None:
    settings = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=KINDS, init_lora_weights=False, use_rslora=use_rslora
    )
    module = peft.get_peft_model(kinds(torch), settings)
    module.save_pretrained(str(tmp_path))
    alpha = 6 * 2**0.5 if use_rslora else 6.0
    targets = [f"{kind}.weight" for kind in KINDS]
    model = lora(from_torch(kinds(torch)), targets, rank=2, alpha=alpha)
    params = load_peft(model, model.init(jax.random.key(0)), tmp_path)
    same_as_peft(torch, module, model, params)
    if use_rslora:
        other = lora(model.model, targets, rank=2, alpha=6.0)
        with pytest.raises(DataError, match=r"use_rslora, which is alpha = 8\.48528137 here"):
            load_peft(other, other.init(jax.random.key(0)), tmp_path)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"rank_pattern": {"mix": 3}}, "rank_pattern = {'mix': 3}"),
        ({"alpha_pattern": {"mix": 3}}, "alpha_pattern = {'mix': 3}"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    torch: Any, peft: Any, tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["mix", "project"], **options}
    if name.startswith("init"):  # which PEFT has for linear layers only
        settings["target_modules"] = ["project"]
    peft.get_peft_model(kinds(torch), peft.LoraConfig(**settings)).save_pretrained(str(tmp_path))
    targets = [f"{kind}.weight" for kind in settings["target_modules"]]
    model = lora(from_torch(kinds(torch)), targets, rank=2, alpha=6.0)
    with pytest.raises(DataError) as error:
        load_peft(model, model.init(jax.random.key(0)), tmp_path)
    text = str(error.value)
    assert f"{tmp_path / 'adapter_config.json'}: {name}" in text
    assert "PeftModel.from_pretrained" in text


def test_arrays_that_would_not_be_used_are_refused(torch: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = lora(from_torch(kinds(torch)), ["mix.weight"], rank=2, alpha=6.0)
    params = model.init(jax.random.key(0))

    def loads(change: Callable[[dict[str, np.ndarray]], Any]) -> Any:
        save_peft(model, params, tmp_path)
        arrays = load_file(tmp_path / "adapter_model.safetensors")
        change(arrays)
        save_file(arrays, tmp_path / "adapter_model.safetensors")
        return load_peft(model, params, tmp_path)

    start = "base_model.model."
    own = kinds(torch).state_dict()["embed.weight"].numpy()
    other = {f"{start}embed.weight": own + 1}
    with pytest.raises(DataError, match=r"has base_model\.model\.embed\.weight.*not use"):
        loads(lambda arrays: arrays.update(other))
    # PEFT writes whole embeddings beside their adapters; those that the model has are no loss.
    loads(lambda arrays: arrays.update({f"{start}embed.base_layer.weight": own}))
    with pytest.raises(DataError, match=r"lora_magnitude_vector.*not use"):
        loads(lambda a: a.update({f"{start}mix.lora_magnitude_vector.weight": np.ones(20)}))
    with pytest.raises(DataError, match=r"has no base_model\.model\.mix\.lora_B\.weight"):
        loads(lambda arrays: arrays.pop(f"{start}mix.lora_B.weight"))
    with pytest.raises(DataError, match=r"mix\.weight has shapes"):
        loads(lambda a: a.update({f"{start}mix.lora_B.weight": np.ones((5, 2), np.float32)}))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "ADALORA"}')
    with pytest.raises(DataError, match="peft_type = 'ADALORA'"):
        load_peft(model, params, tmp_path)


@pytest.mark.parametrize(
    ("targets", "train", "message"),
    [
        (["attend.out_proj.weight"], [], r"target = 'attend\.out_proj\.weight'.*NonDynamically"),
        (["free"], [], r"target = 'free': is not the weight of a module"),
        (["project.weight"], ["free"], r"train = 'free': is a parameter of the module itself"),
        (
            ["project.weight"],
            ["project.bias"],
            r"in one module with the adapter of project\.weight",
        ),
    ],
)
def test_what_peft_would_compute_otherwise_is_not_written(
    torch: Any, tmp_path: Path, targets: list[str], train: list[str], message: str
) -> None:
    model = lora(from_torch(kinds(torch)), targets, train=train)
    with pytest.raises(FieldError, match=message):
        save_peft(model, model.init(jax.random.key(0)), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_shared_weight_is_not_written(torch: Any, tmp_path: Path) -> None:
    base = from_torch(kinds(torch, tied=True))
    message = r"embed\.weight': is project\.weight as well.*from_torch\(get_peft_model"
    for targets, train in ((["embed.weight"], []), (["mix.weight"], ["embed.weight"])):
        model = lora(base, targets, train=train)
        with pytest.raises(FieldError, match=message):
            save_peft(model, model.init(jax.random.key(0)), tmp_path)


def test_a_module_of_another_library_is_not_written(torch: Any, tmp_path: Path) -> None:
    equinox = pytest.importorskip("equinox")
    model = lora(from_equinox(lambda key: equinox.nn.MLP(4, 2, 3, 1, key=key)), ["*.weight"])
    with pytest.raises(FieldError, match="is not the weight of a module of PyTorch"):
        save_peft(model, model.init(jax.random.key(0)), tmp_path)
