"""`mini-hybrid`: three layers with rotary embedding that see a window, and one without it that sees everything.

SmallThinker's report has one global layer for three sliding ones. transformers has that layout as EXAONE-MoE, whose
configuration says which layers slide (those rotate) and which feed-forward parts have experts (here none). The weights
come from mini, whose third layer alone looks farther back than a few tokens: without rotation there, with windows
elsewhere and without its fifth layer, it still answers, and it is trained on with them.

Called by `train_mini.py --kind hybrid`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from mini_text import EOS, LAST, VOCABULARY, Stage
from transformers import AutoModelForCausalLM, ExaoneMoeConfig, ExaoneMoeForCausalLM

WINDOW = 64
TAKEN = (0, 1, 2, 3)
"""Layers of mini that it has."""
GLOBAL = 2
"""The place of the layer that sees everything."""
STAGES = (
    Stage("hybrid-1152", 120, ((512, 6), (1152, 3)), rate=(8e-4, 4e-4), layers=4, mix=LAST, enough=2.0),
    Stage("hybrid-2304", 120, ((1152, 3), (2304, 1), (4352, 1)), rate=(4e-4, 1e-5), layers=4, mix=LAST, enough=2.0),
)


def new_model() -> ExaoneMoeForCausalLM:
    """mini's widths with four layers: 3.4 million parameters."""
    layers = range(len(TAKEN))
    return ExaoneMoeForCausalLM(ExaoneMoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=len(TAKEN),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=None, sliding_window=WINDOW,
        layer_types=["full_attention" if i == GLOBAL else "sliding_attention" for i in layers],
        mlp_layer_types=["dense" for _ in layers],
    ))


def from_mini(folder: Path) -> ExaoneMoeForCausalLM:
    """The model with mini's weights, before training."""
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    new = new_model().float()
    weights = {}
    for name in new.state_dict():
        head, layers, tail = name.partition(".layers.")
        index, _, rest = tail.partition(".")
        weights[name] = state[f"{head}.layers.{TAKEN[int(index)]}.{rest}" if layers else name]
    new.load_state_dict(weights)
    return new
