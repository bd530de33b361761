"""The command line: what it hands to the run, what it says, and with which exit code it ends."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import TASKS
from tests.conftest import ROOT
from tests.processes import Ended, python
from trainer.crucible import __main__ as command

Calls = list[dict[str, Any]]


def test_a_run_gets_its_configuration_directory_and_command(command_line: Any, called: Calls, tmp_path: Path) -> None:
    assert command_line("task=captioning", "compile=regional", "trainer.max_steps=7", "seed=3") == 0
    (call,) = called
    assert call["config"].trainer.max_steps == 7
    assert list(call["config"].compile) == ["regional"]
    assert call["command"] == ["task=captioning", "compile=regional", "trainer.max_steps=7", "seed=3"]
    assert call["run_dir"].parent == tmp_path / "outputs" / "captioning" / "regional"
    assert (call["run_dir"] / ".hydra" / "overrides.yaml").is_file()
    assert not list(tmp_path.rglob("*.log"))


def test_hydra_is_its_own_again_once_the_command_is_over(command_line: Any, called: Calls) -> None:
    from hydra._internal import utils
    from hydra._internal.hydra import Hydra

    def replaced() -> list[Any]:
        return [utils.run_and_report, Hydra.compose_config, Hydra.app_help]

    before = replaced()
    assert command_line("compile=whole") == 0
    assert command_line("compile=hole") == 2
    assert len(called) == 1
    assert replaced() == before


def test_inductor_options_keep_their_dotted_names(command_line: Any, called: Calls) -> None:
    assert command_line("compile=whole", "+compile.whole.options={triton.cudagraphs:true}") == 0
    assert called[0]["config"].compile["whole"].options == {"triton.cudagraphs": True}


@pytest.mark.parametrize("flag", [["--config-dir", "."], ["-cd", "."], ["--config-dir=."]])
def test_flags_may_stand_among_options(command_line: Any, called: Calls, flag: list[str]) -> None:
    assert command_line("task=micro", *flag, "compile=whole", "seed=3") == 0
    assert called[0]["command"][-3:] == ["task=micro", "compile=whole", "seed=3"]


@pytest.mark.parametrize(("status", "number", "code"), [("failed", None, 1), ("interrupted", 15, 143)])
def test_the_records_exit_code_is_the_processs(
    command_line: Any, called: Calls, status: str, number: int | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.telemetry.record import RunRecord

    record = RunRecord(task="stand-in", status=status, signal=number)
    monkeypatch.setattr(sys.modules["trainer.run"], "run", lambda *_, **__: record)
    assert command_line() == code


@pytest.mark.parametrize(
    ("arguments", "complaints"),
    [
        (["trainer.max_steps=0"], ["error: trainer.max_steps=0 must be at least 1"]),
        (
            ["trainer.max_step=3"],
            ["error: trainer.max_step is not an option; near: trainer.max_steps, trainer.warmup_steps"],
        ),
        (["task.batchsize=4"], ["error: task.batchsize is not an option; near: task.data.batch_size"]),
        (["task=micro", "task.data.batch_size=4"], ["error: task.data is not an option; near: task.batch_size"]),
        (["task.modle=x"], ["error: task.modle is not an option; there are learning_rate, weight_decay"]),
        (["resume=nowhere"], ["error: resume=nowhere: no such file or directory"]),
        (["task/data=coco", "task.data.root=nowhere"], ["error: task.data.root='nowhere': no such file or folder"]),
        (["compil=regional"], ["error: compil is not an option; near: compile"]),
        (["+compil=regional"], ["error: compil is not an option; near: compile"]),
        (["task/dta=coco"], ["error: task/dta is not a group of options; near: task/data"]),
        (["task=micro", "task/size=base"], ["error: task/size is not a group of options; this task has none"]),
        (
            ["compile.regional.mode=default"],
            ["error: compile.regional: the run has no strategy regional; compile=regional"],
        ),
        (
            ["compile=whole", "compile.hwole.mode=default"],
            ["error: compile.hwole: the run has no strategy hwole; near: whole"],
        ),
        (
            ["-m", "compile=eager,whole", "compile.whole.backend=aot_eager"],
            ["an option of one arm: 'hydra.launcher.arms=[eager,\"whole compile.whole.NAME=VALUE\"]'"],
        ),
        (["trainer.max_steps"], ["error: trainer.max_steps is not NAME=VALUE"]),
        (
            ["compile=regional,whole"],
            ["error: compile=regional,whole: a list is written compile=[regional,whole]; a sweep needs -m"],
        ),
        (["task=captioning,micro"], ["error: task=captioning,micro: several values need -m"]),
        (["--task", "captioning"], ["error: --task captioning: options are written task=captioning"]),
        (["--task=captioning", "seed=1"], ["error: --task=captioning: options are written task=captioning"]),
        (["--seed", "task=micro"], ["error: --seed: options are written seed=VALUE"]),
        (["--config-dir"], ["error: argument --config-dir/-cd: expected one argument"]),
        (["-x"], ["error: -x is not a flag, see --help; options are written NAME=VALUE"]),
        (["task=captionin"], ["error: task=captionin is not an option; near: captioning"]),
        (["hydra.launcher.parallel=2"], ["error: hydra.launcher.parallel is not an option; there are "]),
        (["run=other"], ["error: run=other is not an option; there are peer, train"]),
        (["run=null"], ["error: run=null: null is not an option; there are peer, train"]),
        (["task=3"], ["error: task=3: 3 is not an option; there are captioning, "]),
        (["compile=[regional,null]"], ["error: compile=[regional,null]: null is not an option; there are auto, "]),
        (["compile=[eager,regonal]"], ["error: compile=regonal is not an option; near: regional"]),
        (["hydra/launcher=isolatd"], ["error: hydra/launcher=isolatd is not an option; near: isolated"]),
        (
            ["trainer.max_steps=few"],
            ["error: trainer.max_steps=few: Value 'few' of type 'str' could not be converted to Integer"],
        ),
        (["compile=whole", "compile.whole.options={shape_padding:true}"], ["use +compile.whole.options"]),
        (["compile=hole"], ["error: compile=hole is not an option; near: whole"]),
        (["compile=nope"], ["error: compile=nope is not an option; there are auto, buckets, cached, "]),
        (["compile=[whole"], ["error: compile=[whole: a quote or a bracket is not closed, "]),
        (["hydra.run.dir=my ü"], ["error: hydra.run.dir=my ü: write it in quotes: 'hydra.run.dir=\"my ü\"'"]),
        (["hydra.run.dir=lr=3"], ["error: hydra.run.dir=lr=3: write it in quotes: 'hydra.run.dir=\"lr=3\"'"]),
        (["ü=3"], ["error: ü=3 is not NAME=VALUE"]),
        (
            ["compile=[regional,whole]"],
            ["error: compile: 'regional' and 'whole' both act on the module stage; choose one of them"],
        ),
        (
            ["compile=[regional,cuda_graph]", "compile.regional.mode=reduce-overhead"],
            ["error: compile: 'cuda_graph' captures whole steps, 'regional' asks Inductor for CUDA graphs of its own"],
        ),
        (["compile=whole", "compile.whole.mode=fastest"], ["error: compile.whole.mode='fastest' is not one of ("]),
        (["compile=whole", "+compile.whole.typo=1"], ["error: compile.whole.typo is not an option"]),
        (["--config-dir", "nowhere"], ["error: Additional config directory"]),
        (
            ["task=image_classification", "task/data=coco", "task.data.root=."],
            ["error: task/data=coco belongs to another task; task=NAME --help shows"],
        ),
    ],
)
def test_what_a_user_got_wrong_is_said_shortly(
    command_line: Any, called: Calls, capfd: pytest.CaptureFixture[str], arguments: list[str], complaints: list[str]
) -> None:
    assert command_line(*arguments) == 2
    said = capfd.readouterr().err
    for complaint in complaints:
        assert complaint in said
    assert len(said.splitlines()) <= 3
    assert "HYDRA_FULL_ERROR" not in said
    assert called == []


LINES = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(f"a{n + 1}: &a{n + 1} [{','.join([f'*a{n}'] * 10)}]" for n in range(8))]
BOMB = "\n".join(LINES)
"""Nine lists, each of which holds the one before ten times: a billion values."""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("trainer:\n  max_step: 3\n", "experiment/ours: trainer.max_step is not an option; near: trainer.max_steps"),
        ("defaults: [override /compile: wohle]\n", "compile=wohle is not an option; near: whole"),
        ("seed: 1\nseed: 2\n", "FILE:3: found duplicate key seed"),
        ("trainer:\n  max_steps: 3\n seed: 2\n", "FILE:4: expected <block end>, but found '<block mapping start>' (is"),
        ("seed: 'ä\n", "FILE:3: found unexpected end of stream"),
        (BOMB, "FILE:2: its aliases (*name) make more than 10,000 values of 29"),
        ("seed: &it [1, *it]\n", "FILE:2: an alias (*name) within what it stands for"),
    ],
    ids=["misspelt", "no choice", "twice", "outdented", "quote", "a billion", "itself"],
)
def test_what_is_wrong_in_a_users_file_is_one_line(
    command_line: Any, called: Calls, capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "experiment" / "ours.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{text}", encoding="utf-8")
    assert command_line("--config-dir", str(tmp_path), "experiment=ours") == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"error: {complaint.replace('FILE', str(file))}")
    assert called == []


@pytest.mark.parametrize("arguments", [["hydra.run.dir=link"], ["-m", "hydra.sweep.dir=link", "compile=eager,whole"]])
@pytest.mark.parametrize("target", ["nowhere", "link"], ids=["dangling", "loop"])
def test_a_link_that_leads_nowhere_is_no_folder_and_one_line(
    command_line: Any, called: Calls, capfd: pytest.CaptureFixture[str], arguments: list[str], target: str
) -> None:
    Path("link").symlink_to(target)
    assert command_line(*arguments) == 2
    option = arguments["-m" in arguments]
    assert capfd.readouterr().err == f"error: {option}: a symbolic link to {target} that leads nowhere\n"
    assert command_line("resume=link", "hydra.run.dir=run") == 2
    assert capfd.readouterr().err == "error: resume=link: no such file or directory\n"
    assert called == []


def test_a_strategy_that_this_machine_cannot_run_is_refused_before_any_work(
    command_line: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from tasks.captioning.task import Captioning

    def built(*_: object, **__: object) -> None:
        raise AssertionError("data was built")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Captioning, "build_data", built)
    assert command_line("compile=[cuda_graph]") == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("error: compile.cuda_graph: CUDA graphs need a CUDA device and this machine has none; ")
    assert said.endswith("leave it out or set compile.cuda_graph.required=false")


def test_a_value_error_of_the_run_is_a_refusal(
    command_line: Any, called: Calls, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("task.data.root='' must name a folder")

    monkeypatch.setattr(sys.modules["trainer.run"], "run", refuse)
    assert command_line() == 2
    said, place, code = capfd.readouterr().err.splitlines()[-3:]
    assert said == "error: task.data.root='' must name a folder"
    assert re.fullmatch(r"  .*test_cli\.py:\d+ in refuse", place), "code that is not ours is named"
    assert code.strip().startswith("raise ValueError(")


def test_the_full_error_can_be_asked_for(command_line: Any, called: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="max_steps"):
        command_line("trainer.max_steps=0")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_under_a_debugger_an_unknown_option_is_said_too(
    command_line: Any, called: Calls, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OC_CAUSE", "1")  # what OmegaConf does where there is a trace function
    assert command_line("compile=whole", "compile.whole.options={shape_padding:true}") == 2
    assert "use +compile.whole.options" in capfd.readouterr().err


def test_help_shows_choices_values_and_examples(command_line: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line("compile=regional", "--help") == 0
    text = capfd.readouterr().out
    assert "crucible train -m compile=eager,regional,whole" in text
    assert re.search(
        r"compile=regional  how it is compiled.*\n +auto .*(.*\n)+ +whole .*(.*\n)+ +also debug, eager", text
    )
    assert re.search(r"task/data=shapes  what it is learned from\n +coco,.*shapes", text)
    assert re.search(r"trainer.max_steps=600 +Optimizer steps to train", text)
    assert re.search(r"compile.regional.fullgraph=true +Stop with the reason at a graph break", text)
    assert "schema" not in text
    assert "hydra/" not in text


def test_every_option_of_every_task_and_strategy_has_a_meaning_in_help(
    command_line: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for task in TASKS:
        assert command_line(f"task={task}", "compile=full_stack", "--help") == 0
        options = capfd.readouterr().out.partition("\nset (")[2].splitlines()[1:]
        named = [number for number, line in enumerate(options) if re.match(r"  [a-z]", line)]
        bare = [options[number] for number in named if not "".join(options[number : number + 2])[40:].strip()]
        assert len(named) > 40
        assert bare == []


def crucible(*arguments: str, cwd: Path, **environment: str) -> Ended:
    """The console script, as an installation maps it."""
    (cwd / "crucible").symlink_to(ROOT / "trainer" / "crucible")
    code = COLD + "from crucible.__main__ import main; sys.argv[0] = 'crucible'; sys.exit(main())"
    return python("-c", code, *arguments, cwd=cwd, path=(ROOT, cwd), **environment)


def test_the_command_alone_names_its_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert command.main(arguments) == 0
        text = capsys.readouterr().out
        assert all(re.search(rf"^  {name} +\w", text, re.MULTILINE) for name in command.COMMANDS)
        assert text.count("\n  crucible ") == 3


@pytest.mark.parametrize(("word", "hint"), [("trian", "near: train"), ("zzz", "there are train, compare,")])
def test_an_unknown_command_is_refused_with_those_that_resemble_it(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([word, "task=captioning"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {word} is not a command of crucible; {hint}")


def test_overrides_alone_are_those_of_train(edge: None, called: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["seed=5"], ["train", "seed=5"]):
        monkeypatch.setattr(sys, "argv", ["crucible", *arguments])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        assert stopped.value.code == 0
    assert [call["command"] for call in called] == [["seed=5"], ["seed=5"]]


@pytest.mark.parametrize(
    ("arguments", "arms"),
    [
        (["task=micro"], ["compile=eager,regional,whole", "task=micro"]),
        (["experiment=forces", "seed=1,2"], ["compile=eager,second_order", "experiment=forces", "seed=1,2"]),
        (["task=micro", "compile=eager,debug"], ["task=micro", "compile=eager,debug"]),
    ],
)
def test_compare_with_overrides_trains_the_arms_in_a_sweep(
    arguments: list[str], arms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["crucible"])
    monkeypatch.setattr("trainer.cli.main", lambda: 0)
    assert command.main(["compare", *arguments]) == 0
    assert sys.argv[1:] == ["-m", *arms]


def test_help_of_compare_comes_before_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["compare", "task=captioning", "--help"])
    assert "usage: crucible compare" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_of_every_command_imports_nothing_slow(name: str, tmp_path: Path) -> None:
    done = crucible(name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"usage: crucible {name}" in done.stdout
    assert done.stderr.splitlines()[-1] == "slow: []"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("crucible do", ["doctor"]),
        ("crucible train compile=re", ["compile=regional"]),
        ("crucible compile=re", ["compile=regional"]),
    ],
)
def test_completion_knows_commands_and_overrides(line: str, choices: list[str], tmp_path: Path) -> None:
    assert crucible("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line).stdout.split() == choices


SLOW = {"torch", "lightning", "numpy", "matplotlib", "tensorboard", "transformers"}
COLD = (
    "import sys, atexit; "
    f"atexit.register(lambda: print('slow:', sorted({SLOW} & sys.modules.keys()), file=sys.stderr)); "
)
MAIN = COLD + "from trainer.cli import main; sys.argv[0] = 'crucible'; main()"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--cfg", "job"], ["trainer.max_steps=0"], ["-sc", "query=bash"]], ids=lambda a: a[0]
)
def test_torch_is_not_imported_before_it_is_needed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", "crucible compile=")
    done = python("-c", MAIN, *arguments, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "slow: []"
    assert done.returncode == (2 if "trainer.max_steps=0" in arguments else 0)


def test_completion_knows_the_users_own_options(
    command_line: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text("# @package _global_\nseed: 9\n")
    monkeypatch.setenv("COMP_LINE", f"crucible --config-dir {tmp_path} experiment=ou")
    assert command_line("-sc", "query=bash") == 0
    assert capfd.readouterr().out.split() == ["experiment=ours"]


def test_importing_the_package_touches_neither_path_nor_siblings(tmp_path: Path) -> None:
    code = "import sys; before = list(sys.path); import trainer; sys.exit(sys.path != before or 'tasks' in sys.modules)"
    assert python("-c", code, cwd=tmp_path).returncode == 0
