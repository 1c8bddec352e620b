"""Invariants of logits: equal to the full cache before compression, independent of chunks, batch and head order."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.budget import Budget, BudgetKind
from kvbench.check.trial import (
    CONTEXT,
    FORCED,
    FULL,
    LENGTH,
    LIMIT,
    SHAPES,
    TOLERANCE,
    NotApplicableError,
    allow_rounding,
    cut,
    find_entries,
    find_shapes,
    has_rounded,
    open_at_budget,
    open_session,
    random_ids,
    record_context,
    require_close,
    require_same_entries,
    rounds_entries,
    rounds_scores,
    selects_by_rounding,
    talk,
)
from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.hf.tiny import permute_heads, tiny_model
from kvbench.method import Method

QUESTION = random_ids(11, seed=9)


def identity_at_full_budget(method: Method) -> str:
    """With every entry kept, logits and tokens equal the full cache's over three turns."""
    budget, worst = _full(method), 0.0
    for name, shape in SHAPES.items():
        model = tiny_model(*shape)
        with open_session(method, model, budget) as ours, open_session(FullCache(), model, None) as full:
            worst = max(worst, require_close(ours.prefill(CONTEXT), full.prefill(CONTEXT), f"prefill, {name}"))
            for turn, (a, b) in enumerate(zip(talk(ours), talk(full), strict=True)):
                assert a.ids == b.ids, f"{name}, turn {turn + 1}: tokens {a.ids} are not the full cache's {b.ids}"
            scores = ours.score(FORCED), full.score(FORCED)
            worst = max(worst, require_close(*scores, f"after three turns, {name}"))
    return f"worst logit difference {worst:.1e} over {', '.join(SHAPES)}"


def _full(method: Method) -> Budget | None:
    if method.budget_kind is BudgetKind.BITS:
        raise NotApplicableError("its settings never give the full cache")
    if method.budget_kind is BudgetKind.PROMPT:
        raise NotApplicableError("its settings, and no budget, decide which attention is computed")
    budget = None if method.budget_kind is BudgetKind.NONE else FULL
    with open_session(method, tiny_model(), budget) as session:
        session.prefill(CONTEXT)
        proof = session.effect()
    if not proof.identity:
        assert has_rounded(proof), "its full budget is not an identity, and its stores count no quantized entry"
        raise NotApplicableError("every entry is kept and quantized")
    return budget


def first_token_is_exact(method: Method) -> str:
    """Logits after the prefill equal the full cache's, because compression follows the context's attention."""
    if method.inexact_prefill is not None:
        raise NotApplicableError(method.inexact_prefill)
    worst = 0.0
    for name, shape in find_shapes(method).items():
        model = tiny_model(*shape)
        with open_at_budget(method, model) as ours, open_session(FullCache(), model, None) as full:
            worst = max(worst, require_close(ours.prefill(CONTEXT), full.prefill(CONTEXT), name))
    return f"worst logit difference {worst:.1e}"


def chunks_do_not_matter(method: Method) -> str:
    """The kept entries and the logits do not depend on the chunk size of the prefill, or of a question.

    In 16 bits the model's own entries do, by a rounding, which may move a value to the next code and choose other
    entries to read. There, later logits are compared after chunks of the same entries, computed once.
    """
    worst, shapes = 0.0 if rounds_scores() else _compare_questions(method), find_shapes(method)
    for name, sizes in (("GQA", (1, 7, 50)), ("sliding window", (7, 50))):
        if name not in shapes:
            continue
        model = tiny_model(*shapes[name])
        with open_at_budget(method, model, track=True) as whole:
            logits, kept = whole.prefill(CONTEXT), find_entries(whole)
            scores = whole.score(FORCED)
            rounds = rounds_entries(method, whole)
        cost = allow_rounding(model, lambda x: x.score(FORCED), scores) if rounds else 0.0
        recording = record_context(method, model) if rounds_scores() else None
        for chunk in sizes:
            what = f"{name}, chunks of {chunk}"
            with open_at_budget(method, model, chunk=chunk, track=True) as parts:
                worst = max(worst, require_close(parts.prefill(CONTEXT), logits, what))
                same = require_same_entries(find_entries(parts), kept, what)
                if recording is None and same and not selects_by_rounding(method):
                    worst = max(worst, require_close(parts.score(FORCED), scores, f"after {what}", cost))
            if recording is None:
                continue
            with open_at_budget(method, model, chunk=chunk, track=True, recording=cut(recording, chunk)) as parts:
                parts.prefill(CONTEXT)
                parts.chunk = None  # FORCED is run as after the whole context
                if require_same_entries(find_entries(parts), kept, what):
                    most = cost if rounds else None
                    worst = max(worst, require_close(parts.score(FORCED), scores, f"after {what}", most=most))
    return f"chunks of 1, 7 and 50; worst logit difference {worst:.1e}"


def _compare_questions(method: Method) -> float:
    """The largest difference between the logits after a question that is run in chunks, and at once."""
    model = tiny_model()

    def ask(session: Session) -> Tensor:
        session.question(QUESTION, LIMIT)
        assert session.logits is not None
        return session.logits

    with open_at_budget(method, model) as whole:
        whole.prefill(CONTEXT)
        wanted = ask(whole)
        rounds = rounds_entries(method, whole)
    with open_at_budget(method, model) as parts:
        parts.prefill(CONTEXT)
        parts.chunk = 4
        found = ask(parts)
    cost = allow_rounding(model, ask, wanted) if rounds else 0.0
    return require_close(found, wanted, "a question in chunks of 4", max(2 * TOLERANCE[torch.float32], cost))


def heads_may_be_permuted(method: Method) -> str:
    """Permuting the heads permutes the kept entries, and no head depends on the others."""
    if method.card.heads != "independent":
        raise NotApplicableError(f"its card says that heads are {method.card.heads}")
    model, order = tiny_model(), [1, 0]
    with open_at_budget(method, model, track=True) as session:
        session.prefill(CONTEXT)
        kept, scores = find_entries(session), session.score(FORCED)
        rounds = has_rounded(session.effect())
    cost = allow_rounding(model, lambda x: x.score(FORCED), scores) if rounds else 0.0
    with open_at_budget(method, permute_heads(model, order), track=True) as session:
        session.prefill(CONTEXT)
        found = find_entries(session)
        worst = require_close(session.score(FORCED), scores, "permuted heads", cost)
    if kept is not None and found is not None:
        require_same_entries(found, [[heads[i] for i in order] for heads in kept], "permuted heads")
        with open_at_budget(method, permute_heads(model, [0, 0]), track=True) as session:
            session.prefill(CONTEXT)
            repeated = find_entries(session)
        assert repeated is not None
        first = repeated[0]  # later layers have other inputs
        assert all(x.equal(kept[0][0]) for x in first), "the first head keeps other entries when the other heads change"
    return f"worst logit difference {worst:.1e}"


def batch_does_not_matter(method: Method) -> str:
    """Each of two contexts in a batch gives the logits that it gives alone, but for a code rounded the other way."""
    model, contexts = tiny_model(), [random_ids(LENGTH, seed=4), random_ids(LENGTH, seed=5)]
    with open_at_budget(method, model) as session:
        together = [session.prefill(torch.tensor(contexts)), session.score(torch.tensor([FORCED] * 2))]
    worst = 0.0
    for i, context in enumerate(contexts):
        with open_at_budget(method, model) as session:
            logits, scores = session.prefill(context)[0], session.score(FORCED)[0]
            rounds = rounds_entries(method, session)
        cost = allow_rounding(model, lambda x: x.score(FORCED), scores, context) if rounds else 0.0
        worst = max(
            worst, require_close(logits, together[0][i], f"prefill of sequence {i + 1}"),
            require_close(scores, together[1][i], f"sequence {i + 1}", cost),
        )
    return f"worst logit difference {worst:.1e}"
