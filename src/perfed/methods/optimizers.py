"""Optimizers of local steps and of the server: optax's, by name."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias, final

from jaxtyping import Array

from perfed.core.errors import require
from perfed.core.trees import Params, sgd_step
from perfed.methods.settings import Rate, Weight, check_settings, settings_tree

OptimizerState: TypeAlias = Any


class Optimizer(ABC):
    """A rule for steps params <- params - lr * direction, from the gradients so far."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_settings(self)
        self.check()

    def check(self) -> None:  # noqa: B027
        """Raise `FieldError` for settings that are invalid."""

    @abstractmethod
    def transformation(self) -> Any:
        """Optax's transformation of gradients into directions; None: the gradient itself."""

    def init(self, params: Params) -> OptimizerState:
        """What is kept from step to step."""
        rule = self.transformation()
        return None if rule is None else rule.init(params)

    def step(
        self, params: Params, grad: Params, state: OptimizerState, lr: float | Array
    ) -> tuple[Params, OptimizerState]:
        """One step."""
        rule = self.transformation()
        if rule is None:
            return sgd_step(params, lr, grad), state
        direction, state = rule.update(grad, state, params)
        return sgd_step(params, lr, direction), state


@final
@settings_tree
class SGD(Optimizer):
    """Stochastic gradient descent; with momentum, v <- momentum v + g and steps along v.

    Attributes:
        momentum: 0 is plain SGD, as in the papers.
        nesterov: steps along g + momentum v instead (a setting of `momentum` above 0).
        weight_decay: added to the gradient as weight_decay * params.
    """

    name: ClassVar[str] = "sgd"

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: Weight = 0.0

    def check(self) -> None:
        """A momentum below 1."""
        _require_decay("momentum", self.momentum)
        good = self.momentum > 0 or not self.nesterov
        require(good, "nesterov", self.nesterov, "needs a momentum greater than 0")

    def transformation(self) -> Any:
        """Momentum, if there is any; plain steps take no part of optax."""
        decays = not isinstance(self.weight_decay, float | int) or self.weight_decay > 0
        if self.momentum == 0 and not decays:
            return None
        import optax

        parts = [optax.add_decayed_weights(self.weight_decay)] if decays else []
        if self.momentum > 0:
            parts.append(optax.trace(self.momentum, self.nesterov))
        return optax.chain(*parts)


@final
@settings_tree
class Adam(Optimizer):
    """Adam (Kingma, Ba, 2015).

    Attributes:
        b1: decay of the mean of gradients.
        b2: decay of the mean of their squares.
        eps: added to the root of the latter.
    """

    name: ClassVar[str] = "adam"

    b1: float = 0.9
    b2: float = 0.999
    eps: Rate = 1e-8

    def check(self) -> None:
        """Decays below 1."""
        _require_decay("b1", self.b1)
        _require_decay("b2", self.b2)

    def transformation(self) -> Any:
        """`optax.scale_by_adam`."""
        import optax

        return optax.scale_by_adam(self.b1, self.b2, self.eps)


@final
@settings_tree
class AdamW(Optimizer):
    """Adam with weight decay beside the gradient (Loshchilov, Hutter, 2019).

    Attributes:
        b1: decay of the mean of gradients.
        b2: decay of the mean of their squares.
        eps: added to the root of the latter.
        weight_decay: added to the direction as weight_decay * params.
    """

    name: ClassVar[str] = "adamw"

    b1: float = 0.9
    b2: float = 0.999
    eps: Rate = 1e-8
    weight_decay: Weight = 1e-4

    def check(self) -> None:
        """Decays below 1."""
        _require_decay("b1", self.b1)
        _require_decay("b2", self.b2)

    def transformation(self) -> Any:
        """`optax.scale_by_adam`, then `optax.add_decayed_weights`."""
        import optax

        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.chain(adam, optax.add_decayed_weights(self.weight_decay))


@final
@settings_tree
class Yogi(Optimizer):
    """Yogi (Zaheer et al., 2018): Adam whose second moments grow no faster than they must.

    Attributes:
        b1: decay of the mean of gradients.
        b2: how fast the second moments follow.
        eps: added to their root.
    """

    name: ClassVar[str] = "yogi"

    b1: float = 0.9
    b2: float = 0.999
    eps: Rate = 1e-3

    def check(self) -> None:
        """Decays below 1."""
        _require_decay("b1", self.b1)
        _require_decay("b2", self.b2)

    def transformation(self) -> Any:
        """`optax.scale_by_yogi`."""
        import optax

        return optax.scale_by_yogi(self.b1, self.b2, self.eps)


OPTIMIZERS: dict[str, type[Optimizer]] = {o.name: o for o in (SGD, Adam, AdamW, Yogi)}


def _require_decay(field: str, value: float) -> None:
    number = isinstance(value, float | int) and not isinstance(value, bool)
    require(number and 0 <= value < 1, field, value, "must be a number from 0 to below 1")
