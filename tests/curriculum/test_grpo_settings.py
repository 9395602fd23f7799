"""Settings of training: recipes, what doesn't fit together, TRL's arguments, which tasks when."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttt_adapt.configs import config_names, config_path
from ttt_adapt.curriculum import GRPOSettings, Task
from ttt_adapt.curriculum.training import within_band
from ttt_adapt.curriculum.training.arguments import grpo_arguments
from ttt_adapt.curriculum.training.schedule import Schedule, steps_of_epochs
from ttt_adapt.errors import MissingDependencyError, SettingsError
from ttt_adapt.settings import load_settings, make_settings, to_toml

RECIPES = [name for name in config_names() if name.startswith("ttc_rl_")]
PUBLISHED = {
    "prompts_per_step": 8,
    "num_generations": 16,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "kl_weight": 0.0,
    "temperature": 1.0,
    "epochs": 2,
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_load_and_come_back_from_toml(name: str, tmp_path: Path) -> None:
    recipe = load_settings(GRPOSettings, config_path(name))
    again = tmp_path / "again.toml"
    again.write_text(to_toml(recipe), encoding="utf-8")
    assert load_settings(GRPOSettings, again) == recipe
    if "qwen" in name:
        assert {key: getattr(recipe, key) for key in PUBLISHED} == PUBLISHED


def test_the_published_recipe() -> None:
    recipe = load_settings(GRPOSettings, config_path("ttc_rl_qwen3_4b_instruct"))
    assert recipe.learning_rate == 1e-6
    assert (recipe.max_prompt_tokens, recipe.max_completion_tokens) == (2048, 8192)
    # A mini-batch of one prompt: eight optimizer updates a step.
    assert recipe.updates_per_step == 8
    assert steps_of_epochs(1000, recipe.epochs, recipe.prompts_per_step) == 250


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts_per_update": 3}, r"prompts_per_update \(3\) must divide prompts_per_step \(8\)"),
        ({"micro_batch_size": 3}, r"micro_batch_size \(3\) must divide the 128 completions"),
        ({"dtype": "bfloat16"}, "method 'full' learns in dtype 'float32' only"),
        ({"generation": "vllm", "vllm_mode": "server"}, "needs vllm_server_url"),
        ({"band": (0.6, 0.2)}, "band must be low and high"),
        ({"num_generations": 1}, "num_generations"),
        ({"learning_rat": 1.0}, "did you mean learning_rate"),
    ],
)
def test_what_does_not_fit_together(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_settings(GRPOSettings, values)


def test_arguments_a_cpu_can_bear(tmp_path: Path) -> None:
    settings = GRPOSettings(prompts_per_step=4, prompts_per_update=2, num_iterations=2)
    found = grpo_arguments(settings, folder=str(tmp_path), num_steps=5, num_processes=1,
                           device="cpu", num_parameters=1_000_000)  # fmt: skip
    assert found.use_cpu
    assert not found.bf16
    assert not found.fp16
    assert not found.gradient_checkpointing
    assert found.report_to == []
    assert not found.dataloader_pin_memory
    assert (found.epsilon, found.epsilon_high, found.beta) == (0.2, 0.28, 0.0)
    # 4 tasks x 16 completions a step, in updates of half of them, twice over.
    assert found.generation_batch_size == 64
    assert found.per_device_train_batch_size * found.gradient_accumulation_steps == 32
    assert settings.updates_per_step == 4
    assert found.max_steps == 20
    assert list(tmp_path.iterdir()) == []


def test_arguments_of_a_large_model_and_of_bfloat16(tmp_path: Path) -> None:
    settings = GRPOSettings(precision="bfloat16", micro_batch_size=4)
    found = grpo_arguments(settings, folder=str(tmp_path), num_steps=1, num_processes=1,
                           device="cpu", num_parameters=10**9)  # fmt: skip
    assert found.bf16
    assert found.gradient_checkpointing
    assert found.gradient_accumulation_steps == 32


def test_completions_that_processes_cannot_share(tmp_path: Path) -> None:
    settings = GRPOSettings(prompts_per_step=3, num_generations=2)
    with pytest.raises(SettingsError, match="4 processes must share the 6 completions"):
        grpo_arguments(settings, folder=str(tmp_path), num_steps=1, num_processes=4, device="cpu",
                       num_parameters=1)  # fmt: skip
    with pytest.raises(SettingsError, match=r"micro_batch_size \(2\) must divide the 3"):
        grpo_arguments(settings.model_copy(update={"micro_batch_size": 2}), folder=str(tmp_path),
                       num_steps=1, num_processes=2, device="cpu", num_parameters=1)  # fmt: skip


def test_vllm_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="needs the package vllm"):
        grpo_arguments(GRPOSettings(generation="vllm"), folder=str(tmp_path), num_steps=1,
                       num_processes=1, device="cpu", num_parameters=1)  # fmt: skip


@settings(deadline=None)
@given(
    num_tasks=st.integers(1, 12),
    prompts=st.integers(1, 8),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 5),
    shuffled=st.booleans(),
)
def test_every_task_has_its_turn_in_every_epoch(
    num_tasks: int, prompts: int, epochs: int, seed: int, shuffled: bool
) -> None:
    schedule = Schedule(num_tasks, prompts_per_step=prompts, since=3, seed=seed, shuffled=shuffled)
    num_steps = steps_of_epochs(num_tasks, epochs, prompts)
    stream = [p for step in range(3, 3 + num_steps) for p in schedule.positions(step)]
    for start in range(0, len(stream) - num_tasks + 1, num_tasks):
        assert sorted(stream[start : start + num_tasks]) == list(range(num_tasks))
    assert len(stream) <= max(num_tasks * epochs, prompts)
    if not shuffled:
        assert stream == [position % num_tasks for position in range(len(stream))]


def tasks(num: int) -> list[Task]:
    return [Task(id=f"t{n}", kind="exact", prompt=f"p{n}", answer="a") for n in range(num)]


def test_within_the_band() -> None:
    rates = {"t0": 0.0, "t1": 0.25, "t2": 0.5, "t3": 0.9, "t4": 1.0}
    kept = within_band(tasks(6), rates, band=(0.25, 0.6), at_least=2)
    assert [task.id for task in kept] == ["t1", "t2", "t5"]
    # Too few inside: those nearest to the middle of the band make up for it, in the order given.
    kept = within_band(tasks(5), rates, band=(0.25, 0.6), at_least=4)
    assert [task.id for task in kept] == ["t0", "t1", "t2", "t3"]
    assert len(within_band(tasks(2), {}, band=(0.0, 1.0), at_least=5)) == 2
