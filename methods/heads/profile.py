"""Head profiles: how far each KV head looks for what it has read before, measured on a model and kept on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.kernels.dense_attention.torch import visible_entries
from kvbench.log import say
from kvbench.method import Method, Moment, Step
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model

COPIES = 4
TOKENS = 2500
"""Random tokens of one copy in RazorAttention's paper. Shorter copies come in more probes, until they are as many."""
SHORT_TOKENS = 64
"""Of one copy, on models that do not take the paper's; the literature on induction heads takes 25 to 50."""
CHUNK = 1024
"""Tokens per forward pass, over all probes."""
BLOCK_ELEMENTS = 1 << 22
"""Logits held at a time."""
Scores = tuple[tuple[float, ...], ...]
"""By layer and KV head."""


class HeadProfile(BaseModel):
    """What a head's queries give, of all their attention, to places where their own token stood before.

    Random tokens come in copies. Echo is the attention to the same token in earlier copies, induction to the token
    that followed it there; both are means over the queries of all copies but the first, and of the query heads of a
    KV head the greatest. A perfect induction head has induction 1 and echo 0. (RazorAttention, section 3.3.)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    model_sha256: str
    tokenizer_sha256: str
    """Says which tokens are special, and so in no probe."""
    dtype: str
    tokens: int
    """Random tokens of one copy, no two of them equal."""
    code_sha256: str
    """Of this module: a profile that other code has made is not used."""
    echo: Scores
    induction: Scores


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache; every query that could look into an earlier copy leaves its echo and induction behind."""

    period: int = 2
    """Tokens of one copy."""
    first: int = 0
    """Entry of the first copy's first token."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        for name, mass in zip(("echo", "induction"), look_back(kv, step, self.period, self.first), strict=True):
            kv.state[name] = kv.state[name] + mass if name in kv.state else mass
        return kv.attend(step)


def look_back(kv: LayerKV, step: Step, period: int, first: int) -> tuple[Tensor, Tensor]:
    """Attention of the step's queries to the same token in earlier copies, and to the token after it.

    Sums over queries and batch. [H_q] float64 each. Blocks of queries, so that no T x T matrix is ever held.
    """
    batch, heads, count, _ = step.query.shape
    keys = kv.keys
    kv_heads, n_key = keys.shape[1:3]
    before = step.seen - count
    gone = step.seen - n_key  # entries that a sliding window has left behind
    sums = torch.zeros(2, heads, dtype=torch.float64, device=keys.device)
    distances = period * torch.arange(1, COPIES, device=keys.device)
    size = max(1, BLOCK_ELEMENTS // (batch * heads * n_key))
    for start in range(max(0, first + period - before), count, size):
        stop = min(start + size, count)
        query = step.query[:, :, start:stop].unflatten(1, (kv_heads, -1))  # [B, H_kv, G, t, D]
        logits = (query @ keys[:, :, None].transpose(-1, -2)).float() * step.scale
        if step.softcap is not None:
            logits = step.softcap * torch.tanh(logits / step.softcap)
        mask = visible_entries(before + start - gone, stop - start, n_key, step.window, None, 0, keys.device)
        logits = logits.masked_fill(~mask, -torch.inf)
        total = logits.logsumexp(-1)
        if step.sinks is not None:
            total = torch.logaddexp(total, step.sinks.float().view(1, kv_heads, -1, 1))
        weights = torch.exp(logits - total[..., None]).flatten(1, 2)  # [B, H_q, t, n]
        places = torch.arange(before + start, before + stop, device=keys.device)[:, None] - distances  # [t, copies - 1]
        for offset in (0, 1):
            there = (places >= first) & (places + offset >= gone)
            rows = (places + offset - gone).where(there, 0)
            found = weights.gather(-1, rows.expand(batch, heads, -1, -1)).double() * there
            sums[offset] += found.sum((0, 2, 3))
    return sums[0], sums[1]


def find_profile(model: Model, tokens: int | None = None) -> HeadProfile:
    """The model's profile: from the disk, or measured and kept there.

    tokens: of one copy; None: the paper's number, or SHORT_TOKENS where the model has not so many positions or tokens.

    Raises:
        UserError: more tokens than the model takes, or a file that was made for another model.
    """
    tokens = _probe_length(model, tokens)
    path = _place(model, tokens)
    found = _read(path, model, tokens)
    if found is None:
        started = time.perf_counter()
        found = measure(model, tokens)
        kept = _write(path, found)
        say(
            f"head profile of {model.id} (probes: {_probes(tokens)}, each {COPIES} copies of {tokens} random tokens): "
            f"{time.perf_counter() - started:.1f} s; {kept}."
        )
    return found


def measure(model: Model, tokens: int) -> HeadProfile:
    """Run the probes, as one batch, and take the scores."""
    ids = probe_ids(model, tokens).to(model.device)
    first = ids.shape[1] - COPIES * tokens
    with Session(model, Recorder(period=tokens, first=first), capacity=ids.shape[1]) as session:
        for chunk in ids.split(max(1, CHUNK // len(ids)), dim=1):
            session.forward(chunk, Moment.CONTEXT_CHUNK)
        queries = len(ids) * (COPIES - 1) * tokens
        found = {
            name: tuple(
                tuple((store.state[name].view(layer.kv_heads, -1).amax(1) / queries).tolist())
                for store, layer in zip(session.layers, model.layers, strict=True)
            )
            for name in ("echo", "induction")
        }
    return HeadProfile(
        model_sha256=model.sha256, tokenizer_sha256=model.tokenizer_sha256, dtype=model.dtype, tokens=tokens,
        code_sha256=_code(), echo=found["echo"], induction=found["induction"],
    )


def probe_ids(model: Model, tokens: int) -> Tensor:
    """Probes: the beginning-of-sequence token, where there is one, and copies of unlike random tokens. [probes, T]"""
    plain, generator = torch.tensor(_plain_ids(model)), torch.Generator().manual_seed(0)
    chosen = [plain[torch.randperm(len(plain), generator=generator)[:tokens]] for _ in range(_probes(tokens))]
    copies = torch.stack(chosen).repeat(1, COPIES)
    start = model.tokenizer.bos_token_id
    return copies if start is None else torch.cat([torch.full_like(copies[:, :1], int(start)), copies], dim=1)


def _probes(tokens: int) -> int:
    return math.ceil(TOKENS / tokens)


def _plain_ids(model: Model) -> list[int]:
    special = set(model.tokenizer.all_special_ids)
    embedded = model.module.get_input_embeddings().weight
    assert isinstance(embedded, Tensor)
    return [x for x in range(min(len(model.tokenizer), embedded.shape[0])) if x not in special]


def _probe_length(model: Model, tokens: int | None) -> int:
    """Tokens of a copy as asked for, or the paper's, or SHORT_TOKENS."""
    most = min((model.max_length - 1) // COPIES, len(_plain_ids(model)))
    if most < 2:
        raise UserError(
            f"{model.id} takes {model.max_length} positions and has {len(_plain_ids(model))} tokens to choose from: "
            f"no room for a head profile, {COPIES} copies of 2 random tokens or more. Use a method without one."
        )
    if tokens is not None and tokens > most:
        raise UserError(
            f"probe={tokens} is too long for {model.id}: {COPIES} copies of unlike tokens fit its {model.max_length} "
            f"positions and its vocabulary with {most} tokens at most. Use --set probe={most} or leave it out."
        )
    if tokens is None:
        return TOKENS if most >= TOKENS else min(SHORT_TOKENS, most)
    return tokens


# On the disk


def _code() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _place(model: Model, tokens: int) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hashes = f"{model.sha256[:24]}-{model.tokenizer_sha256[:8]}"
    return cache / "kvbench" / "profiles" / f"{hashes}-{model.dtype}-{tokens}-{_code()[:8]}.json"


def _read(path: Path, model: Model, tokens: int) -> HeadProfile | None:
    """The profile in a file; None, and said, if it is broken."""
    if not path.exists():
        return None
    try:
        found = HeadProfile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no valid head profile"
        say(f"{path}: {reason}; it is measured again.")
        return None
    if found.model_sha256 != model.sha256:
        raise UserError(
            f"{path} was made for another model ({found.model_sha256[:12]}, and {model.id} is {model.sha256[:12]}). "
            "Remove the file: the profile is measured again."
        )
    shape = [x.kv_heads for x in model.layers]
    wanted = (model.tokenizer_sha256, model.dtype, tokens, _code(), shape, shape)
    shapes = map(_shape, (found.echo, found.induction))
    if (found.tokenizer_sha256, found.dtype, found.tokens, found.code_sha256, *shapes) != wanted:
        say(f"{path}: does not say what its name says; it is measured again.")
        return None
    return found


def _shape(scores: Sequence[Sequence[float]]) -> list[int]:
    return [len(x) for x in scores]


def _write(path: Path, profile: HeadProfile) -> str:
    """Keep a profile, whole or not at all, and say where; processes that measured the same write the same."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(profile.model_dump_json(indent=1))
        part.replace(path)
    except OSError as error:  # only a memory of work done
        with contextlib.suppress(OSError):
            part.unlink()
        return f"not kept ({path}: {error.strerror})"
    return f"kept in {path}"
