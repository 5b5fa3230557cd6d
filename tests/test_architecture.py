"""The rooms of ARCHITECTURE.md: each imports only from those it may."""

import ast
import re
from pathlib import Path

import perfed

ROOT = Path(perfed.__file__).parent

# Room -> rooms it may import from. All stand on `core`.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "models": set(),
    "methods": set(),
    "pipeline": set(),
    "data": set(),
    "simulation": {"methods", "pipeline", "data"},
    "evaluation": {"methods", "data", "simulation"},
    "training": {"methods", "pipeline", "data", "simulation", "evaluation"},
    "runs": {"models", "methods", "pipeline", "data", "simulation", "evaluation", "training"},
    "theory": {"methods", "pipeline", "data", "simulation", "evaluation", "training", "runs"},
    "papers": {"methods", "data", "simulation", "evaluation", "training", "runs"},
    "federation": {
        "methods",
        "pipeline",
        "data",
        "simulation",
        "evaluation",
        "training",
        "runs",
    },
    "report": {"data", "evaluation", "training", "runs", "theory", "papers"},
    "cli": {"data", "simulation", "training", "runs", "theory", "papers", "federation", "report"},
}

# Within the federation: what both sides know, and what carries it, know neither side.
WITHIN_FEDERATION: dict[str, set[str]] = {
    "protocol": set(),
    "transport": {"protocol"},
    "server": {"protocol", "transport"},
    "client": {"protocol", "transport"},
    "trial": {"protocol", "transport", "server"},
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
        if room in ("__init__", "__main__"):
            continue
        found.add(room)
        allowed = MAY_IMPORT[room] | {"core", room}
        extra = imported_rooms(path) - allowed
        assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"
    assert found == set(MAY_IMPORT)


def test_the_server_knows_no_client_nor_the_reverse() -> None:
    for path in (ROOT / "federation").rglob("*.py"):
        part = path.relative_to(ROOT / "federation").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        text = path.read_text()
        parts = set(re.findall(r"(?:from|import) perfed\.federation\.([a-z_]+)", text))
        extra = parts - WITHIN_FEDERATION[part] - {part}
        assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"


def test_class_names_stand_once() -> None:
    found: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.name not in found, f"{node.name}: {found[node.name]} and {where}"
                found[node.name] = where


def test_client_side_code_knows_nothing_of_data_or_engines() -> None:
    """Methods see an objective and nothing else: no files, no devices, no federation."""
    allowed = {"abc", "collections", "dataclasses", "functools", "importlib", "math", "numbers"}
    allowed |= {"typing", "jax", "jaxtyping", "optax"}
    for path in [ROOT / "core" / "objective.py", *(ROOT / "methods").glob("*.py")]:
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
