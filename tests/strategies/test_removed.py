"""Names of strategies that are no more: a line that says so, and the run goes on without them."""

from __future__ import annotations

import pytest

from strategies import Auto, Background, Regional
from strategies.base import label, ordered
from trainer.config import compose


def test_background_is_left_out_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"compile\.background was removed: .*compile=auto"):
        given = [Regional(), Background()]
    assert [strategy.name for strategy in ordered(given)] == ["regional"]
    assert label(given) == "regional"
    with pytest.warns(FutureWarning):
        assert label([Auto(), Background()]) == "auto", "it claims no stage"


@pytest.mark.parametrize(
    ("value", "left"), [("background", "eager"), ("[regional,background]", "regional"), ("[background,auto]", "auto")]
)
def test_on_the_command_line_it_is_one_line(value: str, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose(["task=micro", f"compile={value}"])
    assert label(config.compile.values()) == left
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("warning: compile.background was removed: ") for line in said] == [True]
