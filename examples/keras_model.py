"""A Keras model of your own, fitted to each client; then a client's weights in Keras again.

Needs "perfed[keras]". Run it with: python examples/keras_model.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported

from typing import Any

import keras
import numpy as np

import perfed

CLIENT = 3


def network() -> Any:
    """An ordinary Keras model; it gives logits."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def main(rounds: int = 20) -> tuple[perfed.Result, Any]:
    """Train, and give what one client ends with as a Keras model."""
    federation = perfed.load("digits", clients=20)
    # Per-FedAvg: a start that becomes good after a step on a client's own data.
    method = perfed.PerFedAvg(variant="hf", alpha=0.1, beta=0.1, tau=10, batch=20)
    result = perfed.simulate(
        federation, perfed.from_keras(network()), method, rounds=rounds, cohort=10
    )
    for kind, scores in result.scores.items():
        values = scores.accuracy
        print(f"{kind:>12} models: mean {values.mean():.1%}, worst {values.min():.1%}")

    own = result.personal_module(CLIENT)  # own.save("client.keras") keeps it
    x, y = federation.test.client(CLIENT)
    x = federation.scale(x, CLIENT)  # pixels from 0 to 1, as the model was trained on
    share = np.mean(np.argmax(own.predict(x, verbose=0), axis=1) == y)
    by_perfed = result.scores["personalized"].accuracy[CLIENT]
    print(f"client {CLIENT}: {by_perfed:.1%} by perfed, {share:.1%} by its Keras model")
    return result, own


if __name__ == "__main__":
    main()
