"""What the README says of this repository is so."""

import re
from pathlib import Path

import pytest

import ddpopt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = Path(ddpopt.__file__).parent


def test_the_module_map_names_every_module_and_no_other() -> None:
    module_map = README.partition("## Module map")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+(?:\.py|/))`", module_map))
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert named == modules | packages


@pytest.mark.parametrize("target", re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
def test_each_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_each_link_into_the_repository_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
