"""Outer loops: pretraining a language model from scratch, resumable and documented.

Names load on first use: what vision models share with it needs no transformers.
"""

from typing import TYPE_CHECKING

from ttt_adapt.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ttt_adapt.training.pretraining import PretrainResult, plan_pretraining, pretrain

__all__ = ["PretrainResult", "plan_pretraining", "pretrain"]

__getattr__, __dir__ = lazy_exports(
    __name__, {".pretraining": ("PretrainResult", "plan_pretraining", "pretrain")}
)
