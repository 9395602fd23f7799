"""The demonstration: families by hand, tasks that never meet, the model of characters."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum import Verifier
from ttt_adapt.curriculum.demonstration import (
    FAMILIES,
    HELD_BACK,
    HabitSettings,
    character_model,
    character_tokenizer,
    draw_tasks,
    habit,
    pretrain,
    scenario,
    string_task,
)
from ttt_adapt.curriculum.demonstration.characters import save_character_model
from ttt_adapt.curriculum.padding import check_padding_invariance
from ttt_adapt.errors import SettingsError, TaskError
from ttt_adapt.models.loading import load_language_model

BY_HAND = {
    "rotl": "8214", "rotr": "1482", "swap": "8412", "sort": "1248", "desc": "8421", "flip": "1284",
    "ends": "1824", "half": "2148", "incr": "5932", "comp": "5178", "core": "4281", "decr": "3710",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_do_what_they_say(family: str) -> None:
    task = string_task(family, "4821")
    assert (task.prompt, task.answer) == (f"{family} 4821=", BY_HAND[family])
    with Verifier() as verifier:
        assert verifier.verify(task, BY_HAND[family]).reward == 1.0
        assert verifier.verify(task, "4821").reward == 0.0
        assert verifier.verify(task, "").reward == 0.0


def test_every_family_is_told_from_every_other() -> None:
    for one in FAMILIES:
        for other in FAMILIES:
            same = [d for d in ("4821", "1973", "3059") if FAMILIES[one](d) == FAMILIES[other](d)]
            assert one == other or len(same) < 3


def test_a_habit_is_another_family() -> None:
    assert all(habit(family) != family for family in FAMILIES)
    assert sorted(map(habit, FAMILIES)) == sorted(FAMILIES)


@pytest.mark.parametrize("name", ["single", "mixed"])
def test_what_is_evaluated_is_nowhere_else(name: str) -> None:
    found = scenario(name, num_corpus=3000)
    parts = (found.corpus, found.targets, found.evaluation, found.others)
    ids = [task.id for part in parts for task in part]
    assert len(ids) == len(set(ids))
    assert not {task.source for task in found.corpus} & set(HELD_BACK)
    assert {task.source for task in found.others} >= set(HELD_BACK)
    assert {task.source for task in found.evaluation} == {task.source for task in found.targets}
    assert not {task.source for task in found.others} & {task.source for task in found.targets}
    shares = Counter(task.source for task in found.corpus)
    assert abs(shares["rotl"] / len(found.corpus) - 0.08) < 0.01
    assert found == scenario(name, num_corpus=3000)


def test_every_process_draws_the_same_tasks() -> None:
    """Whatever seed Python hashes strings with: sets of names must not decide."""
    script = (
        "from ttt_adapt.curriculum.comparing.inputs import tasks_hash\n"
        "from ttt_adapt.curriculum.demonstration import scenario\n"
        "print(tasks_hash(scenario('mixed', num_corpus=200).corpus))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(hashes) == 1


def test_mixed_targets_are_48_to_12_to_4() -> None:
    found = scenario("mixed", num_corpus=100)
    assert Counter(task.source for task in found.targets) == {"rotl": 48, "sort": 12, "swap": 4}
    assert set(Counter(task.source for task in found.evaluation).values()) == {32}


def test_mistakes_are_named() -> None:
    with pytest.raises(SettingsError, match="single or mixed, found 'both'"):
        scenario("both")
    with pytest.raises(TaskError, match="expected a family of rotl"):
        string_task("turn", "1234")
    with pytest.raises(TaskError, match="expected 4 digits, found '12a4'"):
        string_task("rotl", "12a4")
    with pytest.raises(TaskError, match="at most 10000 tasks"):
        draw_tasks({"rotl": 10001}, 0)


def test_a_token_is_a_character() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer("rotl 4821=")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids) == "rotl 4821="
    assert tokenizer.bos_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer("ß")["input_ids"] == [tokenizer.unk_token_id]


def test_the_model_is_small_and_indifferent_to_padding(tmp_path: Path) -> None:
    model = character_model(0)
    assert 140_000 < sum(parameter.numel() for parameter in model.parameters()) < 170_000
    save_character_model(model, tmp_path / "model")
    loaded = load_language_model(ModelSettings(name=str(tmp_path / "model"), device="cpu"))
    check_padding_invariance(loaded.model, loaded.tokenizer)
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < 2**20


def test_pretraining_is_repeatable_and_done_once(tmp_path: Path) -> None:
    settings = HabitSettings(num_steps=3, batch_size=16)
    steps: list[int] = []
    folders = [
        pretrain(tmp_path / name, settings, progress=lambda done, total: steps.append(done))
        for name in ("one", "two", "one")
    ]
    assert steps == [1, 2, 3, 1, 2, 3]
    one, two = ((folder / "model.safetensors").read_bytes() for folder in folders[:2])
    assert one == two
    pretrain(tmp_path / "one", settings, without=[string_task("rotl", "1234")])
    assert (tmp_path / "one" / "pretraining.json").read_text() != (
        tmp_path / "two" / "pretraining.json"
    ).read_text()


def test_pretraining_learns(tmp_path: Path) -> None:
    import json

    torch.manual_seed(0)
    folder = pretrain(tmp_path, HabitSettings(num_steps=25, batch_size=64))
    losses = json.loads((folder / "pretraining.json").read_text())["losses"]
    assert losses[-1] < 0.7 * losses[0]
