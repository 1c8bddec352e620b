"""What a method computes: the dense cache's logits until it acts, and the same whatever stands beside it."""

from __future__ import annotations

import torch

from kvbench.budget import Budget, BudgetKind
from kvbench.check.trial import (
    CONTEXT,
    FORCED,
    FULL,
    LENGTH,
    SHAPES,
    TOLERANCE,
    NotApplicableError,
    allow_rounding,
    are_same_rows,
    find_rows,
    find_shapes,
    has_rounded,
    open_at_budget,
    open_session,
    random_ids,
    require_close,
    talk,
)
from kvbench.engine.agreement import FullCache
from kvbench.hf.tiny import permute_heads, tiny_model
from kvbench.method import Method


def identity_at_full_budget(method: Method) -> str:
    """With every row kept, logits and tokens are the dense cache's over three turns."""
    budget, worst = _full(method), 0.0
    for name, shape in SHAPES.items():
        model = tiny_model(*shape)
        with open_session(method, model, budget) as ours, open_session(FullCache(), model, None) as dense:
            worst = max(worst, require_close(ours.prefill(CONTEXT), dense.prefill(CONTEXT), f"prefill, {name}"))
            for turn, (a, b) in enumerate(zip(talk(ours), talk(dense), strict=True)):
                assert a.ids == b.ids, f"{name}, turn {turn + 1}: tokens {a.ids} are not the dense cache's {b.ids}"
            scores = ours.score(FORCED), dense.score(FORCED)
            worst = max(worst, require_close(*scores, f"after three turns, {name}"))
    return f"worst logit difference {worst:.1e} over {', '.join(SHAPES)}"


def _full(method: Method) -> Budget | None:
    if method.card.budget is BudgetKind.BITS:
        raise NotApplicableError("its settings are never the dense cache")
    budget = None if method.card.budget is BudgetKind.NONE else FULL
    with open_session(method, tiny_model(), budget) as session:
        session.prefill(CONTEXT)
        proof = session.effect()
    if not proof.identity:
        assert has_rounded(proof), "at its full budget it is no identity, and its stores show no row that was rounded"
        raise NotApplicableError("every row is kept, and rounded")
    return budget


def first_token_is_exact(method: Method) -> str:
    """The logits after the prefill are the dense cache's: compression comes after the context's attention."""
    worst = 0.0
    for name, shape in find_shapes(method).items():
        model = tiny_model(*shape)
        with open_at_budget(method, model) as ours, open_session(FullCache(), model, None) as dense:
            worst = max(worst, require_close(ours.prefill(CONTEXT), dense.prefill(CONTEXT), name))
    return f"worst logit difference {worst:.1e}"


def chunks_do_not_matter(method: Method) -> str:
    """The kept rows and the logits are those of a whole-prompt prefill, whatever the chunk size."""
    worst, shapes = 0.0, find_shapes(method)
    for name, sizes in (("GQA", (1, 7, 50)), ("sliding window", (7, 50))):
        if name not in shapes:
            continue
        model = tiny_model(*shapes[name])
        with open_at_budget(method, model, track=True) as whole:
            logits, kept = whole.prefill(CONTEXT), find_rows(whole)
            scores = whole.score(FORCED)
            rounds = method.card.budget is BudgetKind.BITS or has_rounded(whole.effect())
        for chunk in sizes:
            what = f"{name}, chunks of {chunk}"
            with open_at_budget(method, model, chunk=chunk, track=True) as parts:
                worst = max(worst, require_close(parts.prefill(CONTEXT), logits, what))
                found = find_rows(parts)
                assert found is None or kept is None or are_same_rows(found, kept), f"{what}: other rows were kept"
                cost = allow_rounding(model, lambda x: x.score(FORCED), scores) if rounds else 0.0
                worst = max(worst, require_close(parts.score(FORCED), scores, f"after {what}", max(TOLERANCE, cost)))
    return f"chunks of 1, 7 and 50; worst logit difference {worst:.1e}"


def heads_may_be_permuted(method: Method) -> str:
    """With its heads in another order the model keeps the same rows in that order, and no head looks at the others."""
    if method.card.heads != "independent":
        raise NotApplicableError(f"its heads are {method.card.heads}")
    model, order = tiny_model(), [1, 0]
    with open_at_budget(method, model, track=True) as session:
        session.prefill(CONTEXT)
        kept, scores = find_rows(session), session.score(FORCED)
    with open_at_budget(method, permute_heads(model, order), track=True) as session:
        session.prefill(CONTEXT)
        found = find_rows(session)
        worst = require_close(session.score(FORCED), scores, "permuted heads")
    if kept is not None and found is not None:
        assert are_same_rows(found, [[heads[i] for i in order] for heads in kept]), "other rows were kept"
        with open_at_budget(method, permute_heads(model, [0, 0]), track=True) as session:
            session.prefill(CONTEXT)
            twins = find_rows(session)
        assert twins is not None
        first = twins[0]  # later layers have other inputs
        assert all(x.equal(kept[0][0]) for x in first), "the first head keeps other rows beside other heads"
    return f"worst logit difference {worst:.1e}"


def batch_does_not_matter(method: Method) -> str:
    """A batch of two contexts gives each what it gets alone."""
    model, contexts = tiny_model(), [random_ids(LENGTH, seed=4), random_ids(LENGTH, seed=5)]
    with open_at_budget(method, model) as session:
        together = [session.prefill(torch.tensor(contexts)), session.score(torch.tensor([FORCED] * 2))]
    worst = 0.0
    for i, context in enumerate(contexts):
        with open_at_budget(method, model) as session:
            alone = session.prefill(context)[0], session.score(FORCED)[0]
        for x, y, what in zip(alone, together, ("prefill of ", ""), strict=True):
            worst = max(worst, require_close(x, y[i], f"{what}sequence {i + 1}"))
    return f"worst logit difference {worst:.1e}"
