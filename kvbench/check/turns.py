"""Invariants after the context: turns, forks, short contexts, and decode steps with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.budget import Budget
from kvbench.check.trial import (
    CONTEXT,
    LENGTH,
    LIMIT,
    NEVER_STOP,
    TOLERANCE,
    TURNS,
    NotApplicableError,
    allow_rounding,
    choose_budget,
    find_distance,
    open_at_budget,
    open_session,
    random_ids,
    require_close,
    rounds_entries,
    selects_by_rounding,
    talk,
)
from kvbench.engine.autoregressive import step_logits
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method

ANSWER = random_ids(24, seed=5)


def turns_continue(method: Method) -> str:
    """Over three turns positions count tokens, not entries, and an answer does not depend on the later history."""
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        answers = talk(session)
        tokens = LENGTH + sum(5 + 4 * turn for turn in range(TURNS)) + 3 * (TURNS - 1)
        assert session.seen == tokens, f"{session.seen} tokens seen, {tokens} were run"
        assert all(store.seen == tokens for store in session.layers), "a layer counts other tokens than the session"
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        own = talk(session, reference=False)
        made = LENGTH + sum(5 + 4 * turn for turn in range(TURNS)) + LIMIT * TURNS - 1
        assert session.seen == made, f"own history: {session.seen} tokens seen, {made} were run"
    assert own[0].ids == answers[0].ids, "the first answer depends on what comes after it"
    return f"{tokens} tokens with reference history, {made} with its own"


def forks_equal_fresh_runs(method: Method) -> str:
    """A fork answers bit-identically to a fresh session and does not change its parent."""
    model = tiny_model()
    questions = [random_ids(5, seed=7), random_ids(11, seed=8)]
    with open_at_budget(method, model) as parent:
        parent.prefill(CONTEXT)
        forked = []
        for question in questions:
            with parent.fork() as branch:
                branch.ask(question, LIMIT, stop=NEVER_STOP)
                forked.append(branch.score(random_ids(4, seed=9)))
        with parent.fork() as one, parent.fork() as two:  # two at a time
            for branch, question in zip((one, two), questions, strict=True):
                branch.ask(question, LIMIT, stop=NEVER_STOP)
            both = [one.score(random_ids(4, seed=9)), two.score(random_ids(4, seed=9))]
        parent.ask(questions[0], LIMIT, stop=NEVER_STOP)
        itself = parent.score(random_ids(4, seed=9))
    for i, question in enumerate(questions):
        with open_at_budget(method, model) as fresh:
            fresh.prefill(CONTEXT)
            fresh.ask(question, LIMIT, stop=NEVER_STOP)
            wanted = fresh.score(random_ids(4, seed=9))
        worst = find_distance(forked[i], wanted)
        assert forked[i].equal(wanted), f"question {i + 1}: a fork differs from a fresh run by {worst:.2g}"
        assert both[i].equal(wanted), f"question {i + 1}: of two forks at a time, one differs from a fresh run"
        assert i or itself.equal(wanted), "the parent was changed by its forks"
    return "two questions, in sequence and at once, bit-identical"


def forced_tokens_equal_decode_steps(method: Method) -> str:
    """Forced tokens attend to the same entries as generated ones: logits equal those of decode steps."""
    if selects_by_rounding(method):
        raise NotApplicableError("in bfloat16, rounding decides which entries a token reads")

    def force(session: Session) -> Tensor:
        session.question(random_ids(5), len(ANSWER))
        return session.force(ANSWER)[0]

    model = tiny_model()
    with open_at_budget(method, model) as session:
        session.prefill(CONTEXT)
        with session.fork() as branch:
            forced = force(branch)
        session.question(random_ids(5), len(ANSWER))
        steps = [session.logits, *(step_logits(session, one_token(model, x)) for x in ANSWER[:-1])]
        wanted = torch.cat([x for x in steps if x is not None])
        rounds = rounds_entries(method, session)
    cost = allow_rounding(model, force, wanted) if rounds else 0.0
    worst = require_close(forced, wanted, f"{len(ANSWER)} tokens", max(2 * TOLERANCE[torch.float32], cost))
    return f"{len(ANSWER)} tokens, worst logit difference {worst:.1e}"


def short_contexts_run(method: Method) -> str:
    """Contexts of 1 and 7 tokens and around the window's length run, and store no more entries than tokens."""
    edge = method.minimum_entries()
    lengths = sorted({1, 7, *(x for x in (edge - 1, edge, edge + 1, edge + 2) if x > 0)})
    model = tiny_model()
    for length in lengths:
        budget = None if choose_budget(method) is None else Budget("rows", edge)
        with open_session(method, model, budget, length) as session:
            logits = session.prefill(random_ids(length))
            assert logits.isfinite().all(), f"{length} tokens: logits are not finite"
            talk(session)
            proof = session.effect()
            assert max(proof.entries_kept) <= length, f"{length} tokens: {max(proof.entries_kept)} entries kept"
            assert proof.acted or proof.identity or length <= edge, f"{length} tokens: it did not act"
    return f"{', '.join(map(str, lengths))} tokens"


def static_steps_equal_eager_steps(method: Method) -> str:
    """Decode steps with static shapes, as CUDA graphs need, give the eager logits, or the method gives a reason."""
    if method.graphable is not None:
        raise NotApplicableError(method.graphable)
    worst = 0.0
    model = tiny_model()
    with open_at_budget(method, model) as session:
        session.prefill(CONTEXT)
        session.question(random_ids(5), LIMIT)
        tokens = [one_token(model, x) for x in random_ids(LIMIT, seed=6)]
        with session.fork() as eager:
            wanted = [step_logits(eager, x) for x in tokens]
        session.make_static()
        for i, token in enumerate(tokens):
            worst = max(worst, require_close(step_logits(session, token), wanted[i], f"step {i + 1}"))
    return f"{LIMIT} steps, worst logit difference {worst:.1e}"


def one_token(model: Model, token: int) -> Tensor:
    """A token as the input of one decode step. [1, 1]"""
    return torch.tensor([[token]], device=model.device)
