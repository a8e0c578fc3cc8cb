"""docs/cli.md has every command and every option, as the commands themselves describe them."""

import os
import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from ddpopt.cli import app as cli

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
TABLES = re.compile(r"(?<=<!-- generated -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def options() -> dict[str, dict[str, Any]]:
    """By command and by name its options, without ``--help``."""
    command: Any = get_command(cli.app)
    return {
        name: {each.name: each for each in one.params if each.param_type_name == "option"}
        for name, one in command.commands.items()
    }


def tables() -> str:
    command: Any = get_command(cli.app)
    lines = ["| command | does |", "|---|---|"]
    lines += [f"| `{name}` | {one.short_help} |" for name, one in command.commands.items()]
    lines += ["", "| option | of | default | meaning |", "|---|---|---|---|"]
    by_text: dict[tuple[str, str, str], list[str]] = {}
    for name, known in options().items():
        for each in known.values():
            spelled = " / ".join([*each.opts, *each.secondary_opts])
            value = f"{spelled} {each.metavar}" if each.metavar and each.metavar not in spelled else spelled
            default = "" if each.default is None or each.default is False else f"`{each.default}`"
            by_text.setdefault((value, default, each.help), []).append(name)
    lines += [
        f"| `{option}` | {', '.join(names)} | {default} | {about} |"
        for (option, default, about), names in by_text.items()
    ]
    return "\n".join(lines)


def test_the_page_has_every_command_and_every_option() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page = TABLES.sub(lambda _: tables(), page)
        PAGE.write_text(page, encoding="utf-8")
    assert TABLES.findall(page) == [tables()]


def test_every_option_that_a_page_prints_exists() -> None:
    known = str([each.opts + each.secondary_opts for own in options().values() for each in own.values()])
    for page in PAGE.parent.glob("*.md"):
        for command in re.findall(r"ddpopt [a-z]+ [^`#\n]+", page.read_text(encoding="utf-8")):
            assert [word for word in re.findall(r"--[a-z-]+", command) if f"'{word}'" not in known] == []
