"""Reading in parts, padding and generation of TTT models against reading whole and one by one."""

from typing import Any

import pytest
import torch

from ttt_adapt.errors import FingerprintMismatchError, ModelError
from ttt_adapt.models import TTTCache
from ttt_adapt.testing import tiny_ttt_model

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"layer_types": "ttt_linear"},
    "mlp": {"layer_types": "ttt_mlp"},
    "mamba-linear": {
        "layer_types": "ttt_linear", "use_gate": True, "share_qk": True, "pre_conv": True,
    },
    "mamba-mlp": {"layer_types": "ttt_mlp", "use_gate": True, "share_qk": True, "pre_conv": True},
    "attention": {"layer_types": "attention"},
    "hybrid": {"layer_types": ["attention", "ttt_linear"], "pre_conv": True},
}  # fmt: skip


def some_tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (batch, length), generator=generator)


@pytest.fixture(params=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_ttt_model(**VARIANTS[request.param])


@torch.no_grad()
def test_any_cutting_gives_the_whole(model: Any) -> None:
    tokens = some_tokens(2, 19)
    whole = model(input_ids=tokens, use_cache=False)
    assert whole.past_key_values is None
    for cuts in ([1, 4, 10], [4, 8, 16], [5, 6, 7, 18], list(range(1, 19))):
        cache, parts = None, []
        for part in torch.tensor_split(tokens, cuts, dim=1):
            output = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=1e-4, atol=1e-5)
        assert cache is not None and cache.num_tokens.tolist() == [19, 19]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_equals_unpadded(model: Any, side: str) -> None:
    tokens = some_tokens(3, 13)
    mask = torch.ones(3, 13, dtype=torch.int64)
    if side == "left":
        mask[0, :8], mask[1, :2] = 0, 0
    elif side == "right":
        mask[0, 5:], mask[1, 11:] = 0, 0
    else:
        mask[0, [0, 2, 3, 7, 12]], mask[1, 4] = 0, 0
    more = some_tokens(3, 6, seed=2)
    output = model(input_ids=tokens, attention_mask=mask, use_cache=True)
    later = model(input_ids=more, past_key_values=output.past_key_values).logits
    for row in range(3):
        kept = mask[row].bool()
        alone = model(
            input_ids=torch.cat([tokens[row][kept], more[row]])[None], use_cache=False
        ).logits[0]
        found = torch.cat([output.logits[row][kept], later[row]])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_holds_nothing_that_matters(model: Any) -> None:
    tokens = some_tokens(2, 9)
    mask = torch.ones(2, 9)
    mask[0, :4] = 0
    other = tokens.clone()
    other[0, :4] = 7
    first, second = (
        model(input_ids=ids, attention_mask=mask, use_cache=True) for ids in (tokens, other)
    )
    real = mask.bool()
    assert torch.equal(first.logits[real], second.logits[real])
    for name, tensor in first.past_key_values.tensors().items():
        if not name.endswith(("keys", "values")):
            assert torch.equal(tensor, second.past_key_values.tensors()[name]), name


@torch.no_grad()
def slow_greedy(model: Any, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    tokens = prompt.tolist()
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens[len(prompt) :]


def padded_left(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.ones(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def until_end(tokens: torch.Tensor) -> list[int]:
    found: list[int] = tokens.tolist()
    return found[: found.index(0) + 1] if 0 in found else found


def test_greedy_batch_equals_one_by_one(model: Any) -> None:
    prompts = [some_tokens(1, length, seed=length)[0] for length in (3, 11, 7)]
    ids, mask = padded_left(prompts)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    for row, prompt in enumerate(prompts):
        assert until_end(found[row, ids.shape[1] :]) == slow_greedy(model, prompt, 9)


def test_beam_search_equals_that_without_a_cache(model: Any) -> None:
    prompts = [some_tokens(1, length, seed=length)[0] for length in (3, 6)]
    ids, mask = padded_left(prompts)
    beam: dict[str, Any] = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False}
    cached = model.generate(ids, attention_mask=mask, **beam)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **beam))
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **beam)
        assert until_end(cached[row, 6:]) == until_end(alone[0, len(prompt) :])


def test_sampling_equals_that_without_a_cache(model: Any) -> None:
    prompt = some_tokens(1, 5)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        sampled.append(
            model.generate(
                prompt, max_new_tokens=8, do_sample=True, num_return_sequences=3,
                use_cache=use_cache,
            )
        )  # fmt: skip
    assert torch.equal(*sampled)
    assert len({tuple(row) for row in sampled[0].tolist()}) > 1


def test_generate_goes_on_from_a_cache(model: Any) -> None:
    text, query = some_tokens(1, 10), some_tokens(1, 3, seed=5)
    expected = slow_greedy(model, torch.cat([text, query], 1)[0], 6)
    with torch.no_grad():
        cache = model(input_ids=text, use_cache=True).past_key_values
    again = cache.clone()
    whole = model.generate(
        torch.cat([text, query], 1), past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    assert until_end(whole[0, 13:]) == expected
    again.begin_here()
    alone = model.generate(query, past_key_values=again, max_new_tokens=6, do_sample=False)
    assert until_end(alone[0, 3:]) == expected


def test_prefill_in_chunks(model: Any) -> None:
    ids, mask = padded_left([some_tokens(1, n, seed=n)[0] for n in (12, 7)])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(expected, model.generate(ids, prefill_chunk_size=5, **options))


@torch.no_grad()
def test_rows_of_a_cache(model: Any) -> None:
    tokens, more = some_tokens(2, 7), some_tokens(3, 4, seed=9)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    kept = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    chosen = cache.clone()
    chosen.batch_select_indices(torch.tensor([1, 0, 1]))
    found = model(input_ids=more, past_key_values=chosen).logits
    expected = model(input_ids=torch.cat([tokens[[1, 0, 1]], more], 1)).logits[:, 7:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # What was cloned has not changed.
    assert all(torch.equal(cache.tensors()[name], tensor) for name, tensor in kept.items())
    twice = cache.clone()
    twice.batch_repeat_interleave(2)
    assert twice.batch_size == 4 and twice.num_tokens.tolist() == [7] * 4
    twice.reset()
    assert twice.batch_size == -1 and twice.get_seq_length() == 0 and not twice.tensors()


@torch.no_grad()
def test_a_cache_is_saved_and_read_again(model: Any, tmp_path: Any) -> None:
    tokens, more = some_tokens(2, 7), some_tokens(2, 4, seed=9)
    mask = torch.ones(2, 7)
    mask[0, :3] = 0
    cache = model(input_ids=tokens, attention_mask=mask, use_cache=True).past_key_values
    cache.save(tmp_path / "cache.safetensors", fingerprint="one")
    load: dict[str, Any] = {"config": model.config, "fingerprint": "one"}
    again = TTTCache.load(tmp_path / "cache.safetensors", **load)
    assert again.num_tokens is not None
    assert again.num_tokens.tolist() == [4, 7] and again.get_seq_length() == 7
    found, expected = (model(input_ids=more, past_key_values=c).logits for c in (again, cache))
    assert torch.equal(found, expected)
    with pytest.raises(
        FingerprintMismatchError, match=r"a cache of the model given \(two\), found"
    ):
        TTTCache.load(tmp_path / "cache.safetensors", **{**load, "fingerprint": "two"})
    other = tiny_ttt_model(hidden_size=36).config
    with pytest.raises(FingerprintMismatchError, match="one of another"):
        TTTCache.load(tmp_path / "cache.safetensors", config=other, fingerprint="one")


def test_files_that_hold_no_cache(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    config = tiny_ttt_model().config
    with pytest.raises(ModelError, match=r"none\.safetensors: cannot be read as a saved cache"):
        TTTCache.load(tmp_path / "none.safetensors", config=config, fingerprint="x")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ModelError, match="cannot be read as a saved cache"):
        TTTCache.load(tmp_path / "text", config=config, fingerprint="x")
    save_file({"a": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(ModelError, match="expected a cache of format 'ttt-adapt cache 1', found"):
        TTTCache.load(tmp_path / "weights", config=config, fingerprint="x")
    with pytest.raises(ModelError, match="expected a cache that has read something"):
        TTTCache(config).save(tmp_path / "empty", fingerprint="x")
    assert not (tmp_path / "empty").exists()


@torch.no_grad()
def test_refusals() -> None:
    model, tokens = tiny_ttt_model(), some_tokens(2, 6)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    with pytest.raises(ModelError, match="cannot take 2 tokens back out of fast weights"):
        cache.crop(-2)
    with pytest.raises(ModelError, match=r"as many rows as the cache has \(2\), found 1"):
        model(input_ids=tokens[:1], past_key_values=cache)
    other = tiny_ttt_model(layer_types="ttt_mlp")
    with pytest.raises(FingerprintMismatchError, match="a model of another shape"):
        other(input_ids=tokens, past_key_values=cache)
    from transformers import DynamicCache

    with pytest.raises(ModelError, match="to be a TTTCache, found DynamicCache"):
        model(input_ids=tokens, past_key_values=DynamicCache())
    with pytest.raises(ModelError, match="expected no cache_implementation, found 'static'"):
        model.generate(tokens, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(tokens[:1], assistant_model=tiny_ttt_model(), max_new_tokens=2)


@torch.no_grad()
def test_nan_flows_into_the_state_and_stops_generation() -> None:
    model, tokens = tiny_ttt_model(), some_tokens(2, 6)
    embedded = model.get_input_embeddings()(tokens)
    embedded[0, 3] = torch.nan
    output = model(inputs_embeds=embedded, use_cache=True)
    assert bool(output.logits[0].isnan().any()) and bool(output.logits[1].isfinite().all())
    assert not output.past_key_values.is_finite()
    output.past_key_values.batch_select_indices(torch.tensor([1]))
    assert output.past_key_values.is_finite()
    model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"finite logits, found NaN or infinity in rows \[0, 1\]"):
        model.generate(tokens, max_new_tokens=3)
