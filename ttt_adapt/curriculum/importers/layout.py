"""What an importer is: from one row of a data set's layout to the tasks in it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.curriculum.importers.rows import Row
from ttt_adapt.curriculum.settings import TaskSourceSettings
from ttt_adapt.curriculum.tasks import CodeTests


@dataclass(frozen=True, slots=True)
class Draft:
    """A task before it has an id, a source and a licence.

    Attributes:
        problem: the problem alone; the prompt is made of it.
        own_id: the row's id within its data set; empty: its place is taken.
        prompt: what the model reads where that is not the problem with the template around it.
    """

    kind: str
    problem: str
    answer: str | None = None
    tests: CodeTests | None = None
    meta: Mapping[str, Any] | None = None
    own_id: str = ""
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """One data set's layout.

    Attributes:
        name: as settings name it.
        columns: names that a row has, for people.
        fits: whether a row looks like one.
        drafts: the tasks of a row; raises :class:`Malformed`, whose message says why not.
        licence: of the data set, where all copies have one.
    """

    name: str
    columns: str
    fits: Callable[[Mapping[str, Any]], bool]
    drafts: Callable[[Row, TaskSourceSettings], Iterable[Draft]]
    licence: str = ""


def has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """A test of rows: every one of these columns is there."""
    return lambda values: all(name in values for name in names)


def text(values: Mapping[str, Any], *names: str) -> str:
    """The first of these columns that is there, as text.

    Raises:
        Malformed: none is, or it holds something else, or nothing.
    """
    for name in names:
        if name in values:
            value = values[name]
            if not isinstance(value, str) or not value.strip():
                raise Malformed(f"column {name!r}: expected text, found {value!r:.40}")
            return value
    raise Malformed(f"no column {' or '.join(map(repr, names))}; found: {', '.join(values)}")


def optional_text(values: Mapping[str, Any], *names: str) -> str:
    """The first of these columns that holds text or a number; else empty."""
    for name in names:
        value = values.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    return ""


def chosen(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of these columns that are there and not empty."""
    return {name: values[name] for name in names if values.get(name) not in (None, "", [])}
