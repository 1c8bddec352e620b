"""Hit rates of a simulation, by name, with intervals over stretches of time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError, check_number, unknown
from kvbench.runs.stats import bootstrap_ratio
from kvbench.trace.cache import Simulation, simulate
from kvbench.trace.policies import POLICIES, Optimum
from kvbench.trace.requests import Trace

ID_BYTES = 4
STRETCHES = 20
"""Contiguous parts of a trace, drawn with replacement for the interval: neighbors in time are not independent."""


@dataclass(frozen=True)
class HitRates:
    """Three definitions of one simulation's hit rate; papers use all three and rarely say which."""

    block: float
    """Blocks found over blocks asked for."""
    token: float
    """Prompt tokens found over prompt tokens."""
    request: float
    """Mean over requests of the share of prompt tokens found."""
    interval: tuple[float, float]
    """95 % interval of `block`, bootstrap over 20 contiguous stretches of the trace."""
    reused_tokens: int


def measure(trace: Trace, simulation: Simulation) -> HitRates:
    """Hit rates of a simulation over all requests of its trace."""
    size = trace.block_tokens or 0
    found = simulation.hits
    tokens = [min(n * size, x.input_tokens) for n, x in zip(found, trace.requests, strict=True)]
    shares = [n / x.input_tokens for n, x in zip(tokens, trace.requests, strict=True) if x.input_tokens]
    prompt = sum(x.input_tokens for x in trace.requests)
    return HitRates(
        block=sum(found) / max(1, trace.references), token=sum(tokens) / max(1, prompt),
        request=sum(shares) / max(1, len(shares)), interval=_find_interval(trace, simulation),
        reused_tokens=sum(tokens),
    )


def _find_interval(trace: Trace, simulation: Simulation) -> tuple[float, float]:
    """Whole stretches are drawn. Where one asks for no block, the trace is too short to tell: 0 to 1."""
    count = len(trace.requests)
    edges = sorted({count * i // STRETCHES for i in range(STRETCHES + 1)})
    hits, asked = [], []
    for start, end in itertools.pairwise(edges):
        hits.append(sum(simulation.hits[start:end]))
        asked.append(sum(len(x.blocks) for x in trace.requests[start:end]))
    return bootstrap_ratio(hits, asked) if all(asked) else (0.0, 1.0)


def bytes_per_token(model: str) -> int:
    """Bytes of KV entries that a published architecture stores per token, in 16 bits.

    Raises:
        UserError: an unknown architecture, or a diffusion model.
    """
    from kvbench.registry import ARCHITECTURES, list_architectures

    if model not in list_architectures():
        raise unknown("model", model, list_architectures())
    config = json.loads((ARCHITECTURES / model / "config.json").read_text(encoding="utf-8"))
    if "num_attention_heads" not in config:
        raise UserError(f"model '{model}' is a diffusion model, which keeps no KV entries of a prompt. Give another.")
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * 2)


def find_bounds(trace: Trace, block_bytes: int) -> list[dict[str, Any]]:
    """Capacities that bound any lossless storage of a trace's KV entries as a sequence (arXiv 2604.15356).

    With every distinct block stored once, a cache misses nothing twice. Entries are a function of the tokens, so ids
    alone, computed again for every request, take the least; they save no computation. block_bytes: of one block.
    """
    blocks, tokens = len(trace.parents), trace.block_tokens or 0
    return [
        {"bound": "every distinct block once", "blocks": float(blocks)},
        {"bound": "token ids alone", "blocks": blocks * tokens * ID_BYTES / block_bytes},
    ]


def read_capacity(text: str, trace: Trace, *, least: int = 0) -> float:
    """Blocks from `10000`, `10%` of the trace's distinct blocks, or `infinite`. least: the smallest capacity returned.

    Raises:
        UserError: anything else, or less than one block.
    """
    allowed = "Allowed: blocks such as 10000, a share of the trace's distinct blocks such as 10%, or infinite."
    if text == "infinite":
        return math.inf
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UserError(f"--blocks '{text}' is not a number. {allowed}") from None
    check_number("--blocks", value, 0)  # refuses NaN and infinity too
    blocks = int(len(trace.parents) * value / 100) if text.endswith("%") else value
    if blocks != int(blocks):
        raise UserError(f"--blocks '{text}' must be a whole number of blocks. {allowed}")
    blocks = max(blocks, least)
    if blocks < 1:
        raise UserError(f"--blocks '{text}' is less than one block of this trace. {allowed}")
    return float(blocks)


def read_settings(pairs: list[str], fields: dict[str, Any], policy: str) -> dict[str, Any]:
    """`key=value` settings of a policy, by the types of its defaults.

    Raises:
        UserError: an unknown key, or a value of another type.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in fields:
            hint = f"Write --set {next(iter(fields))}=VALUE." if fields else f"{policy} has none: leave --set out."
            raise unknown(f"setting of policy {policy}", key, fields, hint)
        kind = type(fields[key])
        try:
            found[key] = kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
            raise UserError(f"--set {pair}: must be {wanted}, such as {fields[key]!r}.") from None
        if isinstance(found[key], float) and not math.isfinite(found[key]):
            raise UserError(f"--set {pair}: must be a finite number.")
    return found


def tabulate(
    trace: Trace, policies: Sequence[str], capacities: Sequence[float], settings: list[str],
    seconds_per_token: tuple[float, float] | None, block_bytes: int,
) -> list[dict[str, Any]]:
    """A row per policy and capacity, each with its share of the optimum at that capacity.

    Args:
        trace: with blocks.
        policies: names of POLICIES.
        capacities: blocks.
        settings: `key=value` of every policy.
        seconds_per_token: as of `simulate`.
        block_bytes: bytes of one block, for the column of gigabytes.

    Raises:
        UserError: an unknown or invalid setting, or a policy that needs a field that the trace lacks.
    """
    rows = []
    for capacity in capacities:
        optimum = simulate(trace, Optimum(), capacity, seconds_per_token)
        best = sum(optimum.hits)
        for name in policies:
            kind = POLICIES[name]
            policy = kind(**read_settings(settings, kind().settings, name))
            ran = optimum if kind is Optimum else simulate(trace, policy, capacity, seconds_per_token)
            rates = measure(trace, ran)
            rows.append({
                "policy": name, "settings": policy.settings, "blocks": None if math.isinf(capacity) else int(capacity),
                "gigabytes": None if math.isinf(capacity) else capacity * block_bytes / 1e9, "block": rates.block,
                "low": rates.interval[0], "high": rates.interval[1], "token": rates.token, "request": rates.request,
                "reused_tokens": rates.reused_tokens, "of_optimum": sum(ran.hits) / best if best else 1.0,
                "evictions": ran.evictions, "rejected": ran.rejected,
            })
    return rows
