"""One query: select, predict, continue a prompt; the model stays as it was."""

from pathlib import Path

import pytest

from ttt_adapt import pipeline
from ttt_adapt.config import ExperimentSettings, RetrievalSettings, SelectionSettings, override
from ttt_adapt.errors import UserError
from ttt_adapt.models import LanguageModel, load_language_model
from ttt_adapt.testing import sample_text
from ttt_adapt.types import Selection


@pytest.fixture(scope="module")
def lm(world: Path) -> LanguageModel:
    from ttt_adapt.config import ModelSettings

    return load_language_model(ModelSettings(name=str(world / "model"), device="cpu"))


def weights(lm: LanguageModel) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in lm.model.parameters())


def test_select_agrees_with_the_index(world: Path) -> None:
    text = sample_text(100, 40)
    picked = pipeline.select(
        text, world / "index", selection=SelectionSettings(method="nearest", num_select=5)
    )
    assert isinstance(picked.selection, Selection)
    assert list(picked.selection.indices) == [0, 1, 2, 3, 4]
    assert list(picked.scores) == sorted(picked.scores, reverse=True)
    assert [source.passage_id for source in picked.sources()] == [p.id for p in picked.passages]


def test_query_rows_of_a_long_text(world: Path) -> None:
    text = sample_text(101, 200)
    chunks = RetrievalSettings(query_rows="chunks", num_candidates=5, max_overlap=1.0)
    opened = pipeline.open_index(world / "index")
    (found,) = pipeline.retrieve([pipeline.Query(text)], *opened, chunks)
    assert len(found.rows) > 5
    assert 5 < len(found.neighbors.ids) <= 5 * len(found.rows)


@pytest.mark.parametrize("method", ["full", "lora", "in-context", "none"])
def test_predict_restores_the_model(
    world: Path, settings: ExperimentSettings, lm: LanguageModel, method: str
) -> None:
    before = weights(lm)
    chosen = override(settings, {"adaptation.method": method})
    prediction = pipeline.predict(sample_text(7, 30), world / "index", settings=chosen, lm=lm)
    assert weights(lm) == before
    assert len(prediction.scores) == 3 and not prediction.failure
    assert prediction.scores[0].num_bytes == len(sample_text(7, 30).encode())
    if method in ("full", "lora"):
        assert prediction.learned is not None and len(prediction.learned.losses_nats) == 4
        assert prediction.scores[-1].nats != prediction.scores[0].nats
    else:
        assert prediction.learned is None


def test_continuations_side_by_side(
    world: Path, settings: ExperimentSettings, lm: LanguageModel
) -> None:
    before = weights(lm)
    chosen = override(settings, {"adaptation.learning_rate": 0.05})
    found = pipeline.continue_prompt(
        "return value",
        world / "index",
        settings=chosen,
        lm=lm,
        max_new_tokens=12,
        temperature=1.0,
    )
    assert found.base != found.adapted
    assert weights(lm) == before
    again = pipeline.continue_prompt(
        "return value",
        world / "index",
        settings=chosen,
        lm=lm,
        max_new_tokens=12,
        temperature=1.0,
    )
    assert (again.base, again.adapted) == (found.base, found.adapted)


def test_prefix_is_nearest_first_whatever_the_order_of_learning(
    world: Path, settings: ExperimentSettings, lm: LanguageModel
) -> None:
    text = sample_text(8, 30)
    found = {}
    for method in ("in-context", "full"):
        chosen = override(
            settings, {"adaptation.method": method, "adaptation.order": "farthest-first"}
        )
        prediction = pipeline.predict(text, world / "index", settings=chosen, lm=lm)
        found[method] = [source.score for source in prediction.sources]
    assert found["in-context"] == sorted(found["in-context"], reverse=True)
    assert found["full"] == sorted(found["full"])


@pytest.mark.parametrize("selector", ["nearest", "sift"])
def test_learning_goes_by_the_order_of_picking(
    world: Path, settings: ExperimentSettings, lm: LanguageModel, selector: str
) -> None:
    text = sample_text(8, 30)
    chosen = override(
        settings,
        {"selection.method": selector, "selection.num_select": 12, "selection.noise_var": 10.0},
    )
    picked = pipeline.select(
        text, world / "index", selection=chosen.selection, retrieval=chosen.retrieval
    )
    learned = pipeline.predict(text, world / "index", settings=chosen, lm=lm).sources
    expected = [source.passage_id for source in picked.sources()]
    assert [source.passage_id for source in learned] == expected
    scores = [source.score for source in learned]
    # SIFT comes back to a passage after others; nearest neighbours are sorted as they come.
    assert (scores == sorted(scores, reverse=True)) == (selector == "nearest")
    assert (len(set(scores)) < len(scores)) == (selector == "sift")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_text_is_refused(world: Path, settings: ExperimentSettings, text: str) -> None:
    with pytest.raises(UserError, match="empty"):
        pipeline.predict(text, world / "index", settings=settings)
