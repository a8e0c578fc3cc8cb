"""How `make docs` builds the site: pages by MyST, the reference from docstrings, nothing from the network."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import ddpopt.testing

project = "ddpopt"
copyright = "The ddpopt authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "ddpopt"
html_show_sourcelink = False
# Headings get the anchors that they have on GitHub.
myst_heading_anchors = 4
# Docstrings write names in backticks; those that have an entry become links.
default_role = "py:obj"
# Pages that are not written yet; one that is written and not listed is still a warning.
suppress_warnings = ["toc.not_readable"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_member_order = "groupwise"
python_use_unqualified_type_names = True

FOLDER = Path(__file__).parent
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}\n", re.DOTALL)
PICTURE = '<img class="{0}" src="_static/{1}-{0}.svg" alt="{2}" />'

# autodoc lists the names that a module has; these are imported at first use.
for name in ddpopt.testing.__all__:
    setattr(ddpopt.testing, name, getattr(ddpopt.testing, name))


def write_diagrams(app: Sphinx, _: Exception | None) -> None:
    """Write each diagram twice, so that it follows the theme of the page and not only that of the system."""
    for file in FOLDER.glob("diagrams/*.svg"):
        drawn = file.read_text(encoding="utf-8")
        for theme, rules in (("only-light", ""), ("only-dark", r"\1\n")):
            path = app.outdir / "_static" / f"{file.stem}-{theme}.svg"
            path.write_text(DARK.sub(rules, drawn), encoding="utf-8")


def show_diagrams(_: Sphinx, tree: nodes.document, __: str) -> None:
    """Show the one of the two that fits."""
    for image in list(tree.findall(nodes.image)):
        file = Path(image["uri"])
        if file.suffix == ".svg":
            both = [PICTURE.format(theme, file.stem, image["alt"]) for theme in ("only-light", "only-dark")]
            image.replace_self(nodes.raw("", "".join(both), format="html"))


def leave_out_notes(_: Sphinx, what: str, __: str, ___: object, ____: Any, lines: list[str]) -> None:
    """Leave out the docstrings of modules, which are for readers of the source."""
    if what == "module":
        lines.clear()


def setup(app: Sphinx) -> None:
    """Tell Sphinx of the functions above."""
    app.connect("build-finished", write_diagrams)
    app.connect("doctree-resolved", show_diagrams)
    app.connect("autodoc-process-docstring", leave_out_notes)
