"""Every method in three turns after contexts of different lengths, for GQA, MHA and MQA, against the full cache."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvbench.check.trial import EDGE, FULL, NEVER_STOP, TOLERANCE, has_rounded
from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UndeclaredError, UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, BudgetKind
from kvbench.methods.lossless.verified import Verified
from kvbench.registry import find_method
from kvbench.runs.journal import Effect

LENGTHS = (1, 7, 31, 32, 33, 128, 600)
SHAPES = {"GQA": (4, 2), "MHA": (2, 2), "MQA": (4, 1)}
CASES = [("GQA", 1), ("GQA", 32), ("GQA", 600), ("MHA", 33), ("MQA", 128)]
QUESTIONS, LIMIT, HISTORY = (5, 1, 9), 2, 2
"""Tokens of each turn's question, of each answer, and of what stands in the answer's place from then on."""
LATER = sum(QUESTIONS) + HISTORY * (len(QUESTIONS) - 1)
CLOSE = 3 * TOLERANCE[torch.float32]
"""Between two ways to cut the same sums: pages, chunks or two tiers."""
ROW = 1.125
"""Most bytes of an entry after the context, in full cache entries: its own, and a score and position or page bounds."""
COPIES = {"instinfer": 1.5, "magicdec": 2 * ROW, "triforce": 3 * ROW}
"""Methods that store keys or whole entries in two or three caches, and the same bound for them."""
SETTINGS = {"s2o": {"tau": 0.05}, "flexprefill": {"least": 16}}
"""Of methods that act on no text of these lengths by default: random weights attend to all tokens alike, or a least
number of tokens exceeds them."""

pytestmark = pytest.mark.usefixtures("profile_cache")


@dataclass(frozen=True)
class Talk:
    """The outcome of three turns."""

    logits: list[Tensor]
    """After the context, after each question, and on a forced answer at the end. [V], [V], [V], [V] and [4, V]"""
    acted: list[bool]
    """Whether entries had been dropped, rounded or left unread when these logits were there."""
    rows: list[list[int]]
    """Entries of each KV head right after the context, by layer."""
    proof: Effect


@pytest.fixture
def model(request):
    """A tiny model of each head layout."""
    return tiny_model(*SHAPES[request.param])


def ids(count, seed):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def talk(session, length):
    """A context and three turns with reference history, every answer on a fork; counts tokens and entries."""
    logits, acted, seen = [], [], length

    def note(found):
        assert found.isfinite().all(), "logits are not finite"
        assert [session.seen, *(x.seen for x in session.layers)] == [seen] * (len(session.layers) + 1), "tokens seen"
        assert max(max(x.entries_kept()) for x in session.layers) <= seen, "more rows than tokens"
        logits.append(found)
        acted.append(session.effect().acted)

    note(session.prefill(ids(length, seed=1))[0])
    rows = [x.entries_kept() for x in session.layers]
    for turn, count in enumerate(QUESTIONS):
        session.ask(ids(count, seed=10 + turn), LIMIT, history=ids(HISTORY, seed=20 + turn), stop=NEVER_STOP)
        seen += count + (HISTORY if turn else 0)
        note(session.logits[0])
    with session.fork() as branch:
        forced = branch.force(ids(4, seed=30))[0]
    note(forced)
    return Talk(logits, acted, rows, session.effect())


@functools.cache
def dense_talk(model, length):
    """The same conversation on the full cache."""
    with Session(model, FullCache(), capacity=length + 100) as session:
        return talk(session, length)


def worst(found, wanted):
    """The largest difference of any logit."""
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def named(refusal):
    """The budget that a refusal names as one that can be reached; None: it says to leave it out."""
    reached = r"(?:come to|stores?(?: from)?) ([\d.]+%)"
    found = re.search(rf"Use --budget (\d+) or more|{reached}|Leave --budget out", str(refusal))
    assert found, f"names no budget that can be reached: {refusal}"
    return Budget.parse(found[1] or found[2]) if found.lastindex else None


def fit(method, budget, shape):
    """The method at this budget, or where that is refused at the one that the refusal names."""
    try:
        return method.fit(budget, shape)
    except UserError as refusal:
        return method.fit(named(refusal), shape)


def check(method, model, length, chunk=None):
    """The conversation under a fitted method, with checks of it alone and against the full cache."""
    dense, shape = dense_talk(model, length), model.shape(length)
    with Session(model, method, capacity=length + 100, chunk=chunk) as session:
        found, memory = talk(session, length), session.memory()
        try:
            declared = after = method.declared_bytes(shape)
        except UndeclaredError:  # the text decides; the first token after the context finds it decoded
            declared, after = memory.stored_bytes, shape.full_bytes
        assert memory.stored_bytes == declared, f"{memory.stored_bytes} bytes after the context, {declared} declared"
        assert memory.host_bytes == method.declared_host_bytes(shape), "bytes on the host"
        later = model.shape(length + LATER).full_bytes - shape.full_bytes
        stored = sum(x.nbytes() - x.spare_bytes() for x in session.layers)
        most = after + COPIES.get(method.card.name, ROW) * later
        assert stored <= most, f"{stored} bytes after three turns, {declared} after the context"
    drafts_only = isinstance(method, Verified) and not has_rounded(found.proof)
    equal = len(found.logits) if drafts_only or not any(found.acted) else found.acted.index(True)
    if method.inexact_prefill is None:
        equal = max(1, equal)
    if equal:
        assert worst(found.logits[:equal], dense.logits[:equal]) <= CLOSE, "other logits, before anything was done"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "length"), CASES, indirect=["model"])
def test_three_turns_at_every_length(method_name, model, length):
    """Tokens, entries and bytes are right, and until a method acts its logits are the full cache's, chunks or not."""
    method = find_method(method_name)(**SETTINGS.get(method_name, {})).bind(model)
    budgeted = method.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    if budgeted:
        proof = check(method.fit(FULL, model.shape(length)), model, length).proof
        exact = proof.identity and (not proof.acted or isinstance(method, Verified))  # a draft may lose entries
        assert has_rounded(proof) or exact, "at its full budget it loses something"
    fitted = fit(method, Budget("fraction", 0.25) if budgeted else None, model.shape(length))
    whole, parts = check(fitted, model, length), check(fitted, model, length, chunk=max(4, length // 3))
    too_short = method.budget_kind is BudgetKind.PROMPT and length <= method.minimum_entries()
    assert whole.proof.acted or whole.proof.identity or too_short, "it never acted"
    assert parts.rows == whole.rows, "in chunks other numbers of rows"
    lost = worst(whole.logits, dense_talk(model, length).logits) if has_rounded(whole.proof) else 0.0
    assert worst(parts.logits, whole.logits) <= max(CLOSE, EDGE * lost), "in chunks other logits"


@pytest.mark.slow
def test_a_refusal_names_what_can_be_reached(method_name):
    """A budget of one entry or of a hundredth is met or refused, and the refusal names the least that is not."""
    model = tiny_model()
    method = find_method(method_name)().bind(model)
    for length in LENGTHS:
        shape = model.shape(length)
        for asked in (Budget("rows", 1), Budget("fraction", 0.01)):
            try:
                method.fit(asked, shape)
            except UserError as refusal:
                least = named(refusal)
                method.fit(least, shape)
                if least is not None and least.kind == "rows" and least.value > 1:
                    with pytest.raises(UserError, match=f"Use --budget {least} or more"):
                        method.fit(Budget("rows", least.value - 1), shape)
