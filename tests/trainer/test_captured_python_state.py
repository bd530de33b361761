"""A captured step is right by construction: modules that depend on Python state, as researchers write them, train as in
eager, captured or not.

On the CPU here, on a GPU in ``tests/gpu``. What advances state from within a step is in ``tests/promises/states.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import operator
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.capturing import Captured
from tests.trainer.lightning_modules import Losses, quiet_trainer
from tests.trainer.recording import Recorded

SCALE = 1.0
SETTINGS = {"scale": 1.0}


class Hyperparameters:
    scale = 1.0


class Plain(L.LightningModule):
    """Two layers; the loss is scaled by ``scale``, which each module gets from somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def scale(self, batch_idx: int) -> Any:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, target_B1 = batch
        return nn.functional.mse_loss(self.net(x_BD), target_B1) * self.scale(batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


MODULES: dict[str, tuple[type[Plain], str | None]] = {}
"""By name: the module, and a part of the reason why it is not captured for good; None where it stays captured."""
CALLBACKS: dict[str, Callable[[], L.Callback]] = {}


def case(reason: str | None) -> Callable[[type[Plain]], type[Plain]]:
    def add(kind: type[Plain]) -> type[Plain]:
        MODULES[kind.__name__] = kind, reason
        return kind

    return add


def reads(
    name: str,
    reason: str | None,
    look: Callable[[Any], Any] = lambda self: 1.0,
    put: Callable[[Any, float], Any] = lambda self, value: None,
    make: Callable[[], dict[str, Any]] = dict,
    given: Callable[[Any, Tensor], Tensor] = lambda self, x: x,
) -> None:
    """A module: ``look`` is the scale, ``put`` changes it before each step, ``make`` makes the attributes, ``given`` is
    what the network is given in place of its input."""

    def __init__(self: Any) -> None:
        Plain.__init__(self)
        for attribute, value in make().items():
            setattr(self, attribute, value)

    def scale(self: Any, batch_idx: int) -> Any:
        return look(self)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return Plain.training_step(self, (given(self, batch[0]), batch[1]), batch_idx)

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        put(self, wave(self.global_step))

    body = (__init__, scale, training_step, on_train_batch_start)
    MODULES[name] = type(name, (Plain,), {one.__name__: one for one in body}), reason


def at_step_10(name: str, change: Callable[[Any], Any], **more: Any) -> None:
    """A module that is changed between two steps."""
    reads(name, None, put=lambda self, value: change(self) if self.global_step == 10 else None, **more)


def wave(step: int) -> float:
    return 1.0 + step % 7


def sets(*names: str) -> Callable[[Any, float], Any]:
    """Sets the last of ``names`` on the object that the others lead to."""

    def put(self: Any, value: float) -> None:
        setattr(functools.reduce(getattr, names[:-1], self), names[-1], value)

    return put


# ---- what does not change, or now and then ---------------------------------------------------------------------------


reads("CountsWithoutReading", None, put=sets("seen"))
reads(
    "HasConstantsEverywhere", None,
    lambda self: self.weights[1] * self.names["scale"] * SCALE * SETTINGS["scale"] * Hyperparameters.scale,
    make=lambda: {"weights": [0.5, 1.5], "names": {"scale": 2.0}},
)  # fmt: skip
reads(
    "ReadsConfigurations", None,
    lambda self: self.config.loss.scale * self.config["loss"]["kinds"][1] * self.arguments.scale,
    make=lambda: {
        "config": OmegaConf.create({"loss": {"scale": 2.0, "kinds": [1.0, 2.0]}}),
        "arguments": argparse.Namespace(scale=3.0),
    },
)  # fmt: skip
reads(  # what the messages advise
    "FillsABuffer", None, lambda self: self.kl, lambda self, value: self.kl.fill_(value),
    lambda: {"kl": nn.Buffer(torch.ones(()))},
)  # fmt: skip
reads(  # a schedule by epoch
    "ChangesOnceInAWhile", None, lambda self: self.temperature,
    lambda self, value: setattr(self, "temperature", 1.0 + self.current_epoch),
)  # fmt: skip
reads(
    "SwitchesToEval", None, put=lambda self, value: self.norm.train(self.global_step < 10),
    make=lambda: {"norm": nn.BatchNorm1d(8)}, given=lambda self, x: self.norm(x),
)  # fmt: skip
at_step_10("Freezes", lambda self: self.net[0].requires_grad_(False))
at_step_10("AddsAHookLater", lambda self: self.net[0].register_forward_hook(lambda module, given, output: output * 2))
at_step_10("ReplacesALayer", lambda self: operator.setitem(self.net, 1, nn.ReLU()))
at_step_10("ReplacesAMethod", lambda self: setattr(self, "scale", lambda batch_idx: 3.0))
at_step_10(
    "SwapsTheDataOfAWeight",
    lambda self: setattr(self.net[0].weight, "data", self.net[0].weight.data.clone() * 0.5),
)
at_step_10("ResetsTheOptimizer", lambda self: self.trainer.optimizers[0].state.clear())


@case(None)
class TakesAGradientByItsBatch(Plain):
    """As potentials and gradient penalties do; the batch requires a gradient afterwards."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        inputs.requires_grad_(True)
        outputs = self.net(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return (outputs - targets).square().mean() + slope.square().mean()


@case(None)
class CachesInItsFirstStep(Plain):
    cache: Tensor | None = None

    def scale(self, batch_idx: int) -> Any:
        if self.cache is None:
            self.cache = torch.full((), 2.0)
        return self.cache


@functools.lru_cache(maxsize=4)
def remembered(kind: str) -> float:
    return SETTINGS[kind]


@functools.cache
def remembered_settings(kind: str) -> dict[str, float]:
    return {kind: SETTINGS[kind]}


@case(None)
class CallsAMemo(Plain):
    """A stored answer that is cleared once, and one that somebody changes in its place."""

    def __init__(self) -> None:
        super().__init__()
        remembered.cache_clear()
        remembered_settings.cache_clear()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SETTINGS["scale"] = wave(self.global_step)
        if self.global_step == 20:
            remembered.cache_clear()
        if self.global_step == 30:
            remembered_settings("scale")["scale"] = 5.0

    def scale(self, batch_idx: int) -> Any:
        return remembered("scale") * remembered_settings("scale")["scale"]


@case(None)
class AddsAParameterLater(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("extra", None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.extra = nn.Parameter(torch.full((), 2.0, device=self.device))
            self.trainer.optimizers[0].add_param_group({"params": [self.extra]})

    def scale(self, batch_idx: int) -> Any:
        return 1.0 if self.extra is None else self.extra


@case(None)
class ReplacesATiedWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.net[0].weight

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.tied.weight = nn.Parameter(self.net[0].weight.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.tied(batch[0]), batch[1]), batch_idx)


# ---- what changes at every step -------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Closure:
    def __init__(self) -> None:
        value = 1.0

        def write(to: float) -> None:
            nonlocal value
            value = to

        self.made = {"write": write, "look": lambda: value}


def with_default(held: list[float] = [1.0]) -> float:  # noqa: B006
    return held[0]


def imported() -> float:
    from tests.trainer.capturing import SCALE_ELSEWHERE

    return SCALE_ELSEWHERE


def of_an_imported_module() -> float:
    import tests.trainer.capturing as elsewhere

    return elsewhere.SCALE_ELSEWHERE


LONG = f"""def imported_by_long_code():
    if 0 > SCALE: ({", ".join(f"name_{number}" for number in range(256))})
    from tests.trainer.capturing import SCALE_ELSEWHERE
    return SCALE_ELSEWHERE
"""
exec(compile(LONG, __file__, "exec"))


def partly() -> dict[str, Any]:
    weights = [1.0]
    return {"weights": weights, "look": functools.partial(list.__getitem__, weights, 0)}


reads("PropertyReadsGlobalStep", "global_step", lambda self: wave(self.global_step))
reads("ReadsTheTrainer", "self.trainer.global_step", lambda self: wave(self.trainer.global_step))
reads(
    "ReadsItsDataSet", "train_dataloader.dataset", lambda self: self.trainer.train_dataloader.dataset.scale,
    sets("trainer", "train_dataloader", "dataset", "scale"),
)  # fmt: skip
reads(
    "ScheduledDropout", "self.drop.p", put=lambda self, value: setattr(self.drop, "p", 0.05 * value),
    make=lambda: {"drop": nn.Dropout(0.0)}, given=lambda self, x: self.drop(x),
)  # fmt: skip
reads(
    "MovesATeacher", None, put=lambda self, value: self.teacher.weight.data.lerp_(self.net[0].weight.data, 0.1),
    make=lambda: {"teacher": nn.Linear(8, 8).requires_grad_(False)}, given=lambda self, x: self.teacher(x),
)  # fmt: skip
reads("AttributeSetInAHook", "self.kl", lambda self: self.kl, sets("kl"))
reads("AttributeThroughVars", "self.kl", lambda self: vars(self)["kl"], sets("kl"))
reads("AttributeOfASubmodule", "self.net.1.factor", lambda self: self.net[1].factor, sets("net", "1", "factor"))
reads(
    "NestedContents", "self.settings['loss'][0]['scale'] changes", lambda self: self.settings["loss"][0]["scale"],
    lambda self, value: self.settings["loss"][0].update(scale=value), lambda: {"settings": {"loss": [{"scale": 1.0}]}},
)  # fmt: skip
reads(
    "DequeContents", "self.recent", lambda self: sum(self.recent),
    lambda self, value: self.recent.append(value), lambda: {"recent": deque([1.0], maxlen=3)},
)  # fmt: skip
for name, reason, kind in (
    ("HoldsSlots", "self.held.scale", Slotted),
    ("HoldsAConfiguration", "self.held", functools.partial(OmegaConf.create, {"scale": 1.0})),
    ("HoldsAnObject", "self.held.scale", Hyperparameters),
):
    reads(name, reason, lambda self: self.held.scale, sets("held", "scale"), lambda kind=kind: {"held": kind()})
reads(
    "ReadsAClass", "Hyperparameters.scale", lambda self: Hyperparameters.scale,
    lambda self, value: setattr(Hyperparameters, "scale", value),
)  # fmt: skip
reads(
    "ReadsItsClass", "ReadsItsClass.factor", lambda self: type(self).factor,
    lambda self, value: setattr(type(self), "factor", value),
)  # fmt: skip
reads("ReadsAGlobal", "global SCALE", lambda self: SCALE, lambda self, value: globals().update(SCALE=value))
for name, look in (
    ("ImportsAGlobal", imported),
    ("ReadsAnImportedModule", of_an_imported_module),
    ("ImportsInLongCode", globals()["imported_by_long_code"]),
):
    reads(
        name, "capturing.SCALE_ELSEWHERE", lambda self, look=look: look(),
        lambda self, value: setattr(sys.modules["tests.trainer.capturing"], "SCALE_ELSEWHERE", value),
    )  # fmt: skip
reads(
    "ReadsAGlobalDictionary", "SETTINGS['scale']", lambda self: SETTINGS["scale"],
    lambda self, value: SETTINGS.update(scale=value),
)  # fmt: skip
reads(
    "ClearsItsMemoEveryStep", "remembered", lambda self: remembered("scale"),
    lambda self, value: (remembered.cache_clear(), SETTINGS.update(scale=value)),
)  # fmt: skip
reads(
    "ReadsTheEnvironment", "environment", lambda self: float(os.environ["TESTS_SCALE"]),
    lambda self, value: os.environ.update(TESTS_SCALE=str(value)),
)  # fmt: skip
reads(
    "ReadsAClosure", "value in Closure", lambda self: self.look(), lambda self, value: self.write(value),
    lambda: Closure().made,
)  # fmt: skip
reads(
    "ReadsADefault", "a default of with_default", lambda self: with_default(),
    lambda self, value: operator.setitem(with_default.__defaults__[0], 0, value),  # type: ignore[index]
)  # fmt: skip
reads(
    "ReadsAPartial", "self.look[0][0] changes", lambda self: self.look(),
    lambda self, value: operator.setitem(self.weights, 0, value), partly,
)  # fmt: skip
reads(
    "ReadsTheLearningRate", "param_groups[0]['lr'] changes",
    lambda self: 100 * self.optimizers().param_groups[0]["lr"],
    lambda self, value: self.trainer.optimizers[0].param_groups[0].update(lr=0.001 * value),
)  # fmt: skip
reads(
    "ReplacesATensor", "another tensor", lambda self: self.kl,
    lambda self, value: setattr(self, "kl", torch.full((), value, device=self.device)),
)  # fmt: skip
reads(
    "FillsAnArray", "numbers in self.table", lambda self: float(self.table[0]),
    lambda self, value: operator.setitem(self.table, 0, value), lambda: {"table": numpy.ones(4)},
)  # fmt: skip


# ---- what draws, counts, logs and tells the time ---------------------------------------------------------------------

draws = "draws random numbers on the host"
reads("PythonsRandom", draws, lambda self: 1 + random.random())
reads("NumpysRandom", draws, lambda self: 1 + numpy.random.rand())
reads(
    "OwnNumpyGenerator", f"{draws} from self.generator", lambda self: 1 + self.generator.random(),
    make=lambda: {"generator": numpy.random.default_rng(0)},
)  # fmt: skip
reads("TellsTheTime", "time", lambda self: 1.0 if time.time() > 0 else 2.0)
reads(
    "ReadsAnIterator", "self.endless", lambda self: next(self.endless),
    make=lambda: {"endless": itertools.cycle([1.0, 2.0, 3.0])},
)  # fmt: skip


def after(
    name: str, reason: str, does: Callable[[Any, Tensor], Any], make: Callable[[], dict[str, Any]] = dict
) -> None:
    """A module that does something with its loss; what that returns, if anything, is the loss."""
    reads(name, reason, make=make)
    kind, _ = MODULES[name]
    plain = kind.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = plain(self, batch, batch_idx)
        result = does(self, loss)
        return result if isinstance(result, Tensor) else loss

    kind.training_step = training_step  # type: ignore[method-assign]


def with_the_last_one(self: Any, loss: Tensor) -> Tensor:
    loss, self.last = loss + 0.1 * self.last, loss.detach()
    return loss


def with_what_was_logged(self: Any, loss: Tensor) -> Tensor:
    self.log("loss", loss)
    return loss * (1.0 + self.trainer.callback_metrics.get("loss", torch.zeros(())))


def averaged(self: Any, loss: Tensor) -> None:
    self.accuracy.update(loss.detach())
    self.log("mean", self.accuracy)


def mean_metric() -> dict[str, Any]:
    from torchmetrics import MeanMetric

    return {"accuracy": MeanMetric()}


after("KeepsItsLastLoss", "changes self.last", with_the_last_one, lambda: {"last": 0.0})
after("AppendsLosses", "entries of self.losses", lambda self, loss: self.losses.append(loss.detach()),
      lambda: {"losses": []})  # fmt: skip
after("CountsInAMetric", "changes self.accuracy", averaged, mean_metric)
after("ReadsALoggedMetric", "callback_metrics", with_what_was_logged)
after("LogsToTheLogger", "use self.log", lambda self, loss: self.logger and self.logger.log_metrics({"loss": 1.0}))


@case("changes global SCALE")
class CountsInAGlobal(Plain):
    def scale(self, batch_idx: int) -> Any:
        global SCALE
        SCALE = wave(int(SCALE))
        return SCALE


@case("a backward hook on net.0")
class HasABackwardHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(lambda *_: None)


@case("a hook on the parameter net.0.weight")
class HasAGradientHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * wave(self.global_step))


class SetsKl(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.kl = wave(trainer.global_step)


reads("AttributeSetByACallback", "self.kl", lambda self: self.kl)
reads("HasALambdaCallback", "LambdaCallback.on_after_backward")
CALLBACKS["AttributeSetByACallback"] = SetsKl
CALLBACKS["HasALambdaCallback"] = lambda: LambdaCallback(on_after_backward=lambda trainer, module: None)


STEPS, STEPS_UNTIL_REFUSED = 64, 24


def losses(name: str, folder: Path, *others: L.Callback, accelerator: str = "cpu") -> list[float]:
    """Losses of ``STEPS`` steps of one module; of fewer where capture is given up soon."""
    L.seed_everything(0, verbose=False)
    global SCALE
    SCALE, SETTINGS["scale"], Hyperparameters.scale = 1.0, 1.0, 1.0
    kind, reason = MODULES[name]
    data = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=2)
    watch = Losses()
    callbacks = [watch, *([CALLBACKS[name]()] if name in CALLBACKS else []), *others]
    trainer = quiet_trainer(
        callbacks=callbacks,
        default_root_dir=folder,
        logger=CSVLogger(folder) if name == "LogsToTheLogger" else False,
        accelerator=accelerator,
        devices=1,
        max_steps=STEPS if reason is None else STEPS_UNTIL_REFUSED,
        max_epochs=-1,
    )
    trainer.fit(kind(), data)
    return watch.values


@pytest.mark.parametrize("name", list(MODULES))
def test_losses_are_eagers_step_by_step(name: str, tmp_path: Path) -> None:
    captured = Captured([Recorded()])
    seen = losses(name, tmp_path, captured)
    assert seen == pytest.approx(losses(name, tmp_path), rel=1e-5)
    report, (_, reason) = captured.facts, MODULES[name]
    assert not any("second time" in note for note in captured.program.notes)
    if reason is None:
        assert len(seen) == STEPS
        assert report["refused"] == []
        assert report["replayed_steps"] > STEPS // 2
        assert report["parity"]["verdict"] == "passed"
    else:
        assert any(reason in refusal for refusal in report["refused"]), report["refused"]
