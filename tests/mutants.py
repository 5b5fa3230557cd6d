"""Break the code in small ways, one at a time, and see which breaks no test notices.

    python tests/mutants.py [--count 170] [--seed 0] [--out mutants.json] [--only PART] [--whole]
    python tests/mutants.py --again mutants.json --out again.json

A mutant differs from the code in one operator, number, comparison, word or argument. Mutants are
drawn at random, as many from each file as its share of all there are. Each is run in a copy of the
repository against the test files that are about its part of the code (`TESTS`); with --whole, what
survives these is run against the whole default suite. `make mutants` takes an hour on two cores,
and is not for CI.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "perfed"
# What is broken, and the test files about it, the quickest first.
TESTS = {
    "methods/base.py": ("test_settings", "test_fedavg_and_local", "test_contract", "test_config"),
    "methods/fedavg.py": ("test_settings", "test_fedavg_and_local", "test_reference",
                          "test_learning"),
    "methods/local.py": ("test_settings", "test_fedavg_and_local", "test_reference"),
    "methods/per_fedavg.py": ("test_settings", "test_per_fedavg", "test_reference"),
    "methods/pfedme.py": ("test_settings", "test_pfedme", "test_reference"),
    "methods": ("test_settings", "test_fedavg_and_local", "test_config", "test_contract",
                "test_per_fedavg", "test_pfedme"),
    "pipeline/codecs": ("test_settings", "test_packing", "test_codecs", "test_communication"),
    "pipeline": ("test_settings", "test_communication", "test_codecs", "test_config",
                 "test_contract"),
    "core/objective.py": ("test_objective", "test_per_fedavg", "test_model_state", "test_pfedme",
                          "test_scaling", "test_reference"),
    "simulation/experiment.py": ("test_engines", "test_together", "test_communication",
                                 "test_contract", "test_model_state", "test_reference"),
    "simulation/round.py": ("test_communication", "test_contract", "test_engines",
                            "test_model_state", "test_reference"),
    "evaluation": ("test_settings", "test_evaluation", "test_engines", "test_together",
                   "test_reference"),
    "theory/advice.py": ("test_advice_reasons", "test_advice"),
    "theory/targets.py": ("test_advice_reasons", "test_advice"),
    "theory": ("test_theory_parts", "test_conditions", "test_distances", "test_theory",
               "test_advice", "test_outside_theory"),
}  # fmt: skip

DEFAULT = "not slow and not federation"
SECONDS = 900.0  # a test run that takes longer has been broken
WORKERS = 2

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE,
                                                    ast.Gt: ast.Lt, ast.GtE: ast.LtE}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
# Words that choose between things, and what may be mistaken for them.
WORDS = {
    "train": "test", "test": "train", "uniform": "size", "size": "uniform", "exact": "hf",
    "hf": "fo", "fo": "exact", "received": "kept", "kept": "received", "local": "received",
    "replacement": "epochs", "whole": "tensor", "tensor": "whole", "full": "rest",
    "gd": "nesterov", "nesterov": "gd", "global": "personalized", "personalized": "global",
    "at most": "at least", "at least": "at most",
}  # fmt: skip


# Lines that only decide how much is done at a time, or what is kept for speed: no result depends on
# them.
SPEED = re.compile(r"step = max\(|_ENTRIES = |_GROUP|BLOCK = |2\*\*\d\d|@partial|@cache|unroll")


@dataclass(frozen=True)
class Mutant:
    """A break.

    Attributes:
        file: of the package.
        line: its number.
        was: the expression as it was.
        now: as it is in the mutant.
        index: which of the file's mutants it is.
    """

    file: str
    line: int
    was: str
    now: str
    index: int


def is_message(node: ast.AST) -> bool:
    """Whether it only makes a message, or says what a type is."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    if not called:
        words = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
        return words or isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise)
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr  # type: ignore[attr-defined]
    return name.endswith(("Error", "_rule", "_no", "say", "Reason", "Purpose"))


def candidates(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs of a node and what could stand in its place."""

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        if isinstance(node, ast.Import | ast.ImportFrom) or is_message(node):
            return
        yield from swaps(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if isinstance(child, ast.AST) and not docstring:
                    yield from visit(child)

    yield from visit(tree)


def swaps(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What could stand in a node's place."""

    def changed(**fields: Any) -> tuple[ast.AST, ast.AST]:
        other = deepcopy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return node, other

    match node:
        case ast.Compare(ops=[op]):
            yield changed(ops=[COMPARED[type(op)]()])
            if type(op) in FLIPPED:
                yield changed(ops=[FLIPPED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            yield changed(op=COMPUTED[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node, node.operand
        case ast.BoolOp(op=op):
            yield changed(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Constant(value=bool() as value):
            yield changed(value=not value)
        case ast.Constant(value=int() as value):
            yield changed(value=value + 1)
        case ast.Constant(value=float() as value):
            yield changed(value=2 * value + 0.5)
        case ast.Constant(value=str() as value) if value in WORDS:
            yield changed(value=WORDS[value])
        case ast.IfExp(test=test):
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.If(test=test):
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(args=[first, second, *rest]) if ast.dump(first) != ast.dump(second):
            plain = all(isinstance(a, ast.Name | ast.Attribute) for a in (first, second))
            if plain:
                yield changed(args=[second, first, *rest])
        case ast.Return(value=ast.Call(func=ast.Name(), args=[first, *_])):
            yield changed(value=first)


def mutants_of(file: Path) -> list[tuple[Mutant, str]]:
    """All mutants of a file, each with the file's text."""
    source = file.read_text()
    tree = ast.parse(source)
    found = []
    for index, (node, other) in enumerate(list(candidates(tree))):
        text = replaced(source, node, other)
        line = source.splitlines()[node.lineno - 1]  # type: ignore[attr-defined]
        if text == source or same(text, source) or SPEED.search(line):
            continue
        was, now = (ast.unparse(n).split("\n")[0][:100] for n in (node, other))
        name = str(file.relative_to(PACKAGE))
        found.append((Mutant(name, node.lineno, was, now, index), text))  # type: ignore[attr-defined]
    return found


def replaced(source: str, node: ast.AST, other: ast.AST) -> str:
    """The source with another node in a node's place."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    whole = source.encode()
    if isinstance(node, ast.If):  # only its test: the rest stays as it is written
        return replaced(source, node.test, other.test)  # type: ignore[attr-defined]
    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    if isinstance(node, ast.Return):
        return replaced(source, node.value, other.value)  # type: ignore[arg-type, attr-defined]
    text = ast.unparse(ast.fix_missing_locations(other))
    return (whole[:begin] + f"({text})".encode() + whole[end:]).decode()


def same(text: str, source: str) -> bool:
    """Whether two files mean the same, or the first means nothing."""
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return True


def chosen(count: int, seed: int, only: str) -> list[tuple[Mutant, str]]:
    """Mutants drawn at random, spread over the files."""
    paths = {path for part in TESTS for path in [PACKAGE / part, *(PACKAGE / part).rglob("*.py")]}
    files = sorted(
        path
        for path in paths
        if path.suffix == ".py" and path.name != "__init__.py" and only in str(path)
    )
    every = {path: mutants_of(path) for path in files}
    total = sum(map(len, every.values()))
    rng, found = random.Random(seed), []
    for path in files:
        share = round(count * len(every[path]) / total)
        found += rng.sample(every[path], min(len(every[path]), max(share, 2)))
    print(f"{total} mutants there are, {len(found)} are tried")
    return found


def survivors(outcomes: Path) -> list[tuple[Mutant, str]]:
    """The mutants that no test noticed in an earlier run, wherever they stand now."""
    found = []
    for one in json.loads(outcomes.read_text()):
        if not one["killed"]:
            every = mutants_of(PACKAGE / one["file"])
            alike = [m for m in every if (m[0].was, m[0].now) == (one["was"], one["now"])]
            if alike:
                found.append(min(alike, key=lambda m: abs(m[0].line - one["line"])))
            else:
                print(f"no longer there: {one['file']}:{one['line']}: {one['was']}")
    return found


class Copy:
    """A copy of the repository to break."""

    def __init__(self, at: Path, cache: Path) -> None:
        self.at, self.cache = at, cache
        ignored = shutil.ignore_patterns(
            ".git", ".venv", ".venvs", "__pycache__", "*.egg-info", ".mypy_cache"
        )
        shutil.copytree(ROOT, at, ignore=ignored)

    def run(self, tests: list[str], seconds: float, workers: int = 0) -> tuple[bool, str]:
        """Whether tests pass, and what failed."""
        environment = os.environ | {
            "PYTHONPATH": f"{self.at}/src",
            "PERFED_TESTS_CACHE": str(self.cache),
            "PERFED_DATA": os.environ.get("PERFED_DATA", str(ROOT.parent / "shared" / "data")),
            "XLA_FLAGS": "--xla_backend_optimization_level=0 "
            "--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
            "--xla_cpu_parallel_codegen_split_count=1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", DEFAULT, "--tb=no"]
        command += ["-p", "no:cacheprovider", "-n", str(workers), *tests]
        try:
            done = subprocess.run(
                command, cwd=self.at, env=environment, capture_output=True, text=True,
                timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, "ran too long"
        if done.returncode in (0, 5):
            return True, ""
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return False, lines[0] if lines else done.stdout[-300:] + done.stderr[-300:]


def tests_of(file: str) -> list[str]:
    """The test files about a file of the package: those of the longest path that it is in."""
    part = max((part for part in TESTS if file.startswith(part)), key=len)
    return [f"tests/{name}.py" for name in TESTS[part]]


def outcome_of(copy: Copy, mutant: Mutant, text: str, whole: bool) -> dict[str, Any]:
    """Whether a mutant was killed, and by what."""
    path = copy.at / "src" / "perfed" / mutant.file
    before = path.read_text()
    begun = time.perf_counter()
    path.write_text(text)
    try:
        alive, reason = copy.run(tests_of(mutant.file), SECONDS)
        if alive and whole:
            alive, reason = copy.run(["tests"], 6 * SECONDS)
        spent = time.perf_counter() - begun
        return asdict(mutant) | {"killed": not alive, "by": reason, "seconds": spent}
    finally:
        path.write_text(before)


def main() -> None:
    """Draw, break, test, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=170)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--only", default="", help="a part of the files' paths")
    parser.add_argument("--whole", action="store_true", help="survivors meet the whole suite")
    parser.add_argument("--again", type=Path, help="only those that survived in this earlier --out")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    given = parser.parse_args()
    drawn = survivors(given.again) if given.again else chosen(given.count, given.seed, given.only)
    if given.list:
        for mutant, _ in drawn:
            print(f"{mutant.file}:{mutant.line}: {mutant.was}  ->  {mutant.now}")
        return
    with tempfile.TemporaryDirectory(prefix="perfed-mutants-") as place:
        at = Path(place)
        copies: Queue[Copy] = Queue()
        for i in range(WORKERS):
            copies.put(Copy(at / str(i), at / "cache"))
        outcomes: list[dict[str, Any]] = []
        whole_copy = copies.get()
        for tests in sorted({tuple(tests_of(mutant.file)) for mutant, _ in drawn}):
            alive, reason = whole_copy.run(list(tests), 2 * SECONDS, WORKERS)
            if not alive:  # then it would seem to kill every mutant
                sys.exit(f"tests fail before anything is broken: {reason}")
        copies.put(whole_copy)

        def judge(pair: tuple[Mutant, str]) -> None:
            mutant, text = pair
            copy = copies.get()
            try:
                outcome = outcome_of(copy, mutant, text, given.whole)
            finally:
                copies.put(copy)
            outcomes.append(outcome)
            killed = sum(o["killed"] for o in outcomes)
            mark = "killed  " if outcome["killed"] else "SURVIVED"
            place = f"{mutant.file}:{mutant.line}"
            change = f"{mutant.was}  ->  {mutant.now}  ({outcome['seconds']:.0f} s)"
            print(f"{mark} {killed}/{len(outcomes)} {place}: {change}", flush=True)
            given.out.write_text(json.dumps(outcomes, indent=1))

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(judge, drawn))
    killed = sum(o["killed"] for o in outcomes)
    print(f"{killed} of {len(outcomes)} killed ({100 * killed / len(outcomes):.1f} %)")


if __name__ == "__main__":
    main()
