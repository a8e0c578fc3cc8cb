"""The picture in docs/architecture.md holds: who imports whom, in which sizes, under which names.

Lazy and typing-only imports count too.
"""

import ast
import io
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ddpopt

ROOT = Path(ddpopt.__file__).parent
CORE = "graph planning split proof inline ddp dynamo"
EVERY = f"{CORE} observation explanation ranks cases judge testing fuzz doctor gate"
MAY_IMPORT = {
    "cases": "",
    "ranks": "",
    "graph": "",
    "planning": "graph",
    "split": "graph planning",
    "proof": "graph planning",
    "ddp": "graph planning",
    "inline": "graph planning ddp",
    "dynamo": "graph planning split proof inline ddp",
    "observation": "planning inline ddp dynamo",  # inline: its operator is to be looked into
    "explanation": "graph planning dynamo",
    "judge": f"{CORE} observation explanation ranks cases",
    "testing": f"{CORE} observation explanation ranks cases judge",
    "fuzz": f"{CORE} observation explanation ranks cases judge testing",
    "doctor": f"{CORE} observation explanation ranks cases judge testing",
    "gate": f"{CORE} observation explanation ranks cases judge testing",
    "cli": EVERY,
    "__main__": "cli",
    "torch_private": "",
}
"""For each package those that it may import; all may import `ddpopt.errors` and `ddpopt.torch_private`."""


def module_name(path: Path) -> str:
    return ".".join(("ddpopt", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else str(node.module) for name in inner)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & MODULES.keys()


def package(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def code_lines(text: str) -> int:
    tree = ast.parse(text)
    documented = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    docs = [n.body[0] for n in documented if ast.get_docstring(n, clean=False) is not None]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = {n for t in tokens if t.type not in quiet and t.string for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - {n for d in docs for n in range(d.lineno, (d.end_lineno or 0) + 1)})


def test_packages_import_those_below_them_alone() -> None:
    allowed = {
        (a, b) for a, names in MAY_IMPORT.items() for b in (a, "errors", "torch_private", *names.split())
    }
    edges = {(package(a), package(b)) for a, tree in TREES.items() for b in imports(tree)}
    outside = {(a, "") for a in ("judge", "cli")}  # for the version
    assert {(a, b) for a, b in edges - allowed - outside if a not in ("", "errors")} == set()


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_no_module_imports_itself_on_a_way_around(name: str) -> None:
    own = {
        a: {b for b in imports(t) if package(b) == name} - {a} for a, t in TREES.items() if package(a) == name
    }
    try:
        list(TopologicalSorter(own).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_are_of_a_size_to_read() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): code_lines(path.read_text()) for path in MODULES.values()}
    assert not [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 400]
    assert not [name for name, size in sizes.items() if size < 20 and not name.endswith("__.py")]


def test_no_two_classes_have_one_name() -> None:
    names = [n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()
