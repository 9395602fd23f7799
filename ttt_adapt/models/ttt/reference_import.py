"""Weights of the public PyTorch reference (ttt-lm-pytorch) for our models.

Its parameters, by its names; H heads, C width, D head width, F = 4 D, b mini-batch size:

    model.embed_tokens.weight, model.norm.weight, lm_head.weight
    model.layers.N.{seq_norm, ffn_norm}.weight
    model.layers.N.mlp.{gate,up,down}_proj.weight
    model.layers.N.conv.{norm.weight, conv.weight [C, 1, K], conv.bias}        pre_conv
    model.layers.N.seq_modeling_block.
        {q,k,v,o,g}_proj.weight                                     k not with share_qk; g: use_gate
        conv_{q,k}.{weight [C, 1, K], bias}                                      share_qk
        post_norm.{weight, bias}, ttt_norm_{weight, bias} [H, D]
        learnable_ttt_lr_weight [H, 1, C], learnable_ttt_lr_bias [H, 1], learnable_token_idx [b]
        W1 [H, D, D], b1 [H, 1, D]                                               TTT-Linear
        W1 [H, D, F], b1 [H, 1, F], W2 [H, F, D], b2 [H, 1, D]                   TTT-MLP
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ttt_adapt.errors import ModelError

TIED = "lm_head.weight"

# Endings of its names, and ours.
_RENAMED = (
    (r"\.seq_norm\.", ".mixer_norm."),
    (r"\.ffn_norm\.", ".mlp_norm."),
    (r"(layers\.\d+)\.conv\.", r"\1.pre_conv."),
    (r"\.seq_modeling_block\.", ".mixer."),
    (r"\.ttt_norm_(weight|bias)$", r".norm_\1"),
    (r"\.learnable_ttt_lr_(weight|bias)$", r".lr_\1"),
    (r"\.learnable_token_idx$", ".token_scale_offset"),
)
_LINEAR = ((r"\.W1$", ".initial_weight"), (r"\.b1$", ".initial_bias"))
_MLP = (
    (r"\.W1$", ".initial_w1"),
    (r"\.b1$", ".initial_b1"),
    (r"\.W2$", ".initial_w2"),
    (r"\.b2$", ".initial_b2"),
)
# Axes of size one that ours do not have.
_SQUEEZED = re.compile(
    r"\.(conv(_q|_k)?\.weight|lr_weight|lr_bias|initial_bias|initial_b1|initial_b2)$"
)


def load_reference_state_dict(model: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Give ``model`` the weights of a model of ttt-lm-pytorch; its logits are then that model's.

    Args:
        model: a :class:`ttt_adapt.models.TTTForCausalLM` of the same shape, all of whose layers are
            of one TTT type; changed in place. Its dtype stays.
        state_dict: of the reference's ``TTTForCausalLM``, in any float dtype.

    Raises:
        ModelError: weights that are missing, unknown, or of another shape; names them.
    """
    types = set(model.config.layer_types)
    if len(types) != 1 or "attention" in types:
        raise ModelError(
            "expected a model of ttt_linear or of ttt_mlp layers throughout, found "
            f"{', '.join(sorted(types))}; the reference has no other"
        )
    renamed = (*_RENAMED, *(_LINEAR if types == {"ttt_linear"} else _MLP))
    own = {name: tensor for name, tensor in model.state_dict().items() if name != TIED}
    if not model.config.tie_word_embeddings:
        own[TIED] = model.lm_head.weight
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        ours = name
        for pattern, replacement in renamed:
            ours = re.sub(pattern, replacement, ours)
        if _SQUEEZED.search(ours) and tensor.ndim > 1:
            tensor = tensor.squeeze(1)
        if ours in own or ours != TIED:
            found[ours] = tensor
    problems = [
        *(f"{name} is missing" for name in own.keys() - found.keys()),
        *(f"{name} is unknown" for name in found.keys() - own.keys()),
        *(
            f"{name} is {list(found[name].shape)}, not {list(own[name].shape)}"
            for name in own.keys() & found.keys()
            if own[name].shape != found[name].shape
        ),
    ]
    if problems:
        raise ModelError(
            f"expected the reference's weights in the shape of this model, but {len(problems)} "
            f"differ ({'; '.join(sorted(problems)[:3])}); give TTTConfig the sizes and options "
            "(use_gate, share_qk, pre_conv, layer_types) that model had"
        )
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
