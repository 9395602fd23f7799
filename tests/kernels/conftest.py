"""Triton kernels run in its interpreter where there is no GPU; that is settled as they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
