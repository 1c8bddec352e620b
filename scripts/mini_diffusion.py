"""Train `mini-diffusion`: the weights of `mini` with bidirectional attention, trained to fill in masked answers.

It starts from mini's weights, as Dream started from Qwen2.5, and has one more token: the mask. Every sequence is a
prompt of the tasks, formatted as in evaluation, and a response block of the answer and ends of text. A share of the
block, drawn from 0 to 1, or everything from some token on, is masked, and the loss covers the masked tokens (LLaDA,
arXiv 2502.09992). The head is not shifted. The sixth stage adds two layers, initialized as identity, with which the
model learned to copy lists. In the last two stages most short answers are masked completely; before, the model
predicted a wrong last digit of a value with confidence while the digits before it were masked.

`mini-diffusion-prefix` is mini-diffusion, trained on with prompts that attend to themselves only (LaViDa's mask) to
predict what mini-diffusion predicts without that mask.

Called by `train_mini.py --kind diffusion` and `--kind prefix`. Batches are a function of the step, so a stopped run
continues exactly.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from mini_attention import attend_everywhere
from mini_masking import IGNORED, MASK, MASK_ID, TASKS, Batch, Stage, batches
from mini_optimizers import make_optimizers
from mini_text import EOS, MULTIKEY_1, SHORT, SINGLE_1, VOCABULARY
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3ForCausalLM

from kvbench.diffusion.policy import denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.hf import load_model
from kvbench.methods.diffusion.none import NoCache
from kvbench.task import Mode, Split, Task, encode
from kvbench.tasks.growth import lists, sums
from kvbench.tasks.ruler import niah

TOKENS_PER_STEP = 4
GATED: tuple[tuple[Task, int], ...] = (
    (SINGLE_1, 1024), (niah.NiahSingle2(), 1024), (MULTIKEY_1, 1024), (SHORT, 1024), (lists.ListCopy(), 256),
    (lists.ListCopy(), 384), (sums.RunningSums(), 256),
)
"""Tasks at their lengths."""
AttentionInterface.register("training-everywhere", attend_everywhere)

EVERY, SHARP = (1.0, 1.0, 3.0, 3.0, 3.0, 1.0), (1.0, 1.0, 3.0, 4.0, 0.5, 0.0)
COPY, MOST, LAST = (0.0, 0.0, 0.0, 0.05, 0.0, 1.0), (1.0, 2.0, 2.0, 5.0, 0.0, 5.0), (1.0, 3.0, 2.0, 7.0, 0.0, 6.0)
PAIRS, BOTH = (1.0, 2.0, 2.0, 9.0, 0.0, 6.0), (1.0, 2.0, 2.0, 9.0, 0.0, 12.0)
STAGES = (
    Stage("fill", 1200, ((256, 10), (384, 6)), (2e-3, 1.5e-3), EVERY),
    Stage("fill-512", 700, ((384, 6), (640, 4)), (1.5e-3, 1e-3), EVERY),
    Stage("fill-1024", 800, ((512, 5), (640, 4), (1280, 2)), (1e-3, 3e-5), SHARP),
    Stage("long", 900, ((640, 4), (1280, 2), (1280, 2)), (8e-4, 1e-5), SHARP),
    Stage("last", 450, ((640, 4), (1280, 2), (1280, 2)), (6e-4, 1e-5), SHARP),
    Stage("copy", 900, ((208, 12), (256, 10)), (1.5e-3, 1e-3), COPY, suffix=0.3, layers=7),
    Stage("mix", 450, ((256, 10), (384, 6), (640, 4)), (1.2e-3, 1e-3), MOST, parts=2, suffix=0.3, layers=7),
    Stage(
        "far", 750, ((256, 10), (384, 6), (640, 4), (1280, 2), (1280, 2)), (9e-4, 4e-4), MOST, parts=2, suffix=0.3,
        layers=7,
    ),
    Stage(
        "fine", 300, ((384, 6), (640, 4), (1280, 2), (1280, 2)), (4e-4, 2e-4), LAST, parts=2, suffix=0.3, layers=7,
    ),
    Stage(
        "end", 640, ((208, 12), (256, 10), (320, 8), (640, 4), (1280, 2), (1280, 2)), (6e-4, 1e-5), LAST, parts=2,
        suffix=0.3, layers=7, lists=320,
    ),
    Stage(
        "whole", 1500, ((208, 12), (256, 10), (320, 8), (640, 4), (640, 4), (1280, 2), (1280, 2), (1280, 2)),
        (8e-4, 1e-5), PAIRS, parts=2, suffix=0.3, whole=0.7, layers=7, lists=320,
    ),
    Stage(
        "both", 700, ((208, 12), (256, 10), (256, 10), (320, 8), (640, 4), (1280, 2), (1280, 2), (1280, 2)),
        (5e-4, 1e-5), BOTH, parts=2, suffix=0.3, whole=0.7, layers=7, lists=320,
    ),
)
LISTS = (1.0, 2.0, 2.0, 3.0, 0.0, 12.0)
PREFIX_STAGES = tuple(
    Stage(
        name, 100, ((208, 8), (256, 8), (256, 8), (320, 6), (640, 3)), rate, LISTS, suffix=0.3, whole=0.3, layers=7,
        lists=320,
    ) for name, rate in (("prefix", (8e-4, 1e-5)), ("prefix-more", (1.2e-3, 1e-5)))
)


def start(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]:
    """The model and its tokenizer; mini gets a mask token whose embedding is the mean of all."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if tokenizer.mask_token_id == MASK_ID:
        return model, tokenizer
    tokenizer.add_special_tokens({"mask_token": MASK})
    assert tokenizer.mask_token_id == MASK_ID
    model.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table[MASK_ID] = table[:MASK_ID].mean(0)
    return model, tokenizer


def deepen(old: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """The model with that many layers; the new ones add nothing yet, so its outputs stay the same."""
    config = copy.deepcopy(old.config)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    torch.manual_seed(0)
    new = Qwen3ForCausalLM(config).float()
    new.load_state_dict(old.state_dict(), strict=False)
    with torch.no_grad():
        for layer in new.model.layers[old.config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return new


class Trainer:
    """The model on its way through the stages.

    prefix: whether its prompts attend to themselves only; then it learns the predictions of the model that it was.
    """

    def __init__(self, work: Path, source: Path, stages: tuple[Stage, ...] = STAGES, *, prefix: bool = False) -> None:
        self.file, self.stages, self.prefix = work / "diffusion.pt", stages, prefix
        model, self.tokenizer = start(source)
        self.state = {"stage": 0, "step": 0, "tokens": 0, "seconds": 0.0}
        saved = torch.load(self.file, weights_only=True) if self.file.exists() else None
        if saved is not None:
            self.state = saved["state"]
            model = deepen(model, 1 + max(int(x.split(".")[2]) for x in saved["model"] if ".layers." in x))
            model.load_state_dict(saved["model"])
        self.teacher = start(source)[0] if prefix else None
        if self.teacher is not None:
            self.teacher.set_attn_implementation("training-everywhere")
        self.take(model)
        if saved is not None:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    def take(self, model: Qwen3ForCausalLM) -> None:
        """Train this model from now on, with new optimizers."""
        self.model = model
        model.set_attn_implementation("sdpa" if self.prefix else "training-everywhere")
        self.body = torch.compile(model.model, dynamic=False)
        self.optimizers = make_optimizers(model)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        part = self.file.with_suffix(".part")
        optimizers = [x.state_dict() for x in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers, "state": self.state}, part)
        part.replace(self.file)

    def step(self, stage: Stage, made: list[Batch]) -> tuple[float, list[tuple[int, float]]]:
        """One update; the loss, and for each row its task and the share of masked tokens that came out right."""
        done = self.state["step"]
        rate = min(1.0, (done + 1) / 50) * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done / stage.steps)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        total, seen = 0.0, []
        for ids, labels, weights, kinds, filler, response in made:
            keep = labels != IGNORED
            mask = (response[:, None, :, None] | ~response[:, None, None]) if self.prefix else None  # [B, 1, T, T]
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                logits = self.model.lm_head(hidden[keep])
                target = self.find_targets(ids, labels, keep)
            loss = cross_entropy(logits.float(), target, reduction="none") @ weights[keep].float() / len(ids)
            (loss / len(made)).backward()
            total += loss.item() / len(made)
            right = torch.zeros(labels.shape, dtype=torch.bool)
            right[keep] = logits.argmax(-1) == labels[keep]
            hits = [hit[said].float() for hit, said in zip(right, keep & ~filler, strict=True)]
            seen += [(kind, float(hit.mean())) for kind, hit in zip(kinds, hits, strict=True) if len(hit)]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return total, seen

    @torch.no_grad()
    def find_targets(self, ids: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """The tokens behind the masks, or the distributions that the teacher predicts for them."""
        if self.teacher is None:
            return labels[keep]
        hidden = self.teacher.model(input_ids=ids, use_cache=False).last_hidden_state
        return self.teacher.lm_head(hidden[keep]).float().softmax(-1)

    def run(self, stage: Stage) -> None:
        """Train to the end of the stage, from wherever the checkpoint stands."""
        if stage.layers > self.model.config.num_hidden_layers:
            self.take(deepen(self.model, stage.layers))
        recent: deque[tuple[float, list[tuple[int, float]]]] = deque(maxlen=100)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(batches, stage, self.state["step"], self.tokenizer)
            while self.state["step"] < stage.steps:
                began = time.perf_counter()
                made = coming.result()
                coming = pool.submit(batches, stage, self.state["step"] + 1, self.tokenizer)
                recent.append(self.step(stage, made))
                self.state["step"] += 1
                self.state["tokens"] += sum(x[0].numel() for x in made)
                self.state["seconds"] += time.perf_counter() - began
                if self.state["step"] % 50 == 0:
                    self.save()
                    loss = np.mean([x for x, _ in recent])
                    by_kind = {
                        task.name: round(float(np.mean(hits)), 2) for index, task in enumerate(TASKS)
                        if (hits := [hit for _, seen in recent for kind, hit in seen if kind == index])
                    }
                    print(
                        f"{stage.name} {self.state['step']}/{stage.steps} loss {loss:.3f} "
                        f"{self.state['tokens'] / 1e6:.1f}M tokens {self.state['seconds'] / 60:.1f} min {by_kind}",
                        flush=True,
                    )
        torch.save(self.model.state_dict(), self.ending(stage))
        self.state["stage"] += 1
        self.state["step"] = 0
        self.save()

    def ending(self, stage: Stage) -> Path:
        """Where the weights lie that a stage ended with."""
        return self.file.with_name(f"diffusion-{stage.name}.pt")

    def export(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format: the mean of the last two stages' weights, in bfloat16."""
        ends = [torch.load(self.ending(stage), weights_only=True) for stage in self.stages[-2:]]
        self.model.load_state_dict({name: sum(x[name] for x in ends) / len(ends) for name in ends[0]})
        self.model.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=False)
        self.model.set_attn_implementation("sdpa")
        self.model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        self.tokenizer.save_pretrained(folder)
        path = folder / "config.json"
        document = json.loads(path.read_text())
        document["diffusion"] = {
            "mask_token_id": MASK_ID, "shifted_head": False, "tokens_per_step": TOKENS_PER_STEP,
            **({"attention": "prefix"} if self.prefix else {}),
        }
        path.write_text(json.dumps(document, indent=2) + "\n")


def train(work: Path, source: Path, out: Path, *, prefix: bool = False) -> dict[str, object]:
    """Train the stages that are left and export; what the gate's report says of the training."""
    trainer = Trainer(work, source, PREFIX_STAGES if prefix else STAGES, prefix=prefix)
    while trainer.state["stage"] < len(trainer.stages):
        trainer.run(trainer.stages[int(trainer.state["stage"])])
    trainer.export(out)
    return {"tokens": trainer.state["tokens"], "minutes": round(trainer.state["seconds"] / 60, 1)}


def gate(folder: Path, samples: int) -> list[dict[str, object]]:
    """Mean scores without a cache, as `kvbench run --method none` fills answers in: test split, seed 0."""
    model = load_model(str(folder))
    rows: list[dict[str, object]] = []
    for task, length in GATED:
        scores = []
        for example in task.examples(
            seed=0, split=Split.TEST, n=samples, length=length, turns=1, mode=Mode.SINGLE, tokenizer=model.tokenizer
        ):
            encoded, turn = encode(task, example, model.tokenizer), example.turns[0]
            prompt = [*encoded.context, *encoded.turns[0].first]
            at_once = min(TOKENS_PER_STEP, task.tokens_per_step or TOKENS_PER_STEP)
            sampling = Sampling(steps=math.ceil(turn.max_new_tokens / at_once), block=turn.max_new_tokens)
            ids = denoise(model, NoCache(), prompt, turn.max_new_tokens, sampling).ids[0]
            answer = ids[: ids.index(EOS)] if EOS in ids else ids
            text = str(model.tokenizer.decode(answer, skip_special_tokens=True))
            scores.append(task.scorers[0](text, turn.references, example.facts))
        rows.append({"task": task.name, "length": length, "samples": samples, "score": round(fmean(scores), 4)})
        print(rows[-1], flush=True)
    return rows
