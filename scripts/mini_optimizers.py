"""Optimizers and learning rates for training the bundled models."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def make_optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, ...]:
    """Create the optimizers: Muon for the layers' matrices, AdamW for the rest."""
    matrices = [x for x in model.model.layers.parameters() if x.ndim == 2]
    rest = [x for x in model.parameters() if not any(x is matrix for matrix in matrices)]
    return (
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
