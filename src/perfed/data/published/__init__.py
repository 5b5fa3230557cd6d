"""Published data sets, read from their original files."""

from perfed.data.published.download import PublishedSet, describe_location
from perfed.data.published.heart import heart
from perfed.data.published.images import cifar10, digits, fashion_mnist, mnist, mnist_writers
from perfed.data.published.sets import CIFAR10, FASHION_MNIST, MNIST, MNIST_WRITERS, SHAKESPEARE
from perfed.data.published.text import shakespeare

__all__ = [
    "available",
    "cifar10",
    "digits",
    "fashion_mnist",
    "heart",
    "mnist",
    "mnist_writers",
    "shakespeare",
]

# The published sets that each source is read from.
NEEDS: dict[str, tuple[PublishedSet, ...]] = {
    "digits": (),
    "heart": (),
    "mnist": (MNIST,),
    "fashion-mnist": (FASHION_MNIST,),
    "cifar10": (CIFAR10,),
    "mnist-writers": (MNIST, MNIST_WRITERS),
    "shakespeare": (SHAKESPEARE,),
}


def available(source: str) -> str | None:
    """Where a source's files are on this machine, as text; None if it is not published data."""
    return describe_location(NEEDS[source]) if source in NEEDS else None
