"""What may go into an embedder and what may come out of it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.errors import CorpusError, ModelError


def check_texts(texts: Sequence[str]) -> None:
    """Refuse what has no vector.

    Raises:
        CorpusError: ``texts`` is one string, holds something else than strings, or a text holds a
            lone surrogate and so has no UTF-8 form.
    """
    if isinstance(texts, str):
        raise CorpusError("expected a sequence of texts, found one string; pass [text]")
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise CorpusError(
                f"text {position}: expected a string, found {type(text).__name__}; decode it first"
            )
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"text {position}: lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start} has no UTF-8 form; decode the bytes with errors='replace'"
            ) from None


def unit_rows(vectors_BD: NDArray[np.float64], positions: Sequence[int]) -> NDArray[np.float32]:
    """Rows scaled to length one, as float32.

    Args:
        vectors_BD: float64 ``[B, D]``.
        positions: each row's place among the caller's texts, for the error message.

    Raises:
        ModelError: a row is not finite or is zero, and so has no direction.
    """
    norms = np.linalg.norm(vectors_BD, axis=1)
    sound = np.isfinite(norms) & (norms > 0)
    if not sound.all():
        row = int(np.argmin(sound))
        found = "a zero vector" if norms[row] == 0 else "a non-finite vector"
        raise ModelError(
            f"text {positions[row]}: the model gave {found}; its weights are damaged or overflow in "
            "this dtype (try dtype='float32')"
        )
    units_BD: NDArray[np.float32] = (vectors_BD / norms[:, None]).astype(np.float32)
    return units_BD
