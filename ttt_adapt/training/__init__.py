"""Outer loops: pretraining a language model from scratch, resumable and documented."""

from ttt_adapt.training.pretraining import PretrainResult, plan_pretraining, pretrain

__all__ = ["PretrainResult", "plan_pretraining", "pretrain"]
