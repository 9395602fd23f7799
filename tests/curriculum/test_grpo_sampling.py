"""Attempts: drawn right, one by one, whatever stands beside them; kept; ready for the estimates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ttt_adapt.curriculum import SamplingSettings, SolvedTask, Task, Verifier, sample_attempts
from ttt_adapt.curriculum.decoding import draw_tokens, sample_token_ids, uniform_numbers
from ttt_adapt.curriculum.padding import check_padding_invariance, padding_error
from ttt_adapt.curriculum.prompts import prompt_token_ids
from ttt_adapt.curriculum.sampling import ATTEMPTS_NAME, Completion
from ttt_adapt.curriculum.sampling_settings import PromptSettings
from ttt_adapt.errors import ModelError, TaskError
from ttt_adapt.evaluation import solve_rates
from ttt_adapt.models import wrap_language_model
from ttt_adapt.models.generation import generate
from ttt_adapt.testing import tiny_model, tiny_tokenizer

ARCHITECTURES = ["llama", "gpt2", "ttt_linear"]
PROMPTS = ["a", "a longer prompt", "mid one"]


def tasks(num: int = 3) -> list[Task]:
    return [
        Task(id=f"t{n}", kind="exact", prompt=PROMPTS[n % 3] * (1 + n // 3), answer="x")
        for n in range(num)
    ]


def settings(**values: Any) -> SamplingSettings:
    return SamplingSettings(**{"num_samples": 3, "max_new_tokens": 6, "batch_size": 32, **values})


@pytest.fixture(scope="module")
def plain() -> Any:
    with Verifier() as verifier:
        yield verifier


def attempt(model: Any, some: list[Task], verifier: Verifier, **values: Any) -> list[SolvedTask]:
    kept = {key: values.pop(key) for key in ("ledger", "progress") if key in values}
    return sample_attempts(model, tiny_tokenizer(), some, settings(**values), verifier, **kept)


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9, 0.3]), st.sampled_from([0.5, 1.0, 2.0]))
def test_tokens_are_drawn_by_inverting_the_distribution(
    seed: int, top_p: float, temperature: float
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(4, 7)).astype(np.float32) * 3
    uniforms = generator.random(4)
    found = draw_tokens(torch.tensor(logits), torch.tensor(uniforms), temperature=temperature,
                        top_p=top_p)  # fmt: skip
    for row in range(4):
        scaled = (logits[row] / np.float32(temperature)).astype(np.float64)
        shares = np.exp(scaled - scaled.max())
        shares /= shares.sum()
        order = np.argsort(-shares, kind="stable") if top_p < 1 else np.arange(7)
        kept, total = [], 0.0
        for token in order:
            if top_p < 1 and total >= top_p:
                break
            kept.append(token)
            total += shares[token]
        target, reached = uniforms[row] * total, 0.0
        for token in kept:
            reached += shares[token]
            if reached > target:
                break
        assert int(found[row]) == token


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    uniforms = uniform_numbers(0, "f", 1, 20_000)[0]
    drawn = draw_tokens(logits.expand(20_000, 4), uniforms, temperature=1.0)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    # Five standard errors.
    expected = torch.softmax(logits[0], dim=-1)
    assert bool(((shares - expected).abs() <= 5 * (expected / 20_000).sqrt()).all())


def test_more_samples_begin_with_the_same_ones() -> None:
    few, many = uniform_numbers(1, "t", 2, 5), uniform_numbers(1, "t", 4, 5)
    assert torch.equal(few, many[:2])
    assert not torch.equal(many[0], many[1])
    assert not torch.equal(few, uniform_numbers(2, "t", 2, 5))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_completions_are_those_of_one_prompt_alone(architecture: str, plain: Any) -> None:
    model = tiny_model(7, architecture=architecture)
    lm = wrap_language_model(model, tiny_tokenizer(), name="tiny")
    found = attempt(model, tasks(), plain, num_samples=2, temperature=0.0)
    for task, solved in zip(tasks(), found, strict=True):
        alone = generate(lm, task.prompt, max_new_tokens=6, temperature=0.0, seed=0)
        assert [completion.text for completion in solved.completions] == [alone, alone]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_task_is_attempted_alike_in_any_company(architecture: str, plain: Any) -> None:
    model = tiny_model(1, architecture=architecture)
    together = attempt(model, tasks(5), plain, batch_size=32)
    assert together == attempt(model, tasks(5), plain, batch_size=32)
    reverse = attempt(model, tasks(5)[::-1], plain, batch_size=1)
    assert reverse[::-1] == together
    assert attempt(model, tasks(5), plain, seed=1) != together
    more = attempt(model, tasks(5), plain, num_samples=5)
    assert [item.completions[:3] for item in more] == [item.completions for item in together]


def test_completions_end_with_an_end_token(plain: Any) -> None:
    model = tiny_model(1)
    # The end token (0) is made likely enough to come at different places.
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 20
    drawn = attempt(model, tasks(6), plain, num_samples=4, temperature=2.0, max_new_tokens=12)
    ended = [c for solved in drawn for c in solved.completions if c.ended]
    cut = [c for solved in drawn for c in solved.completions if not c.ended]
    assert all(completion.num_tokens == 12 for completion in cut)
    assert len({completion.num_tokens for completion in ended}) > 1
    assert all("endoftext" not in completion.text for completion in ended)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing(architecture: str) -> None:
    model, tokenizer = tiny_model(3, architecture=architecture), tiny_tokenizer()
    check_padding_invariance(model, tokenizer)
    assert padding_error(model, tokenizer) < 1e-4


def test_absolute_positions_are_wrong_unless_they_are_given() -> None:
    model = tiny_model(3, architecture="gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight *= 20
    assert padding_error(model, tiny_tokenizer(), give_positions=False) > 0.1
    assert padding_error(model, tiny_tokenizer()) < 1e-4


def deaf_to_positions() -> Any:
    """GPT-2 as a class that does not take position ids."""
    model = tiny_model(3, architecture="gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight *= 20

    class Deaf(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None,
            use_cache: Any = None,
        ) -> Any:  # fmt: skip
            return super().forward(input_ids=input_ids, attention_mask=attention_mask,
                                   past_key_values=past_key_values, use_cache=use_cache)  # fmt: skip

    model.__class__ = Deaf
    return model


def test_a_model_that_padding_misleads_is_refused(plain: Any) -> None:
    model = deaf_to_positions()
    with pytest.raises(ModelError, match="padding at the left changes log-probabilities"):
        check_padding_invariance(model, tiny_tokenizer())
    # Sampling never pads for such a model: prompts of one length at a time.
    found = attempt(model, tasks(), plain, num_samples=1, temperature=0.0)
    right = tiny_model(3, architecture="gpt2")
    with torch.no_grad():
        right.transformer.wpe.weight *= 20
    assert found == attempt(right, tasks(), plain, num_samples=1, temperature=0.0)


def test_attempts_are_kept_and_not_drawn_again(tmp_path: Path, plain: Any) -> None:
    model, counts = tiny_model(1), []
    ledger = tmp_path / "kept"
    fresh = attempt(model, tasks(4), plain, batch_size=6)
    some = attempt(model, tasks(2), plain, batch_size=6, ledger=ledger)
    assert some == fresh[:2]
    # A kill in the middle of a line: that task is drawn again, the next line stands by itself.
    path = ledger / ATTEMPTS_NAME
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    path.write_text(lines[0] + "\n" + lines[1][:40], encoding="utf-8")
    again = attempt(model, tasks(4), plain, batch_size=6, ledger=ledger,
                    progress=lambda done, total: counts.append((done, total)))  # fmt: skip
    assert again == fresh
    assert counts[0] == (1, 4)
    assert counts[-1] == (4, 4)
    counts.clear()
    again = attempt(model, tasks(4), plain, num_samples=2, ledger=ledger,
                    progress=lambda done, total: counts.append((done, total)))  # fmt: skip
    assert counts == [(4, 4)]
    assert [len(item.completions) for item in again] == [2] * 4


def test_other_settings_and_models_are_other_attempts(tmp_path: Path, plain: Any) -> None:
    def num_kept() -> int:
        return len((tmp_path / ATTEMPTS_NAME).read_text(encoding="utf-8").splitlines())

    first = attempt(tiny_model(1), tasks(2), plain, ledger=tmp_path)
    hotter = attempt(tiny_model(1), tasks(2), plain, ledger=tmp_path, temperature=1.0)
    assert hotter != first
    assert num_kept() == 4
    assert attempt(tiny_model(2), tasks(2), plain, ledger=tmp_path) != first
    assert num_kept() == 6
    assert all("key" in json.loads(line) for line in
               (tmp_path / ATTEMPTS_NAME).read_text(encoding="utf-8").splitlines())  # fmt: skip


def test_prompts_that_are_too_long(plain: Any) -> None:
    some = [*tasks(2), Task(id="long", kind="exact", prompt="y" * 200, answer="x")]
    found = attempt(tiny_model(1), some, plain)
    assert [len(item.completions) for item in found] == [3, 3, 0]
    assert found[2].prompt_tokens == 201
    rates = solve_rates([item.attempts() for item in found], ks=(1,), num_resamples=10)
    assert rates.pass_at[1].num_tasks == 2
    with pytest.raises(TaskError, match="expected prompts of at most 122 tokens, found none"):
        attempt(tiny_model(1), some[2:], plain)
    with pytest.raises(ModelError, match="128 positions, which leaves no room"):
        attempt(tiny_model(1), tasks(), plain, max_new_tokens=128)


def test_rewards_answers_and_votes() -> None:
    def odd(task: Task, completion: str) -> float | None:
        return None if task.id == "t1" else 1.0

    model = tiny_model(1)
    with Verifier(callables={"odd": odd}) as verifier:
        some = [Task(id=f"t{n}", kind="odd", prompt="p" * (n + 1)) for n in range(2)]
        found = attempt(model, some, verifier)
    assert [c.reward for item in found for c in item.completions] == [1.0] * 3 + [None] * 3
    kept = found[0].attempts(seed=4, subset="family")
    assert (kept.task_id, kept.seed, kept.subset) == ("t0", 4, "family")
    assert kept.rewards == (1.0, 1.0, 1.0)
    assert len(kept.answers) == 3
    assert found[1].attempts().known == ()
    program = SolvedTask("p", (Completion("def f(): ...", 0.0, "wrong", None, 3, True),), 2, False)
    assert program.attempts().answers == ()


def test_right_answers_vote_together(plain: Any) -> None:
    from ttt_adapt.curriculum.sampling import _answer

    task = Task(id="t", kind="math", prompt="half?", answer="1/2")
    texts = ["so \\boxed{\\frac{1}{2}}", "the answer is 0.5", "the answer is 0.25", ""]
    votes = [_answer(task, text, plain.verify(task, text), plain) for text in texts]
    assert votes[0] == votes[1] == "1/2"
    assert votes[2] == "0.25"
    assert votes[3] is None


def test_what_a_model_reads() -> None:
    tokenizer = tiny_tokenizer()
    plainly = prompt_token_ids(tokenizer, "hi", PromptSettings())
    assert plainly[0] == tokenizer.bos_token_id
    assert tokenizer.decode(plainly[1:]) == "hi"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}[quick]{% endif %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = PromptSettings(system_prompt="be brief", thinking="off")
    assert (
        tokenizer.decode(prompt_token_ids(tokenizer, "hi", chat))
        == "[system]be brief[user]hi[quick][assistant]"
    )
    assert prompt_token_ids(tokenizer, "hi", PromptSettings(chat="never")) == plainly
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ModelError, match="chat template refuses the prompt: no system role"):
        prompt_token_ids(tokenizer, "hi", chat)


def test_a_model_that_predicts_nan() -> None:
    model = tiny_model(1)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match="no finite probabilities"):
            sample_token_ids(model, [[5, 6]], uniform_numbers(0, "n", 1, 2)[None],
                             temperature=temperature, end_ids=[0], pad_id=1)  # fmt: skip
    assert not model.training
