from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ttt_adapt.config import IndexSettings
from ttt_adapt.errors import SelectionError
from ttt_adapt.indexes import Index, build_index
from ttt_adapt.testing import HashedWords, sample_passages
from ttt_adapt.types import Neighbors, Passage

FACTORIES = [
    "Flat",
    "IDMap,Flat",
    "IDMap2,IVF8,Flat",
    "IVF8,Flat",
    "IVF8_HNSW4,Flat",
    "IVF8,SQ8",
    "SQ8",
    "HNSW8",
    "HNSW8,SQ8",
    "PCAR8,IVF8,Flat",
    "OPQ2_4,IVF8,PQ2x4",
    "IVF32,PQ12x4fs",
    "IVF32,PQ12x4",
    "IVF8,PQ2x4,RFlat",
    "IVF8,PQ2x4,Refine(SQ8)",
    "L2norm,Flat",
    "RR8,Flat",
]
EXACT = {"Flat", "IDMap,Flat", "L2norm,Flat"}
DIMENSION = 12


class Duplicating(HashedWords):
    """Texts of every third document get one of three vectors: exact ties."""

    def embed(
        self, texts: Sequence[str], *, progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float32]:
        vectors = super().embed(texts, progress=progress)
        for row in range(0, len(texts), 3):
            vectors[row] = np.roll(np.eye(1, self.dimension, dtype=np.float32), row % 2)
        return vectors


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Index]:
    indexes: dict[str, Index] = {}

    def get(factory: str) -> Index:
        if factory not in indexes:
            folder = tmp_path_factory.mktemp("index")
            build_index(
                sample_passages(90),
                Duplicating(DIMENSION),
                folder,
                IndexSettings(shard_passages=70, factory=factory, nprobe=1),
                origin={},
            )
            indexes[factory] = Index.open(folder)
        return indexes[factory]

    return get


def unit(seed: int, num_rows: int) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((num_rows, DIMENSION))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def reference(
    index: Index,
    queries: NDArray[np.float32],
    num_candidates: int,
    reject: Callable[[Passage], str] | None,
) -> tuple[list[int], int, int]:
    """The definition, by sorting everything."""
    vectors = np.asarray(index.all_vectors(), dtype=np.float64)
    passages = index.passages(range(len(index)))
    union: set[int] = set()
    rejected: dict[int, str] = {}
    for query in queries.astype(np.float64):
        scores = (vectors * query).sum(axis=1).astype(np.float32)
        accepted: list[int] = []
        for row in np.lexsort((np.arange(len(scores)), -scores)).tolist():
            if len(accepted) == num_candidates:
                break
            reason = reject(passages[row]) if reject else ""
            if reason:
                rejected[row] = reason
            else:
                accepted.append(row)
        union.update(accepted)
    scores = (vectors[:, None] * queries.astype(np.float64)).sum(axis=2).astype(np.float32).max(1)
    ordered = sorted(union, key=lambda row: (-scores[row], row))
    reasons = list(rejected.values())
    return ordered, reasons.count("own"), reasons.count("overlap")


def check_invariants(index: Index, queries: NDArray[np.float32], found: Neighbors) -> None:
    assert found.ids.dtype == np.int64
    assert found.scores.dtype == found.vectors.dtype == np.float32
    assert len(set(found.ids.tolist())) == len(found.ids)
    assert ((found.ids >= 0) & (found.ids < len(index))).all()
    np.testing.assert_array_equal(found.vectors, index.all_vectors()[found.ids])
    expected = (found.vectors.astype(np.float64) @ queries.T.astype(np.float64)).max(axis=1)
    np.testing.assert_allclose(found.scores, expected, rtol=0, atol=1e-6)
    order = list(zip((-found.scores).tolist(), found.ids.tolist(), strict=True))
    assert order == sorted(order)


def reject_by(modulus: int) -> Callable[[Passage], str] | None:
    if modulus == 0:
        return None
    return lambda p: {0: "own", 1: "overlap"}.get(hash_of(p) % modulus, "")


def hash_of(passage: Passage) -> int:
    return int(passage.document_id.removeprefix("document-"))


@pytest.mark.parametrize("factory", FACTORIES)
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 4),
    num_candidates=st.integers(1, 300),
    modulus=st.sampled_from([0, 1, 2, 3, 7]),
)
def test_against_sorting_everything(
    opened: Callable[[str], Index],
    factory: str,
    seed: int,
    num_rows: int,
    num_candidates: int,
    modulus: int,
) -> None:
    index = opened(factory)
    queries = unit(seed, num_rows)
    if seed % 3 == 0:
        queries[0] = index.vectors([seed % 270])[0]
    reject = reject_by(modulus)
    found = index.search(queries, num_candidates=num_candidates, reject=reject)
    check_invariants(index, queries, found)
    expected, num_own, num_overlap = reference(index, queries, num_candidates, reject)
    if factory in EXACT or num_candidates >= 270:
        assert found.ids.tolist() == expected
        assert (found.num_excluded_own, found.num_excluded_overlap) == (num_own, num_overlap)
    # Whatever FAISS misses, each row gets its share: as many as there are to accept.
    num_left = 270 - sum(1 for p in index.passages(range(270)) if reject and reject(p))
    assert len(found.ids) >= min(num_candidates, num_left)


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "IVF8,SQ8", "HNSW8"])
def test_everything_can_be_asked_for(opened: Callable[[str], Index], factory: str) -> None:
    index = opened(factory)
    for num_candidates in (270, 271, 100_000):
        found = index.search(unit(0, 1), num_candidates=num_candidates)
        assert sorted(found.ids.tolist()) == list(range(270))


def test_ties_go_to_the_lowest_ids(opened: Callable[[str], Index]) -> None:
    for factory in ("Flat", "HNSW8", "IVF8,Flat"):
        index = opened(factory)
        query = index.vectors([0])
        ties = np.flatnonzero((index.all_vectors() == query[0]).all(axis=1))
        assert len(ties) > 20
        for num_candidates in (1, 3, 17):
            found = index.search(query, num_candidates=num_candidates)
            assert found.ids.tolist() == ties[:num_candidates].tolist()


def test_rejecting_everything(opened: Callable[[str], Index]) -> None:
    for factory in ("Flat", "IVF8,Flat", "HNSW8"):
        found = opened(factory).search(unit(1, 2), num_candidates=5, reject=lambda p: "own")
        assert found.ids.shape == found.scores.shape == (0,)
        assert found.vectors.shape == (0, DIMENSION)
        assert (found.num_excluded_own, found.num_excluded_overlap) == (270, 0)


def test_a_passage_is_asked_about_once(opened: Callable[[str], Index]) -> None:
    asked: list[str] = []

    def reject(passage: Passage) -> str:
        asked.append(passage.id)
        return "overlap" if passage.ordinal == 1 else ""

    found = opened("IVF8,SQ8").search(unit(2, 3), num_candidates=40, reject=reject)
    assert len(asked) == len(set(asked))
    assert 0 < found.num_excluded_overlap <= 90


def test_one_row_of_many_is_that_row_alone(opened: Callable[[str], Index]) -> None:
    index = opened("IVF8,Flat")
    queries = unit(3, 4)
    together = index.search(queries, num_candidates=9)
    alone = [index.search(query[None], num_candidates=9).ids.tolist() for query in queries]
    assert set(together.ids.tolist()) == {row for ids in alone for row in ids}


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats(opened: Callable[[str], Index], dtype: Any) -> None:
    queries = unit(4, 2).astype(dtype)
    found = opened("Flat").search(np.asfortranarray(queries), num_candidates=5)
    expected = opened("Flat").search(queries.astype(np.float32), num_candidates=5)
    np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (np.zeros(DIMENSION, np.float32), r"\[M, 12\] with M ≥ 1, found shape \(12,\)"),
        (np.zeros((0, DIMENSION), np.float32), r"found shape \(0, 12\)"),
        (np.zeros((1, 13), np.float32), "dimension 13, the index 12; embed them with hashed w"),
        (np.zeros((1, DIMENSION), np.int64), "floating point, found int64"),
        (np.full((2, DIMENSION), [[0.0], [np.nan]]), "NaN or infinity in row 1"),
        (np.full((1, DIMENSION), np.inf), "NaN or infinity in row 0"),
    ],
)
def test_bad_queries(opened: Callable[[str], Index], queries: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        opened("Flat").search(queries, num_candidates=3)


def test_bad_requests(opened: Callable[[str], Index]) -> None:
    index = opened("Flat")
    with pytest.raises(SelectionError, match="num_candidates must be at least 1, found 0"):
        index.search(unit(0, 1), num_candidates=0)
    with pytest.raises(SelectionError, match="must return '', 'own' or 'overlap', found 'spam'"):
        index.search(unit(0, 1), num_candidates=1, reject=lambda p: "spam")
    for wrong in (-1, 270):
        with pytest.raises(SelectionError, match=f"passage {wrong} is not among the index's 0 to"):
            index.passages([0, wrong])
        with pytest.raises(SelectionError, match=f"passage {wrong} is not among"):
            index.vectors([wrong])
    assert index.passages([]) == []
    with pytest.raises(SelectionError, match="a sample needs at least 1 passage"):
        index.sample(0, 0)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num=st.integers(1, 300), seed=st.integers(0, 99), modulus=st.sampled_from([0, 2, 5]))
def test_samples(opened: Callable[[str], Index], num: int, seed: int, modulus: int) -> None:
    index = opened("Flat")
    reject = reject_by(modulus)
    found = index.sample(num, seed, reject=reject)
    again = index.sample(num, seed, reject=reject)
    np.testing.assert_array_equal(found.ids, again.ids)
    assert len(set(found.ids.tolist())) == len(found.ids)
    accepted = [i for i, p in enumerate(index.passages(range(270))) if not reject or not reject(p)]
    assert len(found.ids) == min(num, len(accepted))
    assert set(found.ids.tolist()) <= set(accepted)
    np.testing.assert_array_equal(found.vectors, index.vectors(found.ids))
    assert (found.scores == 0).all()
    if num > len(accepted):
        assert found.num_excluded_own + found.num_excluded_overlap == 270 - len(accepted)


def test_samples_are_uniform(opened: Callable[[str], Index]) -> None:
    index = opened("Flat")
    counts = np.zeros(270)
    for seed in range(900):
        counts[index.sample(20, seed).ids] += 1
    # Binomial(900, 20/270): mean 66.7, standard deviation 7.9.
    assert abs(counts.mean() - 900 * 20 / 270) < 1e-9
    assert counts.min() > 35
    assert counts.max() < 102
