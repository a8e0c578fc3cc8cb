"""Plain tables: their layout, and that nothing but the arguments decides it."""

import pytest

from ddpopt.explanation.tables import WIDTH, Column, table

COLUMNS = [Column("bucket", "right"), Column("gradients", fills=True)]


@pytest.mark.parametrize("name", ["layers.0.weight", "a" * 200, "[bold]w[/bold]:smile:"])
def test_a_cell_that_fills_wraps_between_names_or_inside_a_longer_one_and_loses_nothing(name: str) -> None:
    lines = table(COLUMNS, [(0, ", ".join([name] * 6))]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(line[8:].replace(" ", "") for line in lines[2:]) == ",".join([name] * 6)
    assert len(name) > WIDTH or all(line.endswith((",", name)) for line in lines[2:])
