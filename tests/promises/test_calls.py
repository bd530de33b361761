"""The user's code is called exactly as often, in the same order and on the same batches as in plain Lightning.

Every hook of module, data module and callback, ``self.log``, optimizers, schedulers, loaders, metrics, loggers and the
random numbers that a step draws are written down, call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crucible import (
    Auto,
    Buckets,
    Cached,
    Checkpointing,
    Compile,
    CudaGraph,
    Dynamic,
    Modular,
    Optimizer,
    Part,
    Regional,
    Strategy,
    Whole,
)
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.promises.counted import (
    ByHand,
    Call,
    Calls,
    Counted,
    Game,
    WritingLogger,
    counted_callback,
    counted_data,
    counted_module,
)
from tests.promises.training import CLOSE, apart, train

STEPS = 12
REGIONAL: Callable[[], list[Strategy]] = lambda: [Regional(backend="eager")]  # noqa: E731
PIECES: dict[str, Callable[[], list[Strategy]]] = {
    "nothing": list,
    "regional": REGIONAL,
    "whole": lambda: [Whole(backend="eager")],
    "modular": lambda: [
        Modular(parts={"net.blocks": Part(how="regional", backend="eager"), "net.head": Part(backend="eager")})
    ],
    "optimizer": lambda: [Optimizer(backend="eager")],
    "checkpointing": lambda: [Checkpointing()],
    "debug": lambda: [Regional(backend="aot_eager")],
    "auto": lambda: [Auto(remember=False)],
    "cuda_graph": lambda: [CudaGraph(required=False)],
    "checkpointing, regional": lambda: [Checkpointing(), Regional(backend="eager")],
    "regional, optimizer": lambda: [Regional(backend="eager"), Optimizer(backend="eager")],
    "full_stack": lambda: [
        *(Regional(backend="eager"), Optimizer(backend="eager"), Buckets(required=False), CudaGraph(required=False))
    ],
}


def calls_of(
    kind: type[Counted],
    strategies: list[Strategy] | None,
    folder: Path,
    *,
    accumulate: int = 1,
    module: dict[str, Any] | None = None,
    own_loaders: bool = True,
    steps: int = STEPS,
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Call], list[float]]:
    """Train so many steps with a validation in the middle; every call, and the losses."""
    calls = Calls()
    automatic = not issubclass(kind, Game | ByHand)
    batches = steps * accumulate
    outcome = train(
        lambda: counted_module(kind, calls, **(module or {})),
        strategies,
        datamodule=counted_data(calls, batches, own=own_loaders),
        callbacks=[
            counted_callback(calls),
            ModelCheckpoint(folder / str(len(list(folder.iterdir()))), every_n_train_steps=steps // 2, save_top_k=-1),
        ],
        compile_options=compile_options,
        **({"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0} if automatic else {}),
        **{
            "enable_checkpointing": True,
            "max_epochs": 2,
            "limit_train_batches": batches // 2,
            "num_sanity_val_steps": 1,
            "logger": WritingLogger(calls),
            "log_every_n_steps": 3,
            **options,
        },
    )
    if outcome.ended is not None:
        raise outcome.ended
    return calls.all(), outcome.losses


def assert_same_calls(seen: list[Call], eager: list[Call]) -> None:
    for number, (one, other) in enumerate(zip(seen, eager, strict=False)):
        if one != other:
            before = "".join(f"\n    {call}" for call in eager[max(number - 5, 0) : number])
            names = [call[0] for call in eager]
            more = {name: [call[0] for call in seen].count(name) - names.count(name) for name in dict.fromkeys(names)}
            pytest.fail(
                f"call {number} is {one}, plain Lightning's is {other}, after{before}\n"
                f"more often than there: { {name: count for name, count in more.items() if count} }"
            )
    assert len(seen) == len(eager), (seen[len(eager) :] or eager[len(seen) :])[:5]


def without_figures(calls: list[Call]) -> list[Call]:
    """Compiled code rounds otherwise: without norms of gradients and logged figures."""
    return [call[:2] if call[0] == "logger" else call[:1] if "step " in call[0] else call for call in calls]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Call], list[float]]]:
    """The calls of plain Lightning, made once for each training."""
    made: dict[str, tuple[list[Call], list[float]]] = {}

    def of(kind: type[Counted], **options: Any) -> tuple[list[Call], list[float]]:
        key = f"{kind.__name__} {options}"
        if key not in made:
            made[key] = calls_of(kind, None, tmp_path_factory.mktemp("plain"), **options)
        return made[key]

    return of


def test_the_calls_are_written_down(plain: Any) -> None:
    calls, losses = plain(Counted, accumulate=1)
    names = [call[0] for call in calls]
    assert names.count("training_step") == STEPS == len(losses)
    assert names.count("optimizer.step begins") == STEPS
    assert [call[1] for call in calls if call[0] == "training_step"] == [*range(STEPS // 2)] * 2
    assert len(set(names)) >= 75, "most of Lightning's hooks were called"


TRIES = {"remember": False, "planned_steps": 10**7, "candidates": ["regional"]}
OF_ONES_OWN: dict[str, Any] = {"module": {"dropout": 0.2, "own_optimizer": True}, "own_loaders": False}
AUTOMATIC: dict[str, tuple[Callable[[], list[Strategy]], dict[str, Any], float]] = {
    **{f"{name}, {n}": (PIECES[name], {"accumulate": n}, CLOSE) for name in PIECES for n in (1, 2)},
    **{
        f"{name}, dropout, torch's loaders, an optimizer of one's own": (PIECES[name], OF_ONES_OWN, CLOSE)
        for name in ("regional", "whole", "optimizer", "auto")
    },
    "one batch": (REGIONAL, {"fast_dev_run": True}, CLOSE),
    "by Inductor": (lambda: [Regional(), Optimizer()], {"accumulate": 1}, 10 * CLOSE),
    "auto tries candidates": (lambda: [Auto(**TRIES)], {"steps": 240}, 100 * CLOSE),  # type: ignore[arg-type]
}
"""Strategies, options, and how near losses are: where not to the last digits, figures are not compared."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if AUTOMATIC[one][2] > CLOSE else []) for one in AUTOMATIC]
)
def test_under_automatic_optimization(name: str, plain: Any, tmp_path: Path) -> None:
    strategies, options, close = AUTOMATIC[name]
    eager, losses = plain(Counted, **options)
    seen, compiled_losses = calls_of(Counted, strategies(), tmp_path, **options)
    assert_same_calls(*((seen, eager) if close == CLOSE else map(without_figures, (seen, eager))))
    assert apart(compiled_losses, losses) <= close


@pytest.mark.parametrize("parity", ["strict", "off"])
def test_whatever_is_compared(parity: str, plain: Any, tmp_path: Path) -> None:
    eager, _ = plain(Counted, accumulate=1)
    assert_same_calls(calls_of(Counted, REGIONAL(), tmp_path, compile_options={"parity": parity})[0], eager)


MANUAL: dict[str, tuple[type[Counted], dict[str, Any]]] = {
    "game": (Game, {}),
    "by hand": (ByHand, {}),
    "by hand, every third": (ByHand, {"every": 3}),
    "by hand, closure": (ByHand, {"closure": True}),
}


@pytest.mark.parametrize("training", MANUAL)
@pytest.mark.parametrize("name", [name for name in PIECES if name != "full_stack"])
def test_under_manual_optimization(name: str, training: str, plain: Any, tmp_path: Path) -> None:
    if training != "game" and name not in ("nothing", "regional", "whole", "optimizer"):
        pytest.skip("one kind of manual optimization for these")
    kind, options = MANUAL[training]
    eager, _ = plain(kind, module=options)
    strategies = PIECES[name]()
    if training == "game" and name == "modular":
        strategies = [Modular(parts={"critic.blocks": Part(how="regional", backend="eager")})]
    assert_same_calls(calls_of(kind, strategies, tmp_path, module=options)[0], eager)


def test_with_a_store_of_graphs(plain: Any, tmp_path: Path) -> None:
    eager, _ = plain(Counted, accumulate=1)
    for _ in range(2):  # cold, then warm
        folder = tmp_path / "checkpoints"
        folder.mkdir(exist_ok=True)
        strategies: list[Strategy] = [Regional(backend="eager"), Cached(url=str(tmp_path / "store"))]
        assert_same_calls(calls_of(Counted, strategies, folder)[0], eager)


RAGGED: dict[str, Callable[[], list[Strategy]]] = {
    "dynamic": lambda: [Dynamic(), Regional(backend="eager")],
    "buckets": lambda: [Buckets(count=2), Regional(backend="eager")],
    "full_stack": lambda: [
        *(Buckets(count=2), Regional(backend="eager"), Optimizer(backend="eager"), CudaGraph(required=False))
    ],
}


@pytest.mark.parametrize("name", RAGGED)
def test_with_batches_of_many_lengths(name: str) -> None:
    """Buckets put other examples together, so that the numbers of calls are compared, and not the batches."""
    from tests.trainer.ragged_modules import RAGGED as DECLARED
    from tests.trainer.ragged_modules import TextData, TextModel, fit

    def counts(callbacks: list[Any]) -> tuple[list[Any], int, int]:
        calls = Calls()
        data = TextData()
        module = fit(data, [counted_callback(calls), *callbacks], module=TextModel(), val_check_interval=5)
        steps = [call for call in calls.all() if "batch" in call[0] or "step" in call[0] or "epoch" in call[0]]
        return [*steps, len(module.trained), len(module.validated)], data.train_set.read, data.val_set.read

    compiling = Compile(RAGGED[name](), ragged=DECLARED, save=False, verbose=False)  # type: ignore[arg-type]
    assert counts([compiling]) == counts([])
