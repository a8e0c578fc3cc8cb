"""Write the API reference, docs/api/, from the docstrings: ``python -m ci.api_pages``.

``--check`` writes nothing and exits with 1 if a page is not up to date. The source is read, not imported, so
the pages do not depend on the installed Python or torch.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "api"
DATA = (
    "ddpopt.planning.plan.Bucket",
    "ddpopt.planning.plan.Segment",
    "ddpopt.planning.plan.Cut",
    "ddpopt.judge.verdict.Finding",
)
PAGES = {
    "functions": ("The functions of `ddpopt`", ("ddpopt.*",)),
    "classes": ("The classes of `ddpopt`", ("ddpopt.*", *DATA)),
    "testing": ("`ddpopt.testing`", ("ddpopt.testing.*",)),
    "strategies": ("Drawn models", ("ddpopt.testing.strategies.models",)),
    "doctor": ("`ddpopt.doctor`", ("ddpopt.doctor.*",)),
    "errors": ("Errors", ("ddpopt.errors.*",)),
}
"""Each page's title and contents; ``*`` is every public name of a module."""
KINDS = {"functions": griffe.Function, "classes": griffe.Class}
"""Pages that show one kind of object."""
NOT_PASSED = ("self", "cls", "draw")
"""Parameters that a caller does not pass; Hypothesis passes ``draw``."""
ENTRIES = ("parameters", "attributes", "raises", "returns", "yields")


def pages() -> dict[Path, str]:
    """All pages, by file."""
    package = griffe.load(
        "ddpopt",
        search_paths=[ROOT],
        docstring_parser="google",
        docstring_options={"warnings": False, "returns_multiple_items": False, "returns_named_value": False},
    )
    return {FOLDER / f"{name}.md": _page(package, name) for name in PAGES}


def _page(package: griffe.Object | griffe.Alias, name: str) -> str:
    title, wanted = PAGES[name]
    kind = KINDS.get(name, (griffe.Function, griffe.Class))
    found = [
        target for pattern in wanted for target in _objects(package, pattern) if isinstance(target, kind)
    ]
    others = (f"[{PAGES[other][0]}]({other}.md)" for other in PAGES if other != name)
    lines = [
        f"# {title}",
        f"Written by `python -m ci.api_pages` from the docstrings. See also {', '.join(others)}.",
        *(block for target in found for block in _described(target)),
    ]
    return "\n\n".join(lines) + "\n"


def _objects(package: griffe.Object | griffe.Alias, pattern: str) -> Iterator[griffe.Object]:
    """One object by its path, or all public ones of a module."""
    path = pattern.removesuffix(".*").partition(".")[2]
    home = package[path] if path else package
    own = [name for name, member in home.members.items() if not (member.is_alias or name.startswith("_"))]
    listed = [str(name) for name in home.exports or () if not str(name).startswith("_")]
    if home.exports and not listed:  # names are loaded lazily: use the imports for type checkers
        aliases = {name: m for name, m in home.members.items() if isinstance(m, griffe.Alias)}
        listed = [name for name, alias in aliases.items() if alias.target_path.startswith("ddpopt.")]
    exported = own if home.exports is None else sorted(listed, key=str.lower)
    for target in (home[name] for name in exported) if pattern.endswith("*") else [home]:
        yield target.final_target if isinstance(target, griffe.Alias) else target


def _described(target: griffe.Object) -> Iterator[str]:
    """A heading, the docstring, and for a class its methods and properties."""
    yield f"## {target.name}"
    if isinstance(target, griffe.Function):
        yield f"```text\n{_signature(target)}\n```"  # a python block would be formatted
    yield from _sections(target)
    for member in target.members.values() if isinstance(target, griffe.Class) else ():
        if member.docstring is not None and not member.name.startswith("_"):
            call = _signature(member) if isinstance(member, griffe.Function) else member.name
            yield f"### `{call}`"
            yield from _sections(member)


def _signature(function: griffe.Function) -> str:
    given = [parameter for parameter in function.parameters if parameter.name not in NOT_PASSED]
    words, keyword_only = [], False
    for parameter in given:
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            words.append("*")
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            kind, ""
        )
        keyword_only |= stars == "*"
        default = "" if parameter.default is None or stars else f"={parameter.default}"
        words.append(f"{stars}{parameter.name}{default}")
    return f"{function.name}({', '.join(words)})"


def _sections(target: griffe.Object | griffe.Alias) -> Iterator[str]:
    returns = target.returns if isinstance(target, griffe.Function) else None
    for section in target.docstring.parsed if target.docstring else ():
        kind = section.kind.value
        if kind == "text":
            yield _markdown(section.value)
        elif kind == "examples":
            yield from (f"```python\n{text}\n```" for _, text in section.value)
        elif kind in ENTRIES:
            yield f"**{(section.title or kind).capitalize()}**"
            entries = [e for e in section.value if e.as_dict().get("name") not in NOT_PASSED]
            yield "\n".join(f"- {_entry(kind, entry, returns)}" for entry in entries)


def _entry(kind: str, entry: griffe.DocstringElement, returns: object) -> str:
    words = _markdown(" ".join(entry.description.split()))
    if kind in ("returns", "yields"):  # griffe parses the words before a colon as a type
        before = "" if entry.annotation in (None, "None", returns) else f"{entry.annotation}: "
        return before + words
    return f"`{entry.annotation if kind == 'raises' else entry.as_dict()['name']}`: {words}"


def _markdown(text: str) -> str:
    """Convert Sphinx markup of code to Markdown."""
    return re.sub(r":\w+:`", "`", text.replace("``", "`"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m ci.api_pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args(arguments).check
    found = pages()
    stale = [f for f, text in found.items() if not f.exists() or f.read_text(encoding="utf-8") != text]
    for file in stale:
        said = "not up to date; run python -m ci.api_pages" if check else "written"
        print(f"{file.relative_to(ROOT)}: {said}")
        if not check:
            file.write_text(found[file], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
