import importlib.metadata
import json
import os
import stat
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from shardwise.cli import doctor as module
from shardwise.cli.doctor import doctor, examine, torch_problem, verdict


@pytest.fixture
def torch_is(monkeypatch):
    """Makes the installed torch look like this version, or absent."""
    true_version = importlib.metadata.version

    def pretend(version: str | None) -> None:
        def fake(package: str) -> str:
            if package != "torch":
                return true_version(package)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", fake)

    return pretend


def finding(name: str) -> module.Finding:
    return next(one for one in examine() if one.name == name)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.13.0+cu130", "2.13.5"])
def test_supported_torch_versions_have_no_problem(torch_is, version):
    torch_is(version)
    assert torch_problem() is None


@pytest.mark.parametrize(
    "version", ["1.13.1", "2.4.0", "2.10.9", "2.14.0", "2.14.0.dev20260101", "3.0.0", "unknown"]
)
def test_an_unsupported_torch_is_named_with_the_line_that_mends_it(torch_is, version):
    torch_is(version)
    problem = torch_problem()
    assert f"torch {version} is not supported" in problem
    assert "pip install torch==2.13.0" in problem
    assert verdict(examine()).startswith("Not ready")


def test_a_missing_torch_is_named_with_the_line_that_mends_it(torch_is):
    torch_is(None)
    assert "torch is not installed" in torch_problem()
    assert "pip install torch==2.13.0" in torch_problem()
    assert finding("torch").state == "bad"


def test_the_doctor_imports_neither_torch_nor_anything_else_heavy():
    code = (
        "import sys, contextlib, typer; from shardwise.cli.doctor import doctor\n"
        "with contextlib.suppress(typer.Exit): doctor(json=True)\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'pyarrow') if name in sys.modules], "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["findings"][0]["name"] == "shardwise"
    assert done.stderr.strip() == "[]"


def run_command(*arguments):
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, arguments)


def test_json_is_one_object_that_says_whether_training_can_start(torch_is):
    for version, ready in (("2.12.0", True), ("2.4.0", False)):
        torch_is(version)
        result = run_command("--json")
        answer = json.loads(result.stdout)
        assert (result.exit_code, answer["ready"]) == (0 if ready else 1, ready)
        assert [one["name"] for one in answer["findings"] if one["state"] == "bad"] == (
            [] if ready else ["torch"]
        )


def test_the_last_line_is_the_verdict(torch_is):
    torch_is("2.12.0")
    assert run_command().stdout.splitlines()[-1] == verdict(examine())
    assert verdict(examine()).endswith("shardwise new demo")  # which needs nothing but the package


def test_a_machine_that_cannot_train_is_told_from_one_that_can_by_the_status(torch_is):
    torch_is("2.12.0")
    assert run_command().exit_code == 0
    torch_is(None)
    assert run_command().exit_code == 1


def test_missing_extras_come_with_their_install_line(monkeypatch):
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    for extra in ("parquet", "tensorboard", "wandb"):
        assert f"pip install 'shardwise[{extra}]'" in finding(extra).words
        assert finding(extra).state == "optional"


def fake_driver(folder, monkeypatch, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_counted_by_name_and_a_cpu_build_of_torch_beside_them_is_a_problem(
    tmp_path, monkeypatch, torch_is
):
    fake_driver(
        tmp_path, monkeypatch, "printf 'NVIDIA H200, 143771\\nNVIDIA H200, 143771\\nNVIDIA L4, [N/A]\\n'"
    )
    assert finding("GPU").words == "2 x NVIDIA H200 (140 GiB), 1 x NVIDIA L4 (0 GiB)"
    torch_is("2.13.0+cpu")
    assert finding("torch").state == "bad"
    torch_is("2.13.0+cu130")
    assert finding("torch").state == "good"


def test_a_driver_that_fails_does_not_stop_the_doctor(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, "echo broken >&2; exit 9")
    assert finding("GPU").state in ("optional", "bad")


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert finding("cache").state == "bad"
    assert "run.folder=PATH" in finding("cache").words
