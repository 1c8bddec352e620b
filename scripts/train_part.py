"""Train the small networks that methods need on `mini`, on text of the tasks' own generators, and ship their weights.

    nice python scripts/train_part.py longspec --work /tmp/longspec      # continues from the last checkpoint
    nice python scripts/train_part.py locret --work /tmp/locret

A part is written to kvbench/models/parts. Its batches are a function of the step, with seeds of their own, so a stopped
run continues with the same batches; examples of the tasks' dev and test splits have other seeds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from mini_text import MULTIKEY_1, SHORT, SINGLE_1, Batches, Stage

from kvbench.hf import Model, load_model
from kvbench.methods.eviction import retaining
from kvbench.methods.eviction.locret import HIDDEN
from kvbench.methods.lossless import drafter as longspec
from kvbench.methods.lossless.longspec import LongSpec
from kvbench.runs.results import TASKS
from kvbench.tasks.growth import lists
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench import kv
from kvbench.techniques.parts import SHIPPED, write_part

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
SINKS, FARTHEST = 4, 4096
"""Tokens that keep their positions, and the farthest position of a shifted text."""


class Run:
    """A training run with its checkpoint."""

    def __init__(self, work: Path, steps: int, shown: str) -> None:
        self.file, self.steps, self.shown = work / "checkpoint.pt", steps, shown
        self.saved = torch.load(self.file, weights_only=True) if self.file.exists() else None
        self.done = int(self.saved["step"]) if self.saved else 0
        self.seconds = float(self.saved["seconds"]) if self.saved else 0.0
        self.recent: deque[float] = deque(maxlen=50)
        self.last = time.process_time()

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
    stage = Stage("longspec", run.steps, SHAPES, mix=LONG)
    texts = Batches(model.tokenizer)

    def draw(step: int) -> longspec.Batch:
        ids, labels, positions, _ = texts.batch(stage, step)
        shift = random.Random(f"longspec/offset/{step}").randrange(FARTHEST - ids.shape[1])
        return ids, labels >= 0, positions + shift * (positions >= SINKS)

    return longspec.train(model, LongSpec.window, run.steps, draw, READS, run.keep, run.done, run.resume)


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
        model, retaining.collect(model, draw_texts(model, TEXTS, "train")), HIDDEN, run.steps,
        run.keep, run.done, run.resume,
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


TRAINERS = {"longspec": (train_longspec, 200, "predicted"), "locret": (train_locret, 4000, "loss")}
"""The training of each part, its steps, and its report."""


def main() -> None:
    """Train the part that is asked for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=TRAINERS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--steps", type=int, help="default: as for the shipped weights")
    parser.add_argument("--out", type=Path, help="file to write; default: among the shipped parts")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    train, steps, shown = TRAINERS[options.part]
    model, run = load_model(options.model), Run(options.work, options.steps or steps, shown)
    weights = train(model, run)
    write_part(
        options.out or SHIPPED / f"{options.part}-{model.id}.safetensors", options.part, model,
        {name: x.to(torch.bfloat16) for name, x in weights.items()}, TASKS, steps=run.steps,
        minutes=round(run.seconds / 60, 1), **({"reads": READS} if options.part == "longspec" else {}),
    )


if __name__ == "__main__":
    main()
