"""Arguments of the benchmarks that cannot be used."""

from collections.abc import Callable

import pytest

from benchmarks import compile as compiling
from benchmarks import step


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (compiling.main, "--models bert", "expected some of gpt, resnet, got 'bert'"),
        (compiling.main, "--modes eager", "expected some of whole, torch, split, inline, got 'eager'"),
        (compiling.main, "--layers 12,0", "expected numbers of layers such as 12,24, got '12,0'"),
        (step.main, "--models linears,bert", "some of linears, gpt, keyword, experts, tied, got 'bert'"),
        (step.main, "--backend inducktor", "got 'inducktor'"),
        (step.main, "--rate fast", "expected a rate such as 1gbit or 500mbit, got 'fast'"),
        (step.main, "--rate 1gbit,1.2.3gbit", "got '1.2.3gbit'"),
        (step.main, "--rounds 0", "invalid choice: 0"),
    ],
)
def test_an_argument_that_cannot_be_is_a_usage_error(
    main: Callable[[list[str]], int], words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    assert message in capsys.readouterr().err
