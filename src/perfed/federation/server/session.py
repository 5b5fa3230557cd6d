"""A federated run on a grid: the folder, the clients, the rounds, the results."""

from collections.abc import Callable
from pathlib import Path

from flwr.serverapp import Grid

from perfed.federation.protocol.messages import without_terms
from perfed.federation.server.clients import RETURN, Clients, Say
from perfed.federation.server.engine import Remote, RemoteScorer
from perfed.federation.server.plan import Plan
from perfed.federation.transport.messenger import Conversation
from perfed.runs import run_dir
from perfed.runs.recording import Recording
from perfed.runs.trackers import observers_of
from perfed.training.trainer import Progress, Result


def run_federation(
    grid: Grid,
    folder: Path,
    keys: dict[str, bytes] | None,
    say: Say,
    on_progress: Callable[[Progress], None] | None = None,
    on_clients: Callable[[Clients], None] = lambda _: None,
) -> Result:
    """Run a federation to its end, from its last checkpoint if it has one.

    Args:
        grid: what clients are reached over.
        folder: the run's, with its plan in it.
        keys: everyone's public key; None: there are none.
        say: told what an operator should know.
        on_progress: told how far the run has come.
        on_clients: given the clients, to watch them.
    """
    plan = Plan.read(folder)
    config = plan.config()
    terms = config.federation
    # Keys may have been added since: clients have the numbers that they had at first.
    clients = Clients(
        Conversation(grid),
        plan.experiment,
        without_terms(plan.settings),
        plan.names,
        keys,
        terms.timeout,
        say,
    )
    on_clients(clients)
    if plan.told:
        clients.take_up(plan.told)
        clients.gather(terms.least(config.build_recipe().cohort), everyone=RETURN)
    else:
        clients.gather(plan.clients)
        clients.settle()
        plan = plan.settled(clients.names, clients.told)
    labels = config.data.settings().get("labels")
    federation = clients.federation(None if labels is None else tuple(labels))
    remote = Remote(config.build_setup(federation), clients, terms)
    plan.write(folder)
    recording = Recording(
        config,
        folder,
        remote,
        observers_of(config.output.trackers),
        scorer=RemoteScorer(remote, config.score_training, config.rounds),
    )
    if not (folder / run_dir.CONFIG).exists():
        recording.begin_folder()
    return recording.run(on_progress, say)
