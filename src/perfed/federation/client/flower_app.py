"""The Flower app of a client."""

from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from perfed.federation.client.client import Client
from perfed.federation.client.client_dir import ClientDir
from perfed.federation.transport.messenger import TYPES, blob_of, record

client_app = ClientApp()


@lru_cache(maxsize=1)
def _client(client_dir: str, data: str, name: str, factories: str) -> Client:
    """The client of this process, which keeps its data and programs loaded."""
    return Client(ClientDir(Path(client_dir)), Path(data), name, tuple(factories.split()))


def _reply(kind: str, message: Message, context: Context) -> Message:
    settings = {
        key: str(context.node_config.get(key, ""))
        for key in ("client_dir", "data", "name", "factories")
    }
    blob = _client(**settings).handle(blob_of(message.content), kind)
    return Message(record(blob), reply_to=message)


@client_app.query()
def join(message: Message, context: Context) -> Message:
    """Describe the data."""
    return _reply("join", message, context)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Make a local update."""
    return _reply("train", message, context)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the models."""
    return _reply("evaluate", message, context)


assert set(TYPES) == {"join", "train", "evaluate"}
