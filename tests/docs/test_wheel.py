"""The wheel needs nothing of the repository, and the README on its page has no link that leads nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardwise import __version__

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "shardwise", source / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(target.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def test_a_new_folder_is_made_from_the_wheel_alone(unpacked: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[0] = {str(unpacked)!r}; sys.argv = ['shardwise', 'new', 'demo', '--template', "
        f"'own-module']\n"
    )
    code += "from shardwise.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "demo.toml",
        "README.md",
        "model.py",
        "text.txt",
    }


def test_the_python_lines_of_the_readme_run_from_the_wheel_alone_in_a_script_without_a_guard(
    unpacked: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "CUDA_VISIBLE_DEVICES": ""}
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    made = [sys.executable, "-m", "shardwise", "new", "demo"]
    subprocess.run(made, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
    script = tmp_path / "demo" / "script.py"
    script.write_text(f"{lines}\nprint(sw.__file__)\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    speed, loss, file = done.stdout.splitlines()[:1] + done.stdout.splitlines()[-2:]
    assert float(speed) > 0
    assert 0 < float(loss) < 10
    assert Path(file) == unpacked / "shardwise/__init__.py"


def test_the_page_of_the_package_has_no_link_into_the_repository(unpacked: Path) -> None:
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert "- Training (docs/training.md): workers" in metadata
    assert "Provides-Extra: torch" in metadata


def test_the_version_of_the_wheel_is_that_of_the_module(unpacked: Path) -> None:
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    assert f"\nVersion: {__version__}\n" in metadata
