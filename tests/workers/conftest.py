"""Chooses Triton's interpreter where there is no GPU. Triton reads the variable when it is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
