"""``crucible.compare`` in a notebook: one line that changes, and an answer that shows itself."""

from __future__ import annotations

import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT
from tests.report.records import record
from trainer.report.comparison import WorkloadComparison, compare_runs
from trainer.report.runs import Run

MODEL = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Lines(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
"""
COMPARE = """
import crucible

arms = [crucible.Regional(backend="eager"), crucible.Whole(backend="eager")]
answer = crucible.compare(Lines(), data, arms, seconds=0.02, rounds=2, trainer={"accelerator": "cpu"})
answer
"""


def comparison(**step_seconds: float) -> WorkloadComparison:
    """Two rounds of arms by their names, each two steps alike."""
    runs = []
    for number in (1, 2):
        for arm, seconds in step_seconds.items():
            made = record(arm, step_seconds=seconds * (1 + 0.001 * number))
            made.round, made.start = number, "cold"
            runs.append(Run(Path(f"{number}-{arm}"), made))
    return compare_runs(runs)[0]


@pytest.mark.slow
def test_a_notebook_gets_one_line_and_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), str(ROOT / "trainer"), *sys.path]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    # torch's own under Python 3.13.0 alone: https://github.com/python/cpython/issues/125608
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
    new = nbformat.v4
    notebook = new.new_notebook(cells=[new.new_code_cell(MODEL), new.new_code_cell(COMPARE)])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=500, resources={}).execute(cwd=str(tmp_path))
    outputs = notebook.cells[1].outputs
    assert len(outputs) <= 3, outputs
    assert [each.output_type for each in outputs if each.output_type != "stream"] == ["display_data", "execute_result"]
    shown, answer = (each.data for each in outputs if each.output_type != "stream")
    lines = shown["text/plain"].splitlines()
    assert lines[0].startswith("comparing eager, regional, whole: 2 rounds")
    assert lines[-1].startswith("verdict: ")
    assert "whole (backend=eager)" in answer["text/html"]
    assert "<b>verdict: " in answer["text/html"]
    assert "ipywidgets" not in str(outputs)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"eager": 0.1, "whole": 0.05, "regional": 0.07}, "whole"),
        ({"eager": 0.1, "whole": 0.2, "regional": 0.3}, "eager"),
        ({"eager": 0.1, "whole": 0.2, "regional": 0.1}, None),
        ({"eager": 0.1, "whole": 0.1}, None),
        ({"whole": 0.1}, None),
        ({"eager": 0.1}, None),
    ],
)
def test_the_best_arm_is_one_that_is_shown_to_be(seconds: dict[str, float], best: str | None) -> None:
    assert comparison(**seconds).best == best


def test_the_answers_html_is_the_table_with_its_names_escaped() -> None:
    found = comparison(eager=0.1, whole=0.05)
    found.workload = "<script>"
    text = found._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<tr>") == 3
    assert f"<b>verdict: {found.verdict}</b>" in text


def test_the_figures_are_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparison(eager=0.1, whole=0.05)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ImportError, match="to_dataframe needs pandas, which is not installed: pip install pandas"):
            found.to_dataframe()
    frame = found.to_dataframe()
    assert list(frame.index) == ["eager", "whole"]
    assert frame.loc["whole", "ratio"] == pytest.approx(2.0, rel=0.01)
    assert frame.loc["eager", "ratio"] != frame.loc["eager", "ratio"], "NaN: the baseline has none"
    assert frame.loc["whole", "step_seconds"] == pytest.approx(0.05, rel=0.01)
