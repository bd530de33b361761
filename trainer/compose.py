"""Compose a Config from the same files and overrides as the command line, for scripts and tests.

config = compose(["task/size=base", "compile=regional", "trainer.max_steps=100"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra

from trainer import plugins
from trainer.cli import CONF
from trainer.config import refuse_written_credentials, register, to_config
from trainer.settings import Config


def compose(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Config:
    """The configuration that ``python -m trainer --config-dir <config_dir> <overrides>`` would run with.

    Raises ValueError for bad values, and for a folder that is none.
    """
    register()
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir={config_dir!r} is not a folder")
        plugins.load_from_command_line(["--config-dir", config_dir])
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        if config_dir is not None:
            # What Hydra does for its command line; its compose knows no further folder.
            # https://github.com/facebookresearch/hydra/blob/v1.3.2/hydra/_internal/utils.py (_run_hydra)
            search_path = create_config_search_path(str(CONF))
            search_path.prepend("command-line", Path(config_dir).resolve().as_uri(), anchor="schema")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2(task_name="compose", config_search_path=search_path)
        cfg = hydra_compose("config", overrides=list(overrides))
        refuse_written_credentials(cfg)
        return to_config(cfg, overrides)
