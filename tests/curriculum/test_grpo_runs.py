"""Whole runs with TRL's own trainer on a tiny model: settings, refusals, tasks chosen anew."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum import GRPOSettings, Task, Verifier, read_tasks, train_curriculum
from ttt_adapt.curriculum.training import StepRecord, TrainingProgress, read_history
from ttt_adapt.errors import FingerprintMismatchError, ModelError, SettingsError, TaskError
from ttt_adapt.models import load_language_model
from ttt_adapt.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SETTINGS_OF_TESTS: dict[str, Any] = {
    "num_steps": 2, "prompts_per_step": 3, "num_generations": 4, "learning_rate": 1e-2,
    "max_completion_tokens": 5, "max_prompt_tokens": 40, "device": "cpu",
}  # fmt: skip
TOKENIZER = tiny_tokenizer()
Reward = Callable[[Task, str], float | None]


def settings(**values: Any) -> GRPOSettings:
    return GRPOSettings(**{**SETTINGS_OF_TESTS, **values})


def tasks(num: int = 6) -> list[Task]:
    return [Task(id=f"t{n}", kind="own", prompt="say " + "ab" * n) for n in range(num)]


def save(folder: Path, model: Any = None) -> Path:
    (model or tiny_model(2)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_language_model(
        ModelSettings(name=str(folder), device="cpu")
    ).model.state_dict()
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def train(out: Path, reward: Reward, model: Path, some: list[Task] | None = None, **values: Any) -> Any:  # fmt: skip
    extra = {key: values.pop(key) for key in ("progress", "reselect") if key in values}
    with Verifier(callables={"own": reward}) as verifier:
        return train_curriculum(
            model, tasks() if some is None else some, settings(**values), out, verifier=verifier,
            **extra,
        )  # fmt: skip


def letters(task: Task, completion: str) -> float:
    """Share of the completion that is lower-case letters, so that groups differ."""
    return sum("a" <= letter <= "z" for letter in completion) / 5


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_lora_learns_and_is_merged(architecture: str, tmp_path: Path) -> None:
    model = save(tmp_path / "m", tiny_model(2, architecture=architecture))
    result = train(tmp_path / "run", letters, model, method="lora", lora_rank=4, kl_weight=0.05,
                   save_dtype="bfloat16")  # fmt: skip
    assert (result.folder / "adapter" / "adapter_model.safetensors").is_file()
    assert weights(result.model).keys() == weights(model).keys()
    assert not same(weights(result.model), weights(model))
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
    result = train(tmp_path / "run", letters, save(tmp_path / "m"), **values)
    assert result.num_steps == 2
    assert all(math.isfinite(record.loss) for record in read_history(result.folder))


def test_tasks_are_chosen_anew_within_the_band(tmp_path: Path) -> None:
    some = tasks(6)

    def reward(task: Task, completion: str) -> float:
        return 1.0 if task.id == "t0" else letters(task, completion)

    train(tmp_path / "band", reward, save(tmp_path / "m"), some, num_steps=4, reselect_every=2,
          band=(0.0, 0.9), order="given")  # fmt: skip
    chosen = list(read_tasks(tmp_path / "band" / "curricula" / "step-00000002.jsonl"))
    assert [task.id for task in chosen] == ["t1", "t2", "t3", "t4", "t5"]
    asked = []

    def reselect(pass_rates: Any, *, step: int, band: tuple[float, float]) -> list[Task]:
        asked.append((sorted(pass_rates), step, band))
        return some[3:]

    train(tmp_path / "hook", reward, tmp_path / "m", some[:3], num_steps=4, reselect_every=2,
          reselect=reselect)  # fmt: skip
    assert asked == [(["t0", "t1", "t2"], 2, (0.25, 0.6))]
    with pytest.raises(SettingsError, match="reselect_every says never"):
        train(tmp_path / "x", reward, tmp_path / "m", reselect=reselect)


def test_long_prompts_are_left_out_and_named(tmp_path: Path) -> None:
    model = save(tmp_path / "m", tiny_model(2, max_length=24, architecture="gpt2"))
    some = [*tasks(3), Task(id="long", kind="own", prompt="x" * 60)]
    result = train(tmp_path / "run", letters, model, some)
    assert result.too_long == {"long": 61}
    with pytest.raises(TaskError, match="1 of 1 tasks left out: prompts of more than 19 tokens"):
        train(tmp_path / "none", letters, model, some[3:])
    with pytest.raises(ModelError, match="24 positions, which leaves no room for a prompt"):
        train(tmp_path / "none", letters, model, max_completion_tokens=24)


def test_what_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "m")
    with pytest.raises(TaskError, match="expected tasks to practise, found none"):
        train(tmp_path / "run", letters, model, [])
    held = [Task(id="b", kind="own", prompt="p", meta={"evaluation_only": True})]
    with pytest.raises(TaskError, match="1 tasks are for evaluation only"):
        train(tmp_path / "run", letters, model, held)
    with pytest.raises(SettingsError, match="lora_targets: lm_head"):
        train(tmp_path / "run", letters, model, method="lora", lora_targets=("lm_head",))
    with pytest.raises(SettingsError, match="lora_targets: Target modules"):
        train(tmp_path / "run", letters, model, method="lora", lora_targets=("nothing",))
    endless = tiny_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="expected a tokenizer with an end token"):
        train(tmp_path / "other", letters, model)


def test_a_folder_of_another_run(tmp_path: Path) -> None:
    model = save(tmp_path / "m")
    first = train(tmp_path / "run", letters, model, num_steps=1)
    # Longer is the same run; a finished one is not done again.
    again = train(tmp_path / "run", letters, model, num_steps=1)
    assert again == first
    assert train(tmp_path / "run", letters, model, num_steps=2).num_steps == 2
    for change in ({"learning_rate": 1e-3}, {"seed": 1}):
        with pytest.raises(FingerprintMismatchError, match="holds a run of another model"):
            train(tmp_path / "run", letters, model, **change)
    with pytest.raises(FingerprintMismatchError):
        train(tmp_path / "run", letters, model, tasks(5))


def test_random_states_of_the_caller_are_kept(tmp_path: Path) -> None:
    import random

    import numpy as np

    model = save(tmp_path / "m")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    train(tmp_path / "run", letters, model, num_steps=1)
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
