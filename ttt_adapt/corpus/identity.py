"""Document ids: the corpus' own where it has them, else its files and positions in them."""

from collections.abc import Collection

from ttt_adapt.corpus.problems import Malformed
from ttt_adapt.corpus.records import Record


class Identities:
    """Gives every record of one corpus an id that no other has.

    Positional ids are unique as they are, so only ids found in records are remembered.

    Args:
        labels: of the corpus' files.
        required: whether ids come from ``id_column``: then a repeated one is malformed input.
            Ids found without being asked for give way to positions when they repeat.
        prefix: begins every id.
    """

    def __init__(self, labels: Collection[str], *, required: bool, prefix: str = "") -> None:
        self._prefix = prefix
        self._labels = frozenset(labels)
        self._required = required
        self._seen: set[str] = set()

    def assign(self, record: Record) -> str:
        """The record's id.

        Raises:
            Malformed: its required id is another record's already.
        """
        return self._prefix + self._unprefixed(record)

    def _unprefixed(self, record: Record) -> str:
        own = record.own_id
        if own is None:
            return record.position_id
        if own in self._seen:
            if self._required:
                raise Malformed(f"id {own!r} is another document's already; ids must be unique")
            return record.position_id
        if not self._required and self._looks_positional(own):
            return record.position_id
        self._seen.add(own)
        return own

    def _looks_positional(self, identifier: str) -> bool:
        label, _, number = identifier.rpartition(":")
        return number.isdecimal() and label in self._labels
