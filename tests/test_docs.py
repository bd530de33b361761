"""The documentation: a site that builds, links and figures that are so, versions that were tested."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest

from strategies import STRATEGIES
from tests.conftest import ROOT
from trainer.report.comparison import compare_runs
from trainer.report.published import (
    COLD,
    CURVES_ALONE,
    RATIO,
    RECORDS,
    SAME,
    STEP,
    SUMMARY,
    WARM,
    PublishedRow,
    figure_text,
    published_rows,
    refreshed,
    rows_in,
    rows_of,
    workloads,
)
from trainer.report.runs import find, is_profiled
from trainer.report.tables import number
from trainer.telemetry.tensorboard import FINAL


@pytest.mark.slow
def test_the_site_builds_strictly_lists_every_public_name_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("properdocs")
    pytest.importorskip("material.plugins.search", reason="needs mkdocs-materialx")
    pytest.importorskip("mkdocstrings_handlers.python")
    # The command of CONTRIBUTING, less its folder. Its warnings count under --strict only where they are shown: no -q.
    (command,) = re.findall(
        r"`properdocs (build --strict -f \S+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    arguments = [sys.executable, "-m", "properdocs", *command.split(), "-d", str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stub = ast.parse((ROOT / "trainer" / "crucible" / "__init__.pyi").read_text(encoding="utf-8"))
    public = {
        f"{node.module}.{name.name}" for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert public - set(re.findall(r'id="([\w.]+)"', (tmp_path / "api.html").read_text(encoding="utf-8"))) == set()
    loads = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert {name: found for name, text in pages.items() if (found := loads.findall(text))} == {}
    assert {name for name, text in pages.items() if "```" in text} == set(), "a block of code is shown as text"
    assert list(tmp_path.glob("search/*")), "the search has an index"


def test_every_strategy_has_its_row_and_its_section() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    sections = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^## .*", text, re.MULTILINE))))
    names = {name for name, strategy in STRATEGIES.items() if not strategy.removed}
    assert (names - rows, names - sections) == (set(), set())


def test_every_direct_dependency_has_a_version_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        re.split(r"[\[<>=]", each)[0] for each in project["dependencies"] + project["optional-dependencies"]["test"]
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert asked - {"setuptools"} <= pinned


def test_no_script_of_the_pages_lies_beside_a_folder_that_hides_a_package_of_ours() -> None:
    """Python looks there first, so that ``python docs/SCRIPT`` would end at its import of ``crucible``."""
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"crucible"}
    beside = {path: {one.stem for one in path.parent.iterdir()} for path in (ROOT / "docs").rglob("*.py")}
    assert {str(path): ours & names for path, names in beside.items() if ours & names} == {}


@pytest.mark.parametrize("fails", [False, True])
def test_ci_tests_the_oldest_and_the_newest_torch(tmp_path: Path, fails: bool) -> None:
    (tmp_path / ".ci").mkdir()
    for name in (".ci/torch", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "check").write_text(f"#!/bin/sh\necho $*\nexit {int(fails)}\n")
    for name in (".ci/torch", "check"):
        os.chmod(tmp_path / name, 0o755)
    done = subprocess.run([tmp_path / ".ci/torch", "--fast"], capture_output=True, text=True, check=False)
    assert re.fullmatch(r"--torch 2\.\d+ --fast\n--torch 2\.\d+ --fast\n", done.stdout)
    assert done.returncode == int(fails), "a failure under one does not hide the other"


README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_folder_of_the_tree_exists_and_every_package_is_in_it() -> None:
    tree = re.search(r"## What is where\n\n```\n(.*?)```", CONTRIBUTING, re.DOTALL)
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines() if line.strip()}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"conf", "docs"} <= named


def test_the_metrics_of_hparams_are_those_of_the_code() -> None:
    assert all(f"`{key}`" in REFERENCE for key in FINAL)


def test_links_lead_to_files() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))]
    assert len(links) > len(PAGES)
    assert [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("code", [0, 3])
def test_ci_runs_the_two_lines_of_the_readme_as_they_are_printed(tmp_path: Path, code: int) -> None:
    checkout, programs = tmp_path / "checkout", tmp_path / "bin"
    (checkout / ".ci").mkdir(parents=True)
    programs.mkdir()
    for name in ("README.md", ".ci/run"):
        shutil.copy2(ROOT / name, checkout / name)
    environment = (
        r"mkdir -p .venv/bin; echo 'pip() { echo pip $*; }; crucible() { echo crucible $*; }' > .venv/bin/activate"
    )
    made = {programs / "python3": environment, checkout / "check": f"pwd; tail -n 1 README.md; ls -A; cat; exit {code}"}
    made |= {programs / name: "" for name in ("g++", "chromium")}  # nothing is missing
    for path, script in made.items():
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    (checkout / "untracked").touch()
    (checkout / "README.md").write_text(README + "\nedited\n")
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run([checkout / ".ci/run"], env=os.environ | path, capture_output=True, text=True, timeout=200)
    first, second = re.findall(r"```bash\n(python3 .*)\n```", README)
    said = [line for line in done.stdout.splitlines() if not line.startswith("== took")]
    assert said[:3] == [f"== {first}", "pip install -e .", "crucible train task=captioning compile=regional"]
    assert said[3:5] == [f"== {second}", "pip install -e .[test]"]
    assert said[6:] == ["edited", ".ci", ".git", ".venv", "README.md", "check"]
    assert done.returncode == (code and 1), done.stderr
    assert not Path(said[5]).exists()
    assert bool(re.search(rf"failed after \d+ s: {re.escape(second)}", done.stderr)) == bool(code)


def published(name: str) -> dict[str, PublishedRow]:
    return {one.arm: one for one in rows_of(find([RECORDS / f"{name}.jsonl"]))}


def test_a_published_ratio_is_what_compare_says_of_the_same_records() -> None:
    differ = []
    for file in sorted(RECORDS.glob("*.jsonl")):
        if not file.name.startswith((SAME, CURVES_ALONE)):
            runs = find([file])
            said = {(found.workload, one.cell.arm): one.ratio for found in compare_runs(runs) for one in found.rows}
            for found in [] if all(map(is_profiled, runs)) else workloads(runs):
                for one in rows_in(found, runs):
                    ratio, text = said[found.workload, one.arm], figure_text(one, RATIO)
                    if RATIO in one.figures and not (ratio and text.startswith(number(ratio.value))):
                        differ.append((file.stem, one.arm, text, ratio))
    assert differ == []


def test_the_table_of_the_readme_is_that_of_its_records() -> None:
    assert refreshed(README) == README, "crucible verify --tables makes it anew"
    assert SUMMARY.search(README) is not None


def test_what_the_readme_says_beside_its_table_is_in_the_records() -> None:
    rows = published("h100-captioning")
    eager, captured = (rows[arm].figures["device ms a step"] for arm in ("eager", "regional+cuda_graph"))
    assert f"[{figure_text(rows['regional+cuda_graph'], RATIO).split()[0]}](docs/results/tasks.md#" in README
    assert f"times as fast, and {median(eager) / median(captured):.2f} in the GPU's own time alone" in README
    rows = published("h100-gpt2")
    by_hand, ours = (figure_text(rows[arm], RATIO).split()[0] for arm in ("peer loop_compile", "regional"))
    assert f"is {by_hand} times as fast as eager in a loop by hand\nwith `torch.compile`, and {ours} with" in README
    summed = SUMMARY.search(README)
    for line in summed[2].splitlines():
        row = published_rows()[line.partition(" ")[0]]
        assert median(row.figures[WARM]) < median(row.figures[COLD]) / 2


def test_what_pages_of_results_say_in_sentences_is_in_the_records() -> None:
    for page, name, arm, figure in (
        ("README", "cpu-micro", "regional", RATIO),
        ("README", "cpu-micro", "whole", RATIO),
        ("tasks", "h100-captioning", "regional+cuda_graph", RATIO),
        ("tasks", "h100-captioning", "whole+cuda_graph", RATIO),
        ("tasks", "h200-captioning-2000", "regional+cuda_graph", STEP),
        ("tasks", "h100-resnet50", "regional+cuda_graph", RATIO),
        ("tasks", "h200-forces-small", "cuda_graph", RATIO),
        ("tasks", "h200-forces-small", "second_order+cuda_graph", RATIO),
        ("h200-peers", "h100-gpt2", "regional", RATIO),
        ("h200-peers", "h200-gpt2-ddp-peers", "regional", STEP),
        ("h200-peers", "h200-captioning-loop-clipped", "whole+cuda_graph", STEP),
    ):
        said = figure_text(published(name)[arm], figure).split(" (")[: None if figure == RATIO else 1]
        text = (RECORDS.parent / f"{page}.md").read_text(encoding="utf-8")
        assert all(one.rstrip(")") in text for one in said), (page, name, arm, said)


def test_what_the_page_on_several_gpus_quotes_is_in_its_records() -> None:
    text = (ROOT / "docs" / "results" / "h200-several-gpus.md").read_text(encoding="utf-8")
    quoted = re.findall(
        r"\| ([\d,]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| \[records\]\(records/([\w-]+)\.jsonl\)", text
    )
    for samples, of_loops, first, name in quoted:
        ours, loop = (run.record for run in find([RECORDS / f"{name}.jsonl"]))
        assert (samples, first) == (f"{ours.samples_per_second:,.0f}", f"{ours.first_step_seconds:.1f}"), name
        assert of_loops == f"{ours.samples_per_second / loop.samples_per_second:.3f}", name
    assert len(quoted) == 4
    for run in find([RECORDS / "h200-llama-3-8b-models.jsonl"]):
        record = run.record
        tokens, flops = record.tokens_per_second / record.world_size, record.teraflops_per_second
        assert re.search(
            rf"\| \**{tokens:,.0f}\** \| \**{flops:.0f}\** \| .* \| {record.peak_device_memory_gib:.1f} \|", text
        )
    for name in ("one", "four"):
        for run in find([RECORDS / f"h200-captioning-ragged-{name}-gpu{'s' * (name == 'four')}.jsonl"]):
            assert f"{run.record.useful_tokens_per_second:,.0f}" in text


def test_what_auto_takes_beside_the_fastest_fixed_arm_is_in_the_records() -> None:
    page = " ".join((ROOT / "docs/results/h200-models.md").read_text(encoding="utf-8").split())
    for host, tasks in (
        (
            "h200-auto-models",
            {
                "image_classification": "ResNet-50",
                "efficientnet": "EfficientNet",
                "convnext": "ConvNeXt",
                "swin": "Swin",
            },
        ),
        ("h200-auto-second-models", {"language_modelling": "GPT-2", "vit": "ViT", "t5": "T5"}),
        ("h200-auto-third-models", {"bert": "BERT", "llama": "Llama", "gemma3": "Gemma 3", "unet": "U-Net"}),
    ):
        for task, name in tasks.items():
            steps = {
                one.record.label: one.record.steady_step_seconds_mean
                for one in find([RECORDS / f"{host}.jsonl"])
                if one.record.task == task
            }
            ratio = steps["auto"] / min(step for arm, step in steps.items() if arm != "auto")
            assert f"{name} {ratio:.3f}" in page
