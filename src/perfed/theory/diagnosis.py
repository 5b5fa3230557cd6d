"""Which conditions of the theorems a run meets, and what the theorems then bound."""

from perfed.methods import FedAvg, Method, PerFedAvg, PFedMe
from perfed.simulation import Experiment
from perfed.theory.conditions import Diagnosis, descent, smoothness
from perfed.theory.constants import Constants
from perfed.theory.fedpaq import diagnose_fedavg
from perfed.theory.per_fedavg import diagnose_per_fedavg
from perfed.theory.pfedme import diagnose_pfedme


def diagnose(experiment: Experiment, constants: Constants, rounds: int) -> Diagnosis:
    """How a run of so many rounds meets the conditions of the theorems on its method."""
    match experiment.method:
        case FedAvg() as method:
            return diagnose_fedavg(method, experiment, constants, rounds)
        case PerFedAvg() as method:
            return diagnose_per_fedavg(method, experiment, constants, rounds)
        case PFedMe() as method:
            return diagnose_pfedme(method, experiment, constants, rounds)
        case method:
            return _diagnose_other(method, constants)


def _diagnose_other(method: Method, c: Constants) -> Diagnosis:
    """A method that no theorem of the three papers covers: only its step sizes against 2/L.

    The weight of a penalty adds to L, since it is the curvature of that penalty.
    """
    rates = [(name, getattr(method, name)) for name in method.step_sizes]
    conditions = []
    for name, rate in rates:
        if rate is not None:
            penalty = method.penalties.get(name)
            weight = 0.0 if penalty is None else getattr(method, penalty)
            conditions.append(descent(name, rate, smoothness(c), penalty, weight))
    note = f"The theorems of the three papers do not cover {method.name}: there is no bound"
    if conditions:
        names = " and ".join(name for name, _ in rates)
        note += f", and only {names} can be checked, against 2/L."
        if method.penalties:
            note += " Where a step follows a penalty too, its weight adds to L."
    else:
        note += (
            ", and no step size can be checked, because the method does not name its own "
            "(Method.step_sizes). The constants and distances hold for any method."
        )
    return Diagnosis(method.name, {}, conditions, [], note)
