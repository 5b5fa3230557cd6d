"""A Flax NNX module of your own, fitted to each client; then a client's weights in NNX again.

Needs "perfed[nnx]". Run it with: python examples/nnx_model.py
"""

import jax
import numpy as np
from flax import nnx

import perfed

CLIENT = 3


class DigitNet(nnx.Module):
    """An ordinary NNX module, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16 * 4 * 4, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images with channels last."""
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def main(rounds: int = 20) -> tuple[perfed.Result, DigitNet]:
    """Train, and give what one client ends with as an NNX module."""
    federation = perfed.load("digits", clients=20)
    # pFedMe: a personal model for each client, tied to the global one.
    method = perfed.PFedMe(lam=15.0, eta=0.03, inner_lr=0.05, local_rounds=10, batch=20)
    result = perfed.simulate(
        federation, perfed.from_nnx(DigitNet(nnx.Rngs(0))), method, rounds=rounds, cohort=10
    )
    for kind, scores in result.scores.items():
        values = scores.accuracy
        print(f"{kind:>12} models: mean {values.mean():.1%}, worst {values.min():.1%}")

    own = result.personal_module(CLIENT)
    own.eval()  # no dropout
    x, y = federation.test.client(CLIENT)
    x = federation.scale(x, CLIENT)  # pixels from 0 to 1, as the model was trained on
    share = np.mean(np.argmax(own(x), axis=1) == y)
    by_perfed = result.scores["personalized"].accuracy[CLIENT]
    print(f"client {CLIENT}: {by_perfed:.1%} by perfed, {share:.1%} by its NNX module")
    return result, own


if __name__ == "__main__":
    main()
