"""Embeddings of tasks: each text once, kept on disk as they are made.

Shape legend: K tasks, M targets, U distinct texts, D width, n texts of a shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttt_adapt.curriculum.selecting.cache import EmbeddingCache, text_key
from ttt_adapt.curriculum.selecting.embedders import TaskEmbedder
from ttt_adapt.curriculum.selecting.measures import mean_vector, unit_rows_in_place
from ttt_adapt.curriculum.tasks import Task
from ttt_adapt.errors import TaskError
from ttt_adapt.types import FloatArray

SHARD_TEXTS = 1024
"""Texts a shard: what a killed run loses at most."""

Progress = Callable[[int, int], None]
StageProgress = Callable[[str, int, int], None]
"""Receives the stage (``embed targets``, ``embed corpus``, ``select``), how much of it is done, and
in all."""


def embed_tasks(
    tasks: Sequence[Task],
    embedder: TaskEmbedder,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Vectors float32 ``[K, D]`` of tasks, in input order, as the embedder gives them.

    Args:
        tasks: at least one.
        embedder: see :func:`~ttt_adapt.curriculum.selecting.embedders.load_task_embedder`.
        cache: a folder of vectors, by model and text. A run that was killed continues there, with
            the same vectors to the last bit; another run finds what both have.
        progress: receives distinct texts done and in all.

    Raises:
        TaskError: no tasks.
        FingerprintMismatchError: the folder holds something else.
    """
    if not tasks:
        raise TaskError("expected at least one task to embed, found none")
    texts = embedder.texts(tasks)
    row_of: dict[str, int] = {}
    for text in texts:
        row_of.setdefault(text, len(row_of))
    distinct = list(row_of)
    vectors_UD = np.empty((len(distinct), embedder.dimension), dtype=np.float32)
    store = None
    if cache is not None:
        store = EmbeddingCache(
            Path(cache),
            fingerprint=embedder.fingerprint,
            dimension=embedder.dimension,
            description=embedder.description,
        )
    num_done = 0

    def advance(num_texts: int) -> None:
        nonlocal num_done
        num_done += num_texts
        if progress is not None and num_texts:
            progress(num_done, len(distinct))

    for start in range(0, len(distinct), SHARD_TEXTS):
        block = distinct[start : start + SHARD_TEXTS]
        _embed_block(block, vectors_UD[start : start + len(block)], embedder, store, advance)
    if len(distinct) == len(texts):
        return vectors_UD
    return vectors_UD[[row_of[text] for text in texts]]


def _embed_block(
    texts: list[str],
    out_nD: NDArray[np.float32],
    embedder: TaskEmbedder,
    store: EmbeddingCache | None,
    advance: Callable[[int], None],
) -> None:
    keys = [text_key(text) for text in texts]
    missing = list(range(len(texts))) if store is None else store.fill(keys, out_nD)
    advance(len(texts) - len(missing))
    if not missing:
        return
    made = embedder.embed([texts[position] for position in missing], progress=advance)
    out_nD[missing] = made
    if store is not None:
        store.add([keys[position] for position in missing], made)


@dataclass(frozen=True, slots=True)
class EmbeddedTasks:
    """Unit vectors of candidates and targets, and what made them.

    Attributes:
        candidates: float32 ``[K, D]``.
        targets: float32 ``[M, D]``.
        description: of the embedder.
        fingerprint: of the embedder.
    """

    candidates: FloatArray
    targets: FloatArray
    description: str
    fingerprint: str


def embed_for_selection(
    candidates: Sequence[Task],
    targets: Sequence[Task],
    embedder: TaskEmbedder,
    *,
    cache: Path | None = None,
    progress: StageProgress | None = None,
) -> EmbeddedTasks:
    """Unit vectors, less the candidates' mean where the embedder asks for it."""

    def stage(name: str) -> Callable[[int, int], None] | None:
        if progress is None:
            return None
        return lambda done, total: progress(name, done, total)

    targets_MD = embed_tasks(targets, embedder, cache, stage("embed targets"))
    candidates_KD = embed_tasks(candidates, embedder, cache, stage("embed corpus"))
    centre = mean_vector(candidates_KD) if embedder.centred else None
    unit_rows_in_place(candidates_KD, centre)
    unit_rows_in_place(targets_MD, centre)
    return EmbeddedTasks(candidates_KD, targets_MD, embedder.description, embedder.fingerprint)
