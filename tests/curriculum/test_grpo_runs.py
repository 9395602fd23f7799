"""Whole runs with TRL's own trainer on a tiny model: settings, refusals, tasks chosen anew."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.curriculum import Task, read_tasks
from ttt_adapt.curriculum.training import StepRecord, TrainingProgress, read_history
from ttt_adapt.errors import FingerprintMismatchError, ModelError, SettingsError, TaskError
from ttt_adapt.testing import (
    own_tasks,
    practise,
    same_tensors,
    save_tiny_model,
    share_of_letters,
    tiny_model,
    tiny_tokenizer,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_lora_learns_and_is_merged(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m", tiny_model(2, architecture=architecture))
    result = practise(
        model, tmp_path / "run", method="lora", lora_rank=4, kl_weight=0.05, save_dtype="bfloat16"
    )
    assert (result.folder / "adapter" / "adapter_model.safetensors").is_file()
    assert weights_of(result.model).keys() == weights_of(model).keys()
    assert not same_tensors(weights_of(result.model), weights_of(model))
    assert read_history(result.folder)[-1].kl is not None


@pytest.mark.parametrize(
    "values",
    [{"generation": "transformers"}, {"micro_batch_size": 2, "num_iterations": 2},
     {"loss": "grpo", "scale_rewards": "none"}, {"precision": "bfloat16"},
     {"learn_from_truncated": False}, {"warmup_steps": 2, "order": "given"},
     {"gradient_checkpointing": "on"}],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
def test_other_settings_run(values: dict[str, Any], tmp_path: Path) -> None:
    result = practise(save_tiny_model(tmp_path / "m"), tmp_path / "run", **values)
    assert result.num_steps == 2
    assert all(math.isfinite(record.loss) for record in read_history(result.folder))


def test_tasks_are_chosen_anew_within_the_band(tmp_path: Path) -> None:
    some = own_tasks(6)

    def reward(task: Task, completion: str) -> float:
        return 1.0 if task.id == "t0" else share_of_letters(task, completion)

    practise(
        save_tiny_model(tmp_path / "m"),
        tmp_path / "band",
        some,
        reward=reward,
        num_steps=4,
        reselect_every=2,
        band=(0.0, 0.9),
        order="given",
    )
    chosen = list(read_tasks(tmp_path / "band" / "curricula" / "step-00000002.jsonl"))
    assert [task.id for task in chosen] == ["t1", "t2", "t3", "t4", "t5"]
    asked = []

    def reselect(pass_rates: Any, *, step: int, band: tuple[float, float]) -> list[Task]:
        asked.append((sorted(pass_rates), step, band))
        return some[3:]

    practise(
        tmp_path / "m",
        tmp_path / "hook",
        some[:3],
        reward=reward,
        num_steps=4,
        reselect_every=2,
        reselect=reselect,
    )
    assert asked == [(["t0", "t1", "t2"], 2, (0.25, 0.6))]
    with pytest.raises(SettingsError, match="reselect_every says never"):
        practise(tmp_path / "m", tmp_path / "x", reward=reward, reselect=reselect)


def test_long_prompts_are_left_out_and_named(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m", tiny_model(2, max_length=24, architecture="gpt2"))
    some = [*own_tasks(3), Task(id="long", kind="own", prompt="x" * 60)]
    result = practise(model, tmp_path / "run", some)
    assert result.too_long == {"long": 61}
    with pytest.raises(TaskError, match="1 of 1 tasks left out: prompts of more than 19 tokens"):
        practise(model, tmp_path / "none", some[3:])
    with pytest.raises(ModelError, match="24 positions, which leaves no room for a prompt"):
        practise(model, tmp_path / "none", max_completion_tokens=24)


def test_what_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m")
    with pytest.raises(TaskError, match="expected tasks to practise, found none"):
        practise(model, tmp_path / "run", [])
    held = [Task(id="b", kind="own", prompt="p", meta={"evaluation_only": True})]
    with pytest.raises(TaskError, match="1 tasks are for evaluation only"):
        practise(model, tmp_path / "run", held)
    with pytest.raises(SettingsError, match="lora_targets: lm_head"):
        practise(model, tmp_path / "run", method="lora", lora_targets=("lm_head",))
    with pytest.raises(SettingsError, match="lora_targets: Target modules"):
        practise(model, tmp_path / "run", method="lora", lora_targets=("nothing",))
    endless = tiny_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="expected a tokenizer with an end token"):
        practise(model, tmp_path / "other")


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m")
    first = practise(model, tmp_path / "run", num_steps=1)
    # Longer is the same run; a finished one is not done again.
    again = practise(model, tmp_path / "run", num_steps=1)
    assert again == first
    assert practise(model, tmp_path / "run", num_steps=2).num_steps == 2
    for change in ({"learning_rate": 1e-3}, {"seed": 1}):
        with pytest.raises(FingerprintMismatchError, match="holds a run of another model"):
            practise(model, tmp_path / "run", **change)
    with pytest.raises(FingerprintMismatchError):
        practise(model, tmp_path / "run", own_tasks(5))


def test_random_states_of_the_caller_are_kept(tmp_path: Path) -> None:
    import random

    import numpy as np

    model = save_tiny_model(tmp_path / "m")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    practise(model, tmp_path / "run", num_steps=1)
    found = (random.random(), float(np.random.rand()), float(torch.rand(())))
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert found == (random.random(), float(np.random.rand()), float(torch.rand(())))


def test_a_record_says_what_is_absent() -> None:
    record = StepRecord(
        3, None, None, 2, 2, 8, 1, 8, 64, 4.0, 1.0, 0.0, None, None, None, None, 1.0
    )
    line = TrainingProgress(record, 4, 61.0).line()
    assert line == "step 3/4  no reward known  without signal 2/2  absent 8  1:01 left"
