"""Measures how far rounding of keys moves attention, by layer: `python scripts/measure_rounding.py qwen2.5-coder-1.5b`.

The text is the start of README.md. A row is a layer: its largest key element, the largest mean of a channel over
tokens, and for each method the total variation distance between the attention of exact and of rounded keys, averaged
over rows and heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.method import Shape
from kvbench.methods.quantization.fp8 import Fp8
from kvbench.methods.quantization.nvfp4 import Nvfp4
from kvbench.methods.quantization.polarquant import PolarQuant
from kvbench.methods.quantization.qjl import QJL
from kvbench.methods.quantization.quarot_kv import QuaRotKV
from kvbench.methods.quantization.turboquant import TurboQuant
from kvbench.reproduce.findings.observe import Layer, attend, causal_mask, observe

README = Path(__file__).parent.parent / "README.md"
TOKENS = 400
METHODS = (Fp8, Nvfp4, QuaRotKV, TurboQuant, PolarQuant, QJL)


class Rounding:
    """Prints a row per layer."""

    def __init__(self, shape: Shape) -> None:
        self.methods = [x().fit(None, shape) for x in METHODS]

    def see(self, layer: Layer) -> None:
        """Print the row of a layer."""
        key, stored = layer.key, layer.step.key
        row = [float(key.abs().max()), float(key.mean(1).abs().max())]
        for method in self.methods:
            coder = method.coders(layer.index)[0].fit(stored)
            rounded = coder.decode(coder.encode(stored), stored.shape[3])[0]
            moved = attend(coder.turn(layer.query[None])[0], rounded, layer.step.scale, causal_mask(layer.length))
            row.append(float((layer.attention - moved).abs().sum(-1).mean()) / 2)
        print(f"| {layer.index} | {row[0]:.0f} | {row[1]:.0f} | {' | '.join(f'{x:.2f}' for x in row[2:])} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    try:
        model = load_model(parser.parse_args().model)
    except UserError as error:
        parser.error(str(error))
    names = " | ".join(x.card.name for x in METHODS)
    print(f"| layer | largest key | largest mean of a channel | {names} |\n| ---: |{' ---: |' * (2 + len(METHODS))}")
    ids = model.tokenizer(README.read_text(encoding="utf-8")).input_ids[:TOKENS]
    observe(model, ids, [Rounding(model.shape(TOKENS)).see])


if __name__ == "__main__":
    main()
