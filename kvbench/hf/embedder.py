"""Sentence vectors of the embedder that `kvbench trace add minilm` brings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer

from kvbench.hf.config import quiet
from kvbench.models.embedder import find_embedder

LONGEST = 256
"""Tokens of a text, as in the published configuration."""
BATCH = 64


def embed(texts: list[str]) -> npt.NDArray[np.float32]:
    """Mean-pooled sentence vectors. [texts, 384]

    Raises:
        UserError: the embedder was not added.
    """
    folder = find_embedder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with quiet():
        model = AutoModel.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        ).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                texts[start: start + BATCH], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            )
            mask = batch["attention_mask"].unsqueeze(-1)  # [texts, T, 1]
            states = model(**batch).last_hidden_state * mask
            found.append((states.sum(1) / mask.sum(1)).numpy())
    return np.concatenate(found)
