"""Rounds of low-rank adapters on a language model, beside an eager PEFT loop and their floor.

A Llama of random weights; clients train adapters of its attention, and the mean of these is taken.
All take turns in one run, on the same sequences: `python -m bench.adapters`. It needs
"perfed[peft]". By default the base has 9 million parameters; on a GPU one of 98 million, for 50
clients: `python -m bench.adapters --device gpu`.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from bench.__main__ import spread, timed
from bench.apart import Apart
from bench.models import allow_tf32, measure, products
from perfed import Experiment, FedAvg, Federation, Task, Vectorized, from_torch, lora
from perfed.core.task import Model, Precision
from perfed.core.trees import Params, Path, tree_bytes, tree_size
from perfed.data import FlatExamples
from perfed.models.lora import LoRA
from perfed.simulation.experiment import EngineState

if TYPE_CHECKING:
    import torch

RANK, ALPHA, LR = 8, 16, 0.05
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD = 64  # numbers per head of attention
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        width: of the model,
        layers: how many it has,
        symbols: and how many it knows.
        length: of a sequence.
        clients: all of them take part in a round.
        batch: sequences per step; all that a client has, so that all batches are alike.
        tau: local steps.
    """

    width: int
    layers: int
    symbols: int
    length: int
    clients: int
    batch: int
    tau: int

    @property
    def inner(self) -> int:
        """The width inside the perceptrons."""
        return 8 * self.width // 3 // 32 * 32

    @property
    def tokens(self) -> int:
        """Of a round."""
        return self.clients * self.tau * self.batch * self.length

    @property
    def flops(self) -> int:
        """Of a round's products: the outputs, back to the inputs, back to the adapters.

        The base's matrices have no gradients; half of the causal attention is masked.
        """
        base = 2 * (4 * self.width**2 + 3 * self.width * self.inner)
        attention = 2 * self.length * self.width
        adapters = 2 * len(ADAPTED) * 2 * self.width * RANK
        layer = 2 * base + 3 * attention + 3 * adapters
        # Nothing before the first layer is trained: its products do not go back to its inputs.
        unasked = 2 * 3 * self.width**2
        head = 2 * 2 * self.width * self.symbols
        return self.tokens * (self.layers * layer - unasked + head)

    def base(self) -> torch.nn.Module:
        """The language model: the mean loss of each sequence's next symbols."""
        import torch
        from torch import nn
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.symbols,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // HEAD,
            num_key_value_heads=self.width // HEAD,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            use_cache=False,
        )

        class Losses(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.language = LlamaForCausalLM(config)

            def forward(self, x: Any) -> Any:
                x = x.long()
                logits = self.language(input_ids=x).logits[:, :-1].transpose(1, 2)
                losses = nn.functional.cross_entropy(logits, x[:, 1:], reduction="none")
                return losses.mean(1)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Losses()

    def adapted(self) -> torch.nn.Module:
        """The same with PEFT's adapters, of which B is not zero, so that all is trained."""
        import torch
        from peft import LoraConfig, get_peft_model

        module = self.base()
        settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            module.language = get_peft_model(module.language, settings)
            for name, leaf in module.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(leaf, std=0.02)
        return module

    def data(self) -> Federation:
        """Random sequences: what they are does not matter for time."""
        rows = self.clients * self.batch
        x = np.random.default_rng(0).integers(0, self.symbols, (rows, self.length), np.int32)
        side = FlatExamples.from_rows(x, np.zeros(rows, np.int32), [self.batch] * self.clients)
        return Federation.from_examples(side, side, classes=2)


@dataclass(frozen=True)
class Contestant:
    """Perfed with one way to have adapters.

    Attributes:
        engine: what computes the rounds.
        start: the state before the first.
        adapters: A and B of every matrix, by its place in the model.
    """

    engine: Vectorized
    start: EngineState
    adapters: Callable[[Params], dict[Path, Any]]

    def take(self, rounds: int) -> float:
        """So many rounds: milliseconds each."""
        advance = self.engine.advance
        return timed(lambda: jax.block_until_ready(advance(self.start, rounds))) / rounds

    def after_one(self) -> dict[Path, Any]:
        """The adapters after a round."""
        return self.adapters(jax.device_get(self.engine.advance(self.start, 1).params))


def engine_of(case: Case, model: Model, chunk: int | None, precision: Precision) -> Vectorized:
    """Perfed's engine; an epoch is a batch, so that all contestants take the same ones."""
    task = Task(model, loss=lambda losses, _: losses, precision=precision)
    method = FedAvg(lr=LR, tau=case.tau, batch=case.batch)
    setup = Experiment(case.data(), task, method, case.clients, sampling="epochs")
    return Vectorized(setup, chunk=chunk)


def of_peft(case: Case, chunk: int | None, precision: Precision) -> Contestant:
    """PEFT's module, converted as it is."""
    engine = engine_of(case, from_torch(case.adapted()), chunk, precision)
    return Contestant(engine, engine.init(), _peft_adapters)


def of_perfed(case: Case, chunk: int | None, precision: Precision) -> Contestant:
    """Perfed's adapters on the converted base, beginning with the same numbers."""
    model: LoRA = lora(
        from_torch(case.base()),
        [f"*.{name}.weight" for name in ADAPTED],
        rank=RANK,
        alpha=ALPHA,
    )
    engine = engine_of(case, model, chunk, precision)
    first = _peft_adapters(from_torch(case.adapted()).init(jax.random.key(0)))
    state = engine.init()
    begun = model.with_adapters(jax.device_get(state.params), first, {})
    placed = jax.device_put(begun, jax.tree.map(lambda leaf: leaf.sharding, state.params))
    return Contestant(engine, state._replace(params=placed), model.adapters)


def _peft_adapters(params: Params) -> dict[Path, Any]:
    """A and B in the parameters of PEFT's module, by the places that the base has."""
    found: dict[Path, Any] = {}

    def visit(tree: Any, path: Path) -> None:
        if "lora_A" in tree:
            place = ("language", *path[3:], "weight")  # less language.base_model.model
            found[place] = tuple(tree[f"lora_{part}"]["default"]["weight"] for part in "AB")
        else:
            for name, part in tree.items():
                visit(part, (*path, name))

    visit(params, ())
    return found


@dataclass(frozen=True)
class Eager:
    """The same rounds as a lean loop over clients: adapters alone have gradients, plain SGD."""

    case: Case
    module: torch.nn.Module
    sequences: list[torch.Tensor]
    start: list[torch.Tensor]

    @classmethod
    def of(cls, case: Case, device: str, precision: Precision) -> Eager:
        """With the model and the sequences where they are needed."""
        import torch

        allow_tf32(precision)
        module, parts = case.adapted().to(device), case.data().train
        own = [parts.client(i)[0].astype(np.int64) for i in range(case.clients)]
        leaves = [leaf.detach().clone() for leaf in module.parameters() if leaf.requires_grad]
        return cls(case, module, [torch.from_numpy(x).to(device) for x in own], leaves)

    def one_round(self) -> list[torch.Tensor]:
        """One client after another, and the mean of what they give."""
        import torch

        leaves = [leaf for leaf in self.module.parameters() if leaf.requires_grad]
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for x in self.sequences:
            with torch.no_grad():
                for leaf, value in zip(leaves, self.start, strict=True):
                    leaf.copy_(value)
            for _ in range(self.case.tau):
                grads = torch.autograd.grad(self.module(x).mean(), leaves)
                with torch.no_grad():
                    for leaf, grad in zip(leaves, grads, strict=True):
                        leaf.sub_(grad, alpha=LR)
            with torch.no_grad():
                for mean, leaf in zip(total, leaves, strict=True):
                    mean.add_(leaf, alpha=1 / len(self.sequences))
        return total

    def take(self, threads: int, rounds: int) -> float:
        """So many rounds: milliseconds each."""
        import torch

        torch.set_num_threads(threads)
        begun = time.perf_counter()
        for _ in range(rounds):
            self.one_round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / rounds

    def after_one(self) -> dict[Path, Any]:
        """The adapters after a round."""
        names = [name for name, leaf in self.module.named_parameters() if leaf.requires_grad]
        params: dict[str, Any] = {}
        for name, leaf in zip(names, self.one_round(), strict=True):
            *parents, last = name.split(".")
            tree = params
            for parent in parents:
                tree = tree.setdefault(parent, {})
            tree[last] = leaf.cpu().numpy()
        return _peft_adapters(params)


def difference(some: dict[Path, Any], others: dict[Path, Any], first: dict[Path, Any]) -> float:
    """The norm of what two rounds differ by, relative to what a round changes."""

    def distance(a: dict[Path, Any], b: dict[Path, Any]) -> float:
        parts = [np.asarray(x) - np.asarray(y) for p in a for x, y in zip(a[p], b[p], strict=True)]
        return float(np.sqrt(sum((part**2).sum() for part in parts)))

    return distance(some, others) / distance(others, first)


def memory(console: Console, name: str, entrant: Contestant, before: int) -> None:
    """What is held between rounds, and what a round takes beside it; measured.

    Args:
        console: where it is printed.
        name: of the contestant.
        entrant: what holds it.
        before: what others hold.
    """
    setup, start = entrant.engine.experiment, entrant.start
    base, adapters = tree_bytes(setup.task.frozen), tree_bytes(setup.model_shape)
    entrant.take(1)
    held = held_bytes() - before
    variables = [setup.variables()]
    program = entrant.engine._block.lower(variables, entrant.engine._data, [start], jnp.int32(1))
    report = program.compile().memory_analysis()
    least = base + adapters + tree_bytes(setup.federation.train.x)
    chunk, _ = entrant.engine._layout.slots(setup.cohort)
    console.print(
        f"{name}: base {base / MIB:.1f} MiB, adapters {adapters / MIB:.2f} MiB; held between "
        f"rounds {held / MIB:.1f} MiB, {held / least:.2f}x base, adapters and sequences once; a "
        f"copy of the base for each client were {setup.cohort * base / MIB:.0f} MiB more. A "
        f"round's program reads {report.argument_size_in_bytes / MIB:.1f} MiB and works in "
        f"{report.temp_size_in_bytes / MIB:.0f} MiB ({chunk} client(s) at once on a device)"
    )
    for device in jax.local_devices()[:1]:
        most = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if most is not None:
            console.print(f"  most that the device has held so far: {most / MIB:.0f} MiB")


def held_bytes() -> int:
    """Of all arrays on the devices; those in the same place, which a CPU's devices share, once."""
    places: dict[int, int] = {}
    for array in jax.live_arrays():
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for shard in array.addressable_shards:
            places[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(places.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default=jax.default_backend())
    for name in ("clients", "width", "layers", "symbols", "length", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of a turn")
    parser.add_argument("--threads", type=int, nargs="+", help="of the eager loop; all are tried")
    parser.add_argument("--chunk", type=int, help="clients at once on a device")
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="float32")
    given = parser.parse_args()
    on_gpu = given.device == "gpu"
    if on_gpu != (jax.default_backend() == "gpu"):
        parser.error(f"--device {given.device}: JAX has started on {jax.default_backend()}")
    case = Case(
        given.width or (768 if on_gpu else 320),
        given.layers or (12 if on_gpu else 6),
        given.symbols or (16384 if on_gpu else 4096),
        given.length or 64,
        given.clients or (50 if on_gpu else 20),
        given.batch or 8,
        given.steps or 2,
    )
    console = Console(width=120, highlight=False)
    ways = {"perfed, PEFT's module": of_peft, "perfed, perfed.lora": of_perfed}
    ours: dict[str, Contestant] = {}
    for name, build in ways.items():
        before = held_bytes()
        ours[name] = build(case, given.chunk, given.precision)
        memory(console, name, ours[name], before)
    eager = Apart(Eager.of, case, "cuda" if on_gpu else "cpu", given.precision)
    expected, first = eager.call("after_one"), ours["perfed, PEFT's module"]
    begun = first.adapters(jax.device_get(first.start.params))
    for name, one in ours.items():
        off = difference(one.after_one(), expected, begun)
        console.print(f"{name}: a round differs from the eager one by {off:.1e} of what it changes")
    takes: dict[str, Callable[[int], float]] = {} if on_gpu else {"GFLOP/s": products("float32")}
    takes |= {name: one.take for name, one in ours.items()}
    threads = given.threads or ([1] if on_gpu else sorted({1, os.cpu_count() or 1}))
    takes |= {f"eager PEFT, {n} thread(s)": partial(eager.call, "take", n) for n in threads}
    for take in takes.values():
        take(1)
    times = measure(takes, given.rounds, given.repeats)
    rates = times.pop("GFLOP/s", None)
    floor = None if rates is None else case.flops / median(rates) / 1e6
    best = min((t for name, t in times.items() if name.startswith("eager")), key=median)
    table = Table(box=box.SIMPLE_HEAD, title="ms per round: median (range)", title_justify="left")
    for heading in ("as", "a round", "least", "of eager", "tokens/s", "GFLOP/s", "of the floor"):
        table.add_column(heading, justify="left" if heading == "as" else "right")
    for name, own in times.items():
        table.add_row(
            name,
            spread(own),
            f"{min(own):.0f}",
            f"{median(best) / median(own):.2f}x",
            f"{1e3 * case.tokens / median(own):,.0f}",
            f"{case.flops / median(own) / 1e6:,.0f}",
            "" if floor is None else f"{100 * floor / median(own):.0f} %",
        )
    setup = first.engine.experiment
    size = tree_size(setup.task.frozen) / 1e6
    console.print(
        f"Base of {size:.1f} M parameters (width {case.width}, {case.layers} layers, "
        f"{case.symbols} symbols), adapters of rank {RANK}; {case.clients} clients, {case.tau} "
        f"steps of batch {case.batch} x {case.length}, {case.flops / 1e9:.0f} GFLOP per round"
    )
    if rates is not None and floor is not None:
        console.print(
            f"Large products {spread(rates)} GFLOP/s, so the floor is {floor:.0f} ms; eager "
            f"takes {median(best) / floor:.2f} times that"
        )
    console.print(table)
    device = jax.devices()[0].device_kind
    console.print(
        f"{os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__} on {device}"
    )


if __name__ == "__main__":
    main()
