"""Training with TRL's own trainer on a tiny model: what moves the weights, and what must not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ttt_adapt.config import ModelSettings
from ttt_adapt.curriculum import GRPOSettings, Verifier
from ttt_adapt.curriculum.training import TrainingProgress, read_history
from ttt_adapt.curriculum.training.arguments import grpo_arguments
from ttt_adapt.curriculum.training.session import RESULT, SETTINGS
from ttt_adapt.curriculum.training.trainer import CurriculumTrainer, Practice
from ttt_adapt.models import load_language_model
from ttt_adapt.settings import load_settings
from ttt_adapt.testing import (
    own_tasks,
    practise,
    same_tensors,
    save_tiny_model,
    tiny_model,
    tiny_practice,
    tiny_tokenizer,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def trainer_of(model: Any, rewards: list[float | None], tmp_path: Path, **values: Any) -> Any:
    """The trainer itself, with these rewards for the completions of its first step."""
    chosen = tiny_practice(**values)
    given = iter(rewards)
    some, tokenizer = own_tasks(chosen.prompts_per_step), tiny_tokenizer()
    ids = [tokenizer(task.prompt)["input_ids"] for task in some]
    arguments = grpo_arguments(chosen, folder=str(tmp_path), num_steps=1, num_processes=1,
                               device="cpu", num_parameters=1)  # fmt: skip
    trainer = CurriculumTrainer(
        model=model, tokenizer=tokenizer, arguments=arguments, settings=chosen,
        practice=lambda step: Practice(some, ids), first_step=0,
        verifier=Verifier(callables={"own": lambda task, completion: next(given)}),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(
    model: Any, batch: dict[str, Any], rewards: list[float | None], size: int
) -> dict[str, torch.Tensor]:
    """GRPO's first update written out: each completion alone, unpadded, its log-probabilities
    times its advantage, over all tokens of completions that count."""
    model.zero_grad()
    total, num_tokens = torch.zeros(()), 0
    for start in range(0, len(rewards), size):
        known = [r for r in rewards[start : start + size] if r is not None]
        if len(known) < 2 or max(known) == min(known):
            continue
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((r - mean) ** 2 for r in known) / (len(known) - 1))
        for row in range(start, start + size):
            reward = rewards[row]
            if reward is None:
                continue
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
            logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0]
            log_probs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
            chosen = log_probs.gather(1, answer[:, None]).sum()
            total = total - (reward - mean) / (spread + 1e-4) * chosen
            num_tokens += len(answer)
    torch.autograd.backward(total / num_tokens)
    return gradients(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_are_those_of_the_formula_without_absent_rewards(
    architecture: str, tmp_path: Path
) -> None:
    model = tiny_model(2, architecture=architecture)
    if architecture == "gpt2":
        with torch.no_grad():
            model.transformer.wpe.weight *= 10
    # A group with an absent reward; one without signal; one with a single known reward.
    rewards = [1.0, 0.0, None, 0.5, 1.0, 1.0, 1.0, 1.0, None, None, None, 0.0]
    trainer = trainer_of(model, rewards, tmp_path)
    batch = trainer._generate_and_score_completions([{}] * 12)
    assert batch["learned"].tolist() == [True, True, False, True] + [False] * 8
    assert trainer.outcome.signal_G.tolist() == [True, False, False]
    trainer._compute_loss(trainer.model, dict(batch)).backward()
    found = gradients(model)
    expected = reference_gradients(model, batch, rewards, 4)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-6, msg=name)
    # What absent completions say has no influence at all.
    model.zero_grad()
    batch["completion_ids"][2] = 7
    trainer._compute_loss(trainer.model, dict(batch)).backward()
    assert same_tensors(gradients(model), found)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_log_probabilities_agree_padded_or_not_and_with_trl(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(2, architecture=architecture)
    trainer = trainer_of(model, [0.0] * 12, tmp_path, temperature=0.7)
    batch = trainer._generate_and_score_completions([{}] * 12)
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    keep = batch["completion_ids"].shape[1]

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, mask, keep, compute_entropy=True
        )
        return log_probs.detach(), entropies.detach()

    dense = both()
    monkeypatch.setattr("ttt_adapt.curriculum.training.trainer.DENSE_LOGITS", 0)
    fused = both()
    for ours, theirs in zip(dense, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for row in range(len(tokens)):
        alone = tokens[row][mask[row].bool()]
        num = int(batch["completion_mask"][row].sum())
        logits = model(input_ids=alone[None]).logits[0, -num - 1 : -1] / 0.7
        expected = torch.log_softmax(logits, dim=-1).gather(1, alone[-num:, None])[:, 0]
        torch.testing.assert_close(dense[0][row, :num], expected, rtol=1e-4, atol=1e-5)


def test_without_our_positions_trl_is_wrong_for_gpt2(tmp_path: Path) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    model = tiny_model(2, architecture="gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight *= 20
    trainer = trainer_of(model, [0.0] * 12, tmp_path)
    batch = trainer._generate_and_score_completions([{}] * 12)
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    arguments = (trainer.model, tokens, mask, batch["completion_ids"].shape[1])
    ours, _, _ = trainer._get_per_token_logps_and_entropies(*arguments)
    theirs, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments)
    padded = batch["prompt_mask"][:, 0] == 0
    # A thousand times what rounding does.
    assert float((ours - theirs)[padded].detach().abs().max()) > 0.01
    torch.testing.assert_close(ours[~padded], theirs[~padded], rtol=1e-4, atol=1e-5)


def test_practice_raises_the_reward_and_everything_is_written(tmp_path: Path) -> None:
    model, seen = save_tiny_model(tmp_path / "m"), list[TrainingProgress]()
    result = practise(
        model,
        tmp_path / "run",
        num_steps=12,
        prompts_per_update=1,
        num_generations=8,
        max_completion_tokens=5,
        progress=seen.append,
    )
    history = read_history(result.folder)
    assert [record.step for record in history] == list(range(1, 13))
    assert history == [progress.record for progress in seen]
    rewards = [record.reward or 0.0 for record in history]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert history[-1].num_rollouts == result.num_rollouts == 12 * 24
    assert result.num_tokens == history[-1].num_tokens > result.num_rollouts
    assert "step 12/12  reward" in seen[-1].line()
    assert seen[-1].left_s == 0.0 < seen[0].left_s
    assert load_settings(GRPOSettings, result.folder / SETTINGS) == tiny_practice(
        num_steps=12, prompts_per_update=1, num_generations=8
    )
    assert (result.folder / RESULT).is_file()
    lm = load_language_model(ModelSettings(name=str(result.model), device="cpu"))
    assert lm.tokenizer.eos_token_id == tiny_tokenizer().eos_token_id
    assert not same_tensors(weights_of(result.model), weights_of(model))


@pytest.mark.parametrize("reward", [None, 1.0], ids=["absent", "equal"])
def test_nothing_to_learn_leaves_every_weight(reward: float | None, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m")
    result = practise(
        model,
        tmp_path / "run",
        reward=lambda task, completion: reward,
        prompts_per_update=1,
        weight_decay=0.1,
    )
    assert same_tensors(weights_of(result.model), weights_of(model))
    history = read_history(result.folder)
    for record in history:
        assert record.skipped_updates == 3
        assert record.zero_signal_groups == record.num_groups == 3
        assert record.absent_rewards == (12 if reward is None else 0)
        assert record.reward == record.pass_rate == reward
    assert result.num_absent == (24 if reward is None else 0)
    assert result.num_zero_signal == 6


def test_groups_without_signal_may_be_kept_as_trl_does(tmp_path: Path) -> None:
    rewards: list[float | None] = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, None, 0.0, 0.0, 0.0]
    kept = trainer_of(tiny_model(2), rewards, tmp_path, zero_signal="keep")
    batch = kept._generate_and_score_completions([{}] * 12)
    assert batch["learned"].tolist() == [True] * 8 + [False] + [True] * 3
    skipping = trainer_of(tiny_model(2), rewards, tmp_path)
    fewer = skipping._generate_and_score_completions([{}] * 12)
    assert fewer["learned"].tolist() == [True] * 4 + [False] * 8
    for one, other in ((kept, batch), (skipping, fewer)):
        one._compute_loss(one.model, dict(other)).backward()
    # The same direction; what differs is the number of tokens that it is averaged over.
    ratio = int(fewer["num_items_in_batch"]) / int(batch["num_items_in_batch"])
    for name, value in gradients(skipping.model).items():
        torch.testing.assert_close(gradients(kept.model)[name], value * ratio, rtol=1e-3, atol=1e-6)
