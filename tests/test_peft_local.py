"""Adapters of a language model in a local folder: trained here, read and written as PEFT does."""

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
