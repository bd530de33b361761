"""``crucible.compile``: PyTorch loops as people write them train under strategies as without, and are measured."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from strategies import (
    Buckets,
    Checkpointing,
    CudaGraph,
    Dynamic,
    Modular,
    Optimizer,
    Part,
    Regional,
    Strategy,
    Whole,
)
from tests.conftest import ROOT
from tests.processes import python
from tests.strategies import backends
from tests.trainer.recording import Recorded
from trainer.guards import ParityError
from trainer.loops.own_loop import PlainTraining, compile
from trainer.telemetry.record import RunRecord

EAGER: dict[str, Any] = {"backend": "eager"}
STRATEGIES: dict[str, Callable[[], list[Strategy]]] = {
    "eager": list,
    "whole": lambda: [Whole(**EAGER)],
    "regional": lambda: [Regional(**EAGER)],
    "modular": lambda: [Modular(parts={"blocks.*": Part(**EAGER)})],
    "checkpointing": lambda: [Checkpointing(), Regional(**EAGER)],
    "optimizer": lambda: [Optimizer(**EAGER)],
}


class Net(nn.Module):
    """Without anything of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def loader(batches: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(4 * batches, width, generator=generator) for width in (8, 1)))
    return DataLoader(data, batch_size=4)


def loss_function(model: nn.Module, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def begin(
    folder: Path | None, model: nn.Module, optimizer: Any, strategies: list[Strategy], **options: Any
) -> PlainTraining:
    given = {"warmup_steps": 1, "measure_peak": False, "folder": folder, "save": folder is not None, "verbose": False}
    return compile(model, optimizer, strategies, **{**given, **options})


class OneLoop:
    """A training of two epochs as somebody wrote it: accumulation, clipping, a schedule, an evaluation."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = adam(self.model)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=6)
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def train(self, batches: Callable[[Any], Any], evaluation: Callable[[Any], Any]) -> None:
        for _ in range(2):
            self.model.train()
            for index, batch in enumerate(batches(loader())):
                loss = loss_function(self.model, batch) / 2
                loss.backward()
                self.losses.append(loss.item())
                if index % 2:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            self.model.eval()
            with torch.no_grad():
                self.evaluated += [loss_function(self.model, batch).item() for batch in evaluation(loader(2))]


@pytest.fixture(scope="module")
def plain() -> OneLoop:
    """What plain PyTorch makes of it."""
    expected = OneLoop()
    expected.train(iter, iter)
    return expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_that_stays_as_it_is_trains_as_without_us(tmp_path: Path, plain: OneLoop, name: str) -> None:
    loop = OneLoop()
    keys = set(loop.model.state_dict())
    with begin(tmp_path, loop.model, loop.optimizer, STRATEGIES[name](), micro_batches=2) as training:
        loop.train(training.batches, training.evaluation)
    assert (loop.losses, loop.evaluated) == (pytest.approx(plain.losses), pytest.approx(plain.evaluated))
    torch.testing.assert_close(loop.model.state_dict(), plain.model.state_dict())
    assert set(loop.model.state_dict()) == keys
    record = RunRecord.load(tmp_path)
    assert (record.status, record.task, record.steps, record.label) == ("finished", "Net", 6, training.record.label)
    assert record.steady_steps
    assert record.data_wait_share is not None
    assert record.config["task"]["batch_size"] == 4
    assert "step" not in vars(loop.optimizer) or name == "eager" or hasattr(loop.optimizer.step, "_wrapped_by_lr_sched")
    assert not loop.optimizer._optimizer_step_post_hooks
    if name == "eager":
        assert record.graphs is record.audits is None
        return
    assert record.graphs
    assert (record.audits.verdict, record.eager_parts) == ("clean", {})


@pytest.mark.parametrize("strategies", [["regional"], ["regional", "optimizer"]])
def test_steps_that_are_ours_train_as_a_loop_of_ones_own(plain: OneLoop, strategies: list[str]) -> None:
    loop, losses = OneLoop(), []
    given = [one for name in strategies for one in STRATEGIES[name]()]
    options: dict[str, Any] = {"micro_batches": 2, "clip": 0.1, "schedule": loop.schedule}
    with begin(None, loop.model, loop.optimizer, given, loss=loss_function, **options) as training:
        for _ in range(2):
            for batch in loader():
                loss = training.step(batch)
                losses.append(loss.item() / 2)
    assert losses == pytest.approx(plain.losses)
    torch.testing.assert_close(loop.model.state_dict(), plain.model.state_dict())
    assert (training.record.steps, training.steps_done) == (6, 6)
    assert training.record.final_loss == pytest.approx(sum(losses) / 6), "the mean of the steps since the last log"
    assert training.record.data_wait_share is None, "nobody knows how long the loop waited"


def captured(strategies: list[Strategy], micro_batches: int) -> tuple[list[float], RunRecord]:
    """Losses of twelve steps, of three times the size from the tenth on; and the record."""
    model, losses, scale = Net(), [], 1.0

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return scale * loss_function(model, batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with begin(None, model, optimizer, strategies, loss=scaled, micro_batches=micro_batches) as training:
        for index, batch in enumerate(training.batches(loader(12 * micro_batches))):
            scale = 1.0 if index < 10 * micro_batches else 3.0
            loss = training.step(batch)
            losses.append(loss.item())
    return losses, training.record


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_whole_steps_are_captured_and_what_the_loss_reads_is_compared(micro_batches: int) -> None:
    expected, _ = captured([], micro_batches)
    losses, record = captured([Recorded()], micro_batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert record.report["recorded"]["replayed_steps"] > 0
    assert record.eager_parts == {}
    assert record.data_wait_share is not None


def test_a_scaler_scales_and_unscales_as_in_a_loop_of_ones_own() -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    expected, theirs = Net(), scaler()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in loader():
        with torch.autocast("cpu", torch.float16):
            loss = loss_function(expected, batch)
        optimizer.zero_grad()
        theirs.scale(loss).backward()
        theirs.unscale_(optimizer)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        theirs.step(optimizer)
        theirs.update()

    model, ours = Net(), scaler()
    options: dict[str, Any] = {"loss": loss_function, "clip": 0.1, "scaler": ours, "precision": "16-mixed"}
    with begin(None, model, torch.optim.SGD(model.parameters(), lr=0.1), [Regional(**EAGER)], **options) as training:
        for batch in loader():
            training.step(batch)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert (ours.state_dict(), training.record.precision) == (theirs.state_dict(), "16-mixed")
    assert training.record.eager_parts == {}


def test_a_loop_of_fabrics_trains_as_without_us() -> None:
    def train(strategies: list[Strategy] | None) -> tuple[list[float], Any, Any]:
        fabric, losses, training = Fabric(accelerator="cpu", precision="bf16-mixed"), [], None
        own = Net()
        model, optimizer = fabric.setup(own, adam(own))
        batches: Any = fabric.setup_dataloaders(loader())
        if strategies is not None:
            training = begin(None, model, optimizer, strategies, precision="bf16-mixed")
            batches = training.batches(batches)
        for batch in batches:
            loss = loss_function(model, batch)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        if training is not None:
            training.close()
        return losses, own.state_dict(), training

    expected, weights, _ = train(None)
    losses, ours, training = train([Whole(**EAGER), Optimizer(**EAGER)])
    assert losses == pytest.approx(expected, rel=1e-2)
    torch.testing.assert_close(ours, weights, rtol=1e-2, atol=1e-3)
    assert (training.record.steps, training.record.regions_compiled, training.record.task) == (6, 1, "Net")
    assert training.record.audits.verdict == "clean"


def test_two_optimizers_that_step_in_one_batch_are_one_step(tmp_path: Path) -> None:
    def train(batches: Callable[[Any], Any], critic: nn.Module, generator: nn.Module, both: list[Any]) -> None:
        for noise, _ in batches(loader()):
            fakes = generator(noise)
            both[0].zero_grad()
            softplus(critic(fakes.detach())).mean().backward()
            both[0].step()
            both[1].zero_grad()
            softplus(-critic(fakes)).mean().backward()
            both[1].step()

    def parts() -> tuple[nn.Module, nn.Module, list[Any]]:
        torch.manual_seed(0)
        two = nn.Linear(8, 1), nn.Linear(8, 8)
        return *two, [torch.optim.Adam(one.parameters(), betas=(0.5, 0.999)) for one in two]

    *expected, both = parts()
    train(iter, *expected, both)
    *models, both = parts()
    with begin(tmp_path, nn.ModuleList(models), both, [Whole(**EAGER)]) as training:
        train(training.batches, *models, both)
    for one, other in zip(models, expected, strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict())
    assert (training.record.steps, training.record.regions_compiled) == (6, 2)
    assert training.record.eager_parts == {}


def test_nothing_of_the_loops_is_called_more_often_than_it_calls_it() -> None:
    calls: list[str] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("optimizer")
            return super().step(closure)

    class Data(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            calls.append("data")
            return super().__getitem__(index)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append("loss")
        return loss_function(model, batch)

    model = Net()
    data = DataLoader(Data(torch.randn(24, 8), torch.randn(24, 1)), batch_size=4)
    with begin(None, model, Counting(model.parameters(), lr=0.1), [Regional(**EAGER)], loss=loss) as training:
        for batch in data:
            training.step(batch)
    assert calls == [*["data"] * 4, "loss", "optimizer"] * 6


# ---- evaluations, pauses, and ends of all kinds ----------------------------------------------------------------------


def steps(training: PlainTraining, model: nn.Module, optimizer: Any, count: int = 6) -> Iterator[int]:
    for index, batch in enumerate(training.batches(loader(count))):
        optimizer.zero_grad()
        loss_function(model, batch).backward()
        optimizer.step()
        yield index


def is_plain(model: nn.Module) -> bool:
    return not any(one._compiled_call_impl for one in model.modules())


def test_an_evaluation_in_the_middle_of_an_epoch_is_compiled_and_belongs_to_no_step() -> None:
    optimizer = adam(model := Net())
    with begin(None, model, optimizer, [Regional(**EAGER)]) as training:
        for index in steps(training, model, optimizer, 8):
            assert not is_plain(model)
            if index % 2:
                for batch in training.evaluation(loader(2)):
                    with torch.no_grad():
                        assert not is_plain(model)
                        loss_function(model, batch)
                assert is_plain(model), "the step is over"
                pickle.dumps(model)
    assert training.record.steps == 8
    assert training.record.pause_seconds
    assert any(not proof.with_gradients and proof.proven for proof in proofs(training))


def proofs(training: PlainTraining) -> list[Any]:
    return [proof for kind in training._program.kinds.values() for proof in kind.proofs.values()]


def test_an_evaluation_before_the_optimizer_steps_leaves_the_step_compiled() -> None:
    optimizer = adam(model := Net())
    with begin(None, model, optimizer, [Regional(**EAGER)]) as training:
        for batch in training.batches(loader()):
            with torch.no_grad():
                for other in training.evaluation(loader(1)):
                    loss_function(model, other)
            assert not is_plain(model)
            loss_function(model, batch).backward()
            optimizer.step()
    assert (training.record.steps, training.record.steady_steps) == (6, 0), "each holds an evaluation"


def test_a_pause_belongs_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = adam(model := Net())
    with begin(None, model, optimizer, []) as training:
        for _ in steps(training, model, optimizer):
            training.pause()
            copies = copy.deepcopy(model)
            torch.testing.assert_close(copies.state_dict(), model.state_dict())
    assert training.record.steps == 6
    assert training.record.pause_seconds


def test_a_loop_that_is_left_early_has_a_finished_record(tmp_path: Path) -> None:
    optimizer = adam(model := Net())
    with begin(tmp_path, model, optimizer, [Regional(**EAGER)]) as training:
        for index in steps(training, model, optimizer):
            if index == 3:
                break
        assert is_plain(model)
        pickle.dumps(model)
    record = RunRecord.load(tmp_path)
    assert (record.status, record.steps) == ("finished", 4)


@pytest.mark.parametrize("by_step", [False, True])
def test_an_error_in_the_middle_is_in_the_record_and_the_module_is_plain(tmp_path: Path, by_step: bool) -> None:
    model, ours = Net(), {"loss": loss_function} if by_step else {}
    optimizer = adam(model)

    def train() -> None:
        with begin(tmp_path, model, optimizer, [Regional(**EAGER), Optimizer(**EAGER)], **ours) as training:
            for index, batch in enumerate(training.batches(loader())):
                if by_step:
                    training.step(batch)
                else:
                    loss_function(model, batch).backward()
                    optimizer.step()
                if index == 2:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    record = RunRecord.load(tmp_path)
    assert (record.status, record.reason, record.steps) == ("failed", "KeyError: 'mine'", 3)
    assert is_plain(model)
    assert "step" not in vars(optimizer)


def test_a_batch_that_the_loss_fails_on_can_be_left_out() -> None:
    model, failed = Net(), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not failed and training.steps_done == 3:
            failed.append(batch)
            raise ValueError("a bad batch")
        return loss_function(model, batch)

    with begin(None, model, adam(model), [Regional(**EAGER)], loss=loss) as training:
        for batch in loader():
            try:
                training.step(batch)
            except ValueError:
                assert is_plain(model)
    assert len(failed) == 1
    assert (training.record.status, training.record.steps) == ("finished", 5)


def test_another_training_ends_the_one_before(tmp_path: Path) -> None:
    model, other, batch = Net(), Net(), next(iter(loader()))
    first = begin(tmp_path / "first", model, adam(model), [], loss=loss_function)
    first.step(batch)
    with begin(None, other, adam(other), [], loss=loss_function) as second:
        assert RunRecord.load(tmp_path / "first").status == "finished"
        with pytest.raises(RuntimeError, match="this training is over"):
            first.step(batch)
        second.step(batch)
        second.close()
    assert second.record.status == "finished", "closed once"


def test_a_training_without_a_batch_says_so() -> None:
    model = Net()
    with pytest.warns(UserWarning, match=r"no batch came by training.step or training.batches"):
        begin(None, model, adam(model), []).close()


SCRIPT = """
import crucible, torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = crucible.compile(model, optimizer, loss=lambda model, x: model(x).mean(), measure_peak=False)
training.step(torch.ones(2, 2))
raise KeyError("mine")
"""


@pytest.mark.slow
def test_a_script_that_ends_without_close_has_a_record_of_why(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT)
    done = python("fit.py", cwd=tmp_path, path=(ROOT, ROOT / "trainer"))
    assert "Linear · eager · failed" in done.stdout, done.stderr
    record = RunRecord.load(tmp_path / "compile_runs" / "run-1")
    assert (record.status, record.reason, record.steps) == ("failed", "KeyError: 'mine'", 1)


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_difference_ends_the_loop_where_that_is_asked_for(tmp_path: Path) -> None:
    optimizer = adam(model := Net())
    how: dict[str, Any] = {"on_difference": "fail"}
    try:
        backends.Fault.forward = 1.01
        with (
            pytest.raises(ParityError, match="not eager's"),
            begin(tmp_path, model, optimizer, [Regional(backend=backends.FAULTY)], **how) as training,
        ):
            assert not [*steps(training, model, optimizer)]
    finally:
        backends.Fault.clear()
    assert RunRecord.load(tmp_path).status == "failed"
    assert is_plain(model)


@pytest.mark.parametrize("autocast", [True, False])
def test_the_rounding_of_the_loops_own_autocast_is_no_difference(autocast: bool) -> None:
    model = nn.ModuleList([nn.Linear(8, 512)])  # many numbers, in which a common factor of one rounding shows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        backends.Fault.forward = 1 + 1.5 * 2.0**-9
        with warnings.catch_warnings(), begin(None, model, optimizer, [Whole(backend=backends.FAULTY)]) as training:
            warnings.simplefilter("ignore")
            for x, _ in training.batches(loader()):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model[0](x).float().square().mean()
                loss.backward()
                optimizer.step()
    finally:
        backends.Fault.clear()
    assert bool(training.record.eager_parts) is not autocast


# ---- what is written -------------------------------------------------------------------------------------------------


def test_curves_go_to_the_writer_and_the_record_beside_them(tmp_path: Path) -> None:
    optimizer = adam(model := Net())
    with SummaryWriter(str(tmp_path)) as writer:
        with begin(
            None, model, optimizer, [Regional(**EAGER)], writer=writer, save=True, log_every_n_steps=2
        ) as training:
            losses = []
            for batch in training.batches(loader()):
                loss = loss_function(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                training.log_loss(loss)
                losses.append(loss.item())
        writer.add_scalar("mine", 1.0, 1)
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=False)
    events.Reload()
    assert {"mine", "train/loss", "speed/steps_per_second", "whole_run/loss"} <= set(events.Tags()["scalars"])
    record = RunRecord.load(tmp_path)
    assert record.final_loss == pytest.approx(sum(losses[-2:]) / 2), "the mean of the steps since the last log"


def test_ragged_batches_are_padded_for_dynamic_shapes() -> None:
    model, lengths = nn.ModuleList([nn.Linear(1, 1)]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"x": torch.ones(2, length)} for length in (3, 9, 16)]
    how: dict[str, Any] = {"ragged": [("x", 1)]}
    with begin(None, model, optimizer, [Dynamic(), Whole(**EAGER)], **how) as training:
        for batch in training.batches(batches):
            lengths.append(batch["x"].shape[1])
            model[0](batch["x"].unsqueeze(-1)).sum().backward()
            optimizer.step()
    assert lengths == [8, 16, 16]


@pytest.mark.slow
def test_the_scripts_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "own_loop.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```python (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for name in ("keep.py", "step.py"):
        assert blocks[name].count("Regional()") == 1
        script = blocks[name].replace("Regional()", "Regional(backend='eager')").replace("range(3)", "range(1)")
        exec(builtins.compile(script, f"docs/own_loop.md {name}", "exec"), names)
    kept, ours = (RunRecord.load(tmp_path / "compile_runs" / f"run-{place}") for place in (1, 2))
    assert (kept.status, kept.steps, kept.regions_compiled, ours.steps) == ("finished", 16, 4, 16)
    assert kept.eager_parts == ours.eager_parts == {}


def compiled_already() -> nn.Module:
    model = Net()
    model.blocks[0].compile(backend="eager")
    return model


def holding_a_compiled_one() -> nn.Module:
    model: Any = Net()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    return model


@pytest.mark.parametrize("make", [compiled_already, holding_a_compiled_one])
def test_what_is_compiled_already_is_left_to_that(make: Callable[[], nn.Module]) -> None:
    trained = []
    for strategies in ([], [Regional(blocks=["blocks"], **EAGER)]):
        trained.append(model := make())
        with begin(None, model, optimizer := adam(model), strategies) as training:
            assert len([*steps(training, model, optimizer, 4)]) == 4
    assert all(map(torch.equal, *(one.state_dict().values() for one in trained)))
    assert training.record.eager_parts == {"blocks.0": "blocks.0 is compiled by torch.compile already"}
    assert (training.record.regions, training.record.regions_compiled) == (2, 2)


def test_an_optimizer_of_sparse_gradients_alone_is_left_to_torch() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.net = nn.Embedding(4, 8, sparse=True), Net()

        def forward(self, x_BD: Tensor) -> Tensor:
            return self.net(x_BD + self.words(torch.arange(len(x_BD)) % 4))

    trained = []
    for strategies in ([], [Optimizer(backend="aot_eager")]):
        trained.append(model := Words())
        optimizers = [torch.optim.SparseAdam(model.words.parameters()), adam(model.net)]
        with begin(None, model, optimizers, strategies) as training:
            for batch in training.batches(loader()):
                model.zero_grad()
                loss_function(model, batch).backward()
                for one in optimizers:
                    one.step()
    for one, other in zip(*(one.parameters() for one in trained), strict=True):
        torch.testing.assert_close(one, other)
    assert training.record.report["optimizer"]["form"] == "eager, functional"
    assert training.record.eager_parts == {"optimizer": "SparseAdam: it has embeddings with sparse gradients"}


# ---- what is refused -------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[Strategy], dict[str, Any], str]] = {
    "capture": (Net, [CudaGraph(required=False)], {}, "cuda_graph captures whole steps: give loss="),
    "buckets": (Net, [Buckets()], {}, "buckets groups and pads batches"),
    "wrapped": (lambda: Fabric(accelerator="cpu").setup(Net()), [], {"loss": loss_function}, "Fabric or accelerate"),
    "paths": (Net, [Regional(blocks=["layers"])], {}, "Regional.blocks: 'layers' matches no submodule"),
    "needless": (Net, [], {"clip": 1.0}, "clip= goes with loss="),
    "micro-batches": (Net, [], {"micro_batches": 0}, "micro_batches=0 must be at least 1"),
    "precision": (Net, [], {"precision": "fp16"}, "precision='fp16' is not one of"),
    "conflict": (Net, [Regional(), Whole()], {}, "'regional' and 'whole' both act on the module stage"),
    "choices": (Net, [], {"parity": "maybe"}, "parity='maybe' is not one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_the_first_batch(name: str, tmp_path: Path) -> None:
    build, strategies, options, message = REFUSED[name]
    model = build()
    optimizer = adam(model)
    with pytest.raises(ValueError, match=message) as caught:
        begin(tmp_path, model, optimizer, strategies, **options)
    assert "\n" not in str(caught.value)
    assert not optimizer._optimizer_step_post_hooks
    assert not [*tmp_path.iterdir()]


def test_what_is_no_module_or_no_optimizer_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"crucible.compile: Regional\(.*\) is no optimizer, which comes before the strat"
    ):
        compile(Net(), [Regional()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"crucible.compile: None is no optimizer"):
        compile(Net(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crucible.compile: <function .* is not a module"):
        compile(lambda x: x, adam(Net()))  # type: ignore[arg-type]


def test_two_optimizers_are_not_stepped_for_the_loop() -> None:
    model = Net()
    with pytest.raises(ValueError, match="loss= takes one optimizer, not 2"):
        begin(None, model, [adam(model), adam(model)], [], loss=loss_function)


def test_a_step_without_a_loss_names_what_is_missing() -> None:
    model = Net()
    with begin(None, model, adam(model), []) as training:
        with pytest.raises(ValueError, match=r"crucible.compile\(..., loss="):
            training.step(next(iter(loader())))
        assert len([*steps(training, model, adam(model), 2)]) == 2
