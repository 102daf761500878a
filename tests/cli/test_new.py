"""The way in: a folder to begin with, a job explained value by value, and commands that can be typed as they
are printed."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from warm import Server

from shardwise.cli.app import app
from shardwise.cli.main import main
from shardwise.cli.new import Template
from shardwise.command_name import command_name
from shardwise.config import read
from shardwise.config.json_schema import job_schema
from shardwise.errors import UserError
from shardwise.library.start import worker_counts

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("template", list(Template))
def test_every_template_is_a_job_that_can_be_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: Template
) -> None:
    monkeypatch.chdir(tmp_path)
    run("new", "some/demo", "--template", template)
    monkeypatch.chdir(tmp_path / "some" / "demo")
    config = read("demo.toml")
    assert Path(str(config.data.source)).is_file()
    assert config.model.module is None or Path(config.model.module.partition(":")[0]).is_file()
    words = (Path("README.md").read_text() + Path("demo.toml").read_text()).split()
    assert "demo.toml" in words
    assert not any("NAME" in word for word in words)


def commands_of(folder: Path) -> list[list[str]]:
    """The commands that a folder's README shows, in order, as a shell splits them."""
    lines = [
        line.strip() for line in (folder / "README.md").read_text().splitlines() if line.startswith("    ")
    ]
    return [shlex.split(line) for line in lines if line.startswith("shardwise ")]


@pytest.mark.parametrize("template", list(Template))
def test_commands_of_a_readme_are_quoted_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: Template
) -> None:
    monkeypatch.chdir(tmp_path)
    run("new", "it's two", "--template", template)
    words = [word for command in commands_of(tmp_path / "it's two") for word in command]
    assert "it's two.toml" in words
    assert "runs/it's two" in words or template == Template.OWN_MODULE


@pytest.mark.parametrize(
    "template",
    [*(pytest.param(name, marks=pytest.mark.full) for name in [*Template][:-1]), Template.OWN_MODULE],
)
def test_every_command_of_a_readme_works_after_the_ones_before(
    warm: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: Template
) -> None:
    """As written, one after the other, in a new folder; only the model is smaller and the steps are fewer."""
    monkeypatch.chdir(tmp_path)
    run("new", "demo", "--template", template)
    folder = tmp_path / "demo"
    job = folder / "demo.toml"
    commands = commands_of(folder)
    few = (
        30 if "drill" in [command[1] for command in commands] else 2
    )  # the faults of a drill are some steps apart
    keys = "steps|every|evaluate_every|sample_tokens|warmup"
    job.write_text(
        re.sub(rf"(?m)^({keys}) = \d+", rf"\1 = {few}", job.read_text().replace("bytes-2m", "bytes-400k"))
    )
    assert len(commands) >= 3
    for _, *words in commands:
        done = warm.run(*words, cwd=folder, environment={})
        assert done.returncode == 0, (words, done.stderr)
        assert "nothing to do" not in done.stderr, words


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("job", [*Template, "examples"])
def test_a_job_to_begin_with_uses_all_gpus_of_the_machine_and_without_any_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, gpus: int
) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: gpus)
    monkeypatch.chdir(tmp_path)
    if job != "examples":
        run("new", "demo", "--template", job)
        monkeypatch.chdir("demo")
    config = read("demo.toml" if job != "examples" else ROOT / "examples/quickstart.toml")
    first_steps = job in (Template.QUICKSTART, "examples")
    assert worker_counts(config, None, None, (None, None)).here == (gpus or (2 if first_steps else 1))


@pytest.mark.parametrize(
    ("words", "workers"),
    [([], 2), (["layout.tensor=2"], 2), (["layout.tensor=2", "layout.data=2"], 4), (["layout.data=1"], 1),
     (["train.driver=local"], 4), (["train.driver=hogwild"], 2), (["layout=auto"], 1)],
)  # fmt: skip
def test_without_gpus_a_data_axis_that_is_asked_for_has_two_workers_where_no_other_axis_has_several(
    monkeypatch: pytest.MonkeyPatch, words: list[str], workers: int
) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    config = read(ROOT / "examples/quickstart.toml", words)
    assert worker_counts(config, None, None, (None, None)).here == workers


def test_a_folder_that_is_there_is_left_as_it_is(shardwise: Shardwise, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = shardwise("new", "mine")
    assert (done.returncode, list((tmp_path / "mine").iterdir())) == (2, [])
    assert "mine: is there already" in done.stderr


@pytest.mark.parametrize("name", ["some/two words", "$(id)", "it's", "-x"])
def test_what_to_type_next_is_quoted_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "--", name], catch_exceptions=False)
    command = done.stderr.rpartition("next: ")[2].strip()
    cd, folder, then, *_, job = shlex.split(command)
    assert (cd, then, folder[0] == "-", job[0] == "-") == ("cd", "&&", False, False)
    assert (tmp_path / folder / job).is_file()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a\nb", "not a name"),
        ("half-\udcff", "not a name"),
        ("x/" + "y" * 253, "shorten the name"),
        ("full", "free"),
    ],
)
def test_a_folder_that_cannot_be_begun_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    def write(path: Path, text: str, encoding: str) -> int:
        if name == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return path.write_bytes(text.encode())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(UserError, match=says):
        run("new", name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["shardwise", "new", "demo"])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, "was removed; change to another" in capsys.readouterr().err) == (2, True)


def test_the_own_module_to_begin_with_is_the_example() -> None:
    template = ROOT / "shardwise/cli/templates/own-module/model.py"
    assert template.read_text() == (ROOT / "examples/own_model.py").read_text()


def test_the_origin_of_every_value_is_shown(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npreset = "bytes-2m"\nhidden = 96\n[data]\nsource = "x.txt"\n[layout]\ndp = 2\n')
    words = ["config", "show", str(job), "train.steps=7", "train.clip=false", "observe.sample=a\nb"]
    shown = json.loads(run(*words, "--json"))
    assert shown["model"]["hidden"] == {"value": 96, "origin": str(job)}
    assert shown["model"]["layers"] == {"value": 4, "origin": "preset bytes-2m"}
    assert shown["layout"]["data"] == {"value": 2, "origin": str(job)}
    assert shown["train"]["steps"] == {"value": 7, "origin": "override train.steps=7"}
    assert shown["train"]["warmup"] == {"value": 10, "origin": "default"}
    text = run(*words)
    again = tomllib.loads(text)
    assert (again["train"]["clip"], again["optimizer"]["betas"]) == (False, [0.9, 0.95])
    (tmp_path / "again.toml").write_text(text)
    assert read(tmp_path / "again.toml") == read(job, words[3:])


def test_an_override_of_the_whole_layout_is_the_origin_of_what_it_left_out(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[data]\nsource = "x.txt"\n[layout]\ndata = 2\n')
    shown = json.loads(run("config", "show", str(job), "layout=auto+lossy", "--json"))["layout"]
    assert shown["data"] == {"value": -1, "origin": "override layout=auto+lossy"}
    assert shown["compression"] == {"value": "auto", "origin": "override layout=auto+lossy"}


def test_the_schema_knows_every_key_and_word_that_the_examples_use() -> None:
    schema = json.loads(run("config", "schema"))
    assert schema == job_schema()
    for job in [*(ROOT / "examples").glob("*.toml"), *(ROOT / "shardwise/cli/templates").glob("*/job.toml")]:
        for section, table in tomllib.loads(job.read_text()).items():
            found = schema["$defs"][schema["properties"][section].get("$ref", "Layout").rpartition("/")[2]]
            kinds = found.get("anyOf", [found])  # each optimizer has its own keys
            known = {key: value for kind in kinds for key, value in kind["properties"].items()}
            assert table.keys() <= known.keys(), (job, section)
            assert all(known[key]["description"] for key in table)
    train = schema["$defs"]["Train"]["properties"]
    assert {"const": False} in train["clip"]["anyOf"]
    assert {"enum": ["auto", "auto+lossy"]} in schema["properties"]["layout"]["anyOf"]
    assert schema["$defs"]["Layout"]["properties"].keys() >= {"tp", "dp_shard"}


def test_editors_accept_jobs_and_refuse_mistakes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(job_schema())
    for job in (ROOT / "examples").glob("*.toml"):
        check.validate(tomllib.loads(job.read_text()))
    assert not check.is_valid({"train": {"stpes": 1}})
    assert not check.is_valid({"train": {"steps": "many"}})
    assert check.is_valid(
        {
            "layout": "auto",
            "train": {"clip": False},
            "optimizer": {"betas": [0.9, 0.95]},
            "checkpoint": {"async": True},
        }
    )


def test_a_shell_can_complete_the_commands() -> None:
    code = "import sys; sys.argv = ['shardwise']; from shardwise.cli.main import main; main()"
    environment = {
        "_SHARDWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": "shardwise d",
        "COMP_CWORD": "1",
        "PYTHONPATH": str(ROOT),
    }
    words = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert words.stdout.split() == ["drill", "doctor", "data"], words.stderr
    assert "--install-completion" in run("--help")


def test_a_printed_command_is_one_that_a_shell_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = tmp_path / "environment" / "bin"
    there.mkdir(parents=True)
    for program in (there / "shardwise", there / "python3"):
        program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(there / "python3"))
    monkeypatch.setattr(sys, "argv", ["environment/bin/shardwise", "train"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert command_name() == str(there / "shardwise")  # not active: by its path, in any folder
    monkeypatch.setattr(sys, "argv", ["-m", "train"])
    assert command_name() == f"{there / 'python3'} -m shardwise"
    monkeypatch.setenv("PATH", f"{there}:/usr/bin")
    assert command_name() == "shardwise"
