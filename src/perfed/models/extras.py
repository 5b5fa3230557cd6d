"""What the adapters of libraries share: missing libraries, places of leaves, choosing an output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from perfed.core.errors import ConfigError, FieldError
from perfed.core.trees import Params, Path

# Which of a model's outputs is scored: a key, an attribute, or a function of all of them.
Output: TypeAlias = str | Callable[[Any], Any] | None


@contextmanager
def extra_needed(user: str, extra: str, *packages: str) -> Iterator[None]:
    """Say which extra to install where one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in packages:
            raise
        raise ConfigError(
            f'{user} needs {error.name}, which is not installed; pip install "perfed[{extra}]"'
        ) from None


def select_output(outputs: Any, output: Output, name: str) -> Any:
    """What a model gives of what a module returned.

    Args:
        outputs: all that it returned.
        output: which one; None: all arrays.
        name: the module's, for messages.
    """
    if callable(output):
        return output(outputs)
    if output is None:
        return _arrays(outputs)
    if isinstance(outputs, Mapping) and output in outputs:
        return outputs[output]
    if not hasattr(outputs, output):
        names = f" with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        allowed = f"{name} returns a {type(outputs).__name__}{names}"
        raise FieldError("output", output, allowed)
    return getattr(outputs, output)


def _arrays(outputs: Any) -> Any:
    """Arrays, and plain containers of them, without anything else."""
    if isinstance(outputs, Mapping):
        arrays = {key: _arrays(value) for key, value in outputs.items()}
        return {key: value for key, value in arrays.items() if value is not None}
    if isinstance(outputs, list | tuple):
        return tuple(_arrays(value) for value in outputs)
    return outputs if hasattr(outputs, "shape") else None


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """A tree of dictionaries with these leaves: `("a", "b")` is at `["a"]["b"]`."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flattened(tree: Params | None) -> dict[Path, Any]:
    """The leaves of a tree of dictionaries by their place."""
    leaves: dict[Path, Any] = {}

    def collect(node: Any, path: Path) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                collect(value, (*path, key))
        else:
            leaves[path] = node

    collect({} if tree is None else tree, ())
    return leaves


def check_leaves(params: Params, expected: Mapping[Path, tuple[int, ...]], name: str) -> None:
    """Raise unless the parameters have the places and shapes that a module has."""
    found = {path: leaf.shape for path, leaf in flattened(params).items()}
    differing = sorted(
        {path for path in {**found, **expected} if found.get(path) != expected.get(path)}, key=str
    )
    if differing:
        path = differing[0]
        raise FieldError(
            "params",
            ".".join(map(str, path)),
            f"has shape {found.get(path)} here and {expected.get(path)} in {name}",
        )
