"""Data sets of the Hugging Face hub, streamed; also a local directory laid out like one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import HUB_PREFIX, label_of
from ttt_adapt.corpus.problems import Malformed, Problem, explain
from ttt_adapt.corpus.records import Record, json_value, needed_columns, record_of
from ttt_adapt.errors import CorpusError


def hub_label(settings: CorpusSettings) -> str:
    """``owner/name[/config]/split``: what positions in a data set are counted within."""
    name = settings.path.removeprefix(HUB_PREFIX)
    if Path(name).is_dir():
        name = label_of(Path(name).resolve().name)
    return "/".join(part for part in (name, settings.hub_config, settings.split) if part)


def read_hub(settings: CorpusSettings) -> Iterator[Record | Problem]:
    """Records of one split in its order, located by row from 1; nothing is downloaded whole.

    Raises:
        CorpusError: the data set, its configuration or its split cannot be opened.
    """
    label = hub_label(settings)
    rows = iter(_open(settings, label))
    row = 0
    while True:
        location = f"{label}:{row + 1}"
        try:
            values = next(rows, None)
        except Exception as error:  # noqa: BLE001 - builders raise whatever they meet
            yield Problem(location, f"cannot be read on: {type(error).__name__}: {explain(error)}")
            return
        if values is None:
            return
        row += 1
        try:
            columns = {str(name): json_value(value) for name, value in values.items()}
            yield record_of(columns, settings, location)
        except Malformed as error:
            yield Problem(location, str(error))


def _open(settings: CorpusSettings, label: str) -> Any:
    import datasets

    name = settings.path.removeprefix(HUB_PREFIX)
    try:
        rows = datasets.load_dataset(
            name, settings.hub_config, split=settings.split, streaming=True
        )
    except Exception as error:
        raise CorpusError(
            f"hub data set {label}: cannot be opened: {explain(error)}; "
            "check its name, hub_config and split, and the way to the hub"
        ) from error
    names = rows.column_names
    if not names:
        return rows
    try:
        return rows.select_columns(needed_columns(names, settings))
    except Malformed as error:
        raise CorpusError(f"hub data set {label}: {error}") from None
