"""A pretraining mixture: documents chosen by a hash of their text, tokenised once, packed.

On disk, in the run's ``tokens/``: ``train.bin`` and ``validation.bin`` (little-endian uint16 token
ids, each document preceded by the beginning-of-text token) and ``mixture.json``, which says what
went in, counted per source.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ttt_adapt.config import PretrainSettings, SourceSettings
from ttt_adapt.corpus import read_documents
from ttt_adapt.corpus.files import is_hub
from ttt_adapt.errors import CorpusError
from ttt_adapt.storage import atomic_write, sha256_file, stable_hash, write_json
from ttt_adapt.training.related import related_texts
from ttt_adapt.training.tokenizer import BEGINNING
from ttt_adapt.types import Document

BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class Mixture:
    """Token streams of a prepared mixture.

    Attributes:
        train: uint16 ``[num_train_tokens]``, memory-mapped.
        validation: uint16 ``[num_validation_tokens]``, memory-mapped; may be empty.
        description: what ``mixture.json`` holds.
    """

    train: np.ndarray[Any, np.dtype[np.uint16]]
    validation: np.ndarray[Any, np.dtype[np.uint16]]
    description: dict[str, Any]


def is_sampled(text: str, fraction: float, seed: int) -> bool:
    """Whether a document of this text belongs to a sample of ``fraction``: the same on every run."""
    if fraction >= 1.0:
        return True
    digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def sampled_texts(source: SourceSettings, seed: int, root: Path) -> Iterator[str]:
    """The texts of :func:`sampled_documents`."""
    return (document.text for document in sampled_documents(source, seed, root))


def sampled_documents(source: SourceSettings, seed: int, root: Path) -> Iterator[Document]:
    """The documents of a source that belong to its sample, in the source's order.

    Args:
        source: its ``path`` is taken relative to ``root`` unless it is absolute or a hub's.
        seed: decides, with the text, what belongs to the sample.
        root: the folder that holds the data.
    """
    for document in read_documents(under(source, root)):
        if is_sampled(document.text, source.fraction, seed):
            yield document


def under(source: SourceSettings, root: Path) -> SourceSettings:
    """The source with its path taken from ``root``, the folder that holds the data."""
    if is_hub(source):
        return source
    return source.model_copy(update={"path": str(root / source.path)})


def prepare_mixture(
    settings: PretrainSettings,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    root: Path,
    report: Callable[[str], None],
) -> Mixture:
    """Tokenise the mixture into ``folder``, or reuse what is there when it is the same mixture.

    Raises:
        CorpusError: a source cannot be read, or nothing is left to train on.
    """
    key = stable_hash(
        {
            "sources": [source.identity() for source in settings.sources],
            "validation": [source.identity() for source in settings.validation],
            "seed": settings.seed,
            "tokenizer": tokenizer.to_str(),
        }
    )
    described = folder / "mixture.json"
    if described.is_file():
        description = json.loads(described.read_text(encoding="utf-8"))
        if description["key"] == key:
            return _open(folder, description)
    folder.mkdir(parents=True, exist_ok=True)
    beginning = tokenizer.token_to_id(BEGINNING)
    if beginning is None:
        raise CorpusError(f"the tokenizer has no token {BEGINNING}; remove it to train another")
    description = {"key": key, "files": {}}
    for name, sources in (("train", settings.sources), ("validation", settings.validation)):
        pieces: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
        counts = []
        for source in sources:
            report(f"tokenising {Path(source.path).name}")
            entry: dict[str, Any] = {"name": Path(source.path).name, "fraction": source.fraction}
            if source.related:
                documents = list(sampled_documents(source, settings.seed, root))
                report(f"ordering passages of {len(documents):,} documents")
                found = related_texts(documents, settings.seed)
                arrays, num_bytes = _tokenise(found.texts, tokenizer, beginning)
                pieces += [np.concatenate(arrays)] if arrays else []
                entry |= {
                    "num_documents": len(documents),
                    "num_related_passages": len(arrays),
                    "mean_cosine_along": found.mean_cosine,
                }
            else:
                texts = sampled_texts(source, settings.seed, root)
                arrays, num_bytes = _tokenise(texts, tokenizer, beginning)
                pieces += arrays
                entry["num_documents"] = len(arrays)
            num_tokens = sum(len(array) for array in arrays)
            counts.append({**entry, "num_bytes": num_bytes, "num_tokens": num_tokens})
        # Whole documents in a seeded order, so that no stretch of training is one source's; those of
        # a related source stay together, and its windows are mixed with the others' by packing.
        order = np.random.default_rng(settings.seed).permutation(len(pieces))
        with atomic_write(folder / f"{name}.bin") as stream:
            for position in order:
                stream.write(pieces[position].astype("<u2").tobytes())
        description[name] = counts
        description["files"][f"{name}.bin"] = sha256_file(folder / f"{name}.bin")
    if not sum(entry["num_tokens"] for entry in description["train"]):
        raise CorpusError("the pretraining mixture holds no text; check the sources' paths")
    write_json(described, description)
    return _open(folder, description)


def packed_blocks(
    tokens: np.ndarray[Any, np.dtype[np.uint16]], max_length: int, seed: int
) -> tuple[int, Callable[[int], np.ndarray[Any, np.dtype[np.int64]]]]:
    """Consecutive blocks of ``max_length + 1`` tokens in a seeded order that differs by epoch.

    Returns:
        The number of blocks in an epoch, and a function from a running position (it may exceed one
        epoch) to an int64 block ``[max_length + 1]``; neighbours share one token, so that every
        token is a target once.
    """
    num_blocks = (len(tokens) - 1) // max_length
    if num_blocks < 1:
        raise CorpusError(
            f"expected more than {max_length} tokens to train on, found {len(tokens)}; "
            "add text or lower max_length"
        )
    orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def block(position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, index = divmod(position, num_blocks)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(num_blocks)
        start = int(orders[epoch][index]) * max_length
        return tokens[start : start + max_length + 1].astype(np.int64)

    return num_blocks, block


def _tokenise(
    texts: Iterable[str], tokenizer: Tokenizer, beginning: int
) -> tuple[list[np.ndarray[Any, np.dtype[np.uint16]]], int]:
    arrays: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
    num_bytes = 0
    batch: list[str] = []

    def flush() -> None:
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            arrays.append(np.array([beginning, *encoding.ids], dtype=np.uint16))
        batch.clear()

    for text in texts:
        num_bytes += len(text.encode())
        batch.append(text)
        if len(batch) == BATCH_DOCUMENTS:
            flush()
    flush()
    return arrays, num_bytes


def _open(folder: Path, description: dict[str, Any]) -> Mixture:
    def tokens(name: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
        path = folder / f"{name}.bin"
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.uint16)
        return np.memmap(path, dtype="<u2", mode="r")

    return Mixture(tokens("train"), tokens("validation"), description)
