"""What a build adds to pyproject.toml: the README as a package index shows it, where a relative link leads
nowhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def with_absolute_links(text: str) -> str:
    """Pictures lead to the file itself, pages to where it is shown."""
    text = re.sub(r"(!\[[^\]]*\])\((?!\w+:|#)", rf"\1({SOURCE}/raw/main/", text)
    return re.sub(r"\]\((?!\w+:|#)", f"]({SOURCE}/blob/main/", text)


setup(
    long_description=with_absolute_links((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
