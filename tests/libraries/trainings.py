"""One small training of each library, as its own documentation shows it, on a CPU.

    python -m tests.libraries.trainings [--libraries chemprop,monai] [--arms regional,whole] [--backend inductor]

prints a line for each library and arm: how far its losses are from plain Lightning's, and how far those are from
themselves with weights a rounding off; what was compiled, what ran eager and why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                         "enable_model_summary": False}  # fmt: skip
"""Options of every trainer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a training is given.

    Args:
        callbacks: Of the trainer, the compiling one among them.
        steps: Optimizer steps.
        folder: For what a library writes.
    """

    callbacks: list[Any]
    steps: int
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """Of a Trainer."""
        return {
            **QUIET,
            "accelerator": "cpu",
            "max_steps": self.steps,
            "callbacks": self.callbacks,
            "default_root_dir": self.folder,
        }


def torch_geometric(run: Run) -> None:
    """GIN on graphs of random sizes: blocks in a ModuleList, the first of another width."""
    import lightning as L
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GIN, global_add_pool

    class Graphs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gnn, self.head = GIN(7, 16, num_layers=3, dropout=0.1), nn.Linear(16, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            pooled = global_add_pool(self.gnn(batch.x, batch.edge_index), batch.batch)
            return functional.cross_entropy(self.head(pooled), batch.y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def graph() -> Data:
        nodes = int(torch.randint(5, 15, ()))
        edges = torch.randint(0, nodes, (2, 3 * nodes))
        return Data(x=torch.randn(nodes, 7), edge_index=edges, y=torch.randint(0, 2, (1,)))

    data = [graph() for _ in range(8 * run.steps)]
    L.Trainer(**run.options).fit(Graphs(), GraphLoader(data, batch_size=8))


def chemprop(run: Run) -> None:
    """Message passing over molecules."""
    import lightning as L
    from chemprop import data, models
    from chemprop import nn as layers

    smiles = ["C" * (1 + i % 6) + ("O" if i % 2 else "N") + "C" * (i % 3) for i in range(8 * run.steps)]
    points = [data.MoleculeDatapoint.from_smi(one, np.array([len(one) / 10])) for one in smiles]
    model = models.MPNN(
        layers.BondMessagePassing(d_h=32, depth=3), layers.MeanAggregation(), layers.RegressionFFN(input_dim=32)
    )
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=8, num_workers=0, shuffle=False)
    L.Trainer(**run.options).fit(model, loader)


def pytorch_forecasting(run: Run) -> None:
    """A temporal fusion transformer."""
    import lightning.pytorch as pl
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    rows = [
        {"series": str(series), "time": time, "value": float(np.sin(time / 3 + series) + 0.1 * series)}
        for series in range(4)
        for time in range(40 + 2 * run.steps)
    ]
    dataset = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=3,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        dataset, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, loss=QuantileLoss(), log_interval=-1
    )
    pl.Trainer(**run.options).fit(model, dataset.to_dataloader(train=True, batch_size=8, num_workers=0))


def darts(run: Run) -> None:
    """A transformer of darts, which copies its trainer's options."""
    from darts import TimeSeries
    from darts.models import TransformerModel

    series = TimeSeries.from_values(np.sin(np.arange(24 + 8 * run.steps) / 5).astype(np.float32))
    model = TransformerModel(
        input_chunk_length=12,
        output_chunk_length=3,
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=32,
        batch_size=8,
        n_epochs=1,
        random_state=0,
        pl_trainer_kwargs={
            name: value for name, value in run.options.items() if name not in ("logger", "enable_checkpointing")
        },
        work_dir=str(run.folder),
    )
    model.fit(series)


def neuralforecast(run: Run) -> None:
    """NHITS."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    times = pd.date_range("2020-01-01", periods=80, freq="D")
    frame = pd.concat(
        pd.DataFrame({"unique_id": str(i), "ds": times, "y": np.sin(np.arange(80) / 4 + i)}) for i in range(3)
    )
    options = {name: value for name, value in run.options.items() if name != "max_steps"}
    sizes: dict[str, Any] = {"h": 3, "input_size": 12, "batch_size": 2, "windows_batch_size": 16}
    model = NHITS(max_steps=run.steps, mlp_units=[[16, 16]] * 3, **sizes, **options)
    NeuralForecast(models=[model], freq="D").fit(frame)


def scvi(run: Run) -> None:
    """A variational autoencoder of counts."""
    import anndata
    import scvi as library

    counts = np.random.default_rng(0).poisson(1.0, (8 * run.steps, 30)).astype(np.float32)
    adata = anndata.AnnData(counts)
    library.model.SCVI.setup_anndata(adata)
    model = library.model.SCVI(adata, n_hidden=16, n_latent=4, n_layers=2)
    model.train(
        max_epochs=1,
        accelerator="cpu",
        train_size=1.0,
        batch_size=8,
        callbacks=run.callbacks,
        enable_progress_bar=False,
        logger=False,
    )


def monai(run: Run) -> None:
    """A U-Net on MetaTensors."""
    import lightning as L
    from monai.data import MetaTensor
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    class Segments(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.1)
            self.loss = DiceLoss(to_onehot_y=True, softmax=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.loss(self.net(batch["image"]), batch["label"])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    batches = [
        {"image": MetaTensor(torch.randn(2, 1, 16, 16)), "label": MetaTensor(torch.randint(0, 2, (2, 1, 16, 16)))}
        for _ in range(run.steps)
    ]
    L.Trainer(**run.options).fit(Segments(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def lightly(run: Run) -> None:
    """SimCLR with lightly's head and loss."""
    import lightning as L
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from torchvision.models import resnet18

    class Contrasts(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(*list(resnet18().children())[:-1])
            self.head, self.loss = SimCLRProjectionHead(512, 32, 16), NTXentLoss()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first, second = (self.head(self.backbone(view).flatten(1)) for view in batch)
            loss: Tensor = self.loss(first, second)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)

    views = [(torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)) for _ in range(run.steps)]
    L.Trainer(**run.options).fit(Contrasts(), DataLoader(views, batch_size=None))  # type: ignore[arg-type]


def segmentation_models_pytorch(run: Run) -> None:
    """A U-Net over a ResNet."""
    import lightning as L
    import segmentation_models_pytorch as smp

    class Segments(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.Unet("resnet18", encoder_weights=None, classes=1)
            self.loss = smp.losses.DiceLoss("binary")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, masks = batch
            loss: Tensor = self.loss(self.model(images), masks)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    batches = [(torch.randn(2, 3, 32, 32), torch.randint(0, 2, (2, 1, 32, 32)).float()) for _ in range(run.steps)]
    L.Trainer(**run.options).fit(Segments(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def gluonts(run: Run) -> None:
    """DeepAR: an LSTM, in which nothing repeats."""
    import pandas as pd
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator

    index = pd.date_range("2020-01-01", periods=120, freq="D")
    frame = pd.DataFrame({"target": np.sin(np.arange(120) / 4)}, index=index)
    options = {name: value for name, value in run.options.items() if name != "enable_checkpointing"}
    DeepAREstimator(
        prediction_length=3,
        context_length=12,
        freq="D",
        hidden_size=16,
        batch_size=8,
        num_batches_per_epoch=run.steps,
        trainer_kwargs={**options, "max_epochs": 1, "enable_checkpointing": True},
    ).train(PandasDataset(frame))


def nequip(run: Run) -> None:
    """Energies and forces of clusters of several sizes: the loss holds a gradient, which the forward takes."""
    import lightning as L
    from nequip.data import AtomicDataDict
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    class Forces(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.potential = NequIPGNNModel(
                seed=0, model_dtype="float64", r_max=4.0, type_names=["A", "B"], num_layers=2, l_max=1, num_features=4,
                parity=False, radial_mlp_depth=1, radial_mlp_width=8, avg_num_neighbors=8.0,
                per_type_energy_scales=1.0, per_type_energy_shifts=0.0,
            )  # fmt: skip

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clusters, forces = batch
            found = self.potential(dict(clusters))
            energy = found[AtomicDataDict.TOTAL_ENERGY_KEY]
            return energy.square().mean() + (found[AtomicDataDict.FORCE_KEY] - forces).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.001)

    draw = torch.Generator().manual_seed(0)  # imports draw from the global one

    def clusters() -> tuple[dict[str, Tensor], Tensor]:
        sizes = torch.randint(4, 9, (3,), generator=draw)
        places = [4 * torch.rand(int(size), 3, generator=draw) for size in sizes]
        near = [(torch.cdist(place, place) < 4).fill_diagonal_(False).nonzero().T for place in places]
        starts = sizes.cumsum(0) - sizes
        return {
            AtomicDataDict.POSITIONS_KEY: torch.cat(places),
            AtomicDataDict.ATOM_TYPE_KEY: torch.randint(0, 2, (int(sizes.sum()),), generator=draw),
            AtomicDataDict.EDGE_INDEX_KEY: torch.cat([one + start for one, start in zip(near, starts, strict=True)], 1),
            AtomicDataDict.BATCH_KEY: torch.arange(3).repeat_interleave(sizes),
            AtomicDataDict.NUM_NODES_KEY: sizes,
        }, torch.randn(int(sizes.sum()), 3, generator=draw)

    before = torch.get_default_dtype()
    set_global_state()
    torch.set_default_dtype(torch.float64)
    try:
        batches = [clusters() for _ in range(run.steps)]
        L.Trainer(**run.options).fit(Forces(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(before)


LIBRARIES: dict[str, Callable[[Run], None]] = {
    training.__name__: training
    for training in (
        *(torch_geometric, chemprop, pytorch_forecasting, darts, neuralforecast),
        *(scvi, monai, lightly, segmentation_models_pytorch, gluonts, nequip),
    )
}
ARMS = ("regional", "whole", "optimizer", "auto")
"""Of every library."""
DERIVING = "nequip"
"""The library whose loss holds a gradient; ``second_order`` is tried on it, too."""
LINE = "{:<28} {:<10} {:<10} {:<9} {:<9} {:<7} {:<9} {}"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What came of one training."""

    losses: list[float] = dataclasses.field(default_factory=list)
    records: list[Any] = dataclasses.field(default_factory=list)
    """Of the compiling callback that trained, a copy of the given one in some libraries; none for plain Lightning."""


def train(
    library: str, arm: str | None, *, steps: int = 8, backend: str = "aot_eager", rounded: bool = False
) -> Result:
    """Train ``library`` under one strategy, or with nothing of ours (None).

    Args:
        backend: The compiler's.
        rounded: Begin with weights that are one rounding off.
    """
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = _callbacks(library, arm, backend, result, rounded=rounded)
        random.seed(0)
        np.random.seed(0)  # the global generator, from which libraries draw
        torch.manual_seed(0)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            LIBRARIES[library](Run(callbacks, steps, Path(folder)))
    return result


def _callbacks(library: str, arm: str | None, backend: str, result: Result, *, rounded: bool) -> list[Any]:
    from crucible import Auto, Compile, Optimizer, Regional, SecondOrder, Whole

    if library in ("darts", "neuralforecast"):
        import pytorch_lightning as lightning
    else:
        import lightning.pytorch as lightning

    class Watch(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for weight in module.parameters() if rounded else ():
                signs = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).sign()
                weight.data *= 1 + 2.0**-23 * signs

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            result.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            result.records.extend(one.record for one in trainer.callbacks if hasattr(one, "record"))

    kinds: dict[str, Callable[[], Any]] = {
        "regional": lambda: Regional(backend=backend),
        "whole": lambda: Whole(backend=backend),
        "optimizer": lambda: Optimizer(backend=backend),
        "auto": lambda: Auto(),
        "second_order": lambda: SecondOrder(backend=backend),
    }
    return [Watch()] if arm is None else [Compile([kinds[arm]()], save=False, verbose=False), Watch()]


def relative_difference(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves; infinite where one has other points, or none."""
    if len(losses) != len(others) or not losses:
        return float("inf")
    return max(abs(one - other) / max(abs(one), 1e-9) for one, other in zip(losses, others, strict=True))


def main() -> None:
    """A line for each library and arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    print(LINE.format("library", "arm", "outcome", "apart", "noise", "graphs", "regions", "what ran eager, and why"))
    for library in given.libraries.split(","):
        try:
            plain = train(library, None, steps=given.steps).losses
            noise = relative_difference(plain, train(library, None, steps=given.steps, rounded=True).losses)
        except Exception as error:
            print(LINE.format(library, "plain", "ended", "", "", "", "", f"{type(error).__name__}: {error}"[:300]))
            continue
        for arm in given.arms.split(","):
            try:
                result = train(library, arm, steps=given.steps, backend=given.backend)
            except Exception as error:
                print(LINE.format(library, arm, "ended", "", "", "", "", f"{type(error).__name__}: {error}"[:300]))
                continue
            (record,) = result.records
            eager = "; ".join(f"{name}: {reason}" for name, reason in record.eager_parts.items())[:300]
            figures = f"{relative_difference(plain, result.losses):.1e}", f"{noise:.1e}", str(record.graphs)
            regions = f"{record.regions_compiled} of {record.regions}"
            print(LINE.format(library, arm, record.status, *figures, regions, eager), flush=True)


if __name__ == "__main__":
    main()
