"""The two Flower apps: what the server does in a run, and what a client does with a message."""

from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from perfed.federation.client.client import Client
from perfed.federation.client.client_dir import Home
from perfed.federation.transport.messenger import TYPES, blob_of, record

client_app = ClientApp()


@lru_cache(maxsize=1)
def _client(home: str, data: str, name: str) -> Client:
    """The client of this process, with its data and programs loaded."""
    return Client(Home(Path(home)), Path(data), name)


def _answered(kind: str, message: Message, context: Context) -> Message:
    settings = {key: str(context.node_config.get(key, "")) for key in ("home", "data", "name")}
    blob = _client(**settings).answer(blob_of(message.content), kind)
    return Message(record(blob), reply_to=message)


@client_app.query()
def hello(message: Message, context: Context) -> Message:
    """Tell what the data look like from outside."""
    return _answered("hello", message, context)


@client_app.train()
def turn(message: Message, context: Context) -> Message:
    """Take a turn."""
    return _answered("turn", message, context)


@client_app.evaluate()
def scoring(message: Message, context: Context) -> Message:
    """Score both models."""
    return _answered("scoring", message, context)


assert set(TYPES) == {"hello", "turn", "scoring"}
