"""What every method must do, whatever its paper says: claims that `kvbench check` tries on tiny random models.

A claim that does not apply to a method says why. The method's card decides: heads that are not independent are not
permuted, and settings that are no identity are not compared with the dense cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvbench.agreement import Dense
from kvbench.autoregressive import step_logits
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, permute_heads, tiny_model
from kvbench.ledger import Certificate
from kvbench.method import Budget, BudgetKind, Method
from kvbench.session import Session, Tokens
from kvbench.store import LayerKV

LENGTH = 120
TURNS = 3
LIMIT = 6
TOLERANCE = 1e-5
FULL = Budget("fraction", 1.0)
NEVER_STOP: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Claim:
    """One claim, whether it held, and what was found."""

    name: str
    passed: bool
    detail: str
    seconds: float


class NotApplicableError(Exception):
    """The claim does not apply to this method, for the reason given."""


def check(kind: type[Method], settings: dict[str, object] | None = None) -> list[Claim]:
    """Try every claim on a method. Failures and exceptions end in the claim, never in a traceback."""
    method = kind(**(settings or {}))  # type: ignore[arg-type]  # the subclass's own fields
    trials, claims = CLAIMS, []
    if kind.card.models == "diffusion":
        from kvbench import diffusion_claims  # it imports this module

        trials = diffusion_claims.CLAIMS
    for name, trial in trials.items():
        started = time.perf_counter()
        try:
            detail, passed = trial(method), True
        except NotApplicableError as reason:
            detail, passed = f"not applicable: {reason}", True
        except AssertionError as failure:
            detail, passed = str(failure) or "failed", False
        except (UserError, Exception) as error:  # noqa: BLE001  # somebody's method may raise anything
            detail, passed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", False
        claims.append(Claim(name, passed, detail, time.perf_counter() - started))
    return claims


# What the claims look at


def _ids(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator).tolist()


def _budget(method: Method, length: int = LENGTH) -> Budget | None:
    """A quarter of the context, or the least that the settings allow."""
    if method.card.budget in (BudgetKind.NONE, BudgetKind.BITS):
        return None
    return Budget("rows", min(length - 1, max(length // 4, method.minimum_rows() + 4)))


def _full(method: Method) -> Budget | None:
    if method.card.budget is BudgetKind.BITS:
        raise NotApplicableError("its settings are never the dense cache")
    budget = None if method.card.budget is BudgetKind.NONE else FULL
    with _session(method, tiny_model(), budget) as session:
        session.prefill(_ids(LENGTH))
        proof = session.certificate()
    if not proof.identity:
        assert _rounds(proof), "at its full budget it is no identity, and its stores show no row that was rounded"
        raise NotApplicableError("every row is kept, and rounded")
    return budget


def _rounds(proof: Certificate) -> bool:
    """Whether the stores say that rows became codes."""
    return bool(proof.facts.get("rows_quantised"))


@contextmanager
def _session(
    method: Method, model: Model, budget: Budget | None, length: int = LENGTH, *, chunk: int | None = None,
    track: bool = False,
) -> Iterator[Session]:
    fitted = method.bind(model).fit(budget, model.shape(length))
    with Session(model, fitted, capacity=length + 200, chunk=chunk, track=track) as session:
        yield session


def _kept(session: Session) -> list[list[Tensor]]:
    """Logical positions of the rows held, sorted, by layer and (batch, KV head)."""
    layers = []
    for store in session.layers:
        positions = store.positions
        if positions is None:
            raise NotApplicableError("its store keeps no positions to look at")
        heads = [x.sort().values for x in positions.flatten(0, 1)]
        if store.frozen is not None and store.frozen.position is not None:
            ragged = store.frozen.position.split(store.frozen.counts)
            heads = [torch.cat([a, b]).sort().values for a, b in zip(ragged, heads, strict=True)]
        layers.append(heads)
    return layers


def _same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    return all(
        a.equal(b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)
    )


def _talk(session: Session, *, golden: bool = True) -> list[Tokens]:
    """Three turns of different lengths."""
    return [
        session.ask(_ids(5 + 4 * turn, seed=turn + 10), LIMIT, history=_ids(3, seed=turn + 20) if golden else None,
                    stop=NEVER_STOP)
        for turn in range(TURNS)
    ]


def _worst(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def _close(a: Tensor, b: Tensor, what: str, allowed: float = TOLERANCE) -> float:
    worst = _worst(a, b)
    assert worst <= allowed, f"{what}: logits differ by {worst:.2g}, allowed {allowed:.0e}"
    return worst


SHAPES = {"GQA": (4, 2, None), "MHA": (2, 2, None), "MQA": (4, 1, None), "sliding window": (4, 2, 48)}


# The claims


def identity_at_full_budget(method: Method) -> str:
    """With every row kept, logits and tokens are the dense cache's over three turns."""
    budget, worst = _full(method), 0.0
    for name, shape in SHAPES.items():
        model = tiny_model(*shape)
        with _session(method, model, budget) as ours, _session(Dense(), model, None) as dense:
            worst = max(worst, _close(ours.prefill(_ids(LENGTH)), dense.prefill(_ids(LENGTH)), f"prefill, {name}"))
            for turn, (a, b) in enumerate(zip(_talk(ours), _talk(dense), strict=True)):
                assert a.ids == b.ids, f"{name}, turn {turn + 1}: tokens {a.ids} are not the dense cache's {b.ids}"
            scores = ours.score(_ids(9, seed=3)), dense.score(_ids(9, seed=3))
            worst = max(worst, _close(*scores, f"after three turns, {name}"))
    return f"worst logit difference {worst:.1e} over {', '.join(SHAPES)}"


def acts_at_its_budget(method: Method) -> str:
    """At a quarter of the context the stores can prove that something happened, and an inert twin's cannot."""
    model = tiny_model()
    with _session(method, model, _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        _talk(session)
        proof = session.certificate()
    if method.card.budget is BudgetKind.NONE:
        raise NotApplicableError("its card declares that it loses nothing")
    assert not proof.identity, "a quarter of the context counts as its declared identity"
    assert proof.acted, f"rows kept {proof.rows_kept} of {proof.rows_seen}, facts {proof.facts}: it never acted"
    inert = _inert(method, model)
    assert not inert.acted, f"a twin that does nothing is certified as well: {inert.facts}"
    assert not inert.identity, "a twin that does nothing counts as its declared identity"
    return f"kept {sum(proof.rows_kept) / len(proof.rows_kept):.0f} of {proof.rows_seen} rows; an inert twin is caught"


def _inert(method: Method, model: Model) -> Certificate:
    """The certificate of the same settings when nothing is stored, read or kept differently."""
    hooks = ("layer", "attend", "evict", "end_of_context", "prefill", "generate")
    plain = {name: getattr(Method, name) for name in hooks}
    twin = type("Inert", (type(method),), plain)(**method.settings)
    with _session(twin, model, _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        _talk(session)
        return session.certificate()


def first_token_is_exact(method: Method) -> str:
    """The logits after the prefill are the dense cache's: compression comes after the context's attention."""
    worst = 0.0
    for name, shape in SHAPES.items():
        model = tiny_model(*shape)
        with _session(method, model, _budget(method)) as ours, _session(Dense(), model, None) as dense:
            worst = max(worst, _close(ours.prefill(_ids(LENGTH)), dense.prefill(_ids(LENGTH)), name))
    return f"worst logit difference {worst:.1e}"


def measured_bytes_are_declared(method: Method) -> str:
    """Bytes counted from storages after the context equal the method's own account."""
    found = []
    for name, shape in SHAPES.items():
        model = tiny_model(*shape)
        with _session(method, model, _budget(method)) as session:
            session.prefill(_ids(LENGTH))
            measured, declared = session.memory().cache_bytes, session.method.declared_bytes(model.shape(LENGTH))
            assert measured == declared, f"{name}: measured {measured} bytes, declared {declared}"
            host, told = session.memory().host_bytes, session.method.declared_host_bytes(model.shape(LENGTH))
            assert host == told, f"{name}: measured {host} bytes on the host, declared {told}"
            found.append(f"{measured / session.memory().dense_bytes:.1%}")
    return f"{', '.join(found)} of the dense bytes for {', '.join(SHAPES)}"


def old_rows_are_freed(method: Method) -> str:
    """After compression no storage of a whole context is alive, with the garbage collector off."""
    refs: list[tuple[int, StorageWeakRef]] = []
    original = LayerKV.append

    def append(self: LayerKV, step: object) -> None:
        original(self, step)  # type: ignore[arg-type]  # a Step, passed on
        storages = [x.untyped_storage() for x in self.tensors()]
        refs.extend((x.data_ptr(), StorageWeakRef(x)) for x in storages)

    gc.disable()
    LayerKV.append = append  # type: ignore[method-assign]  # a spy, for this claim only
    try:
        with _session(method, tiny_model(), _budget(method)) as session:
            session.prefill(_ids(LENGTH))
            counted = [x for store in session.layers for x in (*store.tensors(), *store.host_tensors())]
            held = {x.untyped_storage().data_ptr() for x in counted}
            alive = [pointer for pointer, ref in refs if not ref.expired() and pointer not in held]
            watched = len(refs)
    finally:
        LayerKV.append = original  # type: ignore[method-assign]
        gc.enable()
    assert watched, "its stores do not go through LayerKV.append: nothing could be watched"
    assert not alive, f"{len(set(alive))} storages that the ledger does not count are still alive"
    return f"{watched} storages watched, none outlives the ledger's"


def decode_copies_nothing(method: Method) -> str:
    """Decoding within the declared capacity writes in place: no storage is replaced."""
    with _session(method, tiny_model(), _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        session.ask(_ids(5), 2, stop=NEVER_STOP)
        # Alive, so that no new storage gets an old one's address.
        held = [[*store.tensors(), *store.host_tensors()] for store in session.layers]
        session.method.generate(session, 20, NEVER_STOP)
        tensors = [[*store.tensors(), *store.host_tensors()] for store in session.layers]
        after = [[x.untyped_storage().data_ptr() for x in layer] for layer in tensors]
        before = [[x.untyped_storage().data_ptr() for x in layer] for layer in held]
    assert before == after, "storages were replaced while decoding"
    return "20 steps, every storage where it was"


def chunks_do_not_matter(method: Method) -> str:
    """The kept rows and the logits are those of a whole-prompt prefill, whatever the chunk size."""
    worst = 0.0
    for name, sizes in (("GQA", (1, 7, 50)), ("sliding window", (7, 50))):
        model = tiny_model(*SHAPES[name])
        with _session(method, model, _budget(method), track=True) as whole:
            logits, kept = whole.prefill(_ids(LENGTH)), _kept_or_none(whole)
            scores = whole.score(_ids(9, seed=3))
            rounds = method.card.budget is BudgetKind.BITS or _rounds(whole.certificate())
        for chunk in sizes:
            what = f"{name}, chunks of {chunk}"
            with _session(method, model, _budget(method), chunk=chunk, track=True) as parts:
                worst = max(worst, _close(parts.prefill(_ids(LENGTH)), logits, what))
                found = _kept_or_none(parts)
                assert found is None or kept is None or _same(found, kept), f"{what}: other rows were kept"
                allowed = _rounding(model, scores) if rounds else TOLERANCE
                worst = max(worst, _close(parts.score(_ids(9, seed=3)), scores, f"after {what}", allowed))
    return f"chunks of 1, 7 and 50; worst logit difference {worst:.1e}"


def _rounding(model: Model, scores: Tensor) -> float:
    """The difference allowed after compression where rows are rounded to codes: one on an edge may fall either way."""
    with _session(Dense(), model, None) as dense:
        dense.prefill(_ids(LENGTH))
        return max(TOLERANCE, 0.05 * _worst(dense.score(_ids(9, seed=3)), scores))


def _kept_or_none(session: Session) -> list[list[Tensor]] | None:
    try:
        return _kept(session)
    except NotApplicableError:
        return None


def heads_may_be_permuted(method: Method) -> str:
    """With its heads in another order the model keeps the same rows in that order, and no head looks at the others."""
    if method.card.heads != "independent":
        raise NotApplicableError(f"its heads are {method.card.heads}")
    model, order = tiny_model(), [1, 0]
    with _session(method, model, _budget(method), track=True) as session:
        session.prefill(_ids(LENGTH))
        kept, scores = _kept_or_none(session), session.score(_ids(9, seed=3))
    with _session(method, permute_heads(model, order), _budget(method), track=True) as session:
        session.prefill(_ids(LENGTH))
        found = _kept_or_none(session)
        worst = _close(session.score(_ids(9, seed=3)), scores, "permuted heads")
    if kept is not None and found is not None:
        assert _same(found, [[heads[i] for i in order] for heads in kept]), "other rows were kept"
        with _session(method, permute_heads(model, [0, 0]), _budget(method), track=True) as session:
            session.prefill(_ids(LENGTH))
            twins = _kept(session)[0]  # later layers have other inputs
        assert all(x.equal(kept[0][0]) for x in twins), "the first head keeps other rows beside other heads"
    return f"worst logit difference {worst:.1e}"


def batch_does_not_matter(method: Method) -> str:
    """A batch of two contexts gives each what it gets alone."""
    model, contexts = tiny_model(), [_ids(LENGTH, seed=4), _ids(LENGTH, seed=5)]
    with _session(method, model, _budget(method)) as session:
        together = [session.prefill(torch.tensor(contexts)), session.score(torch.tensor([_ids(9, seed=3)] * 2))]
    worst = 0.0
    for i, context in enumerate(contexts):
        with _session(method, model, _budget(method)) as session:
            worst = max(worst, _close(session.prefill(context)[0], together[0][i], f"prefill of sequence {i + 1}"))
            worst = max(worst, _close(session.score(_ids(9, seed=3))[0], together[1][i], f"sequence {i + 1}"))
    return f"worst logit difference {worst:.1e}"


def three_turns_go_on(method: Method) -> str:
    """In three turns positions count tokens, not rows, and answers do not depend on who kept the history."""
    with _session(method, tiny_model(), _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        answers = _talk(session)
        tokens = LENGTH + sum(5 + 4 * turn for turn in range(TURNS)) + 3 * (TURNS - 1)
        assert session.seen == tokens, f"{session.seen} tokens seen, {tokens} were run"
        assert all(store.seen == tokens for store in session.layers), "a layer lost count of the tokens"
    with _session(method, tiny_model(), _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        own = _talk(session, golden=False)
        made = LENGTH + sum(5 + 4 * turn for turn in range(TURNS)) + LIMIT * TURNS - 1
        assert session.seen == made, f"own history: {session.seen} tokens seen, {made} were run"
    assert own[0].ids == answers[0].ids, "the first answer depends on what comes after it"
    return f"{tokens} tokens with golden history, {made} with its own"


def fork_is_a_fresh_run(method: Method) -> str:
    """A fork answers as a fresh session does, bit for bit, and leaves its parent as it was."""
    model = tiny_model()
    questions = [_ids(5, seed=7), _ids(11, seed=8)]
    with _session(method, model, _budget(method)) as parent:
        parent.prefill(_ids(LENGTH))
        forked = []
        for question in questions:
            with parent.fork() as branch:
                branch.ask(question, LIMIT, stop=NEVER_STOP)
                forked.append(branch.score(_ids(4, seed=9)))
        with parent.fork() as one, parent.fork() as two:  # two at a time
            for branch, question in zip((one, two), questions, strict=True):
                branch.ask(question, LIMIT, stop=NEVER_STOP)
            both = [one.score(_ids(4, seed=9)), two.score(_ids(4, seed=9))]
        parent.ask(questions[0], LIMIT, stop=NEVER_STOP)
        itself = parent.score(_ids(4, seed=9))
    for i, question in enumerate(questions):
        with _session(method, model, _budget(method)) as fresh:
            fresh.prefill(_ids(LENGTH))
            fresh.ask(question, LIMIT, stop=NEVER_STOP)
            wanted = fresh.score(_ids(4, seed=9))
        worst = _worst(forked[i], wanted)
        assert forked[i].equal(wanted), f"question {i + 1}: a fork differs from a fresh run by {worst:.2g}"
        assert both[i].equal(wanted), f"question {i + 1}: of two forks at a time, one differs from a fresh run"
        assert i or itself.equal(wanted), "the parent was changed by its forks"
    return "two questions, one after the other and side by side, equal bit for bit"


def short_prompts_run(method: Method) -> str:
    """Contexts of 1, 7 and about the window's tokens run, and none holds more rows than it has tokens."""
    edge = method.minimum_rows()
    lengths = sorted({1, 7, *(x for x in (edge - 1, edge, edge + 1, edge + 2) if x > 0)})
    model = tiny_model()
    for length in lengths:
        budget = None if _budget(method) is None else Budget("rows", edge)
        with _session(method, model, budget, length) as session:
            logits = session.prefill(_ids(length))
            _talk(session)
            assert logits.isfinite().all(), f"{length} tokens: logits are not finite"
            proof = session.certificate()
            assert max(proof.rows_kept) <= length, f"{length} tokens: {max(proof.rows_kept)} rows kept"
            assert proof.acted or proof.identity or length <= edge, f"{length} tokens: it did not act"
    return f"{', '.join(map(str, lengths))} tokens"


def runs_are_equal_and_apart(method: Method) -> str:
    """Two runs are equal bit for bit, with another context run in between."""
    model = tiny_model()

    def run(seed: int) -> tuple[Tensor, list[list[list[int]]], Tensor]:
        with _session(method, model, _budget(method)) as session:
            logits = session.prefill(_ids(LENGTH, seed))
            return logits, [x.ids for x in _talk(session)], session.score(_ids(9, seed=3))

    first, _, again = run(4), run(5), run(4)
    assert first[0].equal(again[0]) and first[1] == again[1] and first[2].equal(again[2]), "a second run differs"
    return "logits, tokens and likelihoods equal"


def static_steps_are_eager_ones(method: Method) -> str:
    """Decode steps of fixed shapes, as a CUDA graph needs them, give the eager logits, or the method says why not."""
    if method.graphable is not None:
        raise NotApplicableError(method.graphable)
    worst = 0.0
    with _session(method, tiny_model(), _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        session.question(_ids(5), LIMIT)
        tokens = [torch.tensor([[x]]) for x in _ids(LIMIT, seed=6)]
        with session.fork() as eager:
            wanted = [step_logits(eager, x) for x in tokens]
        session.make_static()
        for i, token in enumerate(tokens):
            worst = max(worst, _close(step_logits(session, token), wanted[i], f"step {i + 1}"))
    return f"{LIMIT} steps, worst logit difference {worst:.1e}"


def model_is_restored(method: Method) -> str:
    """The model has its attention, its weights and no hook of ours after a session, and after one that failed."""
    model = tiny_model()

    def look() -> tuple[object, ...]:
        hooks = [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.module.modules()]  # noqa: SLF001
        names = [sorted(vars(x)) for x in model.module.modules()]
        weights = [x.sum().item() for x in model.module.state_dict().values()]
        return model.module.config._attn_implementation, hooks, names, weights  # noqa: SLF001  # transformers' name

    before = look()
    with _session(method, model, _budget(method)) as session:
        session.prefill(_ids(LENGTH))
        _talk(session)
    assert look() == before, "the model was left changed"
    try:
        with _session(method, model, _budget(method)) as session:
            session.prefill(_ids(LENGTH))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert look() == before, "the model was left changed by a session that failed"
    return "attention, hooks, attributes and weights as before"


def settings_are_frozen(method: Method) -> str:
    """Settings cannot be changed on the object, and `fit` returns a new one."""
    for name in method.settings:
        try:
            setattr(method, name, None)
        except AttributeError:
            continue
        raise AssertionError(f"setting {name} can be changed: make it a frozen dataclass")
    before = replace(method)
    method.fit(_budget(method), tiny_model().shape(LENGTH))
    assert method == before, "`fit` changed the method it was called on"
    return f"{', '.join(method.settings) or 'no settings'}"


CLAIMS: dict[str, Callable[[Method], str]] = {
    trial.__name__.replace("_", " "): trial
    for trial in (
        settings_are_frozen,
        identity_at_full_budget,
        first_token_is_exact,
        acts_at_its_budget,
        measured_bytes_are_declared,
        old_rows_are_freed,
        decode_copies_nothing,
        chunks_do_not_matter,
        heads_may_be_permuted,
        batch_does_not_matter,
        three_turns_go_on,
        fork_is_a_fresh_run,
        short_prompts_run,
        runs_are_equal_and_apart,
        static_steps_are_eager_ones,
        model_is_restored,
    )
}
