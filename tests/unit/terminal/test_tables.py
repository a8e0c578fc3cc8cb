"""Plain tables: their layout, and that nothing but the arguments decides it."""

import pytest

from ddpopt.terminal.tables import NARROW, WIDTH, Column, paragraph, table


def test_no_column_is_squeezed_and_no_cell_is_cut_however_wide_the_others_are() -> None:
    columns = [Column("node"), Column("segment", "right"), Column("why it is cut there")]
    for length in (50, 75, 300):
        lines = table(columns, [("n" * length, 1, "the graph starts here")]).splitlines()[2:]
        assert "".join(lines).count("n") == length
        assert any(line.endswith("  the graph starts here") for line in lines)
    figures = table([Column("x" * 30, "right") for _ in range(4)], [range(4)]).splitlines()
    assert [len(line) for line in figures] == [126] * 3


COLUMNS = [Column("bucket", "right"), Column("gradients")]


@pytest.mark.parametrize(("columns", "width"), [("59", NARROW), ("79", NARROW), ("200", WIDTH)])
@pytest.mark.parametrize("name", ["layers.0.weight", "a" * 200, "[bold]w[/bold]:smile:"])
def test_a_cell_that_fills_wraps_between_names_or_inside_a_longer_one_and_loses_nothing(
    name: str, columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("COLUMNS", columns), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(variable, value)
    lines = table(COLUMNS, [(0, ", ".join([name] * 6))]).splitlines()
    assert width - len("layers.0.weight, ") < max(map(len, lines)) <= width
    assert max(map(len, paragraph("word " * 30).splitlines())) in (width - 1, width - 2)
    assert "".join(line[8:].replace(" ", "") for line in lines[2:]) == ",".join([name] * 6)
    assert len(name) > WIDTH or all(line.endswith((",", name)) for line in lines[2:])
