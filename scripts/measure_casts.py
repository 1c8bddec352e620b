"""Measures how far casts of keys move attention, layer by layer: `python scripts/measure_casts.py qwen2.5-coder-1.5b`.

The text is the start of README.md. A row is a layer: its largest key element, the largest mean of a channel over
tokens, and for each cast the total variation distance between the attention of exact and of cast keys, averaged over
rows and heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvbench.hf import load_model
from kvbench.methods.quantization.fp8 import Fp8Coder
from kvbench.methods.quantization.nvfp4 import Nvfp4Coder
from kvbench.reproduce.findings.observe import Layer, Observer, Values, attend, causal_mask, observe

README = Path(__file__).parent.parent / "README.md"
TOKENS = 400
CASTS = {"fp8": Fp8Coder("one"), "nvfp4": Nvfp4Coder("one")}


class Casts(Observer):
    """Prints a row per layer."""

    def see(self, layer: Layer) -> None:
        """Print the row of a layer."""
        key, stored = layer.key, layer.step.key
        row = [float(key.abs().max()), float(key.mean(1).abs().max())]
        for cast in CASTS.values():
            rounded = cast.decode(cast.encode(stored), stored.shape[3])[0]
            moved = attend(layer.query, rounded.float(), layer.step.scale, causal_mask(layer.length))
            row.append(float((layer.attention - moved).abs().sum(-1).mean()) / 2)
        print(f"| {layer.index} | {row[0]:.0f} | {row[1]:.0f} | {' | '.join(f'{x:.2f}' for x in row[2:])} |")

    def result(self) -> Values:
        """Nothing: the rows are printed."""
        return {}


if __name__ == "__main__":
    model = load_model(sys.argv[1])
    print(f"| layer | largest key | largest mean of a channel | {' | '.join(CASTS)} |\n| ---: |{' ---: |' * 4}")
    observe(model, model.tokenizer(README.read_text(encoding="utf-8")).input_ids[:TOKENS], [Casts()])
