"""What a method holds: it acts at its budget, and its stores show the bytes that it declares and no others."""

from __future__ import annotations

import gc

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvbench.budget import BudgetKind
from kvbench.check.trial import (
    CONTEXT,
    LENGTH,
    NEVER_STOP,
    NotApplicableError,
    find_shapes,
    open_at_budget,
    random_ids,
    talk,
)
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method
from kvbench.runs.journal import Effect
from kvbench.store import LayerKV


def acts_at_its_budget(method: Method) -> str:
    """At a budget below the context the stores can prove that something happened, and an inert twin's cannot."""
    model = tiny_model()
    with open_at_budget(method, model) as session:
        session.prefill(CONTEXT)
        talk(session)
        proof = session.effect()
    if method.card.budget is BudgetKind.NONE:
        raise NotApplicableError("its card declares that it loses nothing")
    assert not proof.identity, "its budget counts as its declared identity"
    assert proof.acted, f"rows kept {proof.entries_kept} of {proof.entries_seen}, facts {proof.facts}: it never acted"
    inert = _inert(method, model)
    assert not inert.acted, f"a twin that does nothing is certified as well: {inert.facts}"
    assert not inert.identity, "a twin that does nothing counts as its declared identity"
    kept = sum(proof.entries_kept) / len(proof.entries_kept)
    return f"kept {kept:.0f} of {proof.entries_seen} entries; a method that does nothing is caught"


def _inert(method: Method, model: Model) -> Effect:
    """The effect of the same settings when nothing is stored, read or kept differently."""
    hooks = ("layer", "attend", "evict", "end_of_context", "prefill", "generate")
    plain = {name: getattr(Method, name) for name in hooks}
    twin = type("Inert", (type(method),), plain)(**method.settings)
    with open_at_budget(twin, model) as session:
        session.prefill(CONTEXT)
        talk(session)
        return session.effect()


def measured_bytes_are_declared(method: Method) -> str:
    """Bytes counted from storages after the context equal the method's own account."""
    found, shapes = [], find_shapes(method)
    for name, shape in shapes.items():
        model = tiny_model(*shape)
        with open_at_budget(method, model) as session:
            session.prefill(CONTEXT)
            measured, declared = session.memory().stored_bytes, session.method.declared_bytes(model.shape(LENGTH))
            assert measured == declared, f"{name}: measured {measured} bytes, declared {declared}"
            host, told = session.memory().host_bytes, session.method.declared_host_bytes(model.shape(LENGTH))
            assert host == told, f"{name}: measured {host} bytes on the host, declared {told}"
            found.append(f"{measured / session.memory().full_bytes:.1%}")
    return f"{', '.join(found)} of the dense bytes for {', '.join(shapes)}"


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
        with open_at_budget(method, tiny_model()) as session:
            session.prefill(CONTEXT)
            held = {x.untyped_storage().data_ptr() for layer in _tensors(session) for x in layer}
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
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        session.ask(random_ids(5), 2, stop=NEVER_STOP)
        held = _tensors(session)  # alive, so that no new storage gets an old one's address
        session.method.generate(session, 20, NEVER_STOP)
        after = [[x.untyped_storage().data_ptr() for x in layer] for layer in _tensors(session)]
        before = [[x.untyped_storage().data_ptr() for x in layer] for layer in held]
    assert before == after, "storages were replaced while decoding"
    return "20 steps, every storage where it was"


def _tensors(session: Session) -> list[list[Tensor]]:
    """What the ledger counts, by layer."""
    return [[*store.tensors(), *store.host_tensors()] for store in session.layers]
