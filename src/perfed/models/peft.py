"""Adapters in the format of the PEFT library: a folder with their settings and their arrays."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from perfed.core.errors import DataError, FieldError, require
from perfed.core.trees import Params, leaf_paths, path_name
from perfed.core.trees import Path as Place
from perfed.models.extras import extra_needed
from perfed.models.lora import LoRA

_SETTINGS, _ARRAYS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BY_PEFT = "adapt it with PEFT itself, from_torch(get_peft_model(module, config))"

# Settings of PEFT that say how adapters were made, or which, but not what their arrays do.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
_CHECKED = {"r", "lora_alpha", "use_rslora", "init_lora_weights"}
# All other ways to begin change the weights under the adapters, too.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


class _Names(NamedTuple):
    """Where an adapter is in a file.

    Attributes:
        a: the name of PEFT's A, without the prefix.
        b: the name of its B.
        flipped: whether PEFT adapts the transposed weight: B' A' = (B A)^T, so that its A' is our
            B^T and its B' our A^T.
        fan_in_fan_out: PEFT's setting for such a layer.
    """

    a: str
    b: str
    flipped: bool
    fan_in_fan_out: bool

    def exchanged(self, one: Any, two: Any) -> tuple[np.ndarray, np.ndarray]:
        """PEFT's A and B of ours, and ours of PEFT's."""
        one, two = np.asarray(one, np.float32), np.asarray(two, np.float32)
        return (two.T, one.T) if self.flipped else (one, two)


def save_peft(model: LoRA, params: Params, folder: Path | str, base: str = "") -> None:
    """Write adapters as PEFT reads them (`PeftModel.from_pretrained(base, folder)`).

    Args:
        model: the model that `lora` made, of a PyTorch module.
        params: its parameters, such as `result.personal_model(3)`.
        folder: where to; it is made if it is not there.
        base: the name or folder of the model under the adapters, as PEFT notes it.
    """
    folder = Path(folder)
    tensors: dict[str, np.ndarray] = {}
    names = _names(model, params)
    for path, pair in model.adapters(params).items():
        for name, array in zip(names[path][:2], names[path].exchanged(*pair), strict=True):
            tensors[f"{_PREFIX}{name}"] = np.ascontiguousarray(array)
    for place, leaf in model.trained(params).items():
        tensors[f"{_PREFIX}{path_name(place)}"] = np.ascontiguousarray(leaf, np.float32)
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": model.rank,
        "lora_alpha": model.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(name.fan_in_fan_out for name in names.values()),
        "inference_mode": True,
        "target_modules": sorted(path_name(path[:-1]) for path in names),
        "modules_to_save": sorted({path_name(p[:-1]) for p in model.trained(params)}) or None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / _ARRAYS)


def load_peft(model: LoRA, params: Params, folder: Path | str) -> Params:
    """The parameters with the adapters of a folder that PEFT, or `save_peft`, has written.

    Args:
        model: the model that `lora` made, of a PyTorch module.
        params: parameters of it, for what the folder does not have.
        folder: where from.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        with safe_open(folder / _ARRAYS, "np") as file:
            tensors = {
                name.removeprefix(_PREFIX): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} has no adapters of PEFT: {error}") from None
    _check_settings(settings, model, folder / _SETTINGS)
    names = _names(model, params)
    known = {path_name(path[:-1]) for path in names}
    there = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    if known != there:
        raise DataError(
            f"{folder}: has adapters of {', '.join(sorted(there))}, but the model of "
            f"{', '.join(sorted(known))}; give lora() the same modules as target"
        )
    file_name, found = folder / _ARRAYS, {}
    for path, own in model.adapters(params).items():
        pair = (_taken(tensors, name, file_name) for name in names[path][:2])
        found[path] = names[path].exchanged(*pair)
        _check_shapes(found[path], own, path, file_name)
        if model.freezes_a and not np.allclose(own[0], found[path][0]):
            raise DataError(
                f"{folder}: lora_A of {path_name(path)} is not the model's, which is frozen; make "
                "the model without freeze_a, or with the seed that the folder's was made by"
            )
    whole = {}
    for path, leaf in model.trained(params).items():
        whole[path] = np.asarray(tensors.pop(path_name(path), leaf), np.float32)
        _check_shapes((whole[path],), (leaf,), path, file_name)
    _check_rest(tensors, model, file_name)
    return model.with_adapters(params, found, whole)


def _names(model: LoRA, params: Params) -> dict[Place, _Names]:
    """Where each adapter is in a file; what PEFT would compute otherwise is refused."""
    places, trained = list(model.adapters(params)), list(model.trained(params))
    what = "is not the weight of a module of PyTorch, which PEFT adapts"
    for path in places:
        require(path[-1] == "weight" and len(path) > 1, "target", path_name(path), what)
    back = getattr(model.model, "write_back", None)
    require(back is not None, "target", path_name(places[0]), what)
    with extra_needed("the format of PEFT", "torch", "torch"):
        import torch
    module = model.write_back(params)
    require(isinstance(module, torch.nn.Module), "target", path_name(places[0]), what)
    _check_trained_whole(places, trained)
    _check_not_shared(module, places, trained)
    return {path: _names_in(module, path) for path in places}


def _names_in(module: Any, path: Place) -> _Names:
    """Where the adapter of one of a module's layers is in a file."""
    import torch
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

    name = path_name(path[:-1])
    layer = module.get_submodule(name)
    kind = type(layer)
    # A kind with a `forward` of its own may use its weight in other ways than PEFT does.
    if kind.forward is torch.nn.Linear.forward and kind is not NonDynamicallyQuantizableLinear:
        return _Names(f"{name}.lora_A.weight", f"{name}.lora_B.weight", False, False)
    # Known by its name, since transformers need not be installed.
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return _Names(f"{name}.lora_A.weight", f"{name}.lora_B.weight", True, True)
    if kind.forward is torch.nn.Embedding.forward and layer.max_norm is None:
        return _Names(f"{name}.lora_embedding_A", f"{name}.lora_embedding_B", True, False)
    what = f"is the weight of a {kind.__name__}, which PEFT does not adapt, or in another way; "
    raise FieldError("target", path_name(path), what + _BY_PEFT)


def _check_trained_whole(places: list[Place], trained: list[Place]) -> None:
    """PEFT keeps a whole copy of each module that has a trained leaf, without adapters in it."""
    for path in trained:
        what = "is a parameter of the module itself, and PEFT keeps those of its submodules only; "
        require(len(path) > 1, "train", path_name(path), what + _BY_PEFT)
        for other in places:
            what = f"is in one module with the adapter of {path_name(other)}, which PEFT ignores; "
            apart = other[: len(path) - 1] != path[:-1]
            require(apart, "train", path_name(path), what + _BY_PEFT)


def _check_not_shared(module: Any, places: list[Place], trained: list[Place]) -> None:
    """An adapter of a weight of two modules adapts both here, and one with PEFT."""
    owners: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(tensor), []).append(name)
    others = {name: [n for n in names if n != name] for names in owners.values() for name in names}
    for field, paths in (("target", places), ("train", trained)):
        for path in paths:
            shared = others.get(path_name(path), [])
            what = f"is {', '.join(shared)} as well, and PEFT would change one of them alone; "
            require(not shared, field, path_name(path), what + _BY_PEFT)


def _check_settings(settings: Any, model: LoRA, file: Path) -> None:
    """Raise where the adapters of a folder are not those of the model."""
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise DataError(f'{file}: peft_type = {kind!r}, but load_peft reads "LORA" alone')
    others = {
        name: value
        for name, value in settings.items()
        if name not in _NO_EFFECT | _CHECKED and value and value != "none"
    }
    if settings.get("init_lora_weights") not in _STARTS:
        others["init_lora_weights"] = settings["init_lora_weights"]
    for name, value in others.items():
        raise DataError(
            f"{file}: {name} = {value!r}, which perfed.lora does not compute; let PEFT load the "
            "folder, PeftModel.from_pretrained(base, folder, is_trainable=True), and pass its "
            "model to from_torch"
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    advice = "give lora() the folder's rank and alpha"
    if rank != model.rank:
        raise DataError(f"{file}: r = {rank}, but the model has {model.rank}; {advice}")
    text = f"lora_alpha = {alpha}"
    if settings.get("use_rslora") and isinstance(alpha, int | float):
        # Its scale is alpha / sqrt(rank), and ours alpha / rank.
        alpha *= math.sqrt(model.rank)
        text += f" with use_rslora, which is alpha = {alpha:.9g} here"
    if not isinstance(alpha, int | float) or not math.isclose(alpha, model.alpha, rel_tol=1e-6):
        raise DataError(f"{file}: {text}, but the model has {model.alpha}; {advice}")


def _taken(tensors: dict[str, np.ndarray], name: str, file: Path) -> np.ndarray:
    if name not in tensors:
        raise DataError(f"{file}: has no {_PREFIX}{name}; write the adapters again")
    return tensors.pop(name)


def _check_shapes(found: Any, own: Any, path: Place, file: Path) -> None:
    there, here = ([np.shape(leaf) for leaf in leaves] for leaves in (found, own))
    if there != here:
        raise DataError(
            f"{file}: {path_name(path)} has shapes {there}, but the model {here}; is the base "
            "another one?"
        )


def _check_rest(tensors: dict[str, np.ndarray], model: LoRA, file: Path) -> None:
    """Raise for an array that is not used, unless it is a copy of the base's, as of embeddings."""
    base = model.frozen["base"]
    everything = model.structure.unflatten(range(len(base)))
    own = {path_name(path): leaf for path, leaf in zip(leaf_paths(everything), base, strict=True)}
    for name, array in tensors.items():
        leaf = own.get(name.replace(".base_layer.", "."))
        if leaf is None or leaf.shape != array.shape or not np.allclose(leaf, array):
            raise DataError(
                f"{file}: has {_PREFIX}{name}, which the model would not use; name it in "
                "lora(..., train=[...]), or let PEFT load the folder, "
                "PeftModel.from_pretrained(base, folder, is_trainable=True), and pass its model "
                "to from_torch"
            )
