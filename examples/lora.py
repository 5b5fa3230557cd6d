"""Low-rank adapters on a frozen transformer: each client has its own B, and all share A.

The transformer is made from a configuration, with random weights, since nothing is downloaded here;
with `from_pretrained` it is yours. Needs "perfed[peft]". Run it with: python examples/lora.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import ViTConfig, ViTForImageClassification

import perfed

CLIENT = 3


def transformer() -> ViTForImageClassification:
    """A small vision transformer for images of 8x8; the same weights each time."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=32,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, initializer_range=0.2,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def main(rounds: int = 20) -> tuple[perfed.Result, torch.nn.Module]:
    """Train the adapters, write those of a client as PEFT does, and load them with PEFT."""
    targets = ["q_proj", "v_proj", "fc1", "fc2"]
    settings = LoraConfig(r=4, target_modules=targets, modules_to_save=["classifier"])
    # What PEFT has frozen is neither trained nor sent, and is in memory once for all clients.
    model = perfed.from_torch(
        get_peft_model(transformer(), settings), input_layout="channels-last", output="logits"
    )
    federation = perfed.load("digits", clients=20)
    method = perfed.FedAvg(lr=0.01, tau=10, batch=16, optimizer=perfed.AdamW())
    result = perfed.simulate(
        federation, model, method, rounds=rounds, cohort=10, personal=("*.lora_B",)
    )
    before = result.history[0].scores["personalized"].accuracy
    after = result.scores["personalized"].accuracy
    print(f"accuracy: mean {before.mean():.1%} before, {after.mean():.1%} after {rounds} rounds")
    whole = 4 * sum(p.numel() for p in transformer().parameters())
    print(f"bytes: {whole:,} of the base, {result.traffic.uplink.max():,} of a client's message")

    with TemporaryDirectory() as folder:
        result.personal_module(CLIENT).save_pretrained(folder)
        print(f"client {CLIENT}'s adapters:", *sorted(f.name for f in Path(folder).iterdir()))
        own = PeftModel.from_pretrained(transformer(), folder)
    return result, own.eval()


if __name__ == "__main__":
    main()
