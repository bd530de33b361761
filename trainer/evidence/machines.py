"""Machines: what decides how fast compiled code is and stays the same from night to night, as one readable name.

Device, host processor and the major versions of torch, Triton and CUDA: figures of one machine are no measure for
another, whereas a new minor version is just what a comparison over time is for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
from collections.abc import Mapping

from trainer.sweep.processes import visible_gpus
from trainer.telemetry.machine import processor_name
from trainer.telemetry.record import RunRecord

SOFTWARE = ("torch", "triton", "cuda")


def fingerprint(device: str, processor: str, versions: Mapping[str, str | None]) -> str:
    """``NVIDIA H200, AMD EPYC 9654, torch 2, triton 3, cuda 13``; what is not there is left out."""
    majors = [f"{name} {version.partition('.')[0]}" for name in SOFTWARE if (version := versions.get(name))]
    return ", ".join(dict.fromkeys([device, processor, *majors]))


def fingerprint_of(record: RunRecord) -> str | None:
    """The machine that a record was made on; None when it does not say which."""
    processor = record.processor or (record.device if record.device_type == "cpu" else None)
    if record.device is None or processor is None:
        return None
    return fingerprint(record.device, processor, record.versions)


def this_fingerprint() -> str:
    """The one of this machine, without importing torch."""
    processor = processor_name()
    return fingerprint(_gpu_name() or processor, processor, _versions())


def _gpu_name() -> str | None:
    """Name of the first GPU that a process would see; None without one, or with a torch that has no CUDA."""
    gpus = visible_gpus()
    if not gpus or _versions()["cuda"] is None:
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        first = gpus[0]
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(first)
        )
        return str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:  # CUDA_VISIBLE_DEVICES names what is not there
        return None
    finally:
        pynvml.nvmlShutdown()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in SOFTWARE[:2]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # torch.version.cuda, of the file alone: importing torch takes seconds.
    place = importlib.util.find_spec("torch")
    file = None if place is None or place.origin is None else os.path.join(os.path.dirname(place.origin), "version.py")
    found["cuda"] = runpy.run_path(file).get("cuda") if file is not None and os.path.isfile(file) else None
    return found
