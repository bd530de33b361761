"""``cached`` in a whole run: whatever is wrong with the store, training goes on to the end and the record says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import STEPS, curve, train


def test_a_run_whose_store_is_out_of_reach_finishes_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRUCIBLE_CACHE_KEY", raising=False)
    taken = tmp_path / "taken"
    taken.write_text("a file, not a folder")
    plain = train(tmp_path / "plain", strategy="regional", task="micro")
    for url in (str(taken), str(taken / "below"), "memory://without-a-key"):
        changes = ["compile=[regional,cached]", f"compile.cached.url={url}"]
        run_dir = tmp_path / str(abs(hash(url)))
        record = train(run_dir, *changes, strategy="regional", task="micro")
        assert (record.status, record.steps) == ("finished", STEPS)
        assert record.label == "cached+regional"
        assert curve(run_dir) == curve(tmp_path / "plain")
        assert record.final_loss == plain.final_loss
        assert record.report["cached"]["state"] == "idle", "this backend compiles nothing that could be cached"
        assert any(note.startswith("cached: cold start: ") for note in record.notes)
