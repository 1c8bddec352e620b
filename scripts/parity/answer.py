"""kvpress's pipeline as a process that answers on request: `python answer.py MODEL_FOLDER`, in its environment.

Every line of standard input is JSON: token ids of a `context` and of its `questions`, and `new_tokens`. Every line of
standard output has the CPU seconds of prefill and compression and of all answers, and the entries kept per head.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from kvpress import SnapKVPress
from kvpress.pipeline import KVPressTextGenerationPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


class TimedPipeline(KVPressTextGenerationPipeline):
    """kvpress's own pipeline; sums the time of its answers."""

    answering = 0.0

    def generate_answer(self, **arguments: object) -> str:
        """As kvpress's, timed."""
        started = time.process_time()
        answer: str = super().generate_answer(**arguments)
        self.answering += time.process_time() - started
        return answer


def main() -> None:
    """Answer until standard input ends."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = -1  # every answer has all its tokens
    pipeline = TimedPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(sys.argv[1]))
    press = SnapKVPress(compression_ratio=0.75, window_size=32, kernel_size=7)
    for line in sys.stdin:
        asked = json.loads(line)
        inputs = {
            "context_ids": torch.tensor([asked["context"]]),
            "questions_ids": [torch.tensor([x]) for x in asked["questions"]],
        }
        cache, pipeline.answering = DynamicCache(), 0.0
        started = time.process_time()
        with torch.inference_mode():
            pipeline._forward(inputs, max_new_tokens=asked["new_tokens"], press=press, cache=cache)  # noqa: SLF001
        total = time.process_time() - started
        print(json.dumps({
            "prefill_s": total - pipeline.answering, "answers_s": pipeline.answering, "kept": cache.get_seq_length(),
        }), flush=True)


if __name__ == "__main__":
    main()
