"""The list in docs/architecture.md holds: who imports whom, in which sizes, under which names.

Lazy and typing-only imports count too.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ddpopt

ROOT = Path(ddpopt.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
LISTED = {
    name: set(others.split(", ")) for name, others in re.findall(r"^(\w+) → ([\w, ]+)$", TEXT, re.MULTILINE)
}
LOWEST: tuple[str, ...] = ("graph", "ranks", "cases", "hang", "terminal", "torch_private")
ROOMS = {
    name: set(others.split(", ")) - {""}
    for name, others in re.findall(r"^judge\.(\w+) →(?: (.*))?$", TEXT, re.MULTILINE)
}
LEAVES = ("compare", "verdict")
"""Modules of the judge that all its rooms may import."""
IMPORTS: dict[str, set[str]] = {**{name: set() for name in LOWEST}, "__main__": {"cli"}, **LISTED}
"""For each package those that it imports; all may import `ddpopt.errors` and `ddpopt.torch_private`."""


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


def code_lines(tree: ast.Module) -> set[int | None]:
    """Where a statement or an expression begins or ends."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)]
    return {line for node in nodes for line in (node.lineno, node.end_lineno)}


def test_packages_import_those_that_the_page_lists_and_no_others() -> None:
    edges = {(package(a), package(b)) for a, tree in TREES.items() for b in imports(tree)}
    everywhere = {"errors", "torch_private", ""}  # the last for the version
    found = {(a, b) for a, b in edges if a not in ("", "errors", b) and b not in everywhere}
    assert {(a, b) for a, b in edges if not b} <= {("judge", ""), ("cli", ""), ("", "")}
    assert found == {(a, b) for a, names in IMPORTS.items() for b in names}


def test_packages_form_layers_and_the_picture_has_each_arrow_that_no_longer_way_makes_needless() -> None:
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(IMPORTS).static_order():
        reached[name] = IMPORTS[name].union(*(reached[other] for other in IMPORTS[name]))
    needless = {(a, c) for a, names in LISTED.items() for b in names for c in reached[b]}
    drawn = re.findall(r'data-imports="(\w+) (\w+)"', (PAGE.parent / "diagrams/packages.svg").read_text())
    assert sorted(drawn) == sorted({(a, b) for a, names in LISTED.items() for b in names} - needless)


def room(name: str) -> str:
    """The room of the judge that a module is in, or the leaf that it is; empty for the judge itself."""
    return name.split(".")[2] if name.count(".") > 1 and package(name) == "judge" else ""


def test_rooms_of_the_judge_import_those_that_the_page_lists_and_no_others() -> None:
    edges = {(room(a), room(b)) for a, tree in TREES.items() for b in imports(tree) if room(a) and room(b)}
    between = {(a, b) for a, b in edges if a != b and b not in LEAVES}
    assert between == {(a, b) for a, others in ROOMS.items() for b in others}
    assert {room(name) for name in MODULES} - {""} == {*ROOMS, *LEAVES}


def test_only_trials_start_ranks_for_the_judge() -> None:
    starts = {name for name, tree in TREES.items() if "ddpopt.ranks.pool" in imports(tree)}
    assert {room(name) for name in starts if package(name) == "judge"} == {"trials"}


@pytest.mark.parametrize("name", sorted(IMPORTS))
def test_no_module_imports_itself_on_a_way_around(name: str) -> None:
    trees = {each: tree for each, tree in TREES.items() if package(each) == name}
    own = {each: {b for b in imports(tree) if package(b) == name} - {each} for each, tree in trees.items()}
    try:
        list(TopologicalSorter(own).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_are_of_a_size_to_read() -> None:
    assert not [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 400]
    small = [name for name, tree in TREES.items() if len(code_lines(tree)) < 20]
    assert not [name for name in small if not MODULES[name].stem.endswith("__")]


def test_one_function_is_called_compile() -> None:
    homes = [m for m, tree in TREES.items() for n in tree.body if getattr(n, "name", "") == "compile"]
    assert homes == [ddpopt.compile.__module__]


def test_no_two_classes_have_one_name() -> None:
    names = [n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


def test_tests_share_only_what_is_in_support_and_selftest() -> None:
    tests = ROOT.parent / "tests"
    trees = {path: ast.parse(path.read_text()) for path in tests.rglob("*.py")}
    froms = {(path, str(node.module)) for path, tree in trees.items() for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom)}  # fmt: skip
    shared = [(path.name, name) for path, name in froms if name.startswith("tests.")]
    assert shared
    assert not [each for each in shared if each[1].split(".")[1] not in ("support", "selftest")]
