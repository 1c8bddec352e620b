"""Head profiles: attention of each KV head to earlier copies of the current token, measured and cached on disk."""

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
from kvbench.kernels.blocks import fit_block, float_products
from kvbench.kernels.dense_attention.torch import visible_entries
from kvbench.log import say
from kvbench.machine import cache_folder
from kvbench.method import Method, Moment, Step
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model

COPIES = 4
TOKENS = 2500
"""Random tokens per copy in RazorAttention's paper. With shorter copies there are more probes, for as many tokens."""
SHORT_TOKENS = 64
"""Random tokens per copy on models too small for the paper's; work on induction heads uses 25 to 50."""
PATIENCE = 30
"""Seconds between two lines of progress."""
CHUNK = 1024
"""Tokens per forward pass, over all probes."""
Scores = tuple[tuple[float, ...], ...]
"""Scores by layer and KV head."""


class HeadProfile(BaseModel):
    """Echo and induction scores of every KV head, measured on copies of random tokens.

    Echo is the share of attention to the same token in earlier copies, induction the share to the token after it
    there. Both are means over the queries of all copies but the first, and the maximum over the query heads of a KV
    head. A perfect induction head has induction 1 and echo 0. (RazorAttention, section 3.3.)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    model_sha256: str
    tokenizer_sha256: str
    """Determines the special tokens, which are in no probe."""
    dtype: str
    tokens: int
    """Random tokens per copy, all different."""
    code_sha256: str
    """Hash of this module: a profile from other code is not used."""
    echo: Scores
    induction: Scores


@dataclass(frozen=True)
class HeadRecorder(Method):
    """The full cache; records echo and induction of every query after the first copy."""

    period: int = 2
    """Tokens per copy."""
    first: int = 0
    """Position of the first copy's first token."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; adds echo and induction to the state. [B, H_q, T, D_v]"""
        for name, mass in zip(("echo", "induction"), look_back(kv, step, self.period, self.first), strict=True):
            kv.state[name] = kv.state[name] + mass if name in kv.state else mass
        return kv.attend(step)


def look_back(kv: LayerKV, step: Step, period: int, first: int) -> tuple[Tensor, Tensor]:
    """Attention of the step's queries to the same token in earlier copies, and to the token after it.

    Sums over queries and batch. [H_q] float64 each. Computed in blocks of queries, without a T x T matrix.
    """
    batch, heads, count, _ = step.query.shape
    keys = kv.keys
    kv_heads, n_key = keys.shape[1:3]
    before = step.seen - count
    gone = step.seen - n_key  # entries that a sliding window has left behind
    sums = torch.zeros(2, heads, dtype=torch.float64, device=keys.device)
    distances = period * torch.arange(1, COPIES, device=keys.device)
    size = fit_block(batch * heads * n_key, keys)
    for start in range(max(0, first + period - before), count, size):
        stop = min(start + size, count)
        query = step.query[:, :, start:stop].unflatten(1, (kv_heads, -1))  # [B, H_kv, G, t, D]
        logits = step.cap(float_products(query, keys[:, :, None]) * step.scale)
        mask = visible_entries(before + start - gone, stop - start, n_key, step.window, None, 0, keys.device)
        logits = logits.masked_fill(~mask, -torch.inf)
        total = logits.logsumexp(-1)
        if step.sinks is not None:
            total = torch.logaddexp(total, step.sinks.float().view(1, kv_heads, -1, 1))
        weights = torch.exp(logits - total[..., None]).flatten(1, 2)  # [B, H_q, t, n]
        places = torch.arange(before + start, before + stop, device=keys.device)[:, None] - distances  # [t, copies - 1]
        for offset in (0, 1):
            there = (places >= first) & (places + offset >= gone)
            entries = (places + offset - gone).where(there, 0)
            found = weights.gather(-1, entries.expand(batch, heads, -1, -1)).double() * there
            sums[offset] += found.sum((0, 2, 3))
    return sums[0], sums[1]


def find_profile(model: Model, tokens: int | None = None) -> HeadProfile:
    """Read the model's profile from disk, or measure and cache it.

    tokens: per copy; None: the paper's number, or SHORT_TOKENS if the model has too few positions or tokens.

    Raises:
        UserError: the model takes fewer tokens, or the file was made for another model.
    """
    tokens = _probe_length(model, tokens)
    path = _place(model, tokens)
    found = _read(path, model, tokens)
    if found is None:
        started = time.perf_counter()
        say(
            f"measuring the head profile of {model.id} (probes: {_probes(tokens)}, each {COPIES} copies of {tokens} "
            "random tokens) ..."
        )
        found = measure(model, tokens)
        say(f"head profile: {time.perf_counter() - started:.1f} s; {_write(path, found)}.")
    return found


def measure(model: Model, tokens: int) -> HeadProfile:
    """Run the probes as one batch and compute the scores."""
    ids = probe_ids(model, tokens).to(model.device)
    first = ids.shape[1] - COPIES * tokens
    with Session(model, HeadRecorder(period=tokens, first=first), capacity=ids.shape[1]) as session:
        chunks, said = ids.split(max(1, CHUNK // len(ids)), dim=1), time.perf_counter()
        for number, chunk in enumerate(chunks, 1):
            session.forward(chunk, Moment.CONTEXT_CHUNK)
            if time.perf_counter() - said > PATIENCE:
                said = time.perf_counter()
                say(f"head profile: {number} of {len(chunks)} chunks; later ones take longer")
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
    """Probes: the beginning-of-sequence token, if any, and copies of different random tokens. [probes, T]"""
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
    """Tokens per copy: as asked for, the paper's, or SHORT_TOKENS (`UserError` if there are too few positions)."""
    most = min((model.max_length - 1) // COPIES, len(_plain_ids(model)))
    if most < 2:
        raise UserError(
            f"{model.id} takes {model.max_length} positions and has {len(_plain_ids(model))} tokens to choose from: "
            f"too few for a head profile, {COPIES} copies of 2 random tokens or more. Use a method without one."
        )
    if tokens is not None and tokens > most:
        raise UserError(
            f"probe={tokens} is too long for {model.id}: {COPIES} copies of different tokens fit its "
            f"{model.max_length} positions and its vocabulary with {most} tokens at most. Use --set probe={most} or "
            "leave it out."
        )
    if tokens is None:
        return TOKENS if most >= TOKENS else min(SHORT_TOKENS, most)
    return tokens


# The cache on disk


def _code() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _place(model: Model, tokens: int) -> Path:
    hashes = f"{model.sha256[:24]}-{model.tokenizer_sha256[:8]}"
    return cache_folder() / "profiles" / f"{hashes}-{model.dtype}-{tokens}-{_code()[:8]}.json"


def _read(path: Path, model: Model, tokens: int) -> HeadProfile | None:
    """The profile in a file; None, with a message, if it is invalid (`UserError` if it is another model's)."""
    if not path.exists():
        return None
    try:
        found = HeadProfile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a valid head profile"
        say(f"{path}: {reason}; it is measured again.")
        return None
    if found.model_sha256 != model.sha256:
        raise UserError(
            f"{path} was made for another model ({found.model_sha256[:12]}, and {model.id} is {model.sha256[:12]}). "
            "Remove the file; the profile is then measured again."
        )
    shape = [x.kv_heads for x in model.layers]
    wanted = (model.tokenizer_sha256, model.dtype, tokens, _code(), shape, shape)
    shapes = map(_shape, (found.echo, found.induction))
    if (found.tokenizer_sha256, found.dtype, found.tokens, found.code_sha256, *shapes) != wanted:
        say(f"{path}: the content does not match the file name; it is measured again.")
        return None
    return found


def _shape(scores: Sequence[Sequence[float]]) -> list[int]:
    return [len(x) for x in scores]


def _write(path: Path, profile: HeadProfile) -> str:
    """Write a profile atomically and describe where; concurrent processes write the same content."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(profile.model_dump_json(indent=1))
        part.replace(path)
    except OSError as error:  # it is only a cache
        with contextlib.suppress(OSError):
            part.unlink()
        return f"not kept ({path}: {error.strerror})"
    return f"kept in {path}"
