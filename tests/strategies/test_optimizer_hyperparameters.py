"""Hyperparameters mirrored on the device: written when they change, floats left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from strategies.optimizer.step import DeviceScalar, Mirror


def adamw(**options: object) -> torch.optim.AdamW:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    return torch.optim.AdamW([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}], **options)  # type: ignore[arg-type]


def test_the_tensors_follow_a_schedule_of_rate_and_betas_and_stay_the_same_objects() -> None:
    optimizer = adamw()
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    mirror = Mirror(optimizer)
    rate, betas = mirror.groups[0]["lr"], mirror.groups[1]["betas"]
    for _ in range(8):
        optimizer.step()
        schedule.step()
        mirror.refresh()
        torch.testing.assert_close(mirror.groups[0]["lr"], torch.tensor(optimizer.param_groups[0]["lr"]))
        torch.testing.assert_close(
            mirror.groups[1]["betas"], tuple(map(torch.tensor, optimizer.param_groups[1]["betas"]))
        )
    assert mirror.groups[0]["lr"] is rate
    assert mirror.groups[1]["betas"] is betas
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_groups_have_values_of_their_own_and_flags_have_none() -> None:
    mirror = Mirror(adamw(weight_decay=0.5))
    assert (float(mirror.groups[0]["weight_decay"]), float(mirror.groups[1]["weight_decay"])) == (0.5, 0.0)  # type: ignore[arg-type]
    assert set(mirror.groups[0]) == {"lr", "betas", "eps", "weight_decay"}
    with pytest.raises(KeyError):
        mirror.groups[0]["amsgrad"]


def test_a_users_own_tensor_is_copied_and_a_group_added_later_is_followed() -> None:
    rate = torch.tensor(0.5)
    optimizer = adamw(lr=rate)
    mirror = Mirror(optimizer)
    rate.fill_(0.25)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.125})
    mirror.refresh()
    assert float(mirror.groups[0]["lr"]) == 0.25  # type: ignore[arg-type]
    assert float(mirror.groups[2]["lr"]) == 0.125  # type: ignore[arg-type]
    assert mirror.groups[0]["lr"] is not rate


def test_only_what_has_changed_is_written() -> None:
    scalar = DeviceScalar(1.0, device=torch.device("cpu"))
    version = scalar.tensor._version
    scalar.write(1.0)
    assert scalar.tensor._version == version
    scalar.write(2.0)
    assert scalar.tensor._version > version
    assert scalar.tensor.ndim == 0
    assert float(scalar.tensor) == 2.0
