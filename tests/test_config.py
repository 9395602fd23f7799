"""Settings: defaults, bounds, TOML there and back, overrides, and errors of one line."""

import json
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ttt_adapt import config
from ttt_adapt.config import (
    ChunkSettings,
    CorpusSettings,
    EvaluationSettings,
    ExperimentSettings,
    ModelSettings,
    PretrainSettings,
    SelectionSettings,
    Settings,
    SourceSettings,
    load_settings,
    make_settings,
    override,
    to_toml,
)
from ttt_adapt.configs import config_names, config_path
from ttt_adapt.errors import SettingsError

ALL = [
    value
    for value in vars(config).values()
    if isinstance(value, type) and issubclass(value, Settings) and value is not Settings
]
PRETRAIN: dict[str, Any] = {"name": "x", "sources": [{"path": "a.jsonl"}]}

texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.integers(1, 10**9)
rates = st.floats(1e-12, 1e12)
shares = st.floats(0.0, 1.0)
corpora = st.builds(
    CorpusSettings,
    path=texts,
    text_column=texts,
    id_column=st.none() | texts,
    subset_column=st.none() | texts,
    include=st.lists(texts, max_size=3).map(tuple),
    exclude=st.lists(texts, max_size=3).map(tuple),
    separator=st.none() | texts,
    on_error=st.sampled_from(["fail", "skip"]),
    max_documents=st.none() | counts,
)
sources = st.builds(SourceSettings, path=texts, separator=st.none() | texts, fraction=shares)
experiments = st.builds(
    ExperimentSettings,
    model=st.builds(ModelSettings, name=texts, trust_remote_code=st.booleans()),
    data=st.none() | corpora,
    corpus=st.none() | corpora,
    selection=st.builds(
        SelectionSettings, num_select=counts, noise_var=rates, alpha=st.none() | rates
    ),
    evaluation=st.builds(
        EvaluationSettings,
        steps=st.sets(st.integers(0, 1000), min_size=1).map(lambda steps: tuple(sorted(steps))),
    ),
    seed=st.integers(0, 2**63 - 1),
)
pretrainings = st.builds(
    PretrainSettings,
    name=texts,
    sources=st.lists(sources, max_size=3).map(tuple),
    validation=st.lists(sources, max_size=2).map(tuple),
    learning_rate=rates,
    warmup_fraction=shares,
    early_length=st.sampled_from([None, 256, 1024]),
)


@given(experiments)
@hypothesis_settings(deadline=None)
def test_an_experiment_survives_toml(settings: ExperimentSettings) -> None:
    assert ExperimentSettings.model_validate(tomllib.loads(to_toml(settings))) == settings


@given(pretrainings)
@hypothesis_settings(deadline=None)
def test_a_pretraining_survives_toml(settings: PretrainSettings) -> None:
    assert PretrainSettings.model_validate(tomllib.loads(to_toml(settings))) == settings


@given(experiments | pretrainings)
@hypothesis_settings(deadline=None)
def test_an_identity_says_all_that_is_asked_for(settings: Settings) -> None:
    identity = json.loads(json.dumps(settings.identity()))
    assert type(settings).model_validate(identity) == settings


def test_an_identity_is_what_it_was_before_later_settings() -> None:
    corpus = CorpusSettings(path="a.jsonl", split="test")
    assert corpus.identity() == corpus.model_dump(mode="json", exclude={"id_prefix"})
    changed = corpus.model_copy(update={"id_prefix": "old/"})
    assert changed.identity() == changed.model_dump(mode="json")
    # In tables and lists of tables too.
    experiment = ExperimentSettings(data=corpus)
    assert experiment.identity()["data"] == corpus.identity()
    plain, related = (SourceSettings(path="a.jsonl", related=value) for value in (False, True))
    run = PretrainSettings(name="m", sources=(plain, related), schedule="cosine")
    assert run.identity()["sources"] == [plain.identity(), {**plain.identity(), "related": True}]
    assert run.identity()["schedule"] == "cosine" and "backbone" not in run.identity()


@pytest.mark.parametrize("kind", ALL)
def test_later_settings_are_settings_with_a_default(kind: type[Settings]) -> None:
    for name in kind.later:
        assert not kind.model_fields[name].is_required(), name


@pytest.mark.parametrize(
    "text",
    [
        'say "no"',
        "back\\slash",
        "two\nlines\r\n",
        "tab\t",
        "\x00\x1f\x7f\x80",
        "\u2028",
        "𐍈é",
        "'''",
    ],
)
def test_hard_texts_survive_a_file(tmp_path: Path, text: str) -> None:
    settings = ExperimentSettings(data=CorpusSettings(path=text, include=(text, "b")))
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(settings), encoding="utf-8", newline="")
    assert load_settings(ExperimentSettings, path) == settings


def test_written_settings_are_complete_and_in_order() -> None:
    text = to_toml(ExperimentSettings(data=CorpusSettings(path="a.jsonl")))
    assert text.startswith('seed = 0\n\n[model]\nname = "llama-7m"\n')
    assert '[data]\npath = "a.jsonl"' in text
    assert "steps = [0, 1, 5, 10, 20, 50]" in text
    assert "corpus" not in tomllib.loads(text)


@pytest.mark.parametrize("kind", ALL)
def test_what_may_be_none_is_none_by_default(kind: type[Settings]) -> None:
    """TOML has no null: leaving a key out must mean the same."""
    for name, field in kind.model_fields.items():
        if type(None) in typing.get_args(field.annotation):
            assert field.default is None, name


@pytest.mark.parametrize("kind", ALL)
def test_settings_cannot_change(kind: type[Settings]) -> None:
    required = {"path": "p", "name": "n", "sources": ()}
    settings = kind(**{k: v for k, v in required.items() if k in kind.model_fields})
    with pytest.raises(ValidationError, match="frozen"):
        setattr(settings, next(iter(kind.model_fields)), "x")
    assert hash(settings) == hash(settings.model_copy())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sed": 1}, "settings: unknown setting sed; did you mean seed?"),
        (
            {"selection": {"noisevar": 1}},
            "settings: unknown setting selection.noisevar; did you mean noise_var?",
        ),
        ({"data": {"path": "x", "txt_column": "t"}}, "data.txt_column; did you mean text_column?"),
        ({"noise_var": 1}, "unknown setting noise_var; did you mean selection.noise_var?"),
        (
            {"max_length": 1},
            "max_length; did you mean adaptation.max_length or scoring.max_length?",
        ),
        ({"model": {"qqqq": 1}}, "model.qqqq; known: name, revision, dtype, device, trust_remote"),
        ({"a\nb": 1}, "unknown setting a b; known: model, data,"),
        ({"data": {}}, "settings: data.path: Field required (found {})"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0 (found -1)"),
        ({"seed": 2**63}, "seed: Input should be less than 9223372036854775808"),
        ({"seed": True}, "seed: expected a number or text, not true or false (found True)"),
        ({"selection": {"noise_var": 0}}, "selection.noise_var: Input should be greater than 0"),
        ({"selection": {"noise_var": float("inf")}}, "noise_var: Input should be a finite number"),
        ({"selection": {"method": "siff"}}, "selection.method: Input should be 'nearest', "),
        ({"adaptation": {"beta1": 1.0}}, "adaptation.beta1: Input should be less than 1"),
        (
            {"model": {"name": "a\ud800"}},
            "model.name: expected text with a UTF-8 form, found a lone",
        ),
        ({"chunks": {"size": 9, "overlap": 9}}, "overlap (9) must be smaller than size (9)"),
        ({"evaluation": {"steps": [5, 1]}}, "steps must ascend without repeats, found (5, 1)"),
        ({"evaluation": {"steps": []}}, "steps must ascend without repeats, found ()"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_settings(ExperimentSettings, values)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"early_length": 300}, "early_length (300) must divide max_length (1024)"),
        ({"num_heads": 3}, "num_heads (3) must cut hidden_size (256) into heads of even width"),
        ({"hidden_size": 12}, "num_heads (4) must cut hidden_size (12) into heads of even width"),
        (
            {"sources": [{"path": "a"}, {"path": "b", "fractoin": 1}]},
            "unknown setting sources.1.fractoin; did you mean fraction?",
        ),
        ({"sources": [{"fraction": 2}]}, "sources.0.fraction: Input should be less than or equal"),
    ],
)
def test_pretraining_refuses_what_cannot_be_built(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_settings(PretrainSettings, {**PRETRAIN, **change})
    assert expected in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        make_settings(ExperimentSettings, {"sed": 1, "seed": "x", "index": {"nprobe": 0}})
    assert str(caught.value).count("; ") >= 2
    assert all(word in str(caught.value) for word in ("sed;", "seed: ", "index.nprobe: "))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed = ", "not valid TOML: Invalid value (at end of document)"),
        (b"seed = 1\nseed = 2", "not valid TOML: Cannot overwrite a value (at "),
        (b"x = '\xff'", "not valid TOML: 'utf-8' codec can't decode byte 0xff"),
        (b"x = " + b"[" * 5000, "not valid TOML: nested too deeply"),
        (b"seed = " + b"9" * 5000, "not valid TOML: Exceeds the limit"),
        (b"sed = 1", "unknown setting sed; did you mean seed?"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_settings(ExperimentSettings, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {expected}")
    assert "\n" not in message


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: no such settings file"):
        load_settings(ExperimentSettings, tmp_path / "absent.toml")
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load_settings(ExperimentSettings, tmp_path)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 7\r\n")
    assert load_settings(ExperimentSettings, path).seed == 7


def test_overrides_replace_and_leave_the_rest() -> None:
    before = ExperimentSettings()
    after = override(before, {"selection.noise_var": 0.5, "seed": 3, "data.path": "a.jsonl"})
    assert (after.selection.noise_var, after.seed) == (0.5, 3)
    assert after.data == CorpusSettings(path="a.jsonl")
    assert after.selection.method == before.selection.method
    assert before == ExperimentSettings()
    assert override(after, {}) == after


def test_overrides_apply_in_order_and_keep_the_callers_values() -> None:
    table = {"method": "nearest", "noise_var": 2.0}
    after = override(ExperimentSettings(), {"selection": table, "selection.noise_var": 3.0})
    assert (after.selection.method, after.selection.noise_var) == ("nearest", 3.0)
    assert table == {"method": "nearest", "noise_var": 2.0}
    assert (
        override(after, {"selection.noise_var": 3.0, "selection": table}).selection.noise_var == 2
    )


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (
            {"selection.noise": 1},
            "overrides: unknown setting selection.noise; did you mean noise_v",
        ),
        ({"seed.x": 1}, "overrides: seed.x: seed holds a value, not a table of settings"),
        ({"evaluation.steps.0": 1}, "evaluation.steps.0: steps holds a value, not a table"),
        ({"attic.x": 1}, "overrides: unknown setting attic; known: model, data"),
        ({"": 1}, "overrides: unknown setting ; known: model, data"),
        ({"data.split": "test"}, "overrides: data.path: Field required"),
        ({"model": None}, "overrides: model: Input should be a valid dictionary"),
    ],
)
def test_an_override_that_fits_nowhere(assignments: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        override(ExperimentSettings(), assignments)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_chunks_that_overlap_less_than_their_size_are_welcome() -> None:
    assert ChunkSettings(size=2, overlap=1).overlap == 1


def test_recipes_are_found_by_name() -> None:
    names = config_names()
    assert names == sorted(names)
    assert {"pile_gpt2_sift_full", "pile_gpt2_nn", "pile_phi3_sift_lora"} <= set(names)
    assert all(config_path(name).is_file() for name in names)


def test_a_recipe_of_another_name() -> None:
    with pytest.raises(SettingsError, match="'pile_gpt2_n'; did you mean pile_gpt2_nn?"):
        config_path("pile_gpt2_n")
    with pytest.raises(SettingsError, match=r"'\.\./secret'; known: .*pile_gpt2_nn"):
        config_path("../secret")


@pytest.mark.parametrize(
    ("name", "rate", "method", "order"),
    [
        ("pile_gpt2_sift_full", 5e-5, "sift", "as-selected"),
        ("pile_gpt2_large_sift_full", 5e-5, "sift", "as-selected"),
        ("pile_gpt2_nn", 2e-5, "nearest", "nearest-first"),
        ("pile_neo_nn", 5e-6, "nearest", "nearest-first"),
    ],
)
def test_recipes_hold_the_published_settings(
    name: str, rate: float, method: str, order: str
) -> None:
    recipe = load_settings(ExperimentSettings, config_path(name))
    assert (recipe.adaptation.learning_rate, recipe.adaptation.epsilon) == (rate, 1e-8)
    assert (recipe.selection.method, recipe.adaptation.order) == (method, order)
    assert recipe.selection.num_select == recipe.evaluation.steps[-1] == 50
    assert recipe.retrieval.max_overlap == 1.0
