"""Fill and keep a store of compiled artifacts: ``crucible warm_cache fill compile=[regional,cached]``.

Meant for CI and image builds: what ``compile.cached`` would have to compile in a first run is compiled here, so that
every run with the same model, strategies, versions and kind of device starts warm.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.arguments import exit_code, parser, positive
from strategies.cached.store import KEY_VARIABLE, ArtifactStore, Refused, read_key

EXAMPLES = f"""\
examples:
  crucible warm_cache fill task=captioning compile=[regional,cached]
  crucible warm_cache fill compile=[whole,cached] compile.cached.url=s3://bucket/compiled task/size=base
  crucible warm_cache fill --config-dir mine task=ours compile=[regional,cached]
  crucible warm_cache list s3://bucket/compiled
  crucible warm_cache verify ~/.cache/crucible/compiled
  crucible warm_cache prune s3://bucket/compiled --max-gib 5 --older-than-days 30

A store that is not a local folder of your own is signed: set {KEY_VARIABLE} to a secret of 16 characters or more.
Exit codes: 0 done, 1 not (nothing stored, bundles refused), 2 wrong arguments.
"""
GIB, MIB, DAY_SECONDS = 1 << 30, 1 << 20, 86400.0


def main(arguments: list[str] | None = None) -> int:
    """Do what ``arguments`` say; returns the exit code."""
    options = parse(arguments)
    return exit_code(lambda _: fill(options) if options.action == "fill" else kept(options))


def kept(options: argparse.Namespace) -> int:
    """Show or prune what a store holds."""
    key = read_key("--key-file", options.key_file)
    try:
        store = ArtifactStore(options.url, key=key, storage_options=dict(options.storage_option))
        if options.action == "prune":
            return prune(store, max_gib=options.max_gib, older_than_days=options.older_than_days)
        return show(store, whole=options.action == "verify")
    except ValueError:
        raise
    except ImportError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # any error of any file system
        print(f"error: {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def fill(options: argparse.Namespace) -> int:
    """Take a few steps and validate one batch in a temporary directory, only to compile and store."""
    from trainer.config import compose
    from trainer.run import run

    overrides, steps = options.overrides, options.steps
    config = compose(overrides, config_dir=options.config_dir)
    if "cached" not in config.compile:
        raise ValueError("nothing to fill: add 'cached' to the strategies, compile=[regional,cached] for instance")
    if getattr(config.compile["cached"], "read_only", False):
        raise ValueError("compile.cached.read_only=true stores nothing")
    short = dataclasses.replace(
        config.trainer,
        max_steps=steps,
        val_every_n_steps=min(steps, config.trainer.val_every_n_steps),
        val_batches=1,
        checkpoint_every_n_steps=0,
        warmup_steps=0,
    )
    config = dataclasses.replace(config, trainer=short, resume=None)
    with tempfile.TemporaryDirectory(prefix="warm-cache-", ignore_cleanup_errors=True) as folder:
        record = run(config, run_dir=Path(folder), command=list(overrides), kept=False)
    if record.status != "finished":
        print(f"error: the run {record.status}: {record.reason}", file=sys.stderr)
        return 1
    facts = record.report["cached"]
    if "bytes_saved" in facts:
        print(f"filled: {facts['artifacts_saved']} artifacts, {facts['bytes_saved'] / MIB:.1f} MiB")
        return 0
    if facts["state"] == "warm":
        print(f"already there: {facts['artifacts_loaded']} artifacts, nothing was compiled anew")
        return 0
    problem = facts["save_error"] if "save_error" in facts else facts["reason"]
    print(f"error: nothing stored: {problem}", file=sys.stderr)
    return 1


def show(store: ArtifactStore, *, whole: bool) -> int:
    """Print a line for each bundle; with ``whole``, read each one and fail when any would be refused."""
    refused, total = 0, 0
    bundles = store.bundles()
    for stored in reversed(bundles):
        total += stored.size
        used = datetime.datetime.fromtimestamp(stored.used).isoformat(" ", "minutes")
        try:
            text = describe(store.load(stored.name).manifest if whole else store.manifest(stored.name))
        except Refused as reason:
            refused, text = refused + 1, f"refused: {reason}"
        print(f"{stored.name[-12:]}  {stored.size / MIB:8.2f} MiB  last used {used}  {text}")
    print(f"{len(bundles)} bundles, {total / MIB:.1f} MiB" + (f", {refused} refused" if refused else ""))
    return 1 if whole and refused else 0


def describe(manifest: dict[str, Any]) -> str:
    """A bundle's manifest in one line: artifacts, torch, device, strategies, signed or not."""
    facts = manifest["facts"]
    device = facts["device"]
    names = "+".join(strategy["name"] for strategy in facts["strategies"])
    signed = "unsigned" if manifest["signature"] is None else "signed"
    where = device["processor"] if "processor" in device else device["name"]
    return f"{len(manifest['artifacts'])} artifacts  torch {facts['torch'].split()[0]}  {where}  {names}  {signed}"


def prune(store: ArtifactStore, *, max_gib: float | None, older_than_days: float | None) -> int:
    """Remove what was not used for ``older_than_days``, then the bundles used longest ago over ``max_gib``."""
    if max_gib is None and older_than_days is None:
        raise ValueError("prune: choose what to remove with --max-gib or --older-than-days")
    removed = store.evict(
        max_bytes=float("inf") if max_gib is None else max_gib * GIB,
        before=0.0 if older_than_days is None else time.time() - older_than_days * DAY_SECONDS,
    )
    print(f"removed {len(removed)} bundles, {sum(stored.size for stored in removed) / MIB:.1f} MiB")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    made = parser("warm_cache", __doc__ or "", EXAMPLES)
    actions = made.add_subparsers(dest="action", required=True, metavar="fill | list | verify | prune")
    filling = actions.add_parser("fill", help="compile what a training would compile, and store it")
    filling.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="overrides, as for crucible train")
    filling.add_argument("--config-dir", metavar="DIR", help="your own options and plugin.py, as for crucible train")
    steps_help = "optimizer steps to run (default: %(default)s)"
    filling.add_argument("--steps", type=positive, default=2, metavar="N", help=steps_help)
    for name, help_text in (
        ("list", "what a store holds"),
        ("verify", "read every bundle; exit code 1 when one would be refused"),
        ("prune", "remove bundles"),
    ):
        action = actions.add_parser(name, help=help_text)
        action.add_argument("url", metavar="URL", help="the store: a folder or a URL, as compile.cached.url")
        key_help = f"file with the key of the signatures (default: the variable {KEY_VARIABLE})"
        action.add_argument("--key-file", metavar="FILE", help=key_help)
        storage_help = "option of the URL's file system, as compile.cached.storage_options (default: none)"
        action.add_argument(
            "--storage-option", type=pair, action="append", default=[], metavar="NAME=VALUE", help=storage_help
        )
        if name == "prune":
            gib_help = "GiB to keep; what was used longest ago goes (default: no limit)"
            action.add_argument("--max-gib", type=float, metavar="GIB", help=gib_help)
            days_help = "remove bundles not used for so many days (default: no limit)"
            action.add_argument("--older-than-days", type=float, metavar="DAYS", help=days_help)
    return made.parse_args(arguments)


def pair(text: str) -> tuple[str, str]:
    """``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
