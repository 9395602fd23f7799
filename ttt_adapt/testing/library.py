"""Real text that is on every machine: the modules of Python's standard library."""

import sysconfig
from collections.abc import Iterator

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus import read_documents
from ttt_adapt.types import Document


def library_documents() -> Iterator[Document]:
    """The running interpreter's standard library, without tests and installed packages."""
    return read_documents(
        CorpusSettings(
            path=sysconfig.get_path("stdlib"),
            format="tree",
            include=("*.py",),
            exclude=("site-packages/", "dist-packages/", "test/", "tests/", "idle_test/"),
            on_error="skip",
        )
    )
