"""One peer, trained and timed in this process: ``python -m scripts.peers.cell peer=loop_compile experiment=gpt2``

``scripts.benchmark_peers`` runs several of them and ours in turns. Overrides are those of the trainer; ``peer=`` names
the peer, as ``compile=`` would name strategies.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.peers.names import OVERRIDE, PEERS, refuse, refuse_workload
from trainer import errors
from trainer.compose import compose
from trainer.interrupt import importing
from trainer.sweep.environment import end_with_parent, starting_caches

REFUSED = 2
BACKENDS = ("inductor", "aot_eager", "eager")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the peer; returns 0 finished, 1 failed, 2 refused before any work, 128 + signal interrupted."""
    end_with_parent()
    options = parse(arguments)
    try:
        config = compose(options.overrides, config_dir=options.config_dir)
        if config.compile:
            raise ValueError(f"compile={'+'.join(config.compile)}: a peer takes no strategies of ours; leave it out")
        refuse([options.peer])
        refuse_workload(config)
        with starting_caches(config.repeat, options.out):
            with importing():  # only now, as it reads where its caches are
                from scripts.peers.run import run

            record = run(options.peer, config, run_dir=options.out, command=options.command, backend=options.backend)
    except errors.REFUSALS as error:
        errors.report(error)
        return REFUSED
    except OSError as error:
        errors.report_system(error, place=options.out)
        return REFUSED
    speed = record.steady_steps_per_second
    said = [record.label, record.status, f"{speed:.2f} steps/s" if speed else None, record.reason, str(options.out)]
    print(" · ".join(part for part in said if part))
    return record.exit_code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command-line options; ``command`` is all of them but where the run lies."""
    parser = argparse.ArgumentParser(prog="python -m scripts.peers.cell", description=__doc__)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help=f"{OVERRIDE}NAME and the trainer's overrides")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: outputs/peers/<time>)")
    parser.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for python -m trainer")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of torch.compile (default inductor)")
    options = parser.parse_intermixed_args(arguments)
    named = [word for word in options.overrides if word.startswith(OVERRIDE)]
    if len(named) != 1:
        parser.error(f"name one peer: {', '.join(OVERRIDE + name for name in PEERS)}")
    options.command = [*flags(options.config_dir, options.backend), *options.overrides]
    options.peer = named[0].removeprefix(OVERRIDE)
    options.overrides = [word for word in options.overrides if word != named[0]]
    options.out = options.out or Path("outputs", "peers", f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}")
    return options


def flags(config_dir: str | None, backend: str = BACKENDS[0]) -> list[str]:
    """What of the command is no override, as a process in any directory takes it; defaults are left out."""
    where = [] if config_dir is None else ["--config-dir", str(Path(config_dir).resolve())]
    return where if backend == BACKENDS[0] else [*where, "--backend", backend]


if __name__ == "__main__":
    sys.exit(main())
