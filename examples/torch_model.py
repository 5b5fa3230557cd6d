"""A PyTorch module of your own, fitted to each client; then a client's weights in PyTorch again.

Needs "perfed[torch]". Run it with: python examples/torch_model.py
"""

import torch
from torch import nn

import perfed

CLIENT = 3


class DigitNet(nn.Module):
    """An ordinary module, as for any PyTorch training loop: batch normalization, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of images with channels first."""
        return self.head(self.features(x))


def main(rounds: int = 20) -> tuple[perfed.Result, DigitNet]:
    """Train, and put what one client ends with into a fresh module."""
    # From the class, weights are drawn by the run's seed; from a module, they are the module's.
    # Images of perfed have channels last, and PyTorch's layers want them first.
    model = perfed.from_torch(DigitNet, input_layout="channels-last")
    federation = perfed.load("digits", clients=20)
    method = perfed.FedAvg(lr=0.1, tau=10, batch=20, adapt_batch=20)
    # Normalization stays with each client, which is FedBN.
    result = perfed.simulate(
        federation, model, method, rounds=rounds, cohort=10, batch_norm="personal"
    )
    accuracy = result.scores["personalized"].accuracy
    print(f"accuracy after {rounds} rounds: mean {accuracy.mean():.1%}, worst {accuracy.min():.1%}")

    own = DigitNet()
    own.load_state_dict(result.personal_module(CLIENT).state_dict())
    own.eval()
    x, y = federation.test.client(CLIENT)
    x = federation.scale(x, CLIENT)  # pixels from 0 to 1, as the model was trained on
    with torch.no_grad():
        predicted = own(torch.tensor(x).movedim(-1, 1)).argmax(1)
    share = (predicted == torch.tensor(y)).float().mean().item()
    print(f"client {CLIENT}: {accuracy[CLIENT]:.1%} by perfed, {share:.1%} by its PyTorch module")
    return result, own


if __name__ == "__main__":
    main()
