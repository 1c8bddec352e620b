"""Predicts hours and memory of the claims in docs/reproducing.md by arithmetic, without measuring anything.

The time of a prompt is its multiply-adds at a share of the GPU's peak. It counts twice, because the full cache runs it
again to compare distributions. The time of an answer token is Python's launch time of a step, or the lower bound from
its bytes if that is greater (kvbench/bench/forecast.py has both). Prompts have the average length of the data, answers
the maximum length of the task.

    python scripts/predict_hours.py
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from kvbench.bench.forecast import COPY_SHARE, GPUS, PYTHON_SECONDS
from kvbench.hf import ModelSize, predict_memory
from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.plan import plan_claim
from kvbench.runs.options import Request

GPU = "h100"
PEAK = 989e12
"""Multiply-adds of bfloat16 per second, times two, by NVIDIA's datasheet of the H100 SXM (dense)."""
SHARE = 0.4
"""Of it that a prompt's pass reaches: assumed."""
TOKENS_PER_WORD = 1.5
"""Assumed; LongBench counts words."""


class Size(NamedTuple):
    """A task's prompts and answers in tokens."""

    prompt: float
    answer: int


WORDS = {  # LongBench's own averages, and its limits of new tokens
    "narrativeqa": (18409, 128), "qasper": (3619, 128), "multifieldqa_en": (4559, 64), "hotpotqa": (9151, 32),
    "2wikimqa": (4887, 32), "musique": (11214, 32), "gov_report": (8734, 512), "qmsum": (10614, 512),
    "multi_news": (2113, 512), "trec": (5177, 64), "triviaqa": (8209, 32), "samsum": (6258, 128),
    "passage_count": (11141, 32), "passage_retrieval_en": (9289, 32), "lcc": (1235, 64), "repobench-p": (4206, 64),
}
SCBENCH = {  # SCBench's own averages in tokens, cut at 131,072, and its limits
    "kv": (125e3, 150), "prefix_suffix": (112e3, 150), "vt": (124e3, 30), "repoqa": (65e3, 1024),
    "qa_eng": (131e3, 40), "qa_chn": (131e3, 40), "choice_eng": (131e3, 40), "mf": (120e3, 5), "many_shot": (22e3, 10),
    "summary": (104e3, 200), "summary_with_needles": (105e3, 800), "repoqa_and_kv": (68e3, 1024),
}
RULER = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""New tokens; the needle tasks take 128."""
ROWS = (
    "snapkv:longbench/mistral-7b-v0.2/snapkv-1024",
    "pyramidkv:longbench/llama-3-8b-instruct/pyramidkv-128",
    "kivi:longbench/mistral-7b-instruct-v0.2/kivi-2",
    "kvmerger:longbench/llama2-7b-chat/kvmerger-50",
    "scbench:multi-turn/llama-3.1-8b/kivi",
    "ruler:readme/llama3.1-8b/full/4k",
    "ruler:readme/llama3.1-8b/full/32k",
    "ruler:readme/llama3.1-8b/full/128k",
)


def measure(request: Request) -> Size:
    """The size of a run's samples."""
    kind = request.task.partition("_")[2]
    if request.task.startswith("longbench_"):
        words, answer = WORDS[kind]
        return Size(min(TOKENS_PER_WORD * words, (request.length or 32_768) - answer), answer)
    if request.task.startswith("scbench_"):
        return Size(*SCBENCH[kind])
    answer = RULER.get(request.task, 128)
    return Size((request.length or 0) - answer, answer)


def seconds(request: Request, model: ModelSize) -> float:
    """Of all samples of a run."""
    size = measure(request)
    layer = model.shape.layers[0]
    width = layer.query_heads * layer.key_dim
    prompt = 2 * model.params * size.prompt + 2 * len(model.shape.layers) * width * size.prompt**2
    twice = 1 if request.method == "full" else 2
    floor = (model.weight_bytes + replace(model.shape, length=int(size.prompt)).full_bytes) / (
        GPUS[GPU].bandwidth * COPY_SHARE
    )
    step = max(len(model.shape.layers) * PYTHON_SECONDS, floor)
    return request.samples * (twice * prompt / (PEAK * SHARE) + (request.turns or 1) * size.answer * step)


predict = functools.cache(predict_memory)


def main() -> None:
    """One row per claim, as docs/reproducing.md has them."""
    print("| claim | runs | samples | memory | hours |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for claim in ROWS:
        found = [plan_claim(x) for x in find_claims(claim)]
        requests = list(dict.fromkeys(x for plan in found for x in plan.requests))
        shape = found[0].claim.block.shape
        model = predict(f"random:{shape}", requests[0].dtype)
        longest = max(x.length or 131_072 for x in requests)
        memory = model.weight_bytes + replace(model.shape, length=longest).full_bytes
        hours = sum(seconds(x, model) for x in requests) / 3600
        samples = sum(x.samples for x in requests)
        print(f"| `{claim}` | {len(requests)} | {samples:,} | {memory / 1e9:.0f} GB | {hours:.1f} |")


if __name__ == "__main__":
    main()
