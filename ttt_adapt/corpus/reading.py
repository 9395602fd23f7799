"""Documents of any corpus: one order, one identity rule, one policy for malformed input."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace

from ttt_adapt.config import CorpusSettings
from ttt_adapt.corpus.files import Place, locate
from ttt_adapt.corpus.hub import hub_label, read_hub
from ttt_adapt.corpus.identity import Identities
from ttt_adapt.corpus.jsonl import read_jsonl
from ttt_adapt.corpus.problems import Malformed, Problem, ReadProblems
from ttt_adapt.corpus.records import Record
from ttt_adapt.corpus.tables import read_table
from ttt_adapt.corpus.text import read_separated, read_whole
from ttt_adapt.corpus.tree import tree_files
from ttt_adapt.errors import CorpusError
from ttt_adapt.types import Document


def read_documents(
    settings: CorpusSettings, *, problems: ReadProblems | None = None
) -> Iterator[Document]:
    """Stream a corpus' documents in an order, and under ids, that are the same on every run.

    Memory is bounded by the largest document allowed (``max_document_bytes``), plus the ids of
    records that bring their own. Documents of nothing but white space are counted and left out.

    Args:
        settings: where the text is and how to read it.
        problems: receives counts and skipped records as reading goes on.

    Raises:
        CorpusError: at once, where nothing can be read as asked; while reading, at malformed
            input when ``on_error`` is ``fail``, naming file, line and reason; at the end, when
            there was no document at all.
    """
    if settings.separator is not None and (
        "\n" in settings.separator or "\r" in settings.separator
    ):
        raise CorpusError(f"separator: expected one line, found {settings.separator!r}")
    place = locate(settings)
    found = problems if problems is not None else ReadProblems()
    return _documents(settings, place, found)


def _documents(settings: CorpusSettings, place: Place, found: ReadProblems) -> Iterator[Document]:
    labels = [hub_label(settings)] if place.format == "hub" else [f.label for f in place.files]
    identities = Identities(
        labels, required=settings.id_column is not None, prefix=settings.id_prefix
    )
    before = replace(found, problems=[])
    first: Problem | None = None
    num_documents = 0
    with closing(_items(settings, place, found)) as items:
        for item in items:
            outcome = item if isinstance(item, Problem) else _document(item, identities, found)
            del item
            if isinstance(outcome, Problem):
                if settings.on_error == "fail":
                    raise CorpusError(
                        f"{outcome.location}: {outcome.reason}; mend it, or set on_error to 'skip'"
                    )
                first = first or outcome
                found.add(outcome)
            elif outcome is not None:
                num_documents += 1
                found.num_documents += 1
                yield outcome
                if num_documents == settings.max_documents:
                    return
            del outcome
    if num_documents == 0:
        raise CorpusError(_nothing_found(settings, place, before, found, first))


def _nothing_found(
    settings: CorpusSettings,
    place: Place,
    before: ReadProblems,
    found: ReadProblems,
    first: Problem | None,
) -> str:
    # A collector may serve several corpora: only what this one added is told.
    counts = (
        (found.num_files - before.num_files, "files"),
        (found.num_binary - before.num_binary, "of them binary"),
        (found.num_empty - before.num_empty, "empty documents"),
        (found.num_skipped - before.num_skipped, "malformed records"),
    )
    looked_at = ", ".join(f"{number:,} {what}" for number, what in counts if number)
    message = f"{settings.path}: no document found (read as {place.format}: {looked_at or 'empty'})"
    if first is not None:
        message += f"; the first malformed record is {first.location}: {first.reason}"
    return message + "; check path, format, include and exclude"


def _items(
    settings: CorpusSettings, place: Place, found: ReadProblems
) -> Generator[Record | Problem, None, None]:
    if place.format == "hub":
        yield from read_hub(settings)
    elif place.format == "tree":
        yield from _tree_items(settings, place, found)
    for file in place.files:
        found.num_files += 1
        if place.format == "jsonl":
            yield from read_jsonl(file, settings)
        elif place.format in ("parquet", "arrow"):
            yield from read_table(file, settings)
        elif settings.separator is not None:
            yield from read_separated(file, settings)
        else:
            item = read_whole(file, settings)
            assert item is not None
            yield item


def _tree_items(
    settings: CorpusSettings, place: Place, found: ReadProblems
) -> Generator[Record | Problem, None, None]:
    for file in tree_files(place.root, settings):
        if isinstance(file, Problem):
            yield file
            continue
        found.num_files += 1
        item = read_whole(file, settings, skip_binary=True)
        if item is None:
            found.num_binary += 1
        else:
            yield item


def _document(
    record: Record, identities: Identities, found: ReadProblems
) -> Document | Problem | None:
    """The record with an id and its bytes counted; ``None`` when it is empty."""
    if not record.text or record.text.isspace():
        found.num_empty += 1
        return None
    try:
        num_bytes = len(record.text) if record.text.isascii() else len(record.text.encode())
        identifier = identities.assign(record)
    except UnicodeEncodeError as error:
        return Problem(
            record.location, f"an unpaired surrogate at character {error.start} has no UTF-8 form"
        )
    except Malformed as error:
        return Problem(record.location, str(error))
    found.num_bytes += num_bytes
    return Document(
        id=identifier,
        text=record.text,
        source=record.location,
        subset=record.subset,
        meta=record.meta if record.meta is not None else {},
    )
