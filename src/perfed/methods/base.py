"""The contract of a federated method: a few small pure functions, called by every engine alike.

A round is always the same sentence. The server broadcasts the shared parameters, and `broadcast`;
each client of the cohort makes a `local_update` on its own data; the update pipeline carries what
changed; `server_update` takes the mean. A client that wants its own model calls `personalize`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from jaxtyping import Array, Int, PRNGKeyArray

from perfed.core.objective import BatchSize, Objective
from perfed.core.task import Task
from perfed.core.trees import Params, Path, tree_add
from perfed.methods.settings import check_settings, settings_tree

ClientState: TypeAlias = Any  # a pytree of arrays, or None
ServerState: TypeAlias = Any
Extra: TypeAlias = Any


class RoundContext(NamedTuple):
    """What a client, or the server, knows of the round it is in.

    Attributes:
        round: the round's number, 0 for the first (k in Per-FedAvg, t in pFedMe).
        key: its own randomness in this round.
        cohort_key: randomness that the whole cohort shares in this round.
        cohort: how many clients take part in a round.
        clients: how many clients there are.
    """

    round: Int[Array, ""]
    key: PRNGKeyArray
    cohort_key: PRNGKeyArray
    cohort: int
    clients: int


class Received(NamedTuple):
    """What a client has when its local update begins.

    Attributes:
        params: the whole model: the leaves that the server sent, and the client's personal ones.
        extra: what else the server broadcasts (`Method.broadcast`).
    """

    params: Params
    extra: Extra = None


class LocalUpdate(NamedTuple):
    """What a client ends with.

    Attributes:
        params: its local model. Of shared leaves the server gets the difference to those it sent;
            personal leaves stay with the client.
        client_state: what the client keeps for its next round.
        extra: what is sent beside the difference, a tree of floats.
    """

    params: Params
    client_state: ClientState = None
    extra: Extra = None


class Method(ABC):
    """A federated method: a frozen dataclass made by the decorator `method`.

    What a method does not say has a default that makes it FedAvg's.
    """

    name: ClassVar[str] = ""
    # Whether the server's model means something by itself. Where leaves are personal it does not.
    has_global_model: ClassVar[bool] = True
    # Settings that are step sizes of local updates, which the sharpest curvature limits.
    step_sizes: ClassVar[tuple[str, ...]] = ()
    # Of those whose steps hold a model to another, the weight of that penalty: it adds curvature.
    penalties: ClassVar[Mapping[str, str]] = {}
    # The setting that counts the steps of a local update.
    local_steps: ClassVar[str] = ""
    # Settings of `personalize`: its step size, and how many steps it takes.
    adapt_step_size: ClassVar[str] = ""
    adapt_work: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_settings(self)
        self.check()

    def check(self) -> None:  # noqa: B027
        """Raise `FieldError` for settings that are invalid together; types are checked already."""

    def check_task(self, task: Task, params: Params, classes: int | None) -> None:  # noqa: B027
        """Raise `FieldError` for a model or labels that the method is not for.

        Args:
            task: model and loss.
            params: the shapes of the model's parameters.
            classes: how many classes the labels are of; None: they are numbers.
        """

    def is_shared(self, path: Path) -> bool:
        """Whether the leaf at this place is the server's too; if not, it never leaves a client."""
        return True

    def init_client_state(self, params: Params) -> ClientState:
        """What a client keeps before its first round, given the first model."""
        return None

    def init_server_state(self, params: Params) -> ServerState:
        """What the server keeps beside the shared parameters, given the first of those."""
        return None

    def broadcast(self, server_state: ServerState) -> Extra:
        """What the server sends beside the shared parameters, a tree of floats; None: nothing."""
        return None

    @abstractmethod
    def local_update(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> LocalUpdate:
        """One client's work in a round."""

    def server_update(
        self,
        params: Params,
        server_state: ServerState,
        mean_delta: Params,
        mean_extra: Extra,
        context: RoundContext,
    ) -> tuple[Params, ServerState]:
        """The server's next parameters and state, from means over the cohort.

        By default the mean delta is added.
        """
        return tree_add(params, mean_delta), server_state

    def personalize(
        self,
        objective: Objective,
        received: Received,
        client_state: ClientState,
        context: RoundContext,
    ) -> Params:
        """The client's own model: by default the one that it has received."""
        return received.params

    def gradient_count(self, size: int) -> int:
        """How many gradients of one example a local update takes, for a client of so many."""
        return self.step_count * batch_examples(getattr(self, "batch", 1), size)

    @property
    def step_count(self) -> int:
        """The steps of a local update; 1 if the method does not say."""
        return int(getattr(self, self.local_steps, 1))

    @property
    def adapt_count(self) -> int:
        """The steps of `personalize`; those of a local update if the method does not say."""
        if self.adapt_work:
            return int(getattr(self, self.adapt_work) or 0)
        return 0 if type(self).personalize is Method.personalize else self.step_count


def batch_examples(batch: BatchSize, size: int) -> int:
    """How many examples a batch has, for a client of so many."""
    return size if isinstance(batch, str) else batch


_Class = TypeVar("_Class", bound=Method)


@dataclass_transform(frozen_default=True)
def method(name: str) -> Callable[[type[_Class]], type[_Class]]:
    """Make a class a method with a name: a frozen dataclass and a pytree (`settings_tree`).

    Each of its settings becomes a key of `[method]` in the configuration.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        made = settings_tree(cls)
        made.name = name
        return made

    return decorate
