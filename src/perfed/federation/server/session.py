"""A federated run on a grid: the folder, the clients, the rounds, the results."""

from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import Grid

from perfed.federation.protocol.messages import client_config
from perfed.federation.server.clients import RETURN, ClientManager, Log
from perfed.federation.server.engine import RemoteEngine, RemoteEvaluator
from perfed.federation.server.plan import FederationPlan
from perfed.federation.transport.messenger import Messenger
from perfed.runs import run_dir
from perfed.runs.recording import Recording
from perfed.runs.trackers import trackers_of
from perfed.training import Progress, Result


def run_federation(
    grid: Grid,
    folder: Path,
    keys: dict[str, bytes] | None,
    log: Log,
    on_progress: Callable[[Progress], None] | None = None,
    on_clients: Callable[[ClientManager], None] = lambda _: None,
) -> Result:
    """Run a federation to its end, from its last checkpoint if it has one.

    Args:
        grid: what clients are reached over.
        folder: the run's, with its plan in it.
        keys: everyone's public key; None: there are none.
        log: told what an operator should know.
        on_progress: told how far the run has come.
        on_clients: given the clients, to watch them.
    """
    plan = FederationPlan.read(folder)
    config = plan.config()
    terms = config.federation
    # Keys may have been added since: clients have the numbers that they had at first.
    clients = ClientManager(
        Messenger(grid),
        plan.experiment,
        client_config(plan.settings),
        plan.names,
        keys,
        terms.timeout,
        log,
    )
    on_clients(clients)
    if plan.infos:
        clients.resume(plan.infos)
        clients.gather(terms.least(config.build_preset().cohort), everyone=RETURN)
    else:
        clients.gather(plan.clients)
        clients.begin()
        plan = plan.settled(clients.names, clients.infos)
    labels = config.data.settings().get("labels")
    federation = clients.federation(None if labels is None else tuple(labels))
    remote = RemoteEngine(config.build_experiment(federation), clients, terms)
    plan.write(folder)
    recording = Recording(
        config,
        folder,
        remote,
        trackers_of(config.output.trackers),
        evaluator=RemoteEvaluator(remote, config.eval_training, config.rounds),
    )
    if not (folder / run_dir.CONFIG).exists():
        recording.begin_folder()
    return recording.train(on_progress, log)
