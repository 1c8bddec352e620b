"""Invariants of memory: a method acts at its budget and stores exactly the bytes that it declares."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvbench.budget import BudgetKind
from kvbench.check.trial import (
    CONTEXT,
    LENGTH,
    NEVER_STOP,
    NotApplicableError,
    choose_budget,
    find_shapes,
    find_tensors,
    fit_at_budget,
    open_at_budget,
    open_session,
    random_ids,
    talk,
)
from kvbench.engine.session import Session
from kvbench.errors import UndeclaredError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method
from kvbench.step import Step
from kvbench.store import LayerKV, storage_bytes


def acts_at_its_budget(method: Method) -> str:
    """At a budget below the context the stores count an effect."""
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        talk(session)
        proof = session.effect()
    if method.budget_kind is BudgetKind.NONE:
        raise NotApplicableError(
            "it acts where a task names parts of the prompt" if method.reads_parts else "its card declares it lossless"
        )
    if method.budget_kind is BudgetKind.BITS and proof.identity:
        raise NotApplicableError(f"its settings encode none of {LENGTH} entries: try smaller blocks with --set")
    if method.budget_kind is BudgetKind.PROMPT and proof.identity:
        raise NotApplicableError(f"its settings compute a context of {LENGTH} tokens whole: try others with --set")
    assert not proof.identity, "its budget counts as the declared identity"
    assert proof.acted, f"kept {proof.entries_kept} of {proof.entries_seen} entries, facts {proof.facts}: no effect"
    kept, budget = sum(proof.entries_kept) / len(proof.entries_kept), choose_budget(method)
    if method.budget_kind is BudgetKind.STORED and budget is not None:
        assert kept <= budget.value, f"it kept {kept:.0f} entries per KV head, and its budget is {budget.value:.0f}"
    return f"kept {kept:.0f} of {proof.entries_seen} entries"


def measured_bytes_are_declared(method: Method) -> str:
    """Bytes counted from storages after the context equal the declared bytes, and no tensor of a store is left out."""
    found, shapes = [], find_shapes(method)
    for name, shape in shapes.items():
        model = tiny_model(*shape)
        with open_at_budget(method, model) as session:
            session.prefill(CONTEXT)
            _require_listed(session)
            try:
                declared = session.method.declared_bytes(model.shape(LENGTH))
            except UndeclaredError as reason:
                raise NotApplicableError(str(reason)) from None
            measured = session.memory().stored_bytes
            assert measured == declared, (
                f"{name}: measured {measured} bytes, declared {declared}: {_explain(session, measured - declared)}"
            )
            host, declared = session.memory().host_bytes, session.method.declared_host_bytes(model.shape(LENGTH))
            assert host == declared, f"{name}: measured {host} bytes in host memory, declared {declared}"
            files, declared = session.memory().file_bytes, session.method.declared_file_bytes(model.shape(LENGTH))
            assert files == declared, f"{name}: measured {files} bytes in files, declared {declared}"
            found.append(f"{measured / session.memory().full_bytes:.1%}")
    return f"{', '.join(found)} of the full cache for {', '.join(shapes)}"


def _require_listed(session: Session) -> None:
    """Fail if a store counts fewer bytes than it lists, or holds a tensor of a byte per token that no store lists."""
    listed = {x.untyped_storage().data_ptr() for layer in _tensors(session) for x in layer}
    for store in session.layers:
        counted, size = store.nbytes(), storage_bytes(store.tensors())
        assert counted >= size, f"{type(store).__name__}.nbytes() is {counted}, and its tensors() hold {size} bytes"
        for name, value in vars(store).items():
            storages = {x.data_ptr(): x.nbytes() for x in (y.untyped_storage() for y in find_tensors(value))}
            size = sum(n for pointer, n in storages.items() if n >= LENGTH and pointer not in listed)
            assert not size, f"{type(store).__name__}.{name} holds {size} bytes that its tensors() does not list"


def evicted_entries_are_freed(method: Method) -> str:
    """After compression no storage of the whole context is allocated, and after its session no tensor of it.

    The garbage collector is off until the context is compressed.
    """
    refs: list[tuple[int, StorageWeakRef]] = []
    original = LayerKV.append

    def append(self: LayerKV, step: object) -> None:
        original(self, step)  # type: ignore[arg-type]  # a Step, passed on
        storages = [x.untyped_storage() for x in self.tensors()]
        refs.extend((x.data_ptr(), StorageWeakRef(x)) for x in storages)

    fit_at_budget(method, tiny_model())  # calibrates, and keeps what that finds
    gc.disable()
    LayerKV.append = append  # type: ignore[method-assign,assignment]  # a spy, for this invariant only
    try:
        with open_at_budget(method, tiny_model()) as session:
            session.prefill(CONTEXT)
            held = {x.untyped_storage().data_ptr() for layer in _tensors(session) for x in layer}
            alive = [pointer for pointer, ref in refs if not ref.expired() and pointer not in held]
            watched = len(refs)
    finally:
        LayerKV.append = original  # type: ignore[method-assign]
        gc.enable()
    assert watched, "its stores do not call LayerKV.append, so no storage could be watched"
    assert not alive, f"{len(set(alive))} storages that the ledger does not count are still allocated"
    left = _find_left(method)
    assert not left, f"{len(left)} tensors are still allocated when their session is closed, such as {left[0]}"
    return f"{watched} storages watched, none outlives those that the ledger counts"


def _find_left(method: Method) -> list[str]:
    """Sizes and types of tensors that a session leaves allocated, and that an earlier one did not make."""
    model = tiny_model()
    fitted = fit_at_budget(method, model)

    def run() -> list[Tensor]:
        with Session(model, fitted, capacity=LENGTH + 200) as session:
            session.prefill(CONTEXT)
            talk(session)
        del session
        gc.collect()
        return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]

    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # objects of before need no visit: a process may keep a million
    try:
        before = run()
        known = {id(x) for x in before}
        new = [x for x in run() if id(x) not in known]
    finally:
        if not frozen:  # else collector.py has frozen those of start-up, which would be searched again from now on
            gc.unfreeze()
    return [f"{list(x.shape)} {x.dtype}".replace("torch.", "") for x in new if x.untyped_storage().nbytes() >= LENGTH]


def decode_copies_nothing(method: Method) -> str:
    """Decoding within the declared capacity writes in place: no storage is replaced."""
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        session.ask(random_ids(5), 2, stop=NEVER_STOP)
        held = _tensors(session)  # kept alive, so that no new storage gets an old address
        session.method.generate(session, 20, NEVER_STOP)
        after = [[x.untyped_storage().data_ptr() for x in layer] for layer in _tensors(session)]
        before = [[x.untyped_storage().data_ptr() for x in layer] for layer in held]
    assert before == after, "storages were replaced while decoding"
    return "20 steps, no storage replaced"


def _explain(session: Session, excess: int) -> str:
    """The stored tensors with their bytes; where some of them make up the difference, these alone."""
    found: dict[str, tuple[int, Tensor]] = {}
    for store in session.layers:
        for name, x, size in _name_tensors(store):
            found[name] = found.get(name, (0, x))[0] + size, x
    alone = {name: x for name, x in found.items() if x[0] == excess}
    return ", ".join(
        f"{size} bytes: {name}, {str(x.dtype).removeprefix('torch.')}{', not declared' if alone else ''}"
        for name, (size, x) in (alone or found).items()
    )


def _name_tensors(store: LayerKV) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors that a store counts: the name, the tensor, and its bytes without room for later entries."""
    entries = {} if store._buffer is None else store._buffer.tensors  # noqa: SLF001  # to name what it holds
    places = [("", entries), ("kv.state ", store.state), ("frozen ", vars(store.frozen or object)), ("", vars(store))]
    names = {
        y.untyped_storage().data_ptr(): f"{place}{name}"
        for place, held in reversed(places) for name, y in held.items() if isinstance(y, Tensor)
    }
    for x in store.tensors():
        name = names.get(x.untyped_storage().data_ptr(), f"a tensor of {type(store).__name__}")
        own = any(x is y for y in entries.values())
        yield name, x, x[:, :, : store.n].nbytes if own else x.untyped_storage().nbytes()


def state_follows_entries(method: Method) -> str:
    """No tensor of `kv.state` with an element per entry is left as it was after `keep` and `drop`."""
    counts: dict[str, set[int]] = {}
    other: set[str] = set()
    before: dict[int, dict[str, Tensor]] = {}  # by store: tensors with an element per entry, before entries left
    originals = {name: getattr(LayerKV, name) for name in ("append", "keep", "keep_where", "drop")}

    def spy(name: str) -> Callable[[LayerKV, Tensor], None]:
        def watched(self: LayerKV, chosen: Tensor) -> None:
            for key, x in self.state.items():
                if x.ndim > 2 and x.shape[2] == self.n:
                    before.setdefault(id(self), {})[key] = x
                else:
                    other.add(key)
            originals[name](self, chosen)

        return watched

    def find_stale(kv: LayerKV) -> None:
        for key, x in before.pop(id(kv), {}).items():
            if kv.state.get(key) is x:
                counts.setdefault(key, set()).add(x.shape[2])

    def append(self: LayerKV, step: Step) -> None:
        find_stale(self)
        originals["append"](self, step)

    for name in originals:
        setattr(LayerKV, name, append if name == "append" else spy(name))
    try:
        for length in (LENGTH, LENGTH - 7):
            before.clear()  # ids of closed stores may be taken again
            with open_session(method, tiny_model(), choose_budget(method), length) as session:
                session.prefill(CONTEXT[:length])
                talk(session)
                for kv in session.layers:
                    find_stale(kv)
    finally:
        for name, original in originals.items():
            setattr(LayerKV, name, original)
    stale = [key for key, found in counts.items() if len(found) > 1 and key not in other]
    assert not stale, (
        f"kv.state[{stale[0]!r}] has an element per entry, and does not follow keep and drop. Use "
        f"LayerKV(entry_state=({stale[0]!r},)) and kv.get_entry_state({stale[0]!r})"
    )
    return f"{len(counts.keys() | other)} tensors in kv.state, none with an element per entry that is out of date"


def _tensors(session: Session) -> list[list[Tensor]]:
    """Tensors that the ledger counts, by layer."""
    return [[*store.tensors(), *store.host_tensors()] for store in session.layers]
