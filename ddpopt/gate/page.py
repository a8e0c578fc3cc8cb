"""A comparison with a baseline as a self-contained HTML page, and as a table in GitHub's Markdown.

Invariant: every name and every figure is escaped, and the page loads nothing.
"""

import html
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.gate.comparison import Comparison
from ddpopt.judge.report.junit import junit_xml
from ddpopt.terminal.files import SIGNS

AT_MOST = 200
"""Rows of a table in Markdown; the JSON has all of them."""


def page(comparison: Comparison, suffix: str) -> str:
    """Write a comparison in the form of a file's suffix: ``".html"``, ``".xml"`` (JUnit) or ``".md"``."""
    if suffix == ".xml":
        return junit_xml(comparison.as_verdict())
    return html_page(comparison) if suffix == ".html" else markdown(comparison)


def html_page(comparison: Comparison) -> str:
    """Write a comparison as a page.

    Args:
        comparison: what to show.

    Returns:
        A whole HTML document in UTF-8, without any reference to another file.
    """
    environment = Environment(
        loader=PackageLoader("ddpopt", "gate"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("ddpopt").joinpath("judge/report/verdict.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja").render(comparison=comparison, style=style)


def markdown(comparison: Comparison) -> str:
    """Write a comparison as HTML elements for a Markdown page, inside which nothing is parsed as Markdown."""
    sign = SIGNS[comparison.exit_code]
    blocks = [f"<h2>{sign} {html.escape(comparison.headline)}</h2>"]
    shown = comparison.shown[:AT_MOST]
    if shown:
        heads = "".join(f"<th>{name}</th>" for name in ("case", "where", "figure", "before", "now"))
        rows = [f"<tr>{heads}</tr>"]
        for change in shown:
            now = f"{change.now} ({change.remark})" if change.remark else change.now
            cells = change.case, change.place or "case", change.figure, change.before, now
            rows.append("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in cells) + "</tr>")
        blocks.append("<table>\n" + "\n".join(rows) + "\n</table>")
    if len(comparison.shown) > len(shown):
        blocks.append(f"<p>and {len(comparison.shown) - len(shown)} more, all in the JSON</p>")
    for case, causes in comparison.causes_of_changes.items():
        items = "".join(f"<li>{_cell(cause)}</li>" for cause in causes)
        blocks.append(f"<p>Where the graphs of {_cell(case)} break now:</p>\n<ul>{items}</ul>")
    if comparison.advice:
        why, command = comparison.advice
        blocks.append(f"<p>{_cell(why)}</p>\n<pre>{html.escape(command)}</pre>")
    return "\n\n".join(blocks) + "\n\n"


def _cell(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
