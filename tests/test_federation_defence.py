"""A federation under attack: what a hostile client, or a hostile server, can and cannot do.

First messages alone: whatever comes over the network is either what it should be or refused. Then
Flower itself in the hands of a client that does not keep to its rules, and at last a whole
federation with a rogue in it, and others at its door. This file is also the rogue's program.
"""

import ast
import hashlib
import json
import os
import pickle
import random
import re
import signal
import ssl
import struct
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, isnan, prod
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr")

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import make_message, remove_content_from_message
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    ListRunsRequest,
    ListRunsResponse,
    RegisterNodeRequest,
    StartRunRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node as ProtoNode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors.http import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

import perfed
from federations import (
    NAMES,
    Federation,
    children,
    distance,
    federation,
    settings,
    started,
    stop,
    wait,
    write_clients,
)
from perfed.core.errors import CodecError, ConfigError, DataError, FieldError
from perfed.core.trees import row
from perfed.evaluation import ModelKind
from perfed.federation.client import join as join_module
from perfed.federation.client.client import Client
from perfed.federation.client.client_dir import STATE, ClientDir
from perfed.federation.protocol.framing import MAGIC, VERSION, one_line, pack, unpack
from perfed.federation.protocol.messages import (
    ClientInfo,
    EvaluateReply,
    EvaluateRequest,
    JoinRequest,
    TrainReply,
    TrainRequest,
)
from perfed.federation.server.checks import (
    CheckedUpdate,
    NormLimit,
    read_client_info,
    read_scores,
    read_update,
    typical_norm,
)
from perfed.federation.server.plan import federated_settings
from perfed.federation.transport import flower_runtime as runtime
from perfed.federation.transport import messenger as conversation
from perfed.federation.transport.flower_runtime import Link, register, server_grid
from perfed.federation.transport.gateway import ClientGateway
from perfed.federation.transport.keys import ClientKeys, ServerKeys, make_keys
from perfed.federation.transport.messenger import (
    Failure,
    LinkLostError,
    Messenger,
    Reply,
    blob_of,
    record,
)
from perfed.federation.transport.processes import Program
from perfed.pipeline import Pipeline
from perfed.pipeline.codecs import (
    BFloat16,
    Codec,
    Float16,
    Float32,
    LowPrecision,
    RandomK,
    Sign,
    TopK,
)
from perfed.pipeline.codecs.base import _symbols
from perfed.pipeline.codecs.low_precision import DENSE, FIXED, SPARSE
from perfed.runs import Config
from perfed.simulation import EngineState, Experiment
from perfed.simulation.hosts import free_port
from perfed.simulation.round import Trained, broadcast, client_update, server_update

LOOPBACK = "127.0.0.1"
EXPERIMENT = "run-0123abcd"
ROUND = 7
KINDS: tuple[ModelKind, ...] = ("global", "personalized")
SCORES = ("accuracy", "loss")
FEDAVG = {"name": "fedavg", "lr": 0.1, "tau": 3, "batch": 5}
PFEDME = {"name": "pfedme", "lam": 15.0, "eta": 0.05, "local_rounds": 3, "batch": 5}

CODECS = [
    Float32(),
    Float16(),
    BFloat16(),
    Sign(),
    LowPrecision(1),
    LowPrecision(4, norm="tensor"),
    LowPrecision(15, norm=7),
    LowPrecision(5, code="fixed"),
    LowPrecision(65536),
    TopK(0.1),
    TopK(0.3, LowPrecision(3)),
    TopK(0.3, Float16()),
    RandomK(0.1),
    RandomK(0.5, Sign()),
]


# Messages, one by one.


@dataclass(frozen=True)
class Bench:
    """A server in the middle of a run, as far as messages go."""

    experiment: Experiment
    state: EngineState
    extra: Any = None

    def with_codec(self, codec: Codec) -> Experiment:
        return replace(self.experiment, pipeline=Pipeline.of(codec))

    def read(self, blob: bytes, codec: Codec) -> CheckedUpdate | Failure:
        pipeline, round = self.with_codec(codec).pipeline, int(self.state.round)
        return read_update(blob, pipeline, round, self.shapes, EXPERIMENT)

    @property
    def shapes(self) -> Trained:
        """What clients send."""
        return Trained(jnp.ones(()), self.state.params, self.extra, None, None, None)

    def refuses(self, blob: bytes, why: str, codec: Codec | None = None) -> None:
        found = self.read(blob, codec or Float32())
        assert isinstance(found, Failure), why
        assert why in found.reason

    def change(self, seed: int = 0, zeros: float = 0.0) -> Any:
        """A change of the model; so many of its entries are 0."""
        rng = np.random.default_rng(seed)

        def drawn(leaf: Any) -> Any:
            x = rng.normal(size=leaf.shape) * (rng.random(leaf.shape) >= zeros)
            return jnp.asarray(x, leaf.dtype)

        return jax.tree.map(drawn, self.state.params)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    data = tmp_path_factory.mktemp("bench") / "data"
    write_clients(data, (20,))
    setup = Config.checked(settings(data, FEDAVG)).build().experiment
    return Bench(setup, setup.init_state()._replace(round=jnp.int32(ROUND)))


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fail instead of hanging."""

    def over(*_: object) -> NoReturn:
        raise AssertionError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def raw(header: str | bytes, *parts: bytes, length: int | None = None) -> bytes:
    """A blob with whatever header."""
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    claimed = len(text) if length is None else length
    return b"".join([MAGIC, bytes([VERSION]), claimed.to_bytes(4, "little"), text, *parts])


def taken_apart(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a good message, and what follows it."""
    start = len(MAGIC) + 5
    end = start + int.from_bytes(blob[start - 4 : start], "little")
    facts: dict[str, Any] = json.loads(blob[start:end])
    return facts, blob[end:]


def changed_by(codec: Codec, tree: Any, seed: int = 0) -> bytes:
    """A client's good answer."""
    message = codec.encode(jax.random.key(seed), tree)
    return pack(TrainReply(experiment=EXPERIMENT, round=ROUND), message)


def scored(**changes: Any) -> bytes:
    scores: dict[str, dict[str, float | None]] = {
        kind: dict.fromkeys(SCORES, 0.5) for kind in ("global", "personalized")
    }
    facts: dict[str, Any] = {"experiment": EXPERIMENT, "round": ROUND, "scores": scores}
    return pack(EvaluateReply(**facts | changes))


def introduction(**changes: Any) -> bytes:
    facts: dict[str, Any] = {
        "experiment": EXPERIMENT, "name": "north", "shape": (20,), "dtype": "float32",
        "features": ("a", "b"), "train_examples": 20, "test_examples": 10,
    }  # fmt: skip
    return pack(ClientInfo(**facts | changes))


# JSON that a header's value can be replaced by; the first few are good for some.
ODD = [
    "7", "12", '"south"', "[3,4]", "[]", '["a","c"]', "null", '"uint8"', '"float32"',
    '{"global":{"accuracy":1,"loss":null},"personalized":{"accuracy":0.25,"loss":-3e38}}',
    "-1", "0", "1", "2147483647", "2147483648", "18446744073709551616", "9" * 4000, "9" * 4400,
    "-" + "9" * 4299, "0.5", "7.0", "1e999", "-1e999", "1e-999", "1E400", "0." + "1" * 5000, "NaN",
    "Infinity", "-Infinity", "nan", "true", "false", "null", '""', '"x"', '"7"', '"../../x"',
    '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\ud800"', '"\\n\\u001b[31m"', f'"{"x" * 5000}"',
    "[]", "[[]]", "{}", '{"":{}}', "[" * 990 + "]" * 990, "[" * 9000, '{"a":' * 9000,
    "[" * 3000 + "]" * 3000, "[-1]", "[0,0]", "[1,-1]", "[9223372036854775807]", "[1e3]", "[true]",
    '["1"]', "[null]", f"[{'9' * 4300},{'9' * 4300}]", f"[{'0,' * 3000}0]",
    "[340282346638528859811]",
    '{"global":{"accuracy":1e999,"loss":0},"personalized":{"accuracy":0,"loss":0}}',
    '{"global":{"accuracy":1e300,"loss":0},"personalized":{"accuracy":0,"loss":0}}',
    '{"global":{"accuracy":true,"loss":0},"personalized":{"accuracy":0,"loss":0}}',
    '{"global":{"accuracy":1,"accuracy":0,"loss":0},"personalized":{"accuracy":0,"loss":0}}',
    "[2147483647,2147483647,2147483647]", '["\\ud800"]', "'x'", "{", "]", "", ",", "\\", "\x00",
]  # fmt: skip


def odd_header(draw: random.Random, blob: bytes) -> bytes:
    """A good message with something odd in its header."""
    facts, rest = taken_apart(blob)
    pairs = [(json.dumps(key), json.dumps(value)) for key, value in facts.items()]
    at = draw.randrange(len(pairs))
    match draw.randrange(7):
        case 0:
            pairs[at] = (pairs[at][0], draw.choice(ODD))
        case 6:
            pairs[at] = (pairs[at][0], draw.choice(ODD[:10]))
        case 1:
            pairs.append((pairs[at][0], draw.choice(ODD)))
        case 2:
            del pairs[at]
        case 3:
            pairs.append((draw.choice(['"more"', '"\\ud800"', '""', '"\\n"']), draw.choice(ODD)))
        case 4:
            pairs[at] = (draw.choice(ODD), pairs[at][1])
        case 5:
            return raw(draw.choice(ODD), rest)
    length = draw.choice([None, None, None, 0, 1, 2**31, 2**32 - 1])
    return raw("{" + ",".join(f"{k}:{v}" for k, v in pairs) + "}", rest, length=length)


def odd_parts(draw: random.Random, blob: bytes) -> bytes:
    """A good message whose parts are changed, and whose header says how long they are then."""
    facts, rest = taken_apart(blob)
    body = bytearray(rest)
    match draw.randrange(5):
        case 0:
            for _ in range(draw.randint(1, 8)):
                if body:
                    body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
        case 1:
            del body[draw.randrange(len(body) + 1) :]
        case 2:
            at = draw.randrange(len(body) + 1)
            body[at:at] = draw.randbytes(draw.randint(1, 8))
        case 3:
            at = draw.randrange(len(body) + 1)
            body[at : at + 4] = draw.choice(
                [b"\xff" * 4, b"\0" * 4, struct.pack("<f", draw.choice([3e38, -1e20, 1e-40]))]
            )
        case 4:
            del body[: draw.randint(0, 8)]
    cut = draw.randint(0, len(body)) if draw.random() < 0.1 else len(body)
    parts = [bytes(body[:cut])] + ([bytes(body[cut:])] if cut < len(body) else [])
    return raw(json.dumps(facts | {"parts": [len(part) for part in parts]}), *parts)


def mutated(draw: random.Random, blob: bytes, other: bytes) -> bytes:
    """A message like a good one, or not at all like one."""
    if draw.random() < 0.03:
        return blob
    match draw.randrange(10):
        case 0:
            return blob[: draw.choice([0, 3, 6, 7, 11])] + draw.randbytes(draw.randrange(300))
        case 1:
            return blob[: draw.randrange(len(blob))]
        case 2:
            flipped = bytearray(blob)
            for _ in range(draw.randint(1, 8)):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 3:
            return blob[: draw.randrange(len(blob))] + other[draw.randrange(len(other)) :]
        case 4 | 5 | 6:
            return odd_header(draw, blob)
        case _:
            return odd_parts(draw, blob)


def goods(bench: Bench) -> list[tuple[Codec, bytes]]:
    """Good changes in every codec; and in every code of the low-precision one."""
    made = [
        (codec, changed_by(codec, bench.change(seed, zeros), seed))
        for codec in CODECS
        for seed, zeros in enumerate((0.0, 0.5, 0.97, 1.0))
    ]
    codes = set()
    for codec, blob in made:
        assert isinstance(bench.read(blob, codec), CheckedUpdate)
        if isinstance(codec, LowPrecision) and codec.norm == "whole":
            codes.add(unpack(blob, TrainReply)[1][0][6 + len(codec._settings) + 4] >> 6)
    assert codes == {FIXED, SPARSE, DENSE}
    return made


def sound(found: CheckedUpdate, like: Any) -> bool:
    """Whether a change is one: of the model's shapes, and finite."""
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, found.delta, like)
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.delta))
    return all(jax.tree.leaves(same)) and finite and isfinite(found.norm) and found.extra is None


@pytest.mark.slow
def test_ten_thousand_answers_are_good_or_refused(bench: Bench) -> None:
    """Nothing else is raised, nothing hangs, and both outcomes are frequent for every reader."""
    draw, made, seen = random.Random(1), goods(bench), Counter[tuple[str, bool]]()
    others = [scored(), introduction(), introduction(features=None, name="")]
    setups = {codec: bench.with_codec(codec) for codec in CODECS}

    def tell(reader: str, found: object) -> None:
        refused = isinstance(found, Failure)
        seen[reader, refused] += 1
        if refused:
            assert isinstance(found, Failure)
            assert len(found.reason) < 600
            assert found.reason.isprintable()

    with at_most(300):
        for i in range(10_000):
            codec, good = draw.choice(made)
            if i % 10 < 6:
                blob = mutated(draw, good, draw.choice(made)[1])
                change = read_update(
                    blob, setups[codec].pipeline, int(bench.state.round), bench.shapes, EXPERIMENT
                )
                assert isinstance(change, Failure) or sound(change, bench.state.params)
                tell(codec.name, change)
                continue
            base = draw.choice(others)
            blob = mutated(draw, base, draw.choice([good, *others]))
            scores = read_scores(blob, EXPERIMENT, ROUND, KINDS, SCORES)
            if not isinstance(scores, Failure):
                values = [v for own in scores.values() for v in own.values()]
                assert len(values) == 4
                assert all(isnan(v) or abs(v) < 3.5e38 for v in values)
            told = read_client_info(blob, EXPERIMENT)
            if not isinstance(told, Failure):
                assert told.experiment == EXPERIMENT
                assert told.name.isprintable()
                assert prod(told.shape) < 2**31
                assert min(told.train_examples, told.test_examples) >= 1
                json.dumps(told.model_dump(mode="json"), ensure_ascii=False).encode()
            tell(
                "scores" if base is others[0] else "introduction",
                scores if base is others[0] else told,
            )
            for kind in (TrainReply, EvaluateReply, ClientInfo, TrainRequest, JoinRequest):
                try:
                    unpack(blob, kind)
                except CodecError as error:
                    tell("wire", Failure(str(error)))
    readers = {codec.name for codec in CODECS} | {"scores", "introduction"}
    assert min(seen[reader, refused] for reader in readers for refused in (True, False)) > 20, seen


def test_so_are_a_thousand_records() -> None:
    draw, counted = random.Random(2), Counter[bool]()
    values: list[Any] = [b"", b"x", b"xy", "x", 1, 0.5, True, [b"x"], ["x"], [1], []]
    array = ArrayRecord({"blob": Array(np.zeros(3))})
    for _ in range(1000):
        inner = {"blob": draw.choice(values)}
        if draw.random() < 0.5:
            inner = {draw.choice(["blob", "x", ""]): draw.choice(values) for _ in range(2)}
        given: dict[str, Any] = {draw.choice(["perfed", "perfed", "x"]): ConfigRecord(inner)}
        if draw.random() < 0.3:
            extra: list[Any] = [array, MetricRecord({"blob": 1}), ConfigRecord()]
            given[draw.choice(["perfed", "more"])] = draw.choice(extra)
        try:
            blob = blob_of(RecordDict(given))
            counted[True] += 1
            assert set(given) == {"perfed"}
            assert dict(given["perfed"]) == {"blob": blob}
            assert isinstance(blob, bytes)
        except CodecError:
            counted[False] += 1
    assert min(counted.values()) > 50


def test_short_messages_take_little_memory(bench: Bench) -> None:
    """Whatever a message claims; and headers that would become a million faults."""
    like = {"w": np.zeros((1000, 1000), np.float32)}
    model = 4 * 10**6
    for codec in CODECS:
        start = codec._header(like)
        if isinstance(codec, LowPrecision):
            norms = np.ones(codec._parts((10**6,)), "<f4").tobytes()
            starts = [start + codec._settings + norms + bytes([c]) for c in range(0, 256, 7)]
        elif isinstance(codec, TopK):
            starts = [start + bytes([width]) for width in range(32)]
        else:
            starts = [start]
        for begun in starts:
            for tail in (b"", b"\xff" * 5, b"\xff\xff\xff\xff\x7f", b"\0" * 100, b"\xff" * 1000):
                with pytest.raises(CodecError), memory(16 * model):
                    codec.decode(begun + tail, like)
    many = ",".join
    for header, kind in (
        (f'"features":[{many("0" for _ in range(450_000))}]', ClientInfo),
        (f'{many(f""" "{i}":0""" for i in range(90_000))}', ClientInfo),
        (f'"parts":[{many("0" for _ in range(450_000))}]', ClientInfo),
        (f'"config":[{many("[]" for _ in range(300_000))}]', JoinRequest),
        (f'"scores":{{"a":{{{many(f""" "{i}":"" """ for i in range(60_000))}}}}}', EvaluateReply),
        (f'"parts":[{many("9" * 4000 for _ in range(200))}]', TrainReply),
        (f'"round":{"9" * 900_000}', TrainReply),
        (f'"round":0.{"9" * 900_000}', TrainReply),
    ):
        due = kind.model_fields["kind"].default
        parts = "" if "parts" in header else ',"parts":[]'
        blob = raw(f'{{"experiment":"{EXPERIMENT}","kind":"{due}",{header}{parts}}}')
        with pytest.raises(CodecError), memory(30 * len(blob)), at_most(60):
            unpack(blob, kind)


@contextmanager
def memory(most: int) -> Iterator[None]:
    """Fail if more bytes than this are taken at once."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most, f"{peak / 1e6:.0f} MB"


def poisoned(codec: Codec, tree: Any, value: float) -> bytes:
    """A change that says this for one of its floats, which no honest codec writes."""
    x = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(tree))
    symbols = jax.tree.map(np.array, _symbols(codec, jax.random.key(0), x, sizes))
    floats = [s for s in jax.tree.leaves(symbols) if jnp.issubdtype(s.dtype, jnp.floating)]
    with np.errstate(over="ignore"):
        floats[0].flat[0] = value
    message = codec._header(tree) + codec.write(symbols, sizes)
    return pack(TrainReply(experiment=EXPERIMENT, round=ROUND), message)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_codec_brings_in_what_is_not_finite(bench: Bench, codec: Codec) -> None:
    """Nor what cannot be added up."""
    tree = bench.change()
    for value in (float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38):
        found = bench.read(poisoned(codec, tree, value), codec)
        assert isinstance(found, Failure), (value, found)
    assert isinstance(bench.read(poisoned(codec, tree, 0.25), codec), CheckedUpdate)


def test_answers_to_something_else_are_refused(bench: Bench) -> None:
    tree = bench.change()
    part = Float32().encode(jax.random.key(0), tree)
    good = TrainReply(experiment=EXPERIMENT, round=ROUND)
    assert isinstance(bench.read(pack(good, part), Float32()), CheckedUpdate)
    for blob, why in (
        (pack(good.model_copy(update={"experiment": "other"}), part), "another experiment"),
        (pack(good.model_copy(update={"round": ROUND - 1}), part), f"round {ROUND - 1}, not"),
        (pack(good), "expected 1 parts in the message, got 0"),
        (pack(good, part, part), "expected 1 parts in the message, got 2"),
        (pack(good, *[b""] * 9), "expected 1 parts in the message, got 9"),
        (scored(), 'expected a message of kind "train-reply", got "evaluate-reply"'),
        (pickle.dumps({"kind": "train-reply"}), "not a perfed message"),
        (os.urandom(1000), "not a perfed message"),
        (b"", "not a perfed message"),
        (MAGIC, "the message is truncated"),
        (MAGIC + b"\x02" + b"\0" * 9, "same version of perfed on all machines"),
        (raw("{}", length=3), "invalid length of the message header: 3 bytes"),
        (raw("{}", length=2**32 - 1), "invalid length of the message header: 4294967295 bytes"),
        (raw(" " * 70_000), "invalid length of the message header: 70000 bytes"),
    ):
        bench.refuses(blob, why)
    other = jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2)), tree)
    bench.refuses(changed_by(Float32(), other), "numbers, expected")
    turned = jax.tree.map(lambda leaf: leaf.T if leaf.ndim > 1 else leaf, tree)
    bench.refuses(changed_by(Float32(), turned), "other shapes")
    for codec in CODECS[1:]:
        bench.refuses(pack(good, part), "codec is 0, not", codec)
        bench.refuses(changed_by(codec, tree), f"codec is {codec.number}, not 0")
    for codec, due in ((LowPrecision(2), LowPrecision(3)), (TopK(0.1), TopK(0.2))):
        assert isinstance(bench.read(changed_by(codec, tree), due), Failure)


def test_an_iterate_is_no_way_around(bench: Bench) -> None:
    """What else a method sends is as finite, and counts for the length as well."""
    iterates = replace(bench, extra=bench.state.params)
    tree = bench.change()
    header = TrainReply(experiment=EXPERIMENT, round=ROUND)
    good = Float32().encode(jax.random.key(0), tree)
    far = Float32().encode(jax.random.key(0), jax.tree.map(lambda leaf: 1000 * leaf, tree))
    (bad,) = unpack(poisoned(Float32(), tree, float("nan")), TrainReply)[1]
    found = iterates.read(pack(header, good, good), Float32())
    assert isinstance(found, CheckedUpdate)
    long = iterates.read(pack(header, good, far), Float32())
    assert isinstance(long, CheckedUpdate)
    assert long.norm == pytest.approx(1000 * found.norm, rel=1e-5)
    iterates.refuses(pack(header, good, bad), "not finite")
    iterates.refuses(pack(header, good), "expected 2 parts in the message, got 1")


def refused(norms: list[float], before: float | None, most: float | None = None) -> list[float]:
    """Which lengths of a cohort are refused."""
    usual = typical_norm(norms, before)
    return [norm for norm in norms if NormLimit(100.0, most).check(norm, usual) is not None]


def test_a_change_a_thousand_times_too_long_is_refused() -> None:
    """Whenever there is anything to hold it against: another of the cohort, or a round before."""
    assert refused([1.0, 1000.0], None) == [1000.0]
    assert refused([1.0, 1000.0, 1.1], None) == [1000.0]
    assert refused([1000.0], 1.0) == [1000.0]
    assert refused([1.0, 1000.0], 1.0) == [1000.0]
    assert refused([1.0, 1000.0, 0.9], 1.1) == [1000.0]
    assert refused([1000.0, 1000.0, 0.9], 1.1) == [1000.0, 1000.0]
    # One alone in the first round is held against max_norm only.
    assert refused([1000.0], None) == []
    assert refused([1000.0], None, 10.0) == [1000.0]
    assert refused([9.9, 10.1], 9.9, 10.0) == [10.1]
    # Up to a hundred times is a matter of taste.
    assert refused([1.0, 99.0, 0.5], 1.0) == []


def test_a_change_that_is_nothing_is_no_measure() -> None:
    """Neither does it let a long one in, nor does it get others refused."""
    assert refused([0.0, 1.0, 1000.0], None) == [1000.0]
    assert refused([0.0, 0.0, 1.0, 1000.0], None) == [1000.0]
    assert refused([0.0, 1000.0], 1.0) == [1000.0]
    assert refused([0.0, 1.0], None) == []
    assert refused([1.0], 0.0) == []
    assert refused([0.0, 0.0], 0.0) == []
    assert typical_norm([0.0], None) is None
    # Nor does a tiny one, where there are two more.
    assert refused([1e-9, 1.0, 1.1], None) == []
    assert refused([1e-9, 1.0], 1.0) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"experiment": "other"},
        {"round": ROUND + 1},
        {"scores": {}},
        {"scores": {"global": {"accuracy": 0.5, "loss": 0.5}}},
        {"scores": {"global": {"accuracy": 0.5}, "personalized": {"accuracy": 0.5}}},
        {"scores": dict.fromkeys(("global", "personalized"), dict.fromkeys((*SCORES, "x"), 0.5))},
    ],
)
def test_other_scores_than_were_asked_for_are_refused(changes: dict[str, Any]) -> None:
    found = read_scores(scored(**changes), EXPERIMENT, ROUND, KINDS, SCORES)
    assert isinstance(found, Failure)
    good = read_scores(scored(), EXPERIMENT, ROUND, KINDS, SCORES)
    assert good == dict.fromkeys(("global", "personalized"), dict.fromkeys(SCORES, 0.5))


@pytest.mark.parametrize("value", ["1e999", "NaN", "Infinity", "1e39", "-1e300", "9" * 400, "true"])
def test_scores_are_finite(value: str) -> None:
    facts, _ = taken_apart(scored())
    facts["scores"]["global"]["loss"] = "HERE"
    blob = raw(json.dumps(facts).replace('"HERE"', value))
    assert isinstance(read_scores(blob, EXPERIMENT, ROUND, KINDS, SCORES), Failure)
    undefined = raw(json.dumps(facts).replace('"HERE"', "null"))
    found = read_scores(undefined, EXPERIMENT, ROUND, KINDS, SCORES)
    assert not isinstance(found, Failure)
    assert isnan(found["global"]["loss"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shape", "[2147483647,2147483647]"), ("shape", "[-1]"), ("shape", "[1,1,1,1,1,1,1,1,1]"),
        ("shape", "[65536,65536]"), ("dtype", '"object"'), ("dtype", '"<U9"'),
        ("train_examples", "0"),
        ("train_examples", "2147483648"), ("test_examples", "-1"), ("test_examples", "true"),
        ("features", '["\\ud800"]'), ("features", '"ab"'),
        ("name", '"a\\nb"'), ("name", '"\\u001b[2J"'), ("name", '"\\u202e"'),
        ("name", f'"{"x" * 121}"'), ("experiment", '"other"'), ("parts", "[0]"),
    ],
)  # fmt: skip
def test_introductions_are_what_the_server_can_bear(field: str, value: str) -> None:
    assert isinstance(read_client_info(introduction(), EXPERIMENT), ClientInfo)
    facts, _ = taken_apart(introduction())
    blob = raw(json.dumps(facts | {field: "HERE"}).replace('"HERE"', value))
    assert isinstance(read_client_info(blob, EXPERIMENT), Failure)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ('"round":7,"round":7', "duplicate keys"),
        ('"round":7,"more":1', "unknown key more"),
        (f'"round":{"9" * 30}', "invalid number"),
        ('"round":NaN', "invalid number NaN"),
        ('"round":1e999', "invalid number 1e999"),
        ('"round":7,"parts":[1]', "duplicate keys"),
        ('"round":7,"\\nround 7: client-0 is gone":1', "unknown key"),
        (f'"round":7,"{"x" * 5000}":1', "..."),
    ],
)
def test_odd_headers_are_named(bench: Bench, header: str, why: str) -> None:
    start = f'{{"experiment":"{EXPERIMENT}","kind":"train-reply",'
    bench.refuses(raw(f'{start}{header},"parts":[]}}'), why)
    bench.refuses(raw(f'{start}"round":7,"parts":[]}}'.encode("utf-16")), "not valid JSON")


@pytest.mark.parametrize("lengths", [[-1], [2**63], [2**31], [3], [5], [2, 3], [4, 2**40], [9, -5]])
def test_parts_must_add_up(bench: Bench, lengths: list[int]) -> None:
    facts = {"experiment": EXPERIMENT, "kind": "train-reply", "round": ROUND}
    found = bench.read(raw(json.dumps(facts | {"parts": lengths}), b"four"), Float32())
    assert isinstance(found, Failure)
    assert "parts" in found.reason


def test_what_clients_say_is_one_line_that_can_be_written() -> None:
    nasty = "so\nround 3: client-0 does not count\r\x1b[2J\x07\u2028\u202e\ud800" + "x" * 10**6
    fault = Failure(nasty)
    assert len(fault.reason) < 600
    assert fault.reason.isprintable()
    fault.reason.encode()
    assert Failure("no answer within 5 s").reason == "no answer within 5 s"
    assert one_line("Zoë  is\there", 50) == "Zoë is here"
    assert one_line("x" * 50, 50) == "x" * 50
    assert one_line("x" * 51, 50) == "x" * 50 + "..."


# Questions and answers, over a grid that does what clients want.


Handed = Callable[[Message], Iterable[Message]]


class Odd(Grid):
    """A grid whose answers are up to the test: a function of each node's question."""

    def __init__(self, answers: Mapping[int, Handed]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.answers, self.asked = answers, dict[str, Message]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(f"question {message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self.asked[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = [self.asked[name] for name in message_ids]
        return [reply for q in asked for reply in self.answers[q.metadata.dst_node_id](q)]

    def _never(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    get_nodes = get_node_ids = create_message = send_and_receive = set_run = _never

    @property
    def run(self) -> Run:
        raise NotImplementedError


def says(blob: bytes) -> Handed:
    return lambda question: [Message(record(blob), reply_to=question)]


def asked(answers: Mapping[int, Handed], timeout: float = 60.0) -> dict[int, Reply]:
    grid = Odd(answers)
    return Messenger(grid).send("train", "turn 0", dict.fromkeys(answers, b"?"), timeout)


def raises(error: Exception) -> Handed:
    def answer(question: Message) -> NoReturn:
        raise error

    return answer


REQUEST = httpx.Request("POST", "http://x")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("not enough values to unpack"), KeyError("0" * 64), TypeError("no Message"),
        AttributeError("'RecordDict' object has no attribute 'metadata'"), RecursionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), MemoryError(),
        httpx.HTTPStatusError("500", request=REQUEST, response=httpx.Response(500)),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_flower_cannot_read_is_that_clients_fault(error: Exception) -> None:
    found = asked({1: says(b"one"), 2: raises(error), 3: says(b"three")})
    assert (found[1], found[3]) == (b"one", b"three")
    assert isinstance(found[2], Failure)


def test_an_answer_that_does_not_come_in_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are announced and never sent: Flower waits for them for up to two hours."""
    monkeypatch.setattr(conversation, "_PULL_TIME", 0.1)
    heard, over = threading.Event(), threading.Event()

    def announced(question: Message) -> list[Message]:
        assert heard.wait(60)
        return list(says(b"late")(question))

    def never(question: Message) -> list[Message]:
        over.wait(60)
        return []

    grid = Odd({1: announced, 2: says(b"two"), 3: never})
    questions = dict.fromkeys((1, 2, 3), b"?")
    found = Messenger(grid).send(
        "train", "turn 0", questions, 3.0, lambda node, _: heard.set() if node == 2 else None
    )
    over.set()
    assert found == {1: b"late", 2: b"two"}


def test_nobody_answers_for_another() -> None:
    """What an answer says of itself is the client's word: of whom it is, and to what."""

    def as_another(question: Message) -> list[Message]:
        (reply,) = says(b"forged")(question)
        reply.metadata.__dict__["_reply_to_message_id"] = "question 1"
        reply.metadata.__dict__["_src_node_id"] = 1
        return [reply]

    assert asked({1: says(b"own"), 2: as_another}, 1.0) == {1: b"own"}
    assert asked({1: lambda _: [], 2: as_another}, 1.0) == {}


def test_answers_that_are_none_are_refused() -> None:
    def empty(question: Message) -> list[Message]:
        (reply,) = says(b"")(question)
        reply.__dict__["_content"] = None
        return [reply]

    def wrong(question: Message) -> list[Message]:
        return [Message(Error(2, "I\nwill \x1b[31mnot" + "!" * 10**6), reply_to=question)]

    more = RecordDict({"perfed": ConfigRecord({"blob": b"x"}), "more": ConfigRecord()})
    found = asked({1: empty, 2: wrong, 3: lambda q: [Message(more, reply_to=q)], 4: says(b"four")})
    faults = [found[node] for node in (1, 2, 3)]
    for fault in faults:
        assert isinstance(fault, Failure)
        assert fault.reason.isprintable()
        assert len(fault.reason) < 600
    assert found[4] == b"four"


def test_a_lost_superlink_is_nobodys_fault() -> None:
    with pytest.raises(LinkLostError, match="does not respond anymore"):
        asked({1: says(b"one"), 2: raises(httpx.ConnectError("refused"))})


# The client's side: a server that means ill.


OUTSIDE = [
    "../../x", "../x", "..", ".", "/etc/x", "a/b", "a\\b", "a\0b", "\0", "a\n", " ", "", "x" * 121,
    "x" * 10_000, ".hidden", "~", "~root", "a:b", "-x", "\u202e", "é", "a.b", "C:x", "\ud800",
]  # fmt: skip


READS = ("open", "os.listdir", "os.scandir")
EVENTS = (
    *READS, "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn",
    "socket.connect", "pickle.find_class",
)  # fmt: skip


@dataclass
class Watched:
    """What a process opens, starts and connects to, while it is watched; hooks stay for ever."""

    on: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in EVENTS:
            self.seen.append((event, str(arguments[0]) if arguments else ""))


@pytest.fixture(scope="module")
def watched() -> Watched:
    made = Watched()
    sys.addaudithook(made.hook)
    return made


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@dataclass
class Ground:
    """A client with its own file and home, beside things that are none of a server's business."""

    path: Path
    client: Client
    config: dict[str, Any]

    def join(self, experiment: str = EXPERIMENT, **data: Any) -> ClientInfo:
        config = self.config | {"data": self.config["data"] | data}
        return self.info(experiment, config)

    def info(self, experiment: str, config: dict[str, Any]) -> ClientInfo:
        blob = self.message(JoinRequest, experiment, {"config": config, "name": "client-0"})
        return unpack(self.client.handle(blob, "join"), ClientInfo)[0]

    def message(self, kind: Any, experiment: str, facts: dict[str, Any]) -> bytes:
        """As a server writes it that checks nothing."""
        due = kind.model_fields["kind"].default
        text = json.dumps({"experiment": experiment, "kind": due, "parts": []} | facts)
        return raw(text)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    write_clients(tmp_path / "data")
    write_clients(tmp_path / "secret", (9,), examples=50)
    config = federated_settings(Config.checked(settings(tmp_path / "data", FEDAVG)))
    client = Client(ClientDir(tmp_path / "a" / "b" / "home"), tmp_path / "data" / "client-0.npz")
    return Ground(tmp_path, client, config)


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_server_cannot_lead_a_client_out_of_its_home(ground: Ground, name: str) -> None:
    before = files(ground.path)
    with pytest.raises((CodecError, DataError)):
        ground.join(name)
    asked = {"round": 0, "number": 0, "last_accepted": -1}
    for kind, what in ((TrainRequest, "train"), (EvaluateRequest, "evaluate")):
        with pytest.raises((CodecError, DataError)):
            ground.client.handle(ground.message(kind, name, asked), what)
    assert files(ground.path) == before
    with pytest.raises((DataError, ValueError)):
        ground.client.client_dir.experiment_dir(name)


def test_a_client_reads_its_own_file_whatever_it_is_told(ground: Ground, watched: Watched) -> None:
    """And it runs nothing, and calls nobody."""
    secret = ground.path / "secret"
    orders: list[dict[str, Any]] = [
        {"root": str(secret)}, {"root": "~"}, {"root": "/"}, {"root": "\0"}, {"root": ["x"]},
        {"source": "table", "path": str(secret / "client-0.npz")},
        {"source": "digits"}, {"source": "mnist"}, {"source": "cifar10"}, {"source": "synthetic"},
        {"source": "perfed.data.files:folder"}, {"path": str(secret / "client-0.npz")},
        {"url": "https://example.org/x"}, {"features": ["/etc/passwd"]}, {"label": "../x"},
        {"part": str(secret)}, {"labels": ["0", "1", "2", "__import__('os')"]},
    ]  # fmt: skip
    configs = [ground.config | {"data": ground.config["data"] | order} for order in orders]
    configs += [
        ground.config | {"model": {"name": "os.system"}},
        ground.config | {"model": {"name": "mlr", "class": "os.system"}},
        ground.config | {"method": {"name": "__import__('os').system('x')"}},
        ground.config | {"method": {"name": "fedavg", "lr": "__import__('os')"}},
        ground.config | {"output": {"trackers": ["mlflow", "tensorboard"]}},
        ground.config | {"engine": {"name": "perfed.simulation.Vectorized"}},
        {},
        {"data": None},
    ]
    answered = 0
    for i, config in enumerate(configs):
        watched.seen.clear()
        watched.on = True
        try:
            told = ground.info(f"{EXPERIMENT}-{i}", config)
            answered += 1
            examples = (told.train_examples, told.test_examples)
            assert (told.shape, *examples) == ((6,), 20, 10)
        except (ConfigError, DataError, FieldError):
            pass
        finally:
            watched.on = False
        own = (str(ground.path / "data" / "client-0.npz"), str(ground.client.client_dir.path))
        for event, what in watched.seen:
            place = ground.path.as_posix() in what or "passwd" in what
            assert event in READS, (event, what)
            assert not place or what.startswith(own), (event, what)
    assert 3 <= answered < len(configs) - 10
    watched.on = True
    np.load(secret / "client-0.npz").close()
    watched.on = False
    assert ("open", str(secret / "client-0.npz")) in watched.seen  # it would have been seen


@dataclass
class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    path: str

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_pickle_is_not_opened_by_anyone(ground: Ground, bench: Bench) -> None:
    path = ground.path / "exploded"
    bomb = pickle.dumps(Bomb(str(path)))
    good = TrainReply(experiment=EXPERIMENT, round=ROUND)
    bench.refuses(bomb, "not a perfed message")
    bench.refuses(pack(good, bomb), "mark is 128, not 112")
    for kind in ("join", "train", "evaluate"):
        with pytest.raises(CodecError):
            ground.client.handle(bomb, kind)
    assert not path.exists()
    pickle.loads(bomb)
    assert path.exists()


@pytest.fixture
def kept(ground: Ground) -> tuple[Ground, Path, Callable[[int], bytes]]:
    """A client that has had a turn, what it keeps, and how it is asked again."""
    ground.config = federated_settings(Config.checked(settings(ground.path / "data", PFEDME)))
    ground.join()
    w = (
        Config.checked(settings(ground.path / "data", PFEDME))
        .build()
        .experiment.init_state()
        .params
    )
    model = Float32().encode(jax.random.key(0), w)

    def train(round: int) -> bytes:
        asked = TrainRequest(experiment=EXPERIMENT, round=round, number=0, last_accepted=round - 1)
        return ground.client.handle(pack(asked, model), "train")

    train(0)
    return ground, ground.client.client_dir.experiment_dir(EXPERIMENT) / STATE, train


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda whole: b"",
    lambda whole: whole[:-1],
    lambda whole: whole[:100],
    lambda whole: whole + b"x",
    lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    lambda whole: b"perfed-client-state-9 " + whole[22:],
    lambda whole: whole.partition(b"\n")[2],
    lambda whole: pickle.dumps(Bomb("/nonexistent/x")),
    lambda whole: os.urandom(500),
    lambda whole: b"\n" * 500,
]


def test_a_damaged_memory_is_refused(kept: tuple[Ground, Path, Callable[[int], bytes]]) -> None:
    _, path, train = kept
    whole = path.read_bytes()
    for damage in DAMAGES:
        path.write_bytes(damage(whole))
        with pytest.raises(DataError, match=r"client.state.*remove"):
            train(1)
    path.write_bytes(whole)
    assert isinstance(train(1), bytes)


def test_so_is_one_of_another_model(kept: tuple[Ground, Path, Callable[[int], bytes]]) -> None:
    ground, path, train = kept
    other = ClientDir(ground.path / "other")
    write_clients(ground.path / "wide", (9,))
    client = Client(other, ground.path / "wide" / "client-0.npz")
    values = settings(ground.path / "wide", PFEDME)
    hello = JoinRequest(
        experiment="wide", config=federated_settings(Config.checked(values)), name="client-0"
    )
    client.handle(pack(hello), "join")
    w = Config.checked(values).build().experiment.init_state().params
    asked = TrainRequest(experiment="wide", round=0, number=0, last_accepted=-1)
    client.handle(pack(asked, Float32().encode(jax.random.key(0), w)), "train")
    path.write_bytes((other.experiment_dir("wide") / STATE).read_bytes())
    with pytest.raises(DataError, match=r"another"):
        train(1)


def test_so_is_one_of_another_experiment(
    kept: tuple[Ground, Path, Callable[[int], bytes]],
) -> None:
    """Of the same model, so that nothing else would tell."""
    ground, path, _ = kept
    ground.join("another")
    home = ground.client.client_dir
    (home.experiment_dir("another") / STATE).write_bytes(path.read_bytes())
    first = jax.tree.map(lambda leaf: leaf[0], ground.client._loaded["another"].first_state.clients)
    home.read_records(EXPERIMENT, first)
    with pytest.raises(DataError, match=r"another experiment.*remove"):
        home.read_records("another", first)


# What the code may not even contain.


def test_nothing_here_unpickles() -> None:
    root = Path(perfed.__file__).parent
    unsafe = {
        "pickle",
        "marshal",
        "cloudpickle",
        "dill",
        "shelve",
        "joblib",
        "_pickle",
        "jsonpickle",
    }
    calls = 0
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if "flower" in path.parts and isinstance(node, ast.Import | ast.ImportFrom):
                given = [node.module] if isinstance(node, ast.ImportFrom) else []
                names = [str(name) for name in given] or [alias.name for alias in node.names]
                assert not {name.split(".")[0] for name in names} & unsafe, path
            if isinstance(node, ast.Call):
                calls += 1
                allowed = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert allowed.get("allow_pickle", "False") == "False", (path, node.lineno)
                called = ast.unparse(node.func)
                if "flower" in path.parts:
                    assert called not in ("eval", "exec", "compile", "__import__"), path
    assert calls > 1000


# Flower itself, in the hands of clients that do not keep to its rules.


class Garbled(ConfigRecord):
    """A record whose bytes are well framed, and mean nothing."""

    def deflate(self) -> bytes:
        body = b"\xff\xff\xff garbled"
        return b"ConfigRecord  %d\x00" % len(body) + body


Garbled.__qualname__ = "ConfigRecord"  # objects say their class by this


@dataclass
class FleetClient:
    """A client that speaks Flower's Fleet API by itself, with its own key, at the clients' port."""

    keys: Path
    port: int
    fleet: FleetHttpClient = field(init=False)
    id: int = field(init=False)

    def __post_init__(self) -> None:
        key = load_ssh_private_key((self.keys / "client.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.fleet = FleetHttpClient.from_server_address(
            f"{LOOPBACK}:{self.port}",
            insecure=False,
            root_certificates=str(self.keys / "ca.crt"),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )
        public = public_key_to_bytes(key.public_key())
        activate = ActivateNodeRequest(public_key=public, heartbeat_interval=300)
        self.id = self.fleet.ActivateNode(activate).node_id

    @property
    def node(self) -> Any:
        return ProtoNode(node_id=self.id)

    def pulled(self) -> list[Any]:
        return list(self.fleet.PullMessages(PullMessagesRequest(node=self.node)).messages_list)

    def question(self) -> Any:
        """The next one, as Flower hands it out."""
        found: list[Any] = []

        def came() -> bool:
            found.extend(self.pulled())
            return bool(found)

        wait(came, 60, "a question")
        return found[0].metadata

    def reply(self, question: Any, content: RecordDict, **forged: Any) -> Message:
        """An answer to a question, with whatever is forged about it."""
        now = time.time()
        facts = {
            "run_id": question.run_id, "message_id": "", "src_node_id": self.id,
            "dst_node_id": question.src_node_id, "reply_to_message_id": question.message_id,
            "group_id": question.group_id, "created_at": now,
            "ttl": question.created_at + question.ttl - now - 0.1,
            "message_type": question.message_type,
        }  # fmt: skip
        return make_message(Metadata(**facts | forged), content)

    def push(
        self, message: Message, envelope: dict[str, Any] | None = None, alone: bool = False
    ) -> None:
        """Send a message, in an envelope that may differ from it; `alone`: without its parts."""
        with no_object_id_recompute():
            tree, name = get_object_tree(message), message.object_id
            message.metadata.__dict__["_message_id"] = name
            parts = {id: part.deflate() for id, part in get_all_nested_objects(message).items()}
        proto = message_to_proto(remove_content_from_message(message))
        for key, value in (envelope or {}).items():
            setattr(proto.metadata, key, value)
        request = PushMessagesRequest(
            node=self.node, messages_list=[proto], message_object_trees=[tree]
        )
        answer = self.fleet.PushMessages(request)
        for id, contents in ({} if alone else parts).items():
            part = PushObjectRequest(
                node=self.node, run_id=proto.metadata.run_id, object_id=id,
                object_content=contents, session_id=answer.session_id,
            )  # fmt: skip
            self.fleet.PushObject(part)


@contextmanager
def fleet(path: Path) -> Iterator[tuple[Messenger, FleetClient, FleetClient]]:
    """A real SuperLink behind the clients' port, a run on it, and two clients."""
    make_keys(path / "keys", [], ["honest", "rogue"])
    keys, own = ServerKeys.read(path / "keys" / "server"), free_port()
    (path / "secret").write_bytes(b"x" * 32)
    program = Program(
        "flower-superlink",
        [
            "--host", LOOPBACK, "--port", str(own), "--isolation", "process",
            "--superexec-auth-secret-file", str(path / "secret"),
            "--disable-runtime-dependency-installation", "--enable-supernode-auth",
            "--ssl-certfile", str(keys.certificate), "--ssl-keyfile", str(keys.key),
            "--ssl-ca-certfile", str(keys.authority),
        ],
        path / "home",
        path / "log.txt",
    )  # fmt: skip
    try:
        program.wait_for_port(own)
        link = Link(own, keys.authority, b"x" * 32)
        register(link, keys.clients)
        with (
            ClientGateway(LOOPBACK, 0, f"https://{LOOPBACK}:{own}", keys) as port,
            server_grid(link, lambda: program.ended is None) as grid,
        ):
            honest, rogue = (
                FleetClient(path / "keys" / "clients" / name, port.port)
                for name in ("honest", "rogue")
            )
            yield Messenger(grid), honest, rogue
    finally:
        program.stop()


@pytest.mark.federation
def test_a_client_that_breaks_flowers_rules_is_refused(tmp_path: Path) -> None:
    """Alone: each time the other's answer is there, and the server goes on."""
    with fleet(tmp_path) as (talk, honest, rogue):

        def asked(answer: Callable[[Any], object], timeout: float = 60.0) -> Reply | None:
            def honestly() -> None:
                question = honest.question()
                honest.push(honest.reply(question, record(b"honest")))

            threads = [
                threading.Thread(target=honestly),
                threading.Thread(target=lambda: answer(rogue.question())),
            ]
            for thread in threads:
                thread.start()
            found = talk.send("train", "turn 0", {honest.id: b"?", rogue.id: b"?"}, timeout)
            for thread in threads:
                thread.join()
            assert found[honest.id] == b"honest"
            return found.get(rogue.id)

        # By the rules.
        assert asked(lambda q: rogue.push(rogue.reply(q, record(b"good")))) == b"good"
        # Parts that Flower cannot read.
        garbled = RecordDict({"perfed": Garbled({"blob": b"x"})})
        found = asked(lambda q: rogue.push(rogue.reply(q, garbled)))
        assert isinstance(found, Failure)
        assert "cannot read" in found.reason
        # An answer to one question in the envelope of an answer to another.
        found = asked(
            lambda q: rogue.push(
                rogue.reply(q, record(b"x"), reply_to_message_id="0" * 64),
                {"reply_to_message_id": q.message_id},
            )
        )
        assert isinstance(found, Failure)
        # The name of another message than the one that is sent.
        found = asked(
            lambda q: rogue.push(rogue.reply(q, record(b"y")), {"message_id": "0" * 64}), 8.0
        )
        assert not isinstance(found, bytes)
        # Parts that are announced and never sent.
        assert asked(lambda q: rogue.push(rogue.reply(q, record(b"z")), alone=True), 8.0) is None
        # And by the rules again.
        assert asked(lambda q: rogue.push(rogue.reply(q, record(b"good again")))) == b"good again"


@pytest.mark.federation
def test_a_client_cannot_give_orders_in_the_servers_name(tmp_path: Path) -> None:
    """Nor can it answer for others, or say something to the server unasked."""
    with fleet(tmp_path) as (talk, honest, rogue):
        asking = threading.Thread(
            target=talk.send, args=("train", "turn 0", {honest.id: b"?", rogue.id: b"?"}, 20.0)
        )
        asking.start()
        theirs, question = honest.question(), rogue.question()
        order = {"src_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": ""}
        for to in (honest.id, SUPERLINK_NODE_ID):
            with pytest.raises(httpx.HTTPStatusError, match="40"):
                rogue.push(rogue.reply(question, record(b"order"), dst_node_id=to, **order))
        forged = rogue.reply(theirs, record(b"forged"), src_node_id=honest.id)
        with pytest.raises(httpx.HTTPStatusError, match="40"):
            rogue.push(forged)
        assert honest.pulled() == []
        rogue.push(rogue.reply(question, record(b"own")))
        honest.push(honest.reply(theirs, record(b"own")))
        asking.join()


# A whole federation: a rogue among its clients, and others at its door.


def tampered(answer: bytes, change: Callable[[np.ndarray], np.ndarray]) -> bytes:
    """An answer with other numbers in it."""
    header, (part,) = unpack(answer, TrainReply)
    head, numbers = part[:6], np.frombuffer(part[6:], "<f4")
    return pack(header, head + change(numbers).astype("<f4").tobytes())


def restated(answer: bytes, **facts: Any) -> bytes:
    """An answer that says it is to something else."""
    header, parts = unpack(answer, TrainReply)
    return pack(header.model_copy(update=facts), *parts)


def reshaped(answer: bytes) -> bytes:
    header, _ = unpack(answer, TrainReply)
    return pack(header, Float32().encode(jax.random.key(0), {"w": jnp.ones((2, 2))}))


def unwilling(answer: bytes) -> NoReturn:
    raise RuntimeError("I will\n2026-01-01 00:00:00 round 9: client-0 does not count: \x1b[31mnot")


Lie = Callable[[bytes], bytes | RecordDict]


def lies(trap: Path) -> list[tuple[Lie, str]]:
    """What the rogue answers in each round, and what the server says of it."""
    return [
        (lambda a: tampered(a, lambda x: x * np.float32("nan")), "numbers that are not finite"),
        (reshaped, "the message has 4 numbers, expected 21"),
        (lambda a: tampered(a, lambda x: 1000 * x), "times the typical one"),
        (lambda a: os.urandom(1000), "not a perfed message"),
        (lambda a: restated(a, round=99), "its reply is of round 99, not 4"),
        (lambda a: restated(a, experiment="another"), "the message belongs to another experiment"),
        (lambda a: pickle.dumps(Bomb(str(trap))), "not a perfed message"),
        (lambda a: os.urandom(50_000_000), "not a perfed message"),
        (
            lambda a: RecordDict({**record(a), "more": MetricRecord({"x": 1})}),
            "not a perfed message",
        ),
        (lambda a: RecordDict({"perfed": Garbled({"blob": a})}), "Flower cannot read its reply"),
        (unwilling, "RuntimeError: I will 2026-01-01 00:00:00 round 9: client-0"),
    ]


def rogue(server: str, data: str, home: str, keys: str, go: str, trap: str) -> None:
    """The rogue's program: a real member of the federation, but for what it answers."""
    app, honest = ClientApp(), Client(ClientDir(Path(home)), Path(data))
    answers = [lie for lie, _ in lies(Path(trap))]

    @app.query()
    def join(message: Message, context: Context) -> Message:
        blob = honest.handle(blob_of(message.content), "join")
        return Message(record(blob), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        blob = blob_of(message.content)
        round = unpack(blob, TrainRequest)[0].round
        if round == len(answers) - 1:  # the run is not to be over before all have tried
            wait(Path(go).exists, 500, go)
        lie = answers[round](honest.handle(blob, "train"))
        content = lie if isinstance(lie, RecordDict) else record(lie)
        return Message(content, reply_to=message)

    @app.evaluate()
    def scoring(message: Message, context: Context) -> Message:
        blob = honest.handle(blob_of(message.content), "evaluate")
        facts, _ = taken_apart(blob)
        facts["scores"]["global"]["loss"] = "HERE"
        blob = raw(json.dumps(facts).replace('"HERE"', "1e999"))
        return Message(record(blob), reply_to=message)

    vars(join_module)["client_app"] = app
    vars(runtime)["public_message"] = lambda error: (
        f"{type(error).__name__}: {error}"
    )  # says what it likes
    member = join_module.JoinedClient(
        server, Path(data), ClientDir(Path(home)), ClientKeys.read(Path(keys))
    )
    member.run(lambda line: print(line, flush=True))


def without_the_rogue(values: dict[str, Any]) -> Any:
    """The model that the other two alone come to."""
    made = Config.checked(values).build().experiment
    data, state = made.device_data(), made.init_state()
    records = {i: row(state.clients, i) for i in (0, 1)}
    update = jax.jit(partial(client_update, made))
    for round in range(values["rounds"]):
        sent = broadcast(made, state)
        done = [update(data, sent, records[i], round, i) for i in (0, 1)]
        records = {i: own.record for i, own in enumerate(done)}
        mean = jax.tree.map(lambda a, b: (a + b) / 2, done[0].delta, done[1].delta)
        state = server_update(made, state, (mean, None, None), state.clients)
    return state.params


@dataclass(frozen=True)
class Caller:
    """Someone at the door: by which keys, at which port, and why it is not let in."""

    keys: Path | None
    port: int
    why: str


def callers(path: Path, port: int, plain: int) -> dict[str, Caller]:
    """Those who do not belong to the federation in a folder, or not like this."""
    make_keys(path / "others", [], ["stranger"])
    own, strangers = path / "keys" / "clients" / NAMES[0], path / "others" / "clients" / "stranger"
    mistrusts, unknown = path / "mistrusts", path / "unknown"
    for folder, key, authority in ((mistrusts, own, strangers), (unknown, strangers, own)):
        folder.mkdir()
        for name, source in (("client.key", key), ("client.pub", key), ("ca.crt", authority)):
            (folder / name).write_bytes((source / name).read_bytes())
        (folder / "client.key").chmod(0o600)
    return {
        "mistrusts": Caller(mistrusts, port, "its certificate is not of the authority"),
        "unknown": Caller(unknown, port, "it does not know this client's key"),
        "twice": Caller(own, port, "regards it as still in use"),
        "in plain": Caller(None, port, "then give --keys"),
        "to plain": Caller(own, plain, "join it with --insecure"),
    }


def call(path: Path, name: str, caller: Caller) -> Any:
    """A `perfed join` of its own."""
    keys = ["--insecure", "--name", name] if caller.keys is None else ["--keys", str(caller.keys)]
    return started(
        [
            sys.executable, "-P", "-m", "perfed", "join",
            "--server", f"{LOOPBACK}:{caller.port}", "--patience", "40",
            "--data", str(path / "data" / f"{NAMES[0]}.npz"),
            "--client-dir", str(path / "homes" / name), *keys,
        ],
        path / f"{name}.log",
    )  # fmt: skip


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *children(pid)]


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process and its children can be reached."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in family(pid)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def quiet(pid: int) -> list[str]:
    """Flower's programs among a process's children, all of which must keep to themselves."""
    found = []
    for process in children(pid):
        program = next((w for w in process.cmdline() if w.startswith("flower-")), None)
        if program is not None:
            environment = process.environ()
            assert environment["FLWR_TELEMETRY_ENABLED"] == "0", program
            assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1", program
            found.append(program)
    return found


@dataclass(frozen=True)
class Operator:
    """Someone who would operate the SuperLink, at a port that may or may not be its own."""

    port: int
    client: httpx.Client

    def post(self, call: str, message: Any) -> httpx.Response:
        return self.client.post(
            f"https://{LOOPBACK}:{self.port}/v1/control/{call}",
            content=message.SerializeToString(),
            headers={"content-type": "application/protobuf"},
        )

    def known(self) -> tuple[int, int]:
        """How many runs and keys there are."""
        runs = ListRunsResponse.FromString(self.post("list-runs", ListRunsRequest()).content)
        nodes = ListNodesResponse.FromString(self.post("list-nodes", ListNodesRequest()).content)
        return len(runs.run_dict), len(nodes.nodes_info)


def new_run() -> Any:
    """Code for all clients to run."""
    about = b"""
        [project]
        name = "x"
        version = "1.0.0"
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "p"
        components = { serverapp = "x.a:app", clientapp = "x.a:app" }
        config = {}
    """
    fab, _ = build_fab_from_files({"pyproject.toml": about, "x/__init__.py": b"", "x/a.py": b""})
    return StartRunRequest(fab=Fab(hash_str=hashlib.sha256(fab).hexdigest(), content=fab))


def check_nobody_operates(run: Federation, own: int) -> None:
    """Orders are refused at the clients' port, and would be taken at the SuperLink's own."""
    context = ssl.create_default_context(cafile=run.path / "keys" / "ca.crt")
    public = public_key_to_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())
    orders = [
        ("start-run", new_run()),
        ("register-node", RegisterNodeRequest(public_key=public)),
    ]
    with httpx.Client(verify=context, timeout=60) as client:
        outside, inside = Operator(run.port, client), Operator(own, client)
        before = inside.known()
        for name, order in orders:
            answer = outside.post(name, order)
            assert (name, answer.status_code, answer.content) == (name, 404, b"")
        assert inside.known() == before
        for name, order in orders:
            assert (name, inside.post(name, order).status_code) == (name, 200)
        assert inside.known() == (before[0] + 1, before[1] + 1)


# A line of the log, by which an honest client was refused, late or gone.
DISTURBED = (
    r"\S+ \S+ (round \d+: no (update|scores) from )?client-[01](:| (disconnected|cannot|has not))"
)


@pytest.mark.federation
def test_a_federation_under_attack_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    path, trap, go = tmp_path / "run", tmp_path / "exploded", tmp_path / "go"
    due = [said for _, said in lies(trap)]
    more: dict[str, Any] = {
        "rounds": len(due),
        "eval_every": len(due),
        "federation": {"timeout": 550.0},
    }
    with (
        federation(path, PFEDME, **more) as run,
        federation(tmp_path / "plain", FEDAVG, plain=True) as plain,
    ):
        run.serve()
        for name in NAMES[:2]:
            run.join(name)
        member = [
            f"{LOOPBACK}:{run.port}",
            path / "data" / "client-2.npz",
            path / "homes" / "rogue",
        ]
        keys = path / "keys" / "clients" / NAMES[2]
        command = [sys.executable, __file__, *member, keys, go, trap]
        run.members[NAMES[2]] = started([str(word) for word in command], path / "rogue.log")
        plain.serve()
        run.wait_for("round 1: no update from client-2", 300)
        assert run.server is not None

        # While it runs: where it can be reached, and what it tells others.
        ports = listening(run.server.pid)
        assert {ip for ip, _ in ports} == {LOOPBACK}
        (own,) = {port for _, port in ports} - {run.port}
        assert quiet(run.server.pid) == ["flower-superlink"]
        for name in NAMES[:2]:
            assert {ip for ip, _ in listening(run.members[name].pid)} == {LOOPBACK}
            assert quiet(run.members[name].pid) == ["flower-supernode"]
        check_nobody_operates(run, own)

        # Those at the door.
        plain.wait_for("waiting for clients", 120)
        at_the_door = callers(path, run.port, plain.port)
        tried = {name: call(path, name, caller) for name, caller in at_the_door.items()}
        try:
            for name, process in tried.items():
                assert process.wait(300) == 1, run.log_of(name)
        finally:
            for process in tried.values():
                stop(process)
        for name, caller in at_the_door.items():
            said = run.log_of(name)
            assert caller.why in said, said
            assert "for 40 s" in said, said
            assert "Traceback" not in said, said

        assert run.server.poll() is None
        go.touch()
        run.finish(300)

    for round, said in enumerate(due):
        line = next(x for x in run.log.splitlines() if f"{round}: no update from client-2" in x)
        assert said in line, line
    ended = [line for line in run.log.splitlines() if re.match(DISTURBED, line)]
    assert not ended
    assert "\x1b" not in run.log
    assert run.log.count("no scores from client-2") == 2
    assert not trap.exists()
    assert "Traceback" not in (path / "server.log").read_text()
    assert distance(run.model(), without_the_rogue(run.values)) < 1e-6
    summary = run.summary()
    assert summary["traffic"]["client_uplink_bytes"][2] == 0
    loss = summary["global"]["loss"]
    assert loss["clients"][2] is None
    assert loss["mean"] == pytest.approx(sum(loss["clients"][:2]) / 2)


# What Flower's SuperNode says where one side has keys and the other has none.
NO_TLS_THERE = """
ERROR :     SSL/TLS handshake error detected.
Failed to initialize the connection to the SuperLink.
[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)
"""
TLS_THERE = """
WARNING :   Connection attempt failed, retrying in 0.46 seconds
WARNING :   Connection attempt failed, retrying in 2.54 seconds
"""


@pytest.mark.parametrize(("said", "remedy"), [(NO_TLS_THERE, "--insecure"), (TLS_THERE, "--keys")])
def test_keys_on_one_side_only_are_named(said: str, remedy: str) -> None:
    """A client without keys at a server with them, and the other way round."""
    assert remedy in join_module._cause(said)


def test_so_are_clocks_that_differ() -> None:
    """A signature from the future is refused like one of a node that is not known any more."""
    assert "clock" in join_module._cause(
        "ERROR : Client error '401 Unauthorized' for url 'https://x/'"
    )


if __name__ == "__main__":
    rogue(*sys.argv[1:])
