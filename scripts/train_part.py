"""Train the small networks that methods need on `mini`, on text of the tasks' own generators, and ship their weights.

    nice python scripts/train_part.py longspec --work /tmp/longspec      # continues from the last checkpoint
    nice python scripts/train_part.py locret --work /tmp/locret
    nice python scripts/train_part.py reasoncache --work /tmp/reasoncache
    nice python scripts/train_part.py flux-attention --work /tmp/flux
    nice python scripts/train_part.py ftp --work /tmp/ftp
    nice python scripts/train_part.py seerattention --work /tmp/seer
    nice python scripts/train_part.py nosa --work /tmp/nosa

A part is written to kvbench/models/parts. Its batches are a function of the step, with seeds of their own, so a stopped
run continues with the same batches; examples of the tasks' dev and test splits have other seeds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from mini_text import MULTIKEY_1, SHORT, SINGLE_1, Batches, Stage
from part_texts import Text, draw_asked, draw_batch, draw_formatted, draw_routed, draw_skipped
from torch.nn.functional import cross_entropy

from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.methods.eviction import retaining
from kvbench.methods.eviction.locret import HIDDEN
from kvbench.methods.lossless import drafter as longspec
from kvbench.methods.lossless.longspec import LongSpec
from kvbench.methods.prefill import attention_gate, router, token_router
from kvbench.methods.prefill.flux_attention import FluxAttention
from kvbench.methods.retrieval import value_gate
from kvbench.methods.retrieval.nosa import Nosa
from kvbench.methods.reuse import trained_prefix
from kvbench.methods.reuse.reasoncache import ReasonCache
from kvbench.runs.results import TASKS
from kvbench.tasks.growth import lists
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench import kv
from kvbench.techniques.parts import SHIPPED, write_part
from kvbench.techniques.training import TrainingProgress

LONG = (
    *((SHORT, 3.0), (kv.KeyValueUuid(), 2.0), (SINGLE_1, 1.0), (MULTIKEY_1, 2.0), (niah.NiahSingle3(), 1.0)),
    (lists.ListCopy(), 4.0),
)
"""Tasks whose answers mini knows, and their shares; lists have long answers."""
SHAPES = ((256, 6), (384, 4), (640, 2))
TEXTS = 96
"""Texts that the retaining heads are trained on."""
READS = 2
"""The layer of mini that the drafter reads: over the last one it learned next to nothing."""
GATE_BLOCKS = (16, 32, 64)
"""Tokens of the blocks whose attention the gates predict."""
SINKS, FARTHEST = 4, 4096
"""Tokens that keep their positions, and the farthest position of a shifted text."""
SCHEDULE_TEXTS = 8
"""Texts on which the layers' shares of skipped tokens are measured."""
READ_SHARE = 0.2
"""Share of a context's blocks that are read."""
SPARSITY = 0.9
"""Share of sparse layers: one of mini's five layers finds keys, and no layer where the answer is recent."""


class Run:
    """A training run with its checkpoint."""

    def __init__(self, work: Path, steps: int, shown: str) -> None:
        self.file, self.steps, self.shown = work / "checkpoint.pt", steps, shown
        self.saved = torch.load(self.file, weights_only=True) if self.file.exists() else None
        self.done = int(self.saved["step"]) if self.saved else 0
        self.seconds = float(self.saved["seconds"]) if self.saved else 0.0
        self.recent: deque[float] = deque(maxlen=50)
        self.last = time.process_time()
        self.facts: dict[str, object] = {}
        """Facts of the training for the file."""

    @property
    def progress(self) -> TrainingProgress:
        """The run, as a training takes it."""
        return TrainingProgress(self.done, self.resume, self.keep)

    def resume(self, part: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Restore the checkpoint, if there is one."""
        if self.saved:
            part.load_state_dict(self.saved["part"])
            optimizer.load_state_dict(self.saved["optimizer"])

    def keep(self, part: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, share: float) -> None:
        """Report, and write a checkpoint now and then."""
        self.recent.append(share)
        now = time.process_time()
        self.seconds, self.last = self.seconds + now - self.last, now
        if (step + 1) % 25 == 0 or step + 1 == self.steps:
            state = {
                "part": part.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1,
                "seconds": self.seconds,
            }
            torch.save(state, self.file.with_suffix(".part"))
            self.file.with_suffix(".part").replace(self.file)
            minutes = self.seconds / 60
            print(f"{step + 1}/{self.steps} {self.shown} {fmean(self.recent):.3f}, {minutes:.1f} min", flush=True)


def train_longspec(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The drafter, on answers of the tasks at shifted positions."""
    run.facts["reads"] = READS
    stage = Stage("longspec", run.steps, SHAPES, mix=LONG)
    texts = Batches(model.tokenizer)

    def draw(step: int) -> longspec.Batch:
        ids, labels, positions, _ = texts.batch(stage, step)
        shift = random.Random(f"longspec/offset/{step}").randrange(FARTHEST - ids.shape[1])
        return ids, labels >= 0, positions + shift * (positions >= SINKS)

    return longspec.train(model, LongSpec.window, run.steps, draw, READS, run.progress)


def draw_texts(model: Model, count: int, kind: str) -> Iterator[retaining.Text]:
    """Questions with their answers after their contexts, one text each; the last answer counts."""
    stage, texts = Stage(f"locret-{kind}", count, ((640, 1), (1152, 1)), mix=LONG), Batches(model.tokenizer)
    for step in range(count):
        ids, labels, _, _ = texts.batch(stage, step)
        places = (labels[0] >= 0).nonzero()[:, 0].tolist()
        first = next(x for x in reversed(places) if x - 1 not in places)
        yield ids[:, : places[-1] + 1], first


def train_locret(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The retaining heads; prints how well they rank the entries of texts that they have not seen."""
    weights = retaining.train(
        model, retaining.collect(model, draw_texts(model, TEXTS, "train")), HIDDEN, run.steps, run.progress
    )
    heads = retaining.make_heads(model, HIDDEN)
    heads.load_state_dict(dict(weights))
    held = retaining.collect(model, draw_texts(model, 10, "held"))
    found = [
        retaining.rank_correlation(head(inputs)[:, h], wanted[:, h])
        for head, some in zip(heads, held, strict=True) for inputs, wanted in some for h in range(wanted.shape[1])
    ]
    print(f"rank correlation with the targets of 10 other texts: {fmean(found):.3f}", flush=True)
    return dict(weights)


def train_flux(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The routers; prints how many layers are sparse for prompts of each sort that they have not seen."""
    run.facts["sparsity"] = SPARSITY
    blocks = partial(FluxAttention().blocks_of, model)
    weights = router.train(
        model, run.steps, SPARSITY, blocks, lambda step: draw_routed(model, "train", step), run.progress
    )
    routers = router.make_routers(model)
    routers.load_state_dict(weights)
    for sort in range(2):
        found = [
            torch.stack(list(router.run_gated(
                model, draw_routed(model, "held", step)[sort], blocks,
                lambda layer, pooled: router.opens(routers[str(layer)], pooled).float(),
            )[1].values()))[:, 0]
            for step in range(20)
        ]
        print(f"{('retrieval', 'recent')[sort]}: share of prompts with every entry, by layer: "
              f"{torch.stack(found).mean(0).tolist()}", flush=True)
    return weights


def measure_skips(model: Model, text: Text, kept: Sequence[int], gates: token_router.Gates) -> float:
    """Loss of a text's answer with skipped tokens."""
    ids, labels, prompt = text
    places = (labels[0] >= 0).nonzero()[:, 0]
    with torch.no_grad():
        logits, _ = token_router.run_gated(model, ids, places, prompt, kept, gates)
    return float(cross_entropy(logits[0], labels[0, places]))


def mark_highest(score: Callable[[torch.Tensor], torch.Tensor]) -> token_router.Gates:
    """Gates that keep the tokens with the highest scores."""
    def gates(_: int, features: torch.Tensor, count: int) -> torch.Tensor:
        scores = score(features)
        return torch.zeros_like(scores).scatter_(1, token_router.keep_highest(scores, count), 1.0)

    return gates


def find_schedule(model: Model) -> tuple[float, ...]:
    """How much each layer skips: the less, the more the answers lose if it alone skips a third, at random places."""
    layers, lost = len(model.layers), []
    texts = [draw_skipped(model, "schedule", step) for step in range(SCHEDULE_TEXTS)]
    noise = torch.Generator().manual_seed(0)
    gates = mark_highest(lambda features: torch.rand(features.shape[:2], generator=noise))
    for layer in range(layers):
        kept = [[text[2] * 2 // 3 if i == layer else text[2] for i in range(layers)] for text in texts]
        lost.append(fmean(measure_skips(model, text, some, gates) for text, some in zip(texts, kept, strict=True)))
    return tuple(round(min(lost) / x, 3) for x in lost)


def train_ftp(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The router; prints the loss of answers to prompts that it has not seen, and that of the router it imitates."""
    schedule = run.facts["schedule"] = find_schedule(model)
    print(f"schedule: {schedule}", flush=True)
    weights = token_router.train(
        model, run.steps, schedule, lambda step: draw_skipped(model, "train", step), run.progress
    )
    router = token_router.make_router()
    router.load_state_dict(weights)
    scores = {"trained": lambda features: router(features)[..., 0], "static": token_router.score_static}
    for skipped in token_router.SHARES:
        for name, score in scores.items():
            texts = [draw_skipped(model, "held", step) for step in range(20)]
            found = fmean(
                measure_skips(model, text, token_router.divide(
                    schedule, text[2], round((1 - skipped) * text[2] * len(schedule))
                ), mark_highest(score)) for text in texts
            )
            print(f"{skipped:.0%} skipped, {name} router: loss {found:.3f}", flush=True)
    return weights


def draw_prompts(model: Model, count: int, kind: str) -> Iterator[torch.Tensor]:
    """Prompts of the tasks, with questions and answers. Ids [1, T]"""
    stage, texts = Stage(f"seerattention-{kind}", count, ((640, 1), (1152, 1)), mix=LONG), Batches(model.tokenizer)
    return (texts.batch(stage, step)[0] for step in range(count))


def train_seerattention(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The gates; prints the divergence of trained and of untrained ones from the attention of other prompts."""
    examples = attention_gate.collect(model, draw_prompts(model, TEXTS, "train"), GATE_BLOCKS)
    weights = attention_gate.train(model, examples, run.steps, run.progress)
    held = attention_gate.collect(model, draw_prompts(model, 10, "held"), GATE_BLOCKS)
    gates = attention_gate.make_gates(model)
    for which, own in (("untrained", gates.state_dict()), ("trained", weights)):
        gates.load_state_dict(dict(own))
        found = [
            float(attention_gate.measure_divergence(gate, x, rope).detach())
            for gate, some, rope in zip(gates, held, model.ropes, strict=True) for x in some
        ]
        print(f"divergence of {which} gates on 10 other prompts: {fmean(found):.3f} nats", flush=True)
    return dict(weights)


def train_nosa(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The gates; prints the loss of answers to other prompts, for trained and untrained ones."""
    method = Nosa()
    divide = partial(method.divide_context, share=READ_SHARE)
    weights = value_gate.train(
        model, run.steps, method.block, divide, lambda step: draw_asked(model, "train", step), run.progress
    )
    gates = value_gate.make_gates(model)
    for which, own in (("untrained", gates.state_dict()), ("trained", weights)):
        gates.load_state_dict(dict(own))
        with torch.no_grad():
            found = fmean(float(value_gate.measure_loss(
                model, gates, draw_asked(model, "held", step), method.block, divide, hard=True
            )) for step in range(40))
        print(f"{which} gates: loss {found:.3f} on 40 other prompts", flush=True)
    return dict(weights)


def train_prefix(model: Model, run: Run) -> dict[str, torch.Tensor]:
    """The prefix, from a demonstration; prints how many answers to other questions are right as a whole."""
    demonstration = draw_formatted(random.Random("reasoncache/demonstration"), 3, model)[0]
    run.facts["demonstration"] = demonstration[0].tolist()
    weights = trained_prefix.train(
        model, ReasonCache.entries, run.steps, demonstration, lambda step: draw_batch(model, "train", step),
        run.progress,
    )
    prefix = trained_prefix.Prefix(model, ReasonCache.entries)
    for name in ("demonstration's entries", "trained"):
        if name == "trained":
            prefix.load_state_dict(weights)
        else:
            prefix.take(model, demonstration)
        right = []
        for step in range(6):
            ids, labels = draw_batch(model, "held", step)
            found = trained_prefix.predict(model, prefix, ids, torch.arange(ids.shape[1])).argmax(-1)
            right += ((found == labels) | (labels < 0)).all(1).tolist()
        print(f"{name}: {fmean(right):.3f} of {len(right)} answers right", flush=True)
    return weights


TRAINERS = {
    "longspec": (train_longspec, 200, "predicted"),
    "locret": (train_locret, 4000, "loss"),
    "flux-attention": (train_flux, 300, "loss"), "ftp": (train_ftp, 400, "distance"),
    "seerattention": (train_seerattention, 3000, "divergence"),
    "reasoncache": (train_prefix, 500, "loss"), "nosa": (train_nosa, 300, "loss"),
}
"""The training of each part, its steps, and its report."""
GRADIENTS = ("flux-attention", "ftp", "reasoncache", "nosa")
"""Parts whose training sends gradients through the model, which then is in float32."""


def main() -> None:
    """Train the part that is asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=TRAINERS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, help="default: as for the shipped weights")
    parser.add_argument("--out", type=Path, help="file to write; default: among the shipped parts")
    options = parser.parse_args()
    train, steps, shown = TRAINERS[options.part]
    try:
        model = load_model(options.model, dtype="float32" if options.part in GRADIENTS else None)
    except UserError as error:
        parser.error(str(error))
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(options.work, options.steps or steps, shown)
    weights = train(model, run)
    write_part(
        options.out or SHIPPED / f"{options.part}-{model.id}.safetensors", options.part, model,
        {name: x.to(torch.bfloat16) for name, x in weights.items()}, TASKS, steps=run.steps,
        minutes=round(run.seconds / 60, 1), **run.facts,
    )


if __name__ == "__main__":
    main()
