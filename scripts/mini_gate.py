"""The gate of `mini`: greedy answers of the model as shipped, full cache, on the tasks' test split.

    python scripts/mini_gate.py MODEL_FOLDER      # prints the accuracies

An answer counts when every token of it is the argmax, the end of text after it aside. That is what greedy decoding
says, at the price of one forward pass for question and answer; the tasks' own scorers can only be kinder.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase, Qwen3ForCausalLM

from kvbench.task import Mode, Split, Task, encode
from kvbench.tasks.ruler.niah import NiahMultikey1, NiahSingle1, NiahSingle2
from kvbench.tasks.scbench.kv import KeyValueShort

TASKS: tuple[Task, ...] = (NiahSingle1(), NiahSingle2(), NiahMultikey1(), KeyValueShort())
LENGTHS = (1024, 2048)


@torch.inference_mode()
def answered(model: Qwen3ForCausalLM, asked: Sequence[int], answer: Sequence[int], cache: DynamicCache) -> bool:
    """Whether greedy decoding says the golden answer after these ids, on top of the cache, which then holds both."""
    logits = model(torch.tensor([[*asked, *answer]]), past_key_values=cache).logits[0]
    said: list[int] = logits[len(asked) - 1 : -1].argmax(-1).tolist()
    return said == list(answer)


@torch.inference_mode()
def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, task: Task, length: int, turns: int, n: int
) -> dict[Mode, float]:
    """Share of whole answers over n test samples by mode, each context prefilled once; one turn: `single`."""
    hits: dict[Mode, list[bool]] = {}
    for example in task.examples(seed=0, split=Split.TEST, n=n, length=length, turns=turns, tokenizer=tokenizer):
        encoded = encode(task, example, tokenizer)
        cache = DynamicCache()
        model(torch.tensor([encoded.context]), past_key_values=cache, logits_to_keep=1)
        for turn in encoded.turns:
            mode = Mode.MULTI_REQUEST if turns > 1 else Mode.SINGLE
            hits.setdefault(mode, []).append(answered(model, turn.first, turn.answer, cache))
            cache.crop(-len(turn.first + turn.answer))
        for i, turn in enumerate(encoded.turns if turns > 1 else ()):
            asked = turn.later if i else turn.first
            hits.setdefault(Mode.MULTI_TURN, []).append(answered(model, asked, turn.answer, cache))
    return {mode: sum(found) / len(found) for mode, found in hits.items()}


def gate(folder: Path, n: int, turns: int = 5) -> dict[str, dict[str, float]]:
    """Accuracies of the model in a folder by task and `mode length`, printed as they come."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found: dict[str, dict[str, float]] = {}
    for task, length, asked in itertools.product(TASKS, LENGTHS, (1, turns)):
        for mode, share in measure(model, tokenizer, task, length, asked, n).items():
            found.setdefault(task.name, {})[f"{mode} {length}"] = round(share, 4)
            print(f"gate {task.name} {mode} {length}: {share:.3f}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    print(json.dumps(gate(Path(sys.argv[1]), 100), indent=2))
