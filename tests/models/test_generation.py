"""Generation against a slow loop without a cache; limits and seeds."""

import pytest
import torch

from ttt_adapt.errors import ModelError
from ttt_adapt.models import LanguageModel, generate, wrap_language_model
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer


def tiny(architecture: str = "llama") -> LanguageModel:
    # Larger weights than at initialisation: predictions that differ from token to token.
    model = tiny_model(architecture=architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return wrap_language_model(model, tiny_tokenizer(), name="tiny")


@torch.no_grad()
def slow_greedy(lm: LanguageModel, context: list[int], num_tokens: int) -> str:
    tokens = list(context)
    for _ in range(num_tokens):
        token = int(lm.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if token == lm.tokenizer.eos_token_id:
            break
        tokens.append(token)
    text: str = lm.tokenizer.decode(tokens[len(context) :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_greedy_equals_the_slow_loop(architecture: str) -> None:
    lm = tiny(architecture)
    ids = lm.tokenizer("alpha beta", add_special_tokens=False)["input_ids"]
    found = generate(lm, "alpha beta", max_new_tokens=24, temperature=0.0, seed=0)
    assert found == slow_greedy(lm, [0, *ids], 24)
    with_prefix = generate(
        lm, "alpha beta", max_new_tokens=24, temperature=0.0, seed=0, prefix=(7, 8)
    )
    assert with_prefix == slow_greedy(lm, [0, 7, 8, *ids], 24)


def test_sampling_follows_its_seed_and_nothing_else() -> None:
    lm = tiny()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(lm, "alpha", max_new_tokens=24, temperature=1.0, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert first == generate(lm, "alpha", max_new_tokens=24, temperature=1.0, seed=5)
    assert first != generate(lm, "alpha", max_new_tokens=24, temperature=1.0, seed=6)


def test_long_prompts_are_cut_at_the_left_prefix_first() -> None:
    lm = tiny()
    text = sample_text(0, num_words=100)
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = generate(lm, text, max_new_tokens=8, temperature=0.0, seed=0, prefix=[9] * 500)
    room = lm.max_length - 8 - 1
    assert found == slow_greedy(lm, [0, *ids[-room:]], 8)


def test_empty_prompt_and_only_room_for_the_beginning() -> None:
    lm = tiny()
    assert generate(lm, "", max_new_tokens=4, temperature=0.0, seed=0) == slow_greedy(lm, [0], 4)
    assert generate(lm, "abc", max_new_tokens=127, temperature=0.0, seed=0) == slow_greedy(
        lm, [0], 127
    )


def test_refusals() -> None:
    lm = tiny()
    with pytest.raises(ModelError, match="max_new_tokens must be between 1 and 127 for tiny"):
        generate(lm, "a", max_new_tokens=128, temperature=0.0, seed=0)
    with pytest.raises(ModelError, match="temperature must be 0 or above, found -1"):
        generate(lm, "a", max_new_tokens=8, temperature=-1.0, seed=0)
    with pytest.raises(ModelError, match="lone surrogates"):
        generate(lm, "\ud800", max_new_tokens=8, temperature=0.0, seed=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_nan_continues_nothing(temperature: float) -> None:
    lm = tiny()
    with torch.no_grad():
        lm.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="tiny predicts no finite probabilities; check its weigh"):
        generate(lm, "a", max_new_tokens=4, temperature=temperature, seed=0)
