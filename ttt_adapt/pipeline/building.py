"""From a corpus to an index, and from an index back to the embedder it was built with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ttt_adapt.config import (
    ChunkSettings,
    CorpusSettings,
    EmbeddingSettings,
    IndexSettings,
    make_settings,
)
from ttt_adapt.corpus import ReadProblems, chunk_documents, read_documents
from ttt_adapt.embedding import load_embedder
from ttt_adapt.errors import CorpusError
from ttt_adapt.indexes import (
    BuildProgress,
    FactoryChoice,
    Index,
    IndexInfo,
    add_to_index,
    choose_factory,
)
from ttt_adapt.indexes import build_index as build_index_files
from ttt_adapt.models import resolve_model
from ttt_adapt.runtime import has_native_bfloat16
from ttt_adapt.types import Embedder, Passage


def build_index(
    corpus: CorpusSettings | str | Path,
    folder: Path,
    *,
    chunks: ChunkSettings | None = None,
    embedding: EmbeddingSettings | None = None,
    index: IndexSettings | None = None,
    progress: BuildProgress | None = None,
    problems: ReadProblems | None = None,
) -> IndexInfo:
    """Read, cut, embed and index a corpus; started again after any interruption, it continues.

    Args:
        corpus: settings, or a path for which every other corpus setting is the default.
        folder: the index to make.
        chunks: how documents become passages.
        embedding: how passages become vectors; remembered in the index.
        index: how FAISS holds them.
        progress: receives counts as passages are embedded.
        problems: collects malformed records when ``on_error`` is ``skip``.

    Raises:
        CorpusError: the corpus cannot be read or holds no text.
        IndexFormatError: ``folder`` holds another index.
        BusyError: another process is building it.
    """
    settings = corpus_settings(corpus)
    cuts = chunks or ChunkSettings()
    resolved = resolve_embedding(embedding or EmbeddingSettings())
    embedder = load_embedder(resolved)
    return build_index_files(
        read_passages(settings, cuts, problems),
        embedder,
        folder,
        index or IndexSettings(),
        origin=_origin(settings, cuts, resolved),
        progress=progress,
    )


def add_documents(
    corpus: CorpusSettings | str | Path,
    folder: Path,
    *,
    progress: BuildProgress | None = None,
    problems: ReadProblems | None = None,
) -> IndexInfo:
    """Add a corpus' documents to an index, cut and embedded as those in it; known ids are skipped."""
    index, embedder = open_index(folder)
    cuts = make_settings(ChunkSettings, dict(index.info.origin["chunks"]), where=str(folder))
    passages = read_passages(corpus_settings(corpus), cuts, problems)
    return add_to_index(folder, passages, embedder, progress=progress)


def open_index(folder: Path) -> tuple[Index, Embedder]:
    """An index and the embedder it was built with, loaded from the settings the index remembers.

    Raises:
        IndexFormatError: no finished index of a known format is there.
        FingerprintMismatchError: the embedder of that name is another one now.
    """
    index = Index.open(folder)
    embedder = load_embedder(index_embedding(index))
    index.require_embedder(embedder)
    return index, embedder


def index_embedding(index: Index) -> EmbeddingSettings:
    """The embedding settings an index remembers."""
    values = dict(index.info.origin["embedding"])
    return make_settings(EmbeddingSettings, values, where="the index's origin")


def plan_index(
    corpus: CorpusSettings | str | Path,
    *,
    chunks: ChunkSettings | None = None,
    index: IndexSettings | None = None,
    dimension: int = 384,
    passages_per_s: float = 30.0,
) -> dict[str, Any]:
    """What a build would do, by reading and cutting the corpus without embedding it.

    Returns:
        Counts of documents, passages and bytes, the index that ``auto`` would choose and why, disk
        space in bytes and an estimate of the embedding time in seconds at ``passages_per_s``.
    """
    settings, cuts = corpus_settings(corpus), chunks or ChunkSettings()
    problems = ReadProblems()
    num_passages = num_bytes = 0
    for passage in read_passages(settings, cuts, problems):
        num_passages += 1
        num_bytes += len(passage.text.encode())
    owner = index or IndexSettings()
    choice: FactoryChoice = choose_factory(num_passages, dimension, owner.memory_budget_mb)
    factory = choice.factory if owner.factory == "auto" else owner.factory
    return {
        "num_documents": problems.num_documents,
        "num_passages": num_passages,
        "num_bytes": num_bytes,
        "num_skipped": problems.num_skipped,
        "factory": factory,
        "explanation": choice.explanation if owner.factory == "auto" else "as asked for",
        "disk_bytes": num_bytes + num_passages * dimension * 4 + choice.memory_bytes,
        "embedding_s": num_passages / passages_per_s,
    }


def build_progress(
    update: Callable[[int, int | None, str | None], None] | None, num_passages: int | None = None
) -> BuildProgress:
    """A build's callbacks as one ``update(done, total, text)``, counting anew in each stage.

    Args:
        update: draws a bar; ``None`` draws nothing.
        num_passages: how many there will be, where that is known: gives the bar a time left.
    """
    if update is None:
        return BuildProgress()
    texts = {"embed": "embedding", "train": "training FAISS", "add": "adding", "write": "writing"}
    done, total, text = 0, num_passages, ""

    def on_stage(stage: str, count: int | None) -> None:
        nonlocal done, total, text
        done, total, text = 0, num_passages if count is None else count, texts[stage]
        update(done, total, text)

    def on_advance(count: int) -> None:
        nonlocal done
        done += count
        update(done, total, text)

    return BuildProgress(on_stage, on_advance, on_resumed=on_advance)


def corpus_settings(corpus: CorpusSettings | str | Path) -> CorpusSettings:
    """Settings as given, or the defaults for a path."""
    return corpus if isinstance(corpus, CorpusSettings) else CorpusSettings(path=str(corpus))


def read_passages(
    corpus: CorpusSettings, chunks: ChunkSettings, problems: ReadProblems | None = None
) -> Iterator[Passage]:
    """A corpus' passages in its order."""
    documents = read_documents(corpus, problems=problems)
    return chunk_documents(documents, chunks, offsets=token_offsets(chunks))


def token_offsets(
    chunks: ChunkSettings, model: str = "llama-7m"
) -> Callable[[str], Sequence[tuple[int, int]]] | None:
    """Character spans of a text's tokens when chunks are counted in tokens, else ``None``.

    Tokens are those of the bundled language model, so that an index depends on no other.
    """
    if chunks.unit == "bytes":
        return None
    from tokenizers import Tokenizer

    path = Path(resolve_model(model)) / "tokenizer.json"
    if not path.is_file():
        raise CorpusError(f"chunks are counted in tokens, but {model} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))

    def offsets(text: str) -> Sequence[tuple[int, int]]:
        spans: Sequence[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
        return spans

    return offsets


def resolve_embedding(settings: EmbeddingSettings) -> EmbeddingSettings:
    """Settings without ``auto`` and bundled names, as an index remembers them."""
    changes: dict[str, Any] = {}
    if settings.dtype == "auto":
        native = settings.kind != "hashing" and has_native_bfloat16()
        changes["dtype"] = "bfloat16" if native else "float32"
    if settings.kind == "causal-lm":
        changes["model"] = resolve_model(settings.model)
    return settings.model_copy(update=changes)


def _origin(
    corpus: CorpusSettings, chunks: ChunkSettings, embedding: EmbeddingSettings
) -> dict[str, Any]:
    return {
        "corpus": corpus.identity(),
        "chunks": chunks.identity(),
        "embedding": {
            name: value
            for name, value in embedding.identity().items()
            if name not in ("batch_size", "device")
        },
    }
