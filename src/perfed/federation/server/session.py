"""A federated run on a Flower grid."""

from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import Grid

from perfed.federation.protocol.messages import client_config
from perfed.federation.server.clients import RECONNECT_TIME, ClientManager, Log
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
    """Run a federation to its end, from its last checkpoint if there is one.

    Args:
        grid: connects to the clients.
        folder: the run's, with its plan.
        keys: the clients' public keys; None: there are none.
        log: called with messages for the operator.
        on_progress: called with the progress.
        on_clients: called with the clients once, to watch them.
    """
    plan = FederationPlan.read(folder)
    config = plan.config()
    settings = config.federation
    # Names from the plan: clients keep their numbers when keys are added later.
    clients = ClientManager(
        Messenger(grid),
        plan.experiment,
        client_config(plan.settings),
        plan.names,
        keys,
        settings.timeout,
        log,
    )
    on_clients(clients)
    if plan.infos:
        clients.resume(plan.infos)
        clients.wait_for(settings.least(config.build_preset().cohort), everyone=RECONNECT_TIME)
    else:
        clients.wait_for(plan.clients)
        clients.start()
        plan = plan.with_clients(clients.names, clients.infos)
    labels = config.data.settings().get("labels")
    federation = clients.federation(None if labels is None else tuple(labels))
    remote = RemoteEngine(config.build_experiment(federation), clients, settings)
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
