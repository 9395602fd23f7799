"""Building an index again: what is there is recognised, also when settings have been added since."""

from pathlib import Path

import pytest

from ttt_adapt import pipeline
from ttt_adapt.config import ChunkSettings, CorpusSettings, EmbeddingSettings
from ttt_adapt.errors import UserError
from ttt_adapt.indexes import IndexInfo


def build(world: Path, folder: Path, id_prefix: str = "") -> IndexInfo:
    return pipeline.build_index(
        CorpusSettings(path=str(world / "corpus.jsonl"), id_prefix=id_prefix),
        folder,
        chunks=ChunkSettings(size=120),
        embedding=EmbeddingSettings(kind="hashing"),
    )


def test_an_index_says_what_it_said_before_later_settings(world: Path) -> None:
    (index, _) = pipeline.open_index(world / "index")
    plain = CorpusSettings(path=str(world / "corpus.jsonl"))
    assert index.info.origin["corpus"] == plain.model_dump(mode="json", exclude={"id_prefix"})


def test_building_again(world: Path, tmp_path: Path) -> None:
    first = build(world, tmp_path / "index")
    again = build(world, tmp_path / "index")
    assert again.content_hash == first.content_hash
    with pytest.raises(UserError, match="corpus"):
        build(world, tmp_path / "index", id_prefix="old/")
    other = build(world, tmp_path / "other", id_prefix="old/")
    assert other.origin["corpus"]["id_prefix"] == "old/"
    (index, _) = pipeline.open_index(tmp_path / "other")
    assert index.passages([0])[0].document_id.startswith("old/")
