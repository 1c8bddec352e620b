"""Train the bundled model `mini` on the tasks' own text, gate it, and write it to kvbench/models/mini.

    python scripts/train_mini.py --work /tmp/mini                  # continue from the last checkpoint to the end
    python scripts/train_mini.py --work /tmp/mini --stage recall   # one stage of the list below

A small transformer learns to recall in a curriculum: copying segments of random tokens (where induction heads appear,
after a plateau), then keys next to values and needle sentences in short contexts, then spread positions, then real
lengths. Every batch is a function of (seed, stage, step), so a run that was stopped continues as if it had not been;
the seeds are this script's own and share nothing with the tasks' dev and test splits.

The text is made by the tasks (`compose`) and encoded by `kvbench.task.encode`, the way evaluation shows it: single
questions and several with golden history. Loss is on answers only, and after the last token of an answer the label is
the end of text even where the conversation goes on, so that generation stops by itself. Keys are asked with
replacement and there are more keys than questions: otherwise the model answers by elimination.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.task import Encoded, Example, Frame, Mode, Split, Task, Turn, encode
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench import kv
from kvbench.tasks.words import draw_keys, draw_numbers, words

VOCABULARY = 4096
END, EOS = "<|endoftext|>", 0
# Llama-3's pre-tokenizer: words with their leading sign, digits in groups of up to three.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LONGEST = 6144
"""Positions the model is shown, skipped or real."""
FRAME = Frame("", "", None, None, special=False)
SINGLE_1, SINGLE_2, MULTIKEY_1, SHORT = niah.NiahSingle1(), niah.NiahSingle2(), niah.NiahMultikey1(), kv.KeyValueShort()


# ---------------------------------------------------------------- tokenizer


def corpus() -> Iterator[str]:
    """Text of every kind that the tasks show, and the words and numbers their keys and values are made of."""
    rng = random.Random("mini/tokenizer")
    for _ in range(100):
        # Every group of three digits becomes one token, so that a value is three tokens whatever its digits.
        yield " ".join([f"{n:03d}" for n in range(1000)] + [f"{n:02d}" for n in range(100)])
    for _ in range(400):
        for task, n in ((SINGLE_1, 100), (MULTIKEY_1, 300)):
            pairs = list(zip(draw_keys(rng, 4), draw_numbers(rng, 4), strict=True))
            yield show(task.compose(task.haystack_for(rng), pairs, [0, 1], n, id=""))
        yield show(SHORT.compose(SHORT.pairs(rng, 20), [0, 1, 2], id=""))
    for _ in range(3):
        yield "\n".join(f" {word}" for word in words("adjective"))
        yield "\n".join(f"-{word}" for word in words("noun"))
    for _ in range(50):
        for word in words("adjective", kv.SHORT):
            yield f' "{word} {word}'
        for word in words("noun", kv.SHORT):
            yield f"-{word}"


def show(example: Example) -> str:
    """An example and its golden answers as one text."""
    return example.context + "".join(f"\n{turn.question}{turn.prefix}{turn.answer}" for turn in example.turns)


def train_tokenizer(folder: Path) -> None:
    """Byte-level BPE on the tasks' text, saved as a fast tokenizer without a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=8192).save_pretrained(folder)


# ---------------------------------------------------------------- data

Item = tuple[list[int], list[int], int]
"""Token ids, labels and tokens of context of one sequence; a label is the id that comes next, or -100 (no loss)."""


def item(encoded: Encoded) -> Item:
    """A conversation with golden history as ids, with labels on the answers and the end of text after each."""
    ids, labels = list(encoded.context), [-100] * len(encoded.context)
    for i, turn in enumerate(encoded.turns):
        asked = turn.first if i == 0 else turn.later
        ids += asked + turn.answer
        labels += [-100] * (len(asked) - 1) + [*turn.answer, EOS]
    return ids, labels, len(encoded.context)


def segments(rng: random.Random, length: int, pool: int) -> Item:
    """Short segments of random tokens that recur at varying distances, with labels inside those seen before."""
    tokens = rng.sample(range(1, pool), 64)
    parts: list[list[int]] = []
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < length:
        again = bool(parts) and rng.random() < 0.5
        part = rng.choice(parts) if again else rng.choices(tokens, k=rng.randint(4, 11))
        if not again:
            parts.append(part)
        ids += part
        labels += [*part[1:], -100] if again else [-100] * len(part)
    return ids[:length], labels[:length], 0


def pick(rng: random.Random, keys: int, questions: int) -> list[int]:
    """Which pairs are asked for: with replacement."""
    return [rng.randrange(keys) for _ in range(questions)]


def bare(rng: random.Random, length: int, tokenizer: PreTrainedTokenizerBase) -> Item:
    """The beginners' form: bare keys and values, or bare needle sentences, and questions without their wording."""
    n, questions = max(2, length // 32 - rng.randrange(3)), max(3, length // 64)
    pairs = list(zip(draw_keys(rng, n, rng.choice((0, kv.SHORT))), draw_numbers(rng, n), strict=True))
    line, prefix, end = rng.choice(
        (
            ("{key}: {value}.", " {key}:", "."),
            (niah.NEEDLE, " {key} is:", "."),
            (niah.NEEDLE, niah.PREFIX, "."),
            ('"{key}": "{value}",', '"{key}": "', ""),
        )
    )
    lead = "" if prefix.endswith('"') else " "
    turns = tuple(
        Turn("", prefix.format(key=key), f"{lead}{value}{end}", (value,), 0)
        for key, value in (pairs[i] for i in pick(rng, n, questions))
    )
    context = rng.choice((" ", "\n")).join(line.format(key=key, value=value) for key, value in pairs)
    return item(encode(SINGLE_1, Example("", context, turns), tokenizer, FRAME))


def real(rng: random.Random, length: int, tokenizer: PreTrainedTokenizerBase) -> Item:
    """A tasks' example of about `length` tokens with its questions, more keys hidden than asked for."""
    task = rng.choice((SINGLE_1, MULTIKEY_1, MULTIKEY_1, SHORT))
    if task is SHORT:
        questions = rng.randint(1, max(1, min(8, length // 60)))
        left = length - 30 - questions * 30
        n = max(2, int(left / 11))
        pairs = SHORT.pairs(rng, n)
        return item(encode(task, SHORT.compose(pairs, pick(rng, n, questions), id=""), tokenizer, FRAME))
    questions = rng.randint(1, max(1, min(6, length // 100)))
    left = length - 36 - questions * 52
    keys = rng.randint(1, max(1, min(10, left // 24)))
    pairs = list(zip(draw_keys(rng, keys), draw_numbers(rng, keys), strict=True))
    haystack = task.haystack_for(rng)
    n = max(haystack.least(keys), int((left - keys * 20) / (1.27 if task is SINGLE_1 else 1.06)))
    return item(encode(task, task.compose(haystack, pairs, pick(rng, keys, questions), n, id=""), tokenizer, FRAME))


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    shapes: (length, rows) of a batch, one of them per step. rate: from, to. pool: ids of the copying stages, 0: text.
    bare, spread: shares of sequences in the beginners' form and with skipped positions. enough: stops early once the
    share of whole answers (copying: of tokens) over the last 50 steps reaches it.
    """

    name: str
    steps: int
    shapes: tuple[tuple[int, int], ...]
    rate: tuple[float, float] = (3e-3, 3e-3)
    pool: int = 0
    bare: float = 0.0
    spread: float = 0.0
    enough: float = 0.995


class Batches:
    """The batches of a stage, each a function of its step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        pieces = [tokenizer.decode([i]) for i in range(VOCABULARY)]
        self.ends = np.array([piece.endswith((".", ",", "\n")) for piece in pieces])

    def spread(self, rng: np.random.Generator, ids: np.ndarray, context: int) -> np.ndarray:
        """Position ids that skip ahead after sentences and pairs of the context, up to LONGEST in all.

        It shows short sequences at the distances of long ones.
        """
        jumps = np.zeros(len(ids))
        places = np.flatnonzero(self.ends[ids[:context]]) + 1
        places = places[(places < len(ids)) & (rng.random(len(places)) < rng.random())]
        if len(places):
            share = rng.exponential(size=len(places))
            jumps[places] = share / share.sum() * rng.integers(0, LONGEST - len(ids))
        return np.arange(len(ids)) + np.cumsum(np.floor(jumps)).astype(np.int64)

    def batch(self, stage: Stage, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, labels and position ids of one step."""
        rng = random.Random(f"mini/train/{stage.name}/{step}")
        numbers = np.random.default_rng(rng.getrandbits(64))
        length, rows = rng.choice(stage.shapes)
        ids, labels = np.zeros((rows, length), np.int64), np.full((rows, length), -100, np.int64)
        positions = np.tile(np.arange(length), (rows, 1))
        for row in range(rows):
            if stage.pool:
                one = segments(rng, length, stage.pool)
            else:
                make = bare if rng.random() < stage.bare else real
                one = make(rng, length, self.tokenizer)
            n = min(length, len(one[0]))
            ids[row, :n], labels[row, :n] = one[0][:n], one[1][:n]
            if rng.random() < stage.spread:
                positions[row] = self.spread(numbers, ids[row], min(one[2], length))
        return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions)


# ---------------------------------------------------------------- training


STAGES = (
    Stage("copy", 5000, ((64, 32),), pool=512, enough=0.97),
    Stage("copy-all", 2000, ((64, 32),), pool=VOCABULARY, enough=0.95),
    Stage("recall", 2500, ((192, 16),), bare=0.6),
    Stage("spread", 2500, ((256, 12),), bare=0.2, spread=0.7),
    Stage("512", 1000, ((512, 8),), rate=(2e-3, 2e-3), spread=0.5),
    Stage("1024", 1000, ((512, 8), (1152, 4)), rate=(2e-3, 1e-3), spread=0.3),
    Stage("2048", 1500, ((512, 8), (1152, 4), (2304, 2), (2304, 2)), rate=(1e-3, 1e-4), spread=0.2, enough=2.0),
)


def new_model() -> Qwen3ForCausalLM:
    """Qwen3's shape at 3.4 million parameters: 4 layers of width 256, 4 query and 2 KV heads of 64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)


def whole(right: torch.Tensor, labels: torch.Tensor) -> list[bool]:
    """For each answer (tokens up to an end of text): whether every token of it was right."""
    ends = (labels == EOS).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [bool(right[start : end + 1].all()) for start, end in zip(starts, ends, strict=True)]


class Trainer:
    """A model on its way through the stages, with everything needed to go on after a stop."""

    def __init__(self, work: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.file = work / "checkpoint.pt"
        self.model = new_model()
        self.body = torch.compile(self.model.model, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
        self.batches = Batches(tokenizer)
        self.state = {"stage": 0, "step": 0, "tokens": 0, "seconds": 0.0}
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = saved["state"]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        part = self.file.with_suffix(".part")
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "state": self.state}, part
        )
        part.replace(self.file)

    def step(self, stage: Stage, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[float, list[bool]]:
        """One update; the loss and whether each answer (copying: each token) was right."""
        ids, labels, positions = batch
        done = self.state["step"]
        warm = min(1.0, (done + 1) / 50)
        rate = warm * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done / stage.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        keep = labels.flatten() >= 0
        target = labels.flatten()[keep]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[keep])
        loss = cross_entropy(logits.float(), target)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        right = logits.argmax(-1) == target
        return float(loss), right.tolist() if stage.pool else whole(right, target)

    def run(self, stage: Stage) -> None:
        """Train to the end of the stage, from wherever the checkpoint stands."""
        recent: deque[tuple[float, list[bool]]] = deque(maxlen=50)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches.batch, stage, self.state["step"])
            while self.state["step"] < stage.steps:
                start = time.perf_counter()
                batch = coming.result()
                coming = pool.submit(self.batches.batch, stage, self.state["step"] + 1)
                recent.append(self.step(stage, batch))
                self.state["step"] += 1
                self.state["tokens"] += batch[0].numel()
                self.state["seconds"] += time.perf_counter() - start
                if self.state["step"] % 50 == 0:
                    self.save()
                    answers = [answer for _, more in recent for answer in more]
                    loss, share = np.mean([loss for loss, _ in recent]), np.mean(answers)
                    print(
                        f"{stage.name} {self.state['step']}/{stage.steps} loss {loss:.3f} right {share:.3f} "
                        f"{self.state['tokens'] / 1e6:.1f}M tokens {self.state['seconds'] / 60:.1f} min",
                        flush=True,
                    )
                    if share >= stage.enough:
                        break
        self.state["stage"] += 1
        self.state["step"] = 0
        self.save()


# ---------------------------------------------------------------- gate


@torch.inference_mode()
def answered(model: Qwen3ForCausalLM, ids: list[int], answer: tuple[int, ...], cache: DynamicCache) -> bool:
    """Whether greedy decoding says the golden answer after these ids, on top of the cache.

    One forward over question and answer: the greedy continuation is the answer where each token of it is the argmax.
    """
    logits = model(torch.tensor([[*ids, *answer]]), past_key_values=cache).logits[0]
    return logits[len(ids) - 1 : -1].argmax(-1).tolist() == list(answer)


@torch.inference_mode()
def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, task: Task, mode: Mode, length: int, n: int
) -> float:
    """Share of whole answers over n test samples, full cache, golden history."""
    turns = 1 if mode is Mode.SINGLE else 5
    hits = []
    for example in task.examples(seed=0, split=Split.TEST, n=n, length=length, turns=turns, tokenizer=tokenizer):
        encoded = encode(task, example, tokenizer)
        cache = DynamicCache()
        model(torch.tensor([encoded.context]), past_key_values=cache, logits_to_keep=1)
        for i, turn in enumerate(encoded.turns):
            if mode is Mode.MULTI_REQUEST:
                cache.crop(len(encoded.context))
            asked = turn.later if mode is Mode.MULTI_TURN and i else turn.first
            hits.append(answered(model, list(asked), turn.answer, cache))
    return sum(hits) / len(hits)


def gate(folder: Path, lengths: Sequence[int], n: int) -> dict[str, dict[str, float]]:
    """Measure the model as shipped on every task, mode and length; prints and returns the accuracies."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found: dict[str, dict[str, float]] = {}
    for task, length, mode in itertools.product((SINGLE_1, SINGLE_2, MULTIKEY_1, SHORT), lengths, Mode):
        share = measure(model, tokenizer, task, mode, length, n)
        found.setdefault(task.name, {})[f"{mode} {length}"] = round(share, 4)
        print(f"gate {task.name} {mode} {length}: {share:.3f}", flush=True)
    return found


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face format, weights in bfloat16."""
    shipped = new_model()
    shipped.load_state_dict(trainer.model.state_dict())
    shipped.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=False)
    shipped.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make the tokenizer where there is none, train the stages that are left, export, gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of tokenizer and checkpoint")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "kvbench" / "models" / "mini")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="stop after so many stages")
    parser.add_argument("--samples", type=int, default=100, help="samples of each gate measurement")
    options = parser.parse_args()
    torch.set_num_threads(2)
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(options.work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    trainer = Trainer(options.work, tokenizer)
    while trainer.state["stage"] < options.stages:
        trainer.run(STAGES[int(trainer.state["stage"])])
    export(trainer, tokenizer, options.out)
    report = {
        "accuracy": gate(options.out, (1024, 2048), options.samples),
        "samples": options.samples,
        "turns": {"single": 1, "multi-turn": 5, "multi-request": 5},
        "split": "test",
        "seed": 0,
        "dtype": "bfloat16",
        "script": "scripts/train_mini.py",
        "train_seed": "mini/train/<stage>/<step>",
        "tokens": trainer.state["tokens"],
        "minutes": round(trainer.state["seconds"] / 60, 1),
        "device": f"CPU, {torch.get_num_threads()} threads",
    }
    (options.out / "gate.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
