"""How much of a text occurs in a query, by word n-grams: near-duplicates that would leak."""

import re

from ttt_adapt.errors import SettingsError

_CJK = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")

Gram = tuple[str, ...]


def words(text: str) -> list[str]:
    r"""Lower-cased runs of ``\w``; Han and kana, written without spaces, one word a character."""
    return _WORD.findall(text.lower())


class NgramOverlap:
    """Word n-grams of one query text, to hold passages against.

    Args:
        query: the text that a passage must not repeat.
        ngram_size: words in an n-gram.

    Raises:
        SettingsError: ``ngram_size`` is below 1.
    """

    def __init__(self, query: str, ngram_size: int) -> None:
        if ngram_size < 1:
            raise SettingsError(f"ngram_size: expected at least 1, found {ngram_size}")
        self._words = words(query)
        self._size = min(ngram_size, len(self._words))
        self._grams: dict[int, frozenset[Gram]] = {}

    def fraction(self, text: str) -> float:
        """Share of the text's n-grams, repeats counted, that occur in the query: 0.0 to 1.0.

        A text of fewer words than an n-gram is one n-gram as a whole; against a query of fewer
        words the n-grams are as long as the query. Without words on either side: 0.0.
        """
        found = words(text)
        size = min(self._size, len(found))
        if size == 0:
            return 0.0
        known = self._grams_of(size)
        hits = sum(map(known.__contains__, _grams(found, size)))
        return hits / (len(found) - size + 1)

    def _grams_of(self, size: int) -> frozenset[Gram]:
        grams = self._grams.get(size)
        if grams is None:
            grams = self._grams[size] = frozenset(_grams(self._words, size))
        return grams


def _grams(items: list[str], size: int) -> "zip[Gram]":
    return zip(*(items[start:] for start in range(size)), strict=False)
