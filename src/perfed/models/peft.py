"""Adapters in the format of the PEFT library: a folder with their settings and their arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from perfed.core.errors import DataError, require
from perfed.core.trees import Params, path_name
from perfed.models.lora import LoRA

_SETTINGS, _ARRAYS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


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
    modules = []
    for path, (a, b) in model.adapters(params).items():
        what = "is not the weight of a module of PyTorch, which PEFT adapts"
        require(path[-1] == "weight", "target", path_name(path), what)
        name = path_name(path[:-1])
        modules.append(name)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(b, np.float32)
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
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
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
        settings: dict[str, Any] = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        with safe_open(folder / _ARRAYS, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} has no adapters of PEFT: {error}") from None
    for ours, name in ((model.rank, "r"), (model.alpha, "lora_alpha")):
        if settings.get(name) != ours:
            raise DataError(
                f"{folder}: {name} = {settings.get(name)}, but the model has {ours}; give lora() "
                "the folder's rank and alpha"
            )
    known = {path_name(path[:-1]) for path in model.adapters(params)}
    there = {name.removeprefix(_PREFIX).split(".lora_")[0] for name in tensors if ".lora_" in name}
    if known != there:
        raise DataError(
            f"{folder}: has adapters of {', '.join(sorted(there))}, but the model of "
            f"{', '.join(sorted(known))}; give lora() the same modules as target"
        )
    found = {
        path: tuple(tensors[f"{_PREFIX}{path_name(path[:-1])}.lora_{part}.weight"] for part in "AB")
        for path in model.adapters(params)
    }
    for path, (a, _) in model.adapters(params).items():
        if model.freezes_a and not np.allclose(a, found[path][0]):
            raise DataError(
                f"{folder}: lora_A of {path_name(path)} is not the model's, which is frozen; make "
                "the model without freeze_a, or with the seed that the folder's was made by"
            )
    whole = {
        path: tensors.get(f"{_PREFIX}{path_name(path)}", leaf)
        for path, leaf in model.trained(params).items()
    }
    return model.with_adapters(params, found, whole)
