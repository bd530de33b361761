"""Process-wide settings of torch, Lightning's log and Python's warnings, set in one place and restored."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning

from trainer.settings import TrainerConfig

LIGHTNING_LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextlib.contextmanager
def process_settings(config: TrainerConfig) -> Iterator[None]:
    """Matrix precision for fp32 (TF32 on GPUs that have it), and quiet libraries, for the length of a run."""
    matmul = torch.get_float32_matmul_precision()
    levels = {name: logging.getLogger(name).level for name in LIGHTNING_LOGGERS}
    torch.set_float32_matmul_precision(config.matmul_precision)
    for name in LIGHTNING_LOGGERS:  # its device banner and tips; the run's own heading says what matters
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning's advice (more workers, a smaller logging interval) concerns choices made here on purpose.
            warnings.simplefilter("ignore", PossibleUserWarning)
            # A resumed run writes into a directory of its own; its best checkpoint is judged anew there.
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            # Lightning 2.6 asks torch 2.15's pytree in a way that the newer one deprecates; nothing a user could mend.
            warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.pytorch.utilities._pytree")
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
