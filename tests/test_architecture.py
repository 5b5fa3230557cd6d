"""The rooms of ARCHITECTURE.md: each imports only from those it may."""

import ast
from pathlib import Path

import perfed

ROOT = Path(perfed.__file__).parent

# Room -> rooms it may import from. `errors` and `randomness` are the ground all stand on.
GROUND = {"errors", "randomness"}
MAY_IMPORT = {
    "errors": set(),
    "randomness": set(),
    "differences": set(),
    "objective": {"differences"},
    "models": {"objective"},
    "methods": {"objective"},
    "codecs": set(),
    "data": set(),
    "simulation": {"objective", "methods", "codecs", "data"},
    "evaluation": {"objective", "methods", "data", "simulation"},
    "experiment": {
        "objective",
        "models",
        "methods",
        "codecs",
        "data",
        "simulation",
        "evaluation",
    },
    "theory": {"objective", "methods", "codecs", "data", "simulation", "evaluation", "experiment"},
    "papers": {"data", "evaluation", "experiment"},
    "flower": {"objective", "methods", "codecs", "data", "simulation", "evaluation", "experiment"},
    "report": {"data", "evaluation", "experiment", "papers", "theory"},
    "cli": {"data", "simulation", "experiment", "flower", "papers", "report", "theory"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("perfed.")}
        assert "perfed" not in names, f"{path.name} imports the whole package"
    return rooms


def test_imports_go_one_way() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        found.add(room)
        allowed = MAY_IMPORT[room] | GROUND | {room}
        extra = imported_rooms(path) - allowed
        assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"
    assert found == set(MAY_IMPORT)


def test_client_side_code_knows_nothing_of_data_or_engines() -> None:
    """Methods see an objective and nothing else: no files, no devices, no federation."""
    allowed = {"abc", "collections", "dataclasses", "math", "numbers", "typing", "jax", "jaxtyping"}
    for path in [ROOT / "objective.py", *(ROOT / "methods").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert {name.split(".")[0] for name in names} <= allowed | {"perfed"}, path.name


# Plain tuples, errors and enumerations: nothing in them to override.
PLAIN = {"NamedTuple", "IntEnum", "ValueError", "RuntimeError", "OSError", "SystemExit"}


def test_classes_are_abstract_or_final() -> None:
    """No concrete class is built upon, and each says so."""
    abstract, final, bases = {"Section", "DataPart", "Header"}, set(), set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base) for base in node.bases}
                bases |= names
                if names & {"ABC", "Protocol"}:
                    abstract.add(node.name)
                elif not names & PLAIN and node.name not in abstract:
                    decorators = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
                    assert "final" in decorators, f"{path.name}: {node.name} is not final"
                    final.add(node.name)
    assert not bases & final
