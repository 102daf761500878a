"""Adds the long description to the build: the README as a package index shows it.

A relative link leads nowhere there, so each one becomes its text and the path of the file, which is in the
source distribution.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).parent / "README.md"
RELATIVE_LINK = re.compile(r"!?\[([^\]]*)\]\((?!\w+:|#)([^)#]+)(?:#[^)]*)?\)")


def without_relative_links(text: str) -> str:
    """Replace `[text](path#part)` and `![text](path)` by `text (path)`."""
    return RELATIVE_LINK.sub(r"\1 (\2)", text)


setup(
    long_description=without_relative_links(README.read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
