"""The forces task: its potential, its clusters, its network, and its training compiled as one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tasks.forces.data import Clusters, ClusterSet, envelope, morse
from tasks.forces.model import ForcesNet
from tasks.forces.task import Forces
from tests.tasks.conftest import opened
from tests.trainer.runs import curve, train

CUTOFF = 6.0


def small(**options: Any) -> Forces:
    return Forces(initialise="host", **{"batch_size": 4, "width": 8, "layers": 2, "train_examples": 32, **options})


def network(task: Forces | None = None) -> ForcesNet:
    torch.manual_seed(0)
    return (task or small()).build_net().double()


def in_double(batch: Clusters) -> tuple[Tensor, ...]:
    return tuple(one.double() if one.is_floating_point() else one for one in batch[:4])


def test_forces_of_the_data_are_the_slopes_of_its_energy() -> None:
    cluster = ClusterSet(["0/train/5"], least=6, most=6, cutoff=CUTOFF).batch([0])
    positions, elements = cluster.positions.double(), cluster.elements
    step = 1e-5
    for atom in range(6):
        for axis in range(3):
            moved = torch.zeros_like(positions)
            moved[0, atom, axis] = step
            up, down = (morse(positions + sign * moved, elements, cutoff=CUTOFF) for sign in (1, -1))
            assert float(-(up - down) / (2 * step)) == pytest.approx(float(cluster.forces[0, atom, axis]), abs=1e-4)


def test_a_cluster_depends_on_its_key_alone() -> None:
    keys = [f"0/train/{number}" for number in range(4)]
    together, alone = (ClusterSet(some, least=3, most=9, cutoff=CUTOFF) for some in (keys, keys[2:3]))
    for one, other in zip(together.batch([2]), alone.batch([0]), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert set(together.lengths) <= set(range(3, 10))
    assert len(together) == 4
    with pytest.raises(IndexError):
        together[4]


def test_the_envelope_ends_smoothly() -> None:
    apart = torch.tensor([0.0, 3.0, 6.0, 7.0], dtype=torch.double, requires_grad=True)
    factor = envelope(apart, CUTOFF)
    (slope,) = torch.autograd.grad(factor.sum(), apart)
    assert factor.tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-12)
    assert slope[2:].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_padding_changes_neither_energy_nor_forces() -> None:
    net = network()
    narrow, wide = (
        in_double(next(iter(opened(small(most_atoms=7, pad_to=width)).train_dataloader()))) for width in (7, 12)
    )
    (energy, forces), (padded_energy, padded_forces) = (net(*one[:2]) for one in (narrow, wide))
    torch.testing.assert_close(padded_energy, energy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded_forces[:, :7], forces, rtol=1e-12, atol=1e-12)
    assert not padded_forces[:, 7:].any()
    torch.testing.assert_close(net(*wide)[0], net(*narrow)[0], rtol=1e-12, atol=1e-12)


def test_a_turned_cluster_has_its_energy_and_turned_forces() -> None:
    net = network()
    positions, elements, *_ = in_double(next(iter(opened(small()).train_dataloader())))
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.double))
    energy, forces = net(positions.clone(), elements)
    turned_energy, turned_forces = net(positions @ turn, elements)
    torch.testing.assert_close(turned_energy, energy)
    torch.testing.assert_close(turned_forces, forces @ turn)


def test_operations_are_those_that_torch_counts() -> None:
    task = small(most_atoms=9, pad_to=9)
    batch = next(iter(opened(task).train_dataloader()))
    net = task.build_net()
    positions = batch.positions.requires_grad_() * 1.0  # no leaf: the counter's hooks refuse one within a gradient
    with FlopCounterMode(display=False) as counter:
        net(positions, *batch[1:4])[0].backward()
    assert task.training_flops(batch) == counter.get_total_flops()


RAGGED = ("task.batch_size=4", "task.pad_to=null", "trainer.precision=64-true")


def test_losses_are_eagers_in_double_precision_over_20_steps_of_many_sizes(tmp_path: Path) -> None:
    losses = []
    for arm in ("eager", "second_order"):
        record = train(
            tmp_path / arm, *RAGGED, "trainer.max_steps=20", "trainer.val_every_n_steps=10",
            task="forces", strategy=arm, backend="aot_eager",
        )  # fmt: skip
        losses.append(curve(tmp_path / arm))
        assert record.status == "finished"
    assert record.eager_parts == {}
    assert record.recompiles <= 3
    assert len(losses[0]) == 20
    assert list(losses[1].values()) == pytest.approx(list(losses[0].values()), rel=1e-10)


def test_buckets_bound_the_sizes(tmp_path: Path) -> None:
    record = train(
        tmp_path, *RAGGED, "task.layers=1", "compile.buckets.multiple=1", "trainer.max_steps=12",
        task="forces", strategy="[second_order,buckets]", backend="aot_eager",
    )  # fmt: skip
    assert record.eager_parts == {}
    assert record.padded_share is not None
    assert len(record.report["buckets"]["edges"]) == 2
