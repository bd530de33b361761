"""Compose a Config from the same files and overrides as the command line, for scripts and tests.

config = compose(["task/size=base", "compile=regional", "trainer.max_steps=100"])
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from trainer.cli import CONF
from trainer.config import register, to_config
from trainer.settings import Config


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that ``python -m trainer <overrides>`` would run with. Raises ValueError for bad values."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return to_config(hydra_compose("config", overrides=list(overrides)), overrides)
