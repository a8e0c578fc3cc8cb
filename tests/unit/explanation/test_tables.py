"""Plain tables: their layout, and that nothing but the arguments decides it."""

import pytest

from ddpopt.explanation.tables import WIDTH, Column, table


def test_no_column_is_squeezed_and_no_cell_is_cut_however_wide_the_others_are() -> None:
    columns = [Column("node"), Column("segment", "right"), Column("why it is cut there")]
    for length in (50, 75, 300):
        lines = table(columns, [("n" * length, 1, "the graph starts here")]).splitlines()[2:]
        assert "".join(lines).count("n") == length
        assert any(line.endswith("  the graph starts here") for line in lines)
    figures = table([Column("x" * 30, "right") for _ in range(4)], [range(4)]).splitlines()
    assert [len(line) for line in figures] == [126] * 3


COLUMNS = [Column("bucket", "right"), Column("gradients")]


@pytest.mark.parametrize("name", ["layers.0.weight", "a" * 200, "[bold]w[/bold]:smile:"])
def test_a_cell_that_fills_wraps_between_names_or_inside_a_longer_one_and_loses_nothing(name: str) -> None:
    lines = table(COLUMNS, [(0, ", ".join([name] * 6))]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "".join(line[8:].replace(" ", "") for line in lines[2:]) == ",".join([name] * 6)
    assert len(name) > WIDTH or all(line.endswith((",", name)) for line in lines[2:])
