"""The checkpoints that come with the package: whole, small, documented, better than nothing."""

import csv
from pathlib import Path

import pytest
import torch

from ttt_adapt.adaptation import Reading
from ttt_adapt.config import ModelSettings, PretrainSettings, load_settings
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import LanguageModel, generate, load_language_model, resolve_model
from ttt_adapt.training.card import MODEL_FILES

NAMES = ("llama-7m", "ttt-linear-7m")
MOST_BYTES = 25_000_000

# Herman Melville, Moby-Dick (1851), chapter 1; in nobody's training part.
NOVEL = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my "
    "purse, and nothing particular to interest me on shore, I thought I would sail about a little and "
    "see the watery part of the world. It is a way I have of driving off the spleen and regulating the "
    "circulation."
)
NOTE = (
    "The Vrelstad ferry leaves Quonnock pier at nineteen past six. Captain Zubaran keeps the Vrelstad "
    "ferry's ledger; whoever misses it waits at Quonnock pier for the Umlangeni boat.\n"
)


@pytest.fixture(scope="module", params=NAMES)
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return load_language_model(ModelSettings(name=request.param, device="cpu"))


def score(lm: LanguageModel, text: str, model: object = None) -> float:
    with torch.no_grad():
        return bits_per_byte(
            lm.model if model is None else model, lm.tokenizer, [text], max_length=lm.max_length
        ).value


def test_files(lm: LanguageModel) -> None:
    folder = Path(resolve_model(lm.name))
    assert {path.name for path in folder.iterdir()} == set(MODEL_FILES)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
    settings = load_settings(PretrainSettings, folder / "pretrain.toml")
    assert settings.name == lm.name
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {lm.name}\n") and "Apache-2.0" in card and "nan" not in card
    with (folder / "loss.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert float(rows[-1]["validation_loss_nats"]) < 4


def test_predicts_english_and_goes_on(lm: LanguageModel) -> None:
    assert score(lm, NOVEL) < 2.3
    scrambled = " ".join(sorted(NOVEL.split()))
    assert score(lm, scrambled) > score(lm, NOVEL) + 0.3
    said = generate(
        lm, "The old man looked at the sea and", max_new_tokens=16, temperature=0.0, seed=0
    )
    assert len(said.split()) > 4


def test_reading_a_note_tells_what_it_says() -> None:
    lm = load_language_model(ModelSettings(name="ttt-linear-7m", device="cpu"))
    reading, other = Reading(lm), Reading(lm)
    reading.read([NOTE])
    other.read([NOVEL])
    text = "Whoever misses the Vrelstad ferry waits at Quonnock pier for the Umlangeni boat."
    assert score(lm, text, reading.model) < 0.9 * score(lm, text)
    assert score(lm, text, reading.model) < 0.9 * score(lm, text, other.model)
