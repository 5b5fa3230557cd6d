"""Flower's simulation: a round is one of its `FedAvg` strategy, ten messages to clients and back.

Ray actors with a core and a thread each do the clients' work, the eager loop of bench/eager.py; an
actor has all clients' data in memory. Ray listens on the loopback interface only; no logging.
`run_simulation` is used, not `flwr run`: it can be driven from here, and does the same work.
"""

# mypy: ignore-errors

import logging
import os
import time
from functools import cache
from importlib.metadata import version
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import flwr.simulation
import numpy as np
import ray
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from bench import eager
from bench.peers import common

client_app = ClientApp()


@cache
def data() -> eager.Clients:
    """All clients' examples, once an actor."""
    torch.set_num_threads(1)
    x, y = common.clients()
    return eager.Clients([torch.from_numpy(a) for a in x], [torch.from_numpy(a) for a in y])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's turn."""
    examples, client = data(), int(context.node_config["partition-id"])
    method: Any = SimpleNamespace(tau=common.TAU, lr=common.RATE, batch=common.BATCH)
    w = [torch.from_numpy(a.copy()) for a in message.content["arrays"].to_numpy_ndarrays()]
    w = eager.fedavg(method, examples, client, w)
    content = RecordDict({
        "arrays": ArrayRecord([a.numpy() for a in w]),
        "metrics": MetricRecord({"num-examples": common.SIZE, "gradients": common.TAU}),
    })  # fmt: skip
    return Message(content, reply_to=message)


def total(replies: list[RecordDict], _: str) -> MetricRecord:
    """Of the gradients that the clients say they have computed."""
    return MetricRecord({"gradients": sum(r["metrics"]["gradients"] for r in replies)})


def build(x: common.Floats, y: common.Labels) -> common.Contestant:
    """A simulation in a thread, whose server only lends its grid."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: Queue[Grid] = Queue()
    over = Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        grids.put(grid)
        over.wait()

    started = {
        "num_cpus": common.threads(), "_node_ip_address": "127.0.0.1", "include_dashboard": False,
        "logging_level": logging.ERROR, "log_to_driver": False,
    }  # fmt: skip
    settings = {"init_args": started, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    simulation = Thread(
        target=flwr.simulation.run_simulation,
        args=(server_app, client_app, common.CLIENTS),
        kwargs={"backend_config": settings},
    )
    simulation.start()
    grid = grids.get(timeout=300)
    while len(list(grid.get_node_ids())) < common.CLIENTS:
        time.sleep(0.05)  # the strategy's part is of those that are there when it is asked
    part = common.COHORT / common.CLIENTS
    strategy = FedAvg(part, 0.0, train_metrics_aggr_fn=total, min_available_nodes=common.CLIENTS)
    arrays = ArrayRecord(common.first_weights())
    done = 0

    def rounds(n: int) -> None:
        nonlocal arrays, done
        result = strategy.start(grid, arrays, n)
        arrays = result.arrays
        done += sum(int(m["gradients"]) for m in result.train_metrics_clientapp.values())

    def weights() -> common.Weights:
        return [np.asarray(a) for a in arrays.to_numpy_ndarrays()]

    def close() -> None:
        over.set()
        simulation.join()

    versions = f"{version('flwr')}, Ray {ray.__version__}, torch {torch.__version__}"
    return common.Contestant(versions, rounds, weights, lambda: done, close)


if __name__ == "__main__":
    # By its name, so that actors import this module, and keep its data, instead of being sent it.
    from bench.peers import flower_worker

    common.serve("flower", flower_worker.build, common.threads())
