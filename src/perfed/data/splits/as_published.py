"""MNIST's rows as the authors of pFedMe assigned them, errors included: for their Table 1 alone.

Their generator of May 2020 is meant to cut each class into pieces, one for each client that holds
it. But it counts the rows it has used in an array left over from before, the mask of class 9, which
holds nothing but 0 and 1, and slices `rows[start:n]`: every piece begins with the first or second
row of its class. So most of a client's rows are other clients' rows as well, most of those it is
scored on are rows that others train on (never itself), and most of the set is not used. Where a
piece begins with the second row it is one short, the labels after it move up, and a few are wrong.
"""

import random

import numpy as np
from jaxtyping import Int

from perfed.core.errors import DataError
from perfed.data.splits.base import Part

CLIENTS, CLASSES = 20, 10

CAUTION = (
    'overlap = "as-published": clients share most of their rows, and most rows that a client is '
    "scored on are in another client's training data, as in pFedMe's published experiment; scores "
    "are higher than on separate rows, and only comparable with that paper's table"
)


def pfedme_parts(y: Int[np.ndarray, " examples"]) -> tuple[list[Part], list[Part]]:
    """The training rows and the held-out rows of each client.

    Args:
        y: the labels, 0 to 9, in the order in which the set is published: training rows first.
    """
    rows = [np.flatnonzero(y == label) for label in range(CLASSES)]
    # Client u holds labels u and u + 1, so that four clients hold each.
    held = [(client + j) % CLASSES for client in range(CLIENTS) for j in range(2)]
    sizes = np.random.RandomState(1)
    pieces = [class_pieces(len(own), held.count(label), sizes) for label, own in enumerate(rows)]
    # Read out slot by slot across the classes, though clients take them in another order.
    in_order = iter([piece for slot in zip(*pieces, strict=True) for piece in slot])
    start = y[:CLASSES] == CLASSES - 1
    shuffled = random.Random(1)
    train, test = [], []
    for client in range(CLIENTS):
        own_rows: list[int] = []
        labels: list[int] = []
        for label in held[2 * client : 2 * client + 2]:
            size = next(in_order)
            if int(start[label]) + size < len(rows[label]):
                own_rows += rows[label][int(start[label]) : size].tolist()
                labels += [label] * size
                start[label] = True  # all that a mask can count
        pairs = list(zip(own_rows, labels, strict=False))
        shuffled.shuffle(pairs)
        whole = Part(*np.array(pairs, int).reshape(-1, 2).T)
        cut = int(0.75 * len(pairs))
        train.append(Part(whole.row[:cut], whole.label[:cut]))
        test.append(Part(whole.row[cut:], whole.label[cut:]))
    if not all(len(part.row) for part in [*train, *test]):
        raise DataError(
            f'overlap = "as-published": {len(y)} examples of {CLASSES} classes are too few; it is '
            "meant for MNIST"
        )
    return train, test


def class_pieces(total: int, count: int, rng: np.random.RandomState) -> list[int]:
    """The sizes of a class's pieces: all but the last 1/(count + 1) to 1/2 of what is left."""
    pieces: list[int] = []
    for _ in range(count - 1):
        left = total - sum(pieces)
        low, high = left // (count + 1), left // 2
        if low < 1 or high <= low:
            raise DataError(
                f"the pFedMe split cuts a class of {total} examples into {count} pieces, and these "
                "are too few; use fewer clients"
            )
        pieces.append(int(rng.randint(low, high)))
    return [*pieces, total - sum(pieces)]
