"""Train the bundled model `mini` on the tasks' own text, gate it, and write it to kvbench/models/mini.

    python scripts/train_mini.py --work /tmp/mini      # continues from the last checkpoint to the end
    python scripts/train_mini.py --kind diffusion --work /tmp/mini-diffusion      # from mini's weights (mini_diffusion)
    python scripts/train_mini.py --kind prefix --work /tmp/mini-prefix      # from mini-diffusion's (mini_diffusion)
    python scripts/train_mini.py --kind hybrid --work /tmp/mini-hybrid      # from mini's weights (mini_hybrid)

A small transformer learns to recall in a curriculum: copying segments of random tokens (where induction heads appear,
after a plateau), then keys next to values, needle sentences and ever longer questions in short contexts, then spread
positions, then real lengths at falling rates. Between copying and recall it grows a first layer whose heads look at
the last few tokens (`mini_local`). Every batch is a function of (stage, step), so a stopped run continues
exactly; the seeds are separate from those of the tasks' dev and test splits.

It runs on CPU in about two hours (OMP_NUM_THREADS says on how many threads) and needs a C++ compiler for torch.compile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mini_diffusion
import mini_hybrid
import numpy as np
import torch
from mini_attention import attend
from mini_gate import gate
from mini_local import with_local_layer
from mini_optimizers import make_optimizers
from mini_text import EOS, EVERY, LAST, SHARP, VOCABULARY, Batch, Batches, Stage, train_tokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

STAGES = (
    Stage("copy", 3000, ((64, 32),), layers=4, pool=512),
    Stage("copy-all", 300, ((64, 32),), layers=4, pool=VOCABULARY),
    Stage("recall", 350, ((192, 16),), bare=0.8),
    Stage("spread", 1500, ((256, 12),), bare=0.6, spread=0.3, enough=0.97),
    Stage("512", 800, ((384, 8), (512, 6)), rate=(1.5e-3, 1e-3), bare=0.2, spread=0.2, enough=0.96),
    Stage("1024", 500, ((512, 8), (1152, 4)), rate=(1.2e-3, 8e-4), bare=0.1, spread=0.2, enough=0.975),
    Stage("2048", 800, ((512, 8), (1152, 4), (2304, 2)), rate=(8e-4, 5e-5), spread=0.1, enough=2.0),
    Stage("near", 500, ((512, 8), (512, 8), (1152, 4), (2304, 2)), rate=(6e-4, 2e-5), enough=2.0),
    Stage("every", 1100, ((1152, 4), (2304, 2)), rate=(2e-3, 1e-3), spread=0.2, mix=EVERY, enough=2.0),
    Stage("long", 1000, ((1152, 4), (2304, 2), (2304, 2), (4352, 1)), rate=(1e-3, 3.2e-4), mix=EVERY, enough=2.0),
    Stage("last", 560, ((1152, 4), *((2304, 2),) * 3, (4352, 1)), rate=(4.3e-4, 1e-5), mix=LAST, enough=2.0),
    Stage("sharp", 420, ((2304, 2),), rate=(3e-4, 1e-5), mix=SHARP, enough=2.0),
)


MODELS = Path(__file__).parents[1] / "kvbench" / "models"
AttentionInterface.register("training", attend)


def new_model(layers: int) -> Qwen3ForCausalLM:
    """Qwen3's shape: layers of width 256 with 4 query and 2 KV heads of 64; 4.0 million parameters at 5 layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
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
    starts = [0, *(end + 1 for end in ends)]
    return [bool(right[start : end + 1].all()) for start, end in zip(starts, ends, strict=False)]


def shares(labels: torch.Tensor) -> torch.Tensor:
    """How much each token counts: a long answer more than a short one, but only by the root of its length."""
    ends = (labels == EOS).int()
    answers = ends.cumsum(0) - ends
    weights = answers.bincount()[answers].float().rsqrt()
    return weights / weights.sum()


class Trainer:
    """A model on its way through the stages, with everything needed to go on after a stop."""

    def __init__(
        self, work: Path, tokenizer: PreTrainedTokenizerBase, stages: Sequence[Stage],
        make: Callable[[int], PreTrainedModel],
    ) -> None:
        self.file = work / "checkpoint.pt"
        self.batches, self.stages, self.make = Batches(tokenizer), stages, make
        self.state = {"stage": 0, "step": 0, "tokens": 0, "seconds": 0.0, "layers": stages[0].layers}
        saved = torch.load(self.file, weights_only=True) if self.file.exists() else None
        if saved:
            self.state = saved["state"]
        self.take(make(int(self.state["layers"])))
        if saved:
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    def take(self, model: PreTrainedModel) -> None:
        """Train this model from now on, with new optimizers."""
        self.model = model
        model.set_attn_implementation("training")
        self.body = torch.compile(model.model, dynamic=False)
        self.optimizers = make_optimizers(model)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        part = self.file.with_suffix(".part")
        optimizers = [x.state_dict() for x in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers, "state": self.state}, part)
        part.replace(self.file)

    def step(self, stage: Stage, batch: Batch) -> tuple[float, list[tuple[str, bool]]]:
        """One update; the loss and whether each answer (copying: each token) was right, with the kind of its row."""
        ids, labels, positions, kinds = batch
        done = self.state["step"]
        warm = min(1.0, (done + 1) / 50)
        rate = warm * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done / stage.steps)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        keep = labels.flatten() >= 0
        target = labels.flatten()[keep]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[keep])
        loss = cross_entropy(logits.float(), target, reduction="none") @ shares(target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        right = torch.zeros(labels.numel(), dtype=torch.bool)
        right[keep] = logits.argmax(-1) == target
        answers = []
        for kind, row, hit in zip(kinds, labels, right.view_as(labels), strict=True):
            hits = hit[row >= 0]
            answers += [(kind, one) for one in (hits.tolist() if stage.pool else whole(hits, row[row >= 0]))]
        return loss.item(), answers

    def run(self, stage: Stage) -> None:
        """Train to the end of the stage, from wherever the checkpoint stands."""
        if self.state["layers"] < stage.layers:
            text = torch.cat([self.batches.batch(stage, step)[0].flatten() for step in range(4)])
            self.take(with_local_layer(self.model, new_model(stage.layers), text))
            self.state["layers"] = stage.layers
        recent: deque[tuple[float, list[tuple[str, bool]]]] = deque(maxlen=50)
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
                    loss, share = np.mean([loss for loss, _ in recent]), np.mean([hit for _, hit in answers])
                    by_kind = {
                        name: round(float(np.mean([hit for kind, hit in answers if kind == name])), 3)
                        for name in sorted({kind for kind, _ in answers})
                    }
                    print(
                        f"{stage.name} {self.state['step']}/{stage.steps} loss {loss:.3f} right {share:.3f} "
                        f"{self.state['tokens'] / 1e6:.1f}M tokens {self.state['seconds'] / 60:.1f} min {by_kind}",
                        flush=True,
                    )
                    if share >= stage.enough:
                        break
        if 0 < stage.pool < VOCABULARY:
            self.redraw(stage.pool)
        torch.save(self.model.state_dict(), self.file.with_name(f"{stage.name}.pt"))
        self.state["stage"] += 1
        self.state["step"] = 0
        self.save()

    @torch.no_grad()
    def redraw(self, pool: int) -> None:
        """Draw the embeddings outside the pool anew, with the mean and covariance of those inside.

        With tied embeddings, ids that were never a target are all pushed the same way by the softmax until they can no
        longer be told apart; drawn anew, they are copied almost as well as the trained ones, without any training.
        """
        table = self.model.model.embed_tokens.weight
        inside = table[1:pool]
        factor = torch.linalg.cholesky(torch.cov(inside.T) + 1e-6 * torch.eye(inside.shape[1]))
        drawn = torch.randn(VOCABULARY, inside.shape[1], generator=torch.Generator().manual_seed(1)) @ factor.T
        outside = torch.ones(VOCABULARY, dtype=torch.bool)
        outside[1:pool] = False
        table[outside] = inside.mean(0) + drawn[outside]


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face format: the mean of the last two stages' weights, in bfloat16."""
    done = trainer.stages[: int(trainer.state["stage"])][-2:]
    saved = [torch.load(trainer.file.with_name(f"{stage.name}.pt"), weights_only=True) for stage in done]
    shipped = trainer.make(int(trainer.state["layers"]))
    shipped.load_state_dict({name: sum(x[name] for x in saved) / len(saved) for name in saved[0]})
    shipped.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=False)
    shipped.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make the tokenizer where there is none, train the stages that are left, export, gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of tokenizer and checkpoint")
    kinds = ["mini", "diffusion", "prefix", "hybrid"]
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help="what to train")
    parser.add_argument("--out", type=Path, help="where it goes; default: among the bundled models")
    parser.add_argument("--stages", type=int, default=100, help="stop after this many stages")
    parser.add_argument("--samples", type=int, default=100, help="samples of each gate measurement")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.kind in ("diffusion", "prefix"):
        prefix = options.kind == "prefix"
        out = options.out or MODELS / ("mini-diffusion-prefix" if prefix else "mini-diffusion")
        source = MODELS / ("mini-diffusion" if prefix else "mini")
        report = mini_diffusion.train(options.work, source, out, prefix=prefix)
        report |= {
            "rows": mini_diffusion.gate(out, options.samples), "split": "test", "seed": 0, "dtype": "bfloat16",
            "script": f"scripts/train_mini.py --kind {options.kind}",
            "device": f"CPU, {torch.get_num_threads()} threads",
        }
        (out / "gate.json").write_text(json.dumps(report, indent=2) + "\n")
        return
    mini, hybrid = MODELS / "mini", options.kind == "hybrid"
    options.out = options.out or (MODELS / "mini-hybrid" if hybrid else mini)
    if not hybrid and not (options.work / "tokenizer" / "tokenizer.json").exists():
        train_tokenizer(options.work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(mini if hybrid else options.work / "tokenizer")
    stages, make = (mini_hybrid.STAGES, lambda _: mini_hybrid.from_mini(mini)) if hybrid else (STAGES, new_model)
    trainer = Trainer(options.work, tokenizer, stages, make)
    while trainer.state["stage"] < min(options.stages, len(stages)):
        trainer.run(stages[int(trainer.state["stage"])])
    export(trainer, tokenizer, options.out)
    report = {
        "rows": gate(options.out, options.samples),
        "split": "test",
        "seed": 0,
        "dtype": "bfloat16",
        "script": "scripts/train_mini.py" + " --kind hybrid" * hybrid,
        "gate": "scripts/mini_gate.py",
        "train_seed": "mini/train/<stage>/<step>",
        "tokens": trainer.state["tokens"],
        "minutes": round(trainer.state["seconds"] / 60, 1),
        "device": f"CPU, {torch.get_num_threads()} threads",
    }
    (options.out / "gate.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
