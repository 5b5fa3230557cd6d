"""Break the code in small ways, one at a time, and see which breaks no test notices.

    python tests/mutants.py [--count 220] [--seed 0] [--out mutants.json] [--only PART]

A mutant differs from the code in one operator, number, comparison, word or argument. Mutants are
drawn at random, as many from each file as its share of all there are. Each is run in a copy of the
repository: first the tests that execute the broken line, the quickest first; if all pass, the whole
default suite. `make mutants` takes some hours on two cores, and is not for CI.
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
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "perfed"
TARGETS = ("methods", "codecs", "objective.py", "simulation/setup.py", "evaluation.py", "theory")

DEFAULT = "not slow and not federation"
# The tests that execute a line are run for so many seconds at first, then all of them.
FIRST_SECONDS = 90.0
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


def is_told(node: ast.AST) -> bool:
    """Whether it only makes a message, or says what a type is."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    if not called:
        return isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise)
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr  # type: ignore[attr-defined]
    return name.endswith(("Error", "_rule", "_no", "say", "Reason", "Purpose"))


def candidates(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Pairs of a node and what could stand in its place."""

    def visit(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        if isinstance(node, ast.Import | ast.ImportFrom) or is_told(node):
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
    files = [
        path
        for target in TARGETS
        for path in sorted((PACKAGE / target).rglob("*.py") if (PACKAGE / target).is_dir()
                           else [PACKAGE / target])
        if path.name != "__init__.py" and only in str(path)
    ]  # fmt: skip
    every = {path: mutants_of(path) for path in files}
    total = sum(map(len, every.values()))
    rng, found = random.Random(seed), []
    for path in files:
        share = round(count * len(every[path]) / total)
        found += rng.sample(every[path], min(len(every[path]), max(share, 3)))
    print(f"{total} mutants there are, {len(found)} are tried")
    return found


class Copy:
    """A copy of the repository to break."""

    def __init__(self, at: Path, cache: Path) -> None:
        self.at, self.cache = at, cache
        ignored = shutil.ignore_patterns(".git", ".venv", ".venvs", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, at, ignore=ignored)

    def run(self, tests: list[str], seconds: float, workers: int = 0) -> tuple[bool, str]:
        """Whether tests pass, and what failed."""
        environment = os.environ | {
            "PYTHONPATH": f"{self.at}/src",
            "PERFED_TESTS_CACHE": str(self.cache),
            "PERFED_DATA": os.environ.get("PERFED_DATA", str(ROOT.parent / "shared" / "data")),
            "XLA_FLAGS": "--xla_backend_optimization_level=0 "
            "--xla_llvm_disable_expensive_passes=true",
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


def covered(copy: Copy, at: Path) -> dict[str, dict[int, list[tuple[float, str]]]]:
    """For each file and line, the tests that execute it, with how long they take."""
    report = at / "coverage"
    settings = at / "coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {report}\nsource = {copy.at}/src/perfed\n"
        "[report]\nignore_errors = True\n"
    )
    durations = at / "durations.xml"
    environment = os.environ | {"PYTHONPATH": f"{copy.at}/src",
                                "PERFED_TESTS_CACHE": str(copy.cache)}  # fmt: skip
    environment["PERFED_DATA"] = os.environ.get("PERFED_DATA", str(ROOT.parent / "shared" / "data"))
    command = [sys.executable, "-m", "pytest", "-q", "-m", DEFAULT, "-n", str(WORKERS), "--cov",
               f"--cov-config={settings}", "--cov-context=test", "--cov-report=",
               f"--junitxml={durations}", "-p", "no:cacheprovider"]  # fmt: skip
    subprocess.run(command, cwd=copy.at, env=environment, check=True)
    import coverage

    seconds = {}
    for case in ElementTree.parse(durations).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        seconds[f"{file}.py::{case.get('name')}"] = float(case.get("time", 1.0))
    data = coverage.CoverageData(str(report))
    data.read()
    found: dict[str, dict[int, list[tuple[float, str]]]] = {}
    for path in data.measured_files():
        lines: dict[int, list[tuple[float, str]]] = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            names = {context.split("|")[0] for context in contexts if context}
            lines[line] = sorted((seconds.get(name, 1.0), name) for name in names)
        found[str(Path(path).relative_to(copy.at / "src" / "perfed"))] = lines
    return found


def judged(
    copy: Copy, mutant: Mutant, text: str, tests: list[tuple[float, str]], whole: float
) -> dict[str, Any]:
    """What came of a mutant."""
    path = copy.at / "src" / "perfed" / mutant.file
    before = path.read_text()
    begun = time.perf_counter()
    path.write_text(text)
    try:
        first, spent = [], 0.0
        for seconds, name in tests:
            if spent + seconds > FIRST_SECONDS:
                break
            first.append(name)
            spent += seconds
        rest = [name for _, name in tests[len(first) :]]
        reason = ""
        for some, limit in ((first, 10 * FIRST_SECONDS), (rest, 6 * whole), (["tests"], 6 * whole)):
            alive, reason = copy.run(some, limit) if some else (True, "")
            if not alive:
                break
        spent = time.perf_counter() - begun
        return asdict(mutant) | {"killed": not alive, "by": reason, "seconds": spent}
    finally:
        path.write_text(before)


def main() -> None:
    """Draw, break, test, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--only", default="", help="a part of the files' paths")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    given = parser.parse_args()
    drawn = chosen(given.count, given.seed, given.only)
    if given.list:
        for mutant, _ in drawn:
            print(f"{mutant.file}:{mutant.line}: {mutant.was}  ->  {mutant.now}")
        return
    with tempfile.TemporaryDirectory(prefix="perfed-mutants-") as place:
        at = Path(place)
        copies: Queue[Copy] = Queue()
        for i in range(WORKERS):
            copies.put(Copy(at / str(i), at / "cache"))
        begun = time.perf_counter()
        lines = covered(copies.queue[0], at)
        whole = time.perf_counter() - begun
        outcomes: list[dict[str, Any]] = []

        def judge(pair: tuple[Mutant, str]) -> None:
            mutant, text = pair
            copy = copies.get()
            try:
                own = lines.get(mutant.file, {}).get(mutant.line, [])
                outcome = judged(copy, mutant, text, own, whole)
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
