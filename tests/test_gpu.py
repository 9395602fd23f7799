"""What a CUDA device must not change: choices, scores and restored weights."""

from typing import Any

import numpy as np
import pytest
import torch

from ttt_adapt.adaptation import create_adapter
from ttt_adapt.config import AdaptationSettings
from ttt_adapt.evaluation import bits_per_byte
from ttt_adapt.models import wrap_language_model
from ttt_adapt.runtime import has_native_bfloat16, resolve_device
from ttt_adapt.selection import posterior_variance, sift
from ttt_adapt.testing import sample_text, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def unit_rows(seed: int, num_rows: int, dimension: int) -> torch.Tensor:
    rows = torch.randn(num_rows, dimension, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_auto_is_the_device() -> None:
    assert resolve_device("auto") == DEVICE
    assert has_native_bfloat16(DEVICE) == torch.cuda.is_bf16_supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sift_chooses_there_as_here(dtype: torch.dtype) -> None:
    candidates_KD = unit_rows(0, 400, 64).to(dtype)
    queries_MD = unit_rows(1, 3, 64).to(dtype)
    here = sift(candidates_KD, queries_MD, num_select=30, noise_var=0.1)
    there = sift(candidates_KD.to(DEVICE), queries_MD.to(DEVICE), num_select=30, noise_var=0.1)
    np.testing.assert_array_equal(there.indices, here.indices)
    reference = posterior_variance(
        candidates_KD.double().numpy(), queries_MD.double().numpy(), here.indices, 0.1
    )
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    np.testing.assert_allclose(there.posterior_var, reference, rtol=tolerance)


def test_a_text_costs_there_what_it_costs_here() -> None:
    texts = [sample_text(seed) for seed in range(4)]
    here = bits_per_byte(tiny_model(), tiny_tokenizer(), texts)
    there = bits_per_byte(tiny_model().to(DEVICE), tiny_tokenizer(), texts)
    assert there.total.num_bytes == here.total.num_bytes
    assert there.value == pytest.approx(here.value, rel=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_learning_changes_the_model_and_leaves_no_trace(method: str) -> None:
    lm = wrap_language_model(tiny_model().to(DEVICE), tiny_tokenizer(), name="tiny")
    settings = AdaptationSettings.model_validate(
        {"method": method, "learning_rate": 1e-2, "precision": "float32"}
    )
    texts = [sample_text(seed) for seed in range(5)]
    before = weights(lm.model)
    losses = []
    adapter = create_adapter(lm, settings)
    with adapter.episode([texts], steps=(0, 5)) as episode:
        for point in episode.points():
            losses.append(bits_per_byte(point.model, lm.tokenizer, texts).value)
    adapter.close()
    after = weights(lm.model)
    assert losses[1] < losses[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
