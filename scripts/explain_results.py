"""Measures why results on mini contradict papers (docs/results.md): `python scripts/explain_results.py`.

Norms: the spread of a head's key norms, and the rank of the requested values' keys among them (0 smallest, 1 largest).
Heads: the highest induction score in the probe of RazorAttention and DuoAttention.
"""

from __future__ import annotations

import torch

from kvbench.engine.session import Session
from kvbench.hf import load_model
from kvbench.methods.baseline.full import Full
from kvbench.methods.heads.profile import find_profile
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.registry import find_task
from kvbench.task import Mode, Split, encode

SAMPLES, LENGTH, TURNS, SEED = 8, 1024, 5, 3


def main() -> None:
    """Print both."""
    model, task = load_model("mini"), find_task("niah")()
    spreads, ranks = [], []
    for example in task.examples(
        seed=SEED, split=Split.DEV, n=SAMPLES, length=LENGTH, turns=TURNS, mode=Mode.MULTI_TURN,
        tokenizer=model.tokenizer
    ):
        encoded = encode(task, example, model.tokenizer)
        ids, rows = list(encoded.context), []
        for turn in encoded.turns:
            value = list(turn.answer[1:4])  # a space, three groups of digits, a full stop
            rows += [i + k for i in range(len(ids) - 2) if ids[i : i + 3] == value for k in range(3)]
        with Session(model, Full(), capacity=len(ids)) as session:
            session.prefill(ids)
            norms = torch.stack([store.keys[0].float().norm(dim=-1) for store in session.layers])  # [L, H_kv, n]
        spreads.append((norms.std(-1) / norms.mean(-1)).mean(-1))
        ranks.append(norms.argsort(-1).argsort(-1)[..., rows].float().mean(-1) / norms.shape[-1])
    print("norms, standard deviation over mean, by layer:", torch.stack(spreads).mean(0).mul(100).round().tolist(), "%")
    print("norms, place of the values' rows, by layer and KV head:")
    for layer, heads in enumerate(torch.stack(ranks).mean(0).tolist()):
        print(f"  {layer}: {', '.join(f'{x:.2f}' for x in heads)}")
    print(f"heads, highest induction score: {max(map(max, find_profile(model, RazorAttention().probe).induction)):.3f}")


if __name__ == "__main__":
    main()
