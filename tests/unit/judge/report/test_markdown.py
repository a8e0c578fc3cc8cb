"""A step's summary on GitHub: what a reader of the page sees."""

import html

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ddpopt.terminal.files import AT_MOST, step_summary


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


@given(st.text(alphabet="ab`~#*_|<>&[]() \n"), st.text(alphabet="ab`*_|<&[] ", min_size=1))
def test_a_reader_sees_title_and_text_as_they_are_and_then_the_next_summary(text: str, title: str) -> None:
    page = rendered(step_summary(f"x{title}x", text, 0) + step_summary("next", "y", 1))
    heading = " ".join(f"x{title}x".split())
    assert page == (
        f"<h2>\N{WHITE HEAVY CHECK MARK} {html.escape(heading)}</h2>\n<pre>\n{html.escape(text)}\n</pre>\n"
        "<h2>\N{CROSS MARK} next</h2>\n<pre>\ny\n</pre>\n"
    )


def test_a_text_that_github_would_not_take_is_cut_and_says_so() -> None:
    page = step_summary("RIGHT", "line\n" * AT_MOST, 0)
    assert len(page) < AT_MOST + 200
    assert "... (the JSON has the rest)" in page
