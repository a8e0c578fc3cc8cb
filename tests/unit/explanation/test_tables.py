"""Plain tables: their layout, and that nothing but the arguments decides it."""

import pytest
from expecttest import assert_expected_inline

from ddpopt.explanation.tables import WIDTH, Column, Noted, table

COLUMNS = [Column("bucket", "right"), Column("gradients", fills=True)]


def test_a_remark_stands_below_its_cell_indented() -> None:
    rows = [(0, Noted("layers.7.weight", "it is large enough by itself")), (10, "layers.0.weight")]
    assert_expected_inline(
        table(COLUMNS, rows),
        """\
bucket  gradients
--------------------------------------
     0  layers.7.weight
          it is large enough by itself
    10  layers.0.weight""",
    )


@pytest.mark.parametrize("name", ["layers.0.weight", "a" * 200, "[bold]w[/bold]:smile:"])
def test_a_cell_that_fills_wraps_between_names_or_inside_a_longer_one_and_loses_nothing(name: str) -> None:
    lines = table(COLUMNS, [(0, ", ".join([name] * 6))]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(line[8:].replace(" ", "") for line in lines[2:]) == ",".join([name] * 6)
    assert len(name) > WIDTH or all(line.endswith((",", name)) for line in lines[2:])
