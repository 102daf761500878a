"""`shardwise submit`: all mistakes in one list, nothing written before the job is sound, nothing left behind
if the cluster refuses."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.submit.profile import read_profile
from shardwise.submit.registry import SCHEDULERS, scheduler_named

Shardwise = Callable[..., subprocess.CompletedProcess[str]]
JOB = '[model]\npreset = "bytes-400k"\n[data]\nsource = "text.txt"\n[layout]\ndata = 2\n'
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 400)
    return tmp_path


@pytest.fixture
def submit(shardwise: Shardwise, folder: Path) -> Shardwise:
    """Call `shardwise submit`, with a home of its own and a `sbatch` if `answers` says what it does."""
    programs = folder / "programs"

    def call(*words: str, answers: str = "") -> subprocess.CompletedProcess[str]:
        programs.mkdir(exist_ok=True)
        if answers:
            (programs / "sbatch").write_text(f'#!/bin/sh\necho "$*" > "{folder}/called"\n{answers}\n')
            (programs / "sbatch").chmod(0o755)
        path = f"{programs}:/usr/bin:/bin" if answers else str(programs)
        return shardwise("submit", *words, PATH=path, XDG_CONFIG_HOME=str(folder / "home"))

    return call


def test_a_script_is_written_and_the_command_that_submits_it_printed(submit: Shardwise, folder: Path) -> None:
    done = submit("job.toml", "train.steps=7", "--nodes", "2")
    assert (done.returncode, done.stdout) == (0, "runs/job/slurm.sbatch\n"), done.stderr
    assert done.stderr == "next: sbatch runs/job/slurm.sbatch\n"
    text = (folder / "runs/job/slurm.sbatch").read_text()
    assert "-m shardwise train job.toml train.steps=7 --workers 1 ||" in text
    assert [path.name for path in (folder / "runs/job").iterdir()] == ["slurm.sbatch"]


def test_a_printed_script_is_not_written(submit: Shardwise, folder: Path) -> None:
    done = submit("job.toml", "--nodes", "2", "--spares", "1", "--print")
    assert done.returncode == 0, done.stderr
    assert "train job.toml --workers 1 --min-workers 2 --max-workers 2" in done.stdout
    assert not (folder / "runs").exists()


def test_a_submitted_job_is_answered_with_its_id_and_how_to_follow_it(
    submit: Shardwise, folder: Path
) -> None:
    done = submit("job.toml", "--nodes", "2", "--yes", answers="echo '42;cluster'")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert (folder / "called").read_text() == "--parsable runs/job/slurm.sbatch\n"
    assert done.stderr.splitlines() == [
        "watch   squeue --jobs=42", "cancel  scancel 42", "log     tail -F runs/job/slurm.log"
    ]  # fmt: skip


REFUSED = (
    "echo 'sbatch: error: invalid partition specified: nosuch' >&2\n"
    "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2\nexit 1"
)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (
            "",
            "sbatch: no such command here; submit on a machine that has Slurm's commands, or leave out --yes",
        ),
        (
            REFUSED,
            "sbatch refused the job: invalid partition specified: nosuch; Batch job submission failed: "
            "Invalid partition name specified",
        ),
        ("exit 3", "sbatch refused the job: it ended with status 3"),
    ],
)
def test_a_refused_job_is_answered_in_one_line_and_leaves_nothing(
    submit: Shardwise, folder: Path, answers: str, says: str
) -> None:
    done = submit("job.toml", "--nodes", "2", "--yes", answers=answers)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {says}\n")
    assert not (folder / "runs").exists()


def test_a_refused_job_leaves_an_earlier_script_as_it_was(submit: Shardwise, folder: Path) -> None:
    assert submit("job.toml", "--nodes", "2").returncode == 0
    before = (folder / "runs/job/slurm.sbatch").read_text()
    assert submit("job.toml", "--nodes", "1", "--yes", answers="exit 1").returncode == 2
    assert (folder / "runs/job/slurm.sbatch").read_text() == before


def test_all_mistakes_are_in_one_list_and_nothing_is_written(submit: Shardwise, folder: Path) -> None:
    (folder / "site.toml").write_text('[slurm]\npartiton = "gpu"\ncpus = "many"\n[pbs]\n')
    (folder / "taken").write_text("")
    done = submit(
        "job.toml", "data.source=none.txt", "train.stpes=3", "run.folder=taken/run", "--nodes", "2",
        "--profile", "site.toml", "--yes", answers="echo 1",
    )  # fmt: skip
    assert done.returncode == 2
    for part in (
        "train.stpes",
        "none.txt",
        "run.folder = 'taken/run'",
        "slurm.partiton",
        "slurm.cpus",
        "[pbs]",
    ):
        assert part in done.stderr, done.stderr
    assert done.stderr.startswith("error: job.toml has 6 problems:")
    assert not (folder / "called").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "3"], "layout: 2 devices do not divide over 3 nodes"),
        (["--nodes", "2", "--workers", "4"], "layout"),
        (["layout.data=-1", "--spares", "1"], "--spares 1: it is not known how many workers a node has"),
        (["run.folder=50%"], "Slurm replaces % and"),
        (["--profile", "none.toml"], "none.toml: no such file; shardwise submit --new-profile writes one"),
        (["train.driver=hogwild", "layout=", "--nodes", "2", "--workers", "1"], "hogwild"),
        (["--print", "--yes"], "leave one of them out"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(
    submit: Shardwise, folder: Path, words: list[str], says: str
) -> None:
    done = submit("job.toml", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()


def test_the_profile_says_how_many_workers_a_node_has(submit: Shardwise, folder: Path) -> None:
    (folder / "home/shardwise").mkdir(parents=True)
    (folder / "home/shardwise/site.toml").write_text('[slurm]\ngres = "gpu:h100:8"\n')
    done = submit("job.toml", "layout=", "--nodes", "2", "--spares", "1", "--print")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gres=gpu:h100:8\n" in done.stdout
    assert "--workers 8 --min-workers 16 --max-workers 16" in done.stdout


def test_a_program_is_submitted_like_a_job(submit: Shardwise, folder: Path) -> None:
    (folder / "script.py").write_text("def program(engine):\n    pass\n")
    done = submit("script.py:program", "train.steps=3", "--nodes", "2", "--print")
    assert done.returncode == 0, done.stderr
    assert "-m shardwise train script.py:program train.steps=3 || status=$?" in done.stdout


def test_a_new_profile_has_every_key_as_a_comment_and_is_written_once(
    submit: Shardwise, folder: Path
) -> None:
    done = submit("--new-profile")
    path = folder / "home/shardwise/site.toml"
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    text = path.read_text()
    for name in SCHEDULERS:
        kind = scheduler_named(name).settings
        assert read_profile(path, name) == kind()
        table = text.partition(f"[{name}]\n")[2].partition("\n[")[0]
        keys = "\n".join(line.removeprefix("# ") for line in table.splitlines() if " = " in line)
        assert tomllib.loads(keys).keys() == kind.model_fields.keys()
        kind.model_validate(tomllib.loads(keys))
    again = submit("--new-profile")
    assert (again.returncode, path.read_text()) == (2, text)
    assert "is there already" in again.stderr


def test_the_page_about_slurm_names_every_key_of_the_profile() -> None:
    page = (ROOT / "docs/slurm.md").read_text()
    keys = scheduler_named("slurm").settings.model_fields
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_command_offers_every_engine() -> None:
    from shardwise.cli.submit import SchedulerName

    assert set(SchedulerName) == set(SCHEDULERS)
