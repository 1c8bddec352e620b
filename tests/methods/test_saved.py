"""Saved sessions: every method goes on as if it had not been saved, and files that are wrong are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import safetensors
import safetensors.torch
import torch

from kvbench.engine.reuse import Reuse
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, BudgetKind
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.registry import find_method
from kvbench.store import sealed
from kvbench.store.sealed import hash_tensors

LENGTH = 150
NEVER_STOP = frozenset()

pytestmark = pytest.mark.usefixtures("profile_cache")


def ids(count, seed):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fitted(kind, model):
    """The method at half of the cache, or at its own size."""
    made = kind().bind(model)
    chosen = made.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    return made.fit(Budget("rows", max(LENGTH // 2, made.minimum_entries())) if chosen else None, model.shape(LENGTH))


def go_on(session):
    """Tokens, logits, bytes and counters of two more turns."""
    tokens = [session.ask(ids(9, seed), 6, history=ids(3, 8), stop=NEVER_STOP).ids for seed in (2, 3)]
    return tokens, session.logits, session.memory(), session.effect()


def assert_equal(found, wanted):
    """Two sessions that went on are the same, bit for bit."""
    assert found[0] == wanted[0]
    assert found[1].equal(wanted[1])
    assert found[3] == wanted[3]
    peak = {"peak_bytes": 0}  # a file has no room for entries that are still to come
    assert found[2].model_copy(update=peak) == wanted[2].model_copy(update=peak)


@pytest.mark.few(4)
def test_a_loaded_session_goes_on_as_the_saved_one(method_name, tmp_path):
    """Of every method, after a context and a turn: the same tokens, logits, bytes and facts."""
    model = tiny_model()
    method = fitted(find_method(method_name), model)
    file = tmp_path / "session.safetensors"
    with Session(model, method, capacity=LENGTH + 60) as session:
        session.prefill(ids(LENGTH, 1))
        session.ask(ids(5, 7), 4, stop=NEVER_STOP)
        size = session.save(file)
        held = session.memory()
        wanted = go_on(session)
    assert size == file.stat().st_size
    with Session.load(str(file), model, method) as session:  # a path as text
        loaded = session.memory()
        found = go_on(session)
    assert loaded.model_copy(update={"peak_bytes": held.peak_bytes}) == held
    assert_equal(found, wanted)


@pytest.mark.parametrize(("method", "earlier", "behind"), [
    ("prompt-cache", 30, -22), ("ape", 8, 14), ("no-context", 8, 40),
])
def test_a_session_whose_positions_are_not_its_count_of_tokens_goes_on(method, earlier, behind, tmp_path):
    """Ahead of it, where a schema is longer than the prompt, or behind."""
    model, file = tiny_model(), tmp_path / "session.safetensors"
    lead, one, other = (tuple(ids(n, seed)) for n, seed in ((8, 4), (26, 5), (14, 6)))
    reuse = Reuse((lead, one, other), ((tuple(ids(earlier, 4)), one, other),))
    fit = fitted(find_method(method), model)
    with Session(model, fit, capacity=LENGTH + 60, reuse=reuse) as session:
        session.prefill([*lead, *one, *other], visible=ids(5, 7))
        assert session.behind == behind
        session.save(file)
        wanted = go_on(session)
    with Session.load(file, model, fit) as session:
        assert session.behind == behind
        assert_equal(go_on(session), wanted)


@pytest.mark.parametrize("behind", [54, -5000])
def test_positions_that_the_model_does_not_have_are_refused(behind, tmp_path):
    """Below 0, or above the model's maximum."""
    model, file = tiny_model(), tmp_path / "session.safetensors"
    method, context = fitted(find_method("ape"), model), tuple(ids(53, 1))
    with Session(model, method, capacity=LENGTH + 60, reuse=Reuse((context,), ())) as session:
        session.prefill(context)
        session.save(file)
    rewrite(file, lambda header: header["session"].update(behind=behind))
    with pytest.raises(UserError, match=r"no session that kvbench saved: .*(do not follow|more than the model takes)"):
        Session.load(file, model, method)


# Files


@pytest.fixture
def saved(tmp_path):
    """A file, and the model and method that it was saved with."""
    model = tiny_model()
    method = fitted(SnapKV, model)
    with Session(model, method, capacity=LENGTH + 60) as session:
        session.prefill(ids(LENGTH, 1))
        session.save(tmp_path / "session.safetensors")
    return tmp_path / "session.safetensors", model, method


def rewrite(file, change):
    """Write a file with another header, whose hash is right."""
    tensors = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["about"])
    change(header)
    text = json.dumps(header)
    safetensors.torch.save_file(tensors, file, {"about": text, "sha256": hash_tensors(text, tensors)})


def test_a_file_is_as_large_as_the_stored_entries(saved):
    """Room for later tokens is not written: stored bytes, the last logits, and at most 20 kB of names."""
    file, model, method = saved
    with Session.load(file, model, method) as session:
        held = session.memory().stored_bytes + session.logits.nbytes
        assert session.memory().spare_bytes > 0
    assert held < file.stat().st_size < held + 20_000


@pytest.mark.parametrize(("other", "words"), [
    (lambda model, method: (tiny_model(seed=1), method), "another model: (id|sha256) was"),
    (lambda model, method: (model, replace(method, window=8)), "another method: window was 32 and is 8"),
    (lambda model, method: (model, replace(method, rows=60)), "another method: rows was 75 and is 60"),
    (lambda model, method: (model, fitted(find_method("knorm"), model)), "name was snapkv and is knorm"),
])
def test_another_model_or_method_is_refused(saved, other, words):
    """The message names the first field that differs, and both values."""
    file, *made = saved
    with pytest.raises(UserError, match=words):
        Session.load(file, *other(*made))


@pytest.mark.parametrize("size", [0, 7, 100, -1000, -1])
def test_a_truncated_file_is_refused(saved, size):
    file, model, method = saved
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(UserError, match="is damaged or no safetensors file"):
        Session.load(file, model, method)


def test_one_changed_byte_is_refused(saved):
    file, model, method = saved
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="its hash is not the one it was saved with"):
        Session.load(file, model, method)


@pytest.mark.parametrize("name", ["os:system", "kvbench.store.layer:copy", "kvbench.api:run", "builtins:eval"])
def test_a_file_cannot_name_anything_but_stores(saved, name):
    """Functions, modules and classes of other packages are refused, and nothing is called."""
    file, model, method = saved
    rewrite(file, lambda header: header["objects"][0].update({"class": name}))
    with pytest.raises(UserError, match=f"{name} is no store"):
        Session.load(file, model, method)


@pytest.mark.parametrize("change", [
    lambda header: header.pop("layers"), lambda header: header["objects"].clear(),
    lambda header: header.update(ledger=None), lambda header: header.update(logits={"tensor": 99, "on": "model"}),
    lambda header: header.update(layers={"unknown": 1}), lambda header: header["session"].update(length="x"),
])
def test_a_header_without_sense_is_refused(saved, change):
    file, model, method = saved
    rewrite(file, change)
    with pytest.raises(UserError, match="is no session that kvbench saved"):
        Session.load(file, model, method)


@pytest.mark.parametrize(("change", "words"), [
    (lambda header: header["objects"][0]["fields"].update(dropped=10**6), "1000000 entries dropped of a layer"),
    (lambda header: header["objects"][0]["fields"].update(dropped=0), "0 entries dropped of a layer that lacks 150"),
    (lambda header: header["objects"][0]["fields"].update(seen=LENGTH + 9), "of 2 heads and 159 tokens, the session"),
    (lambda header: header["session"].update(seen=LENGTH - 1), "149 tokens, 0 behind, do not follow"),
    (lambda header: header["session"].update(behind=-4), "-4 behind"),
    (lambda header: header["session"].update(batch=3), "a layer of 2 heads"),
    (lambda header: header["session"].update(compress_seconds=-1.0), "do not follow"),
    (lambda header: header["ledger"].update(peak=8), "its peak is 8 bytes"),
    (lambda header: header["ledger"]["context"].__setitem__(0, -8), "its peak is"),
    (lambda header: header["ledger"]["effect"].update(identity=True), "its context is said to be exact"),
    (lambda header: header["ledger"]["effect"].update(entries_seen=9), "entries of 9"),
    (lambda header: header["ledger"]["effect"].update(entries_kept=[LENGTH + 1.0] * 2), r"its layers keep \(151.0"),
])
def test_counts_that_the_tensors_contradict_are_refused(saved, change, words):
    """Of the right types; counts of reads and of time cannot be checked."""
    file, model, method = saved
    rewrite(file, change)
    with pytest.raises(UserError, match=f"is no session that kvbench saved: .*{words}"):
        Session.load(file, model, method)


FORGED = ("x", None, -1, 10**18, {"dict": []}, {"object": 0})


@pytest.mark.few
@pytest.mark.parametrize(
    "kind", [SnapKV, find_method("quest"), pytest.param(find_method("leoam"), marks=pytest.mark.slow)],
)
def test_stores_with_forged_fields_are_refused(kind, tmp_path):
    """Every field of the first store in turn, with a value of another type or size: refused, or without effect."""
    model, file = tiny_model(), tmp_path / "session.safetensors"
    method = fitted(kind, model)
    with Session(model, method, capacity=LENGTH + 60) as session:
        session.prefill(ids(LENGTH, 1))
        session.save(file)
    saved = file.read_bytes()
    with safetensors.safe_open(file, "pt") as opened:
        names = list(json.loads(opened.metadata()["about"])["objects"][0]["fields"])
    refused = set()
    for name in names:
        for forged in FORGED:
            file.write_bytes(saved)
            rewrite(file, lambda header: header["objects"][0]["fields"].update({name: forged}))  # noqa: B023
            try:
                session = Session.load(file, model, method)
            except UserError as error:
                assert "is no session that kvbench saved" in str(error)  # noqa: PT017  # some are without effect
                refused.add(name)
            else:
                with session:
                    go_on(session)
    assert {"n", "seen", "_block"} <= refused


@pytest.mark.parametrize("kind", [SnapKV, find_method("quest")])
def test_forged_tensors_are_refused(kind, tmp_path):
    """Each tensor in turn without its last column: found by the question that is tried out."""
    model, file = tiny_model(), tmp_path / "session.safetensors"
    method = fitted(kind, model)
    with Session(model, method, capacity=LENGTH + 60) as session:
        session.prefill(ids(LENGTH, 1))
        session.save(file)
    with safetensors.safe_open(file, "pt") as opened:
        text = opened.metadata()["about"]
    tensors = safetensors.torch.load_file(file)
    for name, x in tensors.items():
        if not x.dim():
            continue
        forged = {**tensors, name: x[..., :-1].contiguous()}
        safetensors.torch.save_file(forged, file, {"about": text, "sha256": hash_tensors(text, forged)})
        with pytest.raises(UserError, match="is no session that kvbench saved"):
            Session.load(file, model, method)


def test_other_files_and_sessions_without_a_context_are_refused(saved, tmp_path):
    """Each message says what to do."""
    file, model, method = saved
    with pytest.raises(UserError, match=r"there is no file .*absent. Save a session there first"):
        Session.load(tmp_path / "absent", model, method)
    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(UserError, match="its metadata is missing"):
        Session.load(tmp_path / "weights", model, method)
    with Session(model, method) as session, pytest.raises(UserError, match="no context to save: call prefill first"):
        session.save(file)
    with pytest.raises(UserError, match="could not be written"), Session.load(file, model, method) as session:
        session.save(tmp_path / "no folder" / "file")


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    """And no part of the new one."""
    file, model, method = saved
    before = file.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with Session.load(file, model, method) as session:
        monkeypatch.setattr(sealed, "save_file", fail)
        with pytest.raises(UserError, match="No space left on device"):
            session.save(file)
    assert file.read_bytes() == before
    assert [x.name for x in file.parent.iterdir()] == [file.name]
