"""Test material of the invariants: contexts, sessions on tiny models, and comparisons of their outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.budget import Budget, BudgetKind
from kvbench.engine.agreement import FullCache
from kvbench.engine.autoregressive import Tokens
from kvbench.engine.recording import InexactPrefillError, Recording
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.errors import UserError
from kvbench.hf import Model, Rope
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Method
from kvbench.runs.journal import Effect
from kvbench.step import Moment


class NotApplicableError(Exception):
    """The invariant does not apply to this method, for the reason given."""


class UntestableError(UserError):
    """No invariant can be tested with these settings."""


def random_ids(count: int, seed: int = 1) -> list[int]:
    """Tokens of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).tolist()


LENGTH = 120
CONTEXT = random_ids(LENGTH)
FORCED = random_ids(9, seed=3)
"""Tokens that are scored after the context."""
TURNS = 3
LIMIT = 6
NEVER_STOP: frozenset[int] = frozenset()
FULL = Budget("fraction", 1.0)
SHAPES: dict[str, tuple[int, int, int | None]] = {
    "GQA": (4, 2, None), "MHA": (2, 2, None), "MQA": (4, 1, None), "sliding window": (4, 2, 48),
}
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.2}
"""Allowed difference of logits by the model's element type.

In float32, half a unit in the last place of every weight moves them by up to 0.00002, and an entry without its value by
0.006 to 0.8.
In bfloat16, numbers from 4 to 8 are 0.03 apart. On a CPU without bfloat16 units, rounding moves logits of the full
cache by 0.3 from those in float32; two orders of computation differ by up to 0.1, one entry more or less by 1 to 4.
"""
CONTAINERS = (list, tuple, set, frozenset, deque)
EDGE = 0.05
"""Share of the quantization error that a comparison allows: a value between two codes may be rounded either way."""


def choose_budget(method: Method) -> Budget | None:
    """A quarter of the context, or the least that the settings allow; None where the method takes no budget.

    Three quarters where heads differ by number: in a tiny model one head that keeps every entry already takes most of
    a quarter.

    Raises:
        UntestableError: the settings keep the whole context.
    """
    if method.budget_kind in (BudgetKind.NONE, BudgetKind.BITS, BudgetKind.PROMPT):
        return None
    usual, least = LENGTH * 3 // 4 if method.card.heads == "indexed" else LENGTH // 4, method.minimum_entries()
    if least >= LENGTH:
        raise UntestableError(
            f"{method.card.name} keeps at least {least} entries per KV head with its settings, and the contexts of the "
            f"check have {LENGTH}. Use smaller settings with --set, of at most {LENGTH - 1} entries."
        )
    return Budget("rows", min(LENGTH - 1, max(usual, least + 4)))


def find_shapes(method: Method) -> dict[str, tuple[int, int, int | None]]:
    """Shapes of tiny models, without the one with sliding windows in all layers where the method refuses it."""
    sliding = tiny_model(*SHAPES["sliding window"]).shape(LENGTH)
    try:
        replace(method).fit(choose_budget(method), sliding)
    except UserError:
        return {name: shape for name, shape in SHAPES.items() if name != "sliding window"}
    return SHAPES


@contextmanager
def open_session(
    method: Method, model: Model, budget: Budget | None, length: int = LENGTH, *, chunk: int | None = None,
    track: bool = False, recording: Recording | None = None,
) -> Iterator[Session]:
    """A session at a budget."""
    fitted = method.bind(model).fit(budget, model.shape(length))
    with Session(
        model, fitted, capacity=length + 200, chunk=chunk, track=track, recording=recording
    ) as session:
        yield session


def open_at_budget(
    method: Method, model: Model, *, chunk: int | None = None, track: bool = False, recording: Recording | None = None
) -> AbstractContextManager[Session]:
    """A session at a budget at which the method must act."""
    return open_session(method, model, choose_budget(method), chunk=chunk, track=track, recording=recording)


def fit_at_budget(method: Method, model: Model) -> Method:
    """The method of a run, fitted once for all samples to a budget at which it must act."""
    return method.bind(model).fit(choose_budget(method), model.shape(LENGTH))


def talk(session: Session, *, reference: bool = True) -> list[Tokens]:
    """Three turns of different lengths."""
    return [
        session.ask(random_ids(5 + 4 * turn, seed=turn + 10), LIMIT,
                    history=random_ids(3, seed=turn + 20) if reference else None, stop=NEVER_STOP)
        for turn in range(TURNS)
    ]


def find_distance(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference."""
    return (a - b).abs().max().item()


def require_close(a: Tensor, b: Tensor, what: str, least: float = 0.0, most: float | None = None) -> float:
    """The largest absolute difference; above TOLERANCE, and above `least`, the invariant fails.

    most: allowed in place of TOLERANCE, where both sides were computed alike.
    """
    usual = TOLERANCE[tiny_model().module.dtype] if most is None else most
    worst, allowed = find_distance(a, b), max(usual, least)
    assert worst <= allowed, f"{what}: logits differ by {worst:.2g}, allowed {allowed:.0e}"
    return worst


def allow_rounding(
    model: Model, run: Callable[[Session], Tensor], wanted: Tensor, context: Sequence[int] = CONTEXT
) -> float:
    """The difference allowed where entries are quantized: the share EDGE of the distance from the full cache.

    run: called after the context; returns the logits to compare.
    """
    with open_session(FullCache(), model, None) as full:
        full.prefill(context)
        return EDGE * find_distance(run(full), wanted)


def record_context(method: Method, model: Model) -> Recording | None:
    """The exact prefill of CONTEXT in one pass; None: the method computes the context's entries in its own way."""
    recording = record(model, CONTEXT, None, "torch", outputs=False)
    try:
        with open_at_budget(method, model, recording=recording) as session:
            session.prefill(CONTEXT)
    except InexactPrefillError:
        return None
    return recording


def cut(recording: Recording, chunk: int) -> Recording:
    """The same entries in chunks: computed in chunks, they would be rounded differently in 16 bits."""
    (whole,) = recording.passes
    passes = []
    for start in range(0, LENGTH, chunk):
        part, end = slice(start, min(start + chunk, LENGTH)), min(start + chunk, LENGTH)
        moment = Moment.CONTEXT_END if end == LENGTH else Moment.CONTEXT_CHUNK
        steps = [x.part(part, seen=end, moment=moment) for x in whole.steps]
        passes.append(replace(whole, start=start, ids=whole.ids[:, part], steps=steps))
    return Recording(passes)


def find_tensors(value: object, known: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that is reachable from a value through containers and attributes; not those of rotary embeddings.

    known: ids of the objects that were looked at.
    """
    known = set() if known is None else known
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in known and not isinstance(value, Rope | type):
        known.add(id(value))
        inner = list(value.values() if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else ())
        inner += vars(value).values() if hasattr(value, "__dict__") else ()
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        for part in (*inner, *(getattr(value, name, None) for name in slots)):
            yield from find_tensors(part, known)


def find_entries(session: Session) -> list[list[Tensor]] | None:
    """Positions of the stored entries, sorted, by layer and (batch, KV head); None: a store keeps no positions."""
    layers = []
    for store in session.layers:
        positions = store.positions
        if positions is None:
            return None
        heads = [x.sort().values for x in positions.flatten(0, 1)]
        if store.frozen is not None and store.frozen.position is not None:
            ragged = store.frozen.position.split(store.frozen.counts)
            heads = [torch.cat([a, b]).sort().values for a, b in zip(ragged, heads, strict=True)]
        layers.append(heads)
    return layers


def require_same_entries(found: list[list[Tensor]] | None, wanted: list[list[Tensor]] | None, what: str) -> bool:
    """Whether all heads store the same positions of CONTEXT. Where they do not, the invariant fails.

    In the first layer, entries of equal tokens have equal keys before rotation and equal values, so rounding decides
    which of them is kept. In bfloat16 a share of EDGE may differ, because it decides between nearly equal scores, too.
    """
    if found is None or wanted is None:
        return True
    same, other, total = True, 0, 0
    for layer, (x, y) in enumerate(zip(found, wanted, strict=True)):
        for a, b in zip(x, y, strict=True):
            differing = set(a.tolist()) ^ set(b.tolist())
            same &= not differing
            total += len(b)
            if layer or sorted(CONTEXT[i] for i in a) != sorted(CONTEXT[i] for i in b):
                other += len(differing)
    assert other <= (EDGE * total if rounds_scores() else 0), f"{what}: other entries were kept"
    return same


def rounds_scores() -> bool:
    """Whether scores are computed in 16 bits, where the order of a sum decides between nearly equal ones."""
    return tiny_model().module.dtype != torch.float32


def selects_by_rounding(method: Method) -> bool:
    """Whether a token may read other entries after another order of computation."""
    return method.budget_kind is BudgetKind.READ and rounds_scores()


def rounds_entries(method: Method, session: Session) -> bool:
    """Whether the method stores quantized entries: by its kind, or by what the session's stores count."""
    return method.budget_kind is BudgetKind.BITS or has_rounded(session.effect())


def has_rounded(proof: Effect) -> bool:
    """Whether the stores count quantized entries."""
    return bool(proof.facts.get("entries_quantized"))
