"""The method files of examples/ pass every invariant, and do what their docstrings say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from kvbench.budget import Budget
from kvbench.check import check
from kvbench.check.footprint import measured_bytes_are_declared, state_follows_entries
from kvbench.check.trial import CONTEXT, LENGTH, NEVER_STOP, open_session, random_ids
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method
from kvbench.registry import find_method
from kvbench.selection import RollingMethod, ScoredMethod
from kvbench.store import LayerKV

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
STATEFUL, MERGING = (find_method(f"{EXAMPLES[0].parent / name}.py") for name in ("stateful_eviction", "merging"))


def read_sums(kv):
    """The sums of the first head by position."""
    return dict(zip(kv.logical_positions()[0, 0].tolist(), kv.get_entry_state("received")[0, 0].tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda x: x.stem)
def test_an_example_passes_every_invariant(path):
    assert [x for x in check(find_method(str(path))) if not x.passed] == []


@pytest.mark.parametrize("kind", ["absolute", "relative", "link"])
def test_a_bug_is_reported_with_its_place(tmp_path, monkeypatch, kind):
    """The line of the method's file, wherever in torch it was raised, and however its path was given."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py" if kind == "absolute" else Path("mine.py")
    if kind == "link":
        path.symlink_to(tmp_path / "other.py")
    text = (EXAMPLES[0].parent / "my_method.py").read_text(encoding="utf-8").replace("norm(dim=-1)", "norm(dim=7)")
    path.write_text(text)
    line = next(i for i, x in enumerate(text.splitlines(), 1) if "norm(dim=7)" in x)
    failed = [x.detail for x in check(find_method(str(path))) if not x.passed]
    assert failed
    assert all(x.startswith("IndexError: ") and x.endswith(f"(mine.py, line {line})") for x in failed)


def test_state_follows_the_entries():
    """Over evictions at the end of the context and while decoding, every entry keeps its own sum."""
    model = tiny_model()
    found = {}

    class Watched(STATEFUL):
        def score(self, kv, step, entries):
            if step.layer == 0 and step.moment.compresses:
                found.update(read_sums(kv))
            return super().score(kv, step, entries)

    with open_session(Watched(), model, Budget("rows", 30)) as session:
        session.prefill(CONTEXT)
        store = session.layers[0]
        before = read_sums(store)
        assert len(before) == 30 < len(found) == LENGTH
        assert before == {position: found[position] for position in before}
        assert sum(found.values()) == pytest.approx(LENGTH, rel=1e-5), "every query gives one"
        session.ask(random_ids(5), 12, stop=NEVER_STOP)
        after = read_sums(store)
    assert set(after) - set(before), "new entries came"
    stayed = set(after) & set(before)
    assert stayed and set(before) - stayed, "entries were dropped while decoding"
    assert all(before[x] <= after[x] <= before[x] + 20 for x in stayed)


def test_merging_keeps_the_sum_of_values():
    """A kept value is the mean of those that it stands for, worked out here entry by entry."""
    model, seen = tiny_model(), {}

    class Watched(MERGING):
        def select(self, kv, scores, entries):
            before = kv.keys.clone(), kv.values.clone()
            super().select(kv, scores, entries)
            seen.setdefault(len(seen), (*before, scores, kv.keys.clone(), kv.values.clone()))

    with open_session(Watched(window=4), model, Budget("rows", 10)) as session:
        session.prefill(CONTEXT)
    keys, values, scores, kept_keys, kept_values = seen[0]
    for head in range(keys.shape[1]):
        kept = sorted(sorted(range(LENGTH), key=lambda i, x=scores[0, head]: (-x[i].item(), i))[:10])
        groups = {x: [] for x in kept}
        for i in range(LENGTH):
            alike = [torch.cosine_similarity(keys[0, head, i], keys[0, head, x], dim=0).item() for x in kept]
            groups[i if i in kept else kept[max(range(10), key=alike.__getitem__)]].append(values[0, head, i])
        assert torch.equal(kept_keys[0, head], keys[0, head, kept])
        means = torch.stack([torch.stack(groups[x]).mean(0) for x in kept])
        assert torch.allclose(kept_values[0, head], means, atol=1e-5)


class Stale(STATEFUL):
    """Keeps its sums in kv.state, where they do not follow the entries."""

    def layer(self, index):
        return LayerKV(track=True, bounded=True)

    def attend(self, kv, step):
        old = kv.state.get("received")
        sums = torch.zeros_like(kv.keys[..., 0], dtype=torch.float32)
        if old is not None and old.shape[2] <= sums.shape[2]:
            sums[:, :, :old.shape[2]] = old
        kv.state["received"] = sums + 1
        return super(STATEFUL, self).attend(kv, step)

    def score(self, kv, step, entries):
        return kv.state["received"]


def test_state_that_does_not_follow_is_caught():
    with pytest.raises(AssertionError, match=r"kv.state\['received'\] has an element per entry.*entry_state"):
        state_follows_entries(Stale())


class Undeclared(STATEFUL):
    """Declares the bytes of a store without its state."""

    def layer_bytes(self, index, shape, entries):
        return LayerKV(track=True, bounded=True).bytes_for(shape.layers[index], shape, entries)


def test_undeclared_bytes_are_named():
    """30 entries x 2 KV heads x 2 layers x 4 bytes."""
    with pytest.raises(AssertionError, match="480 bytes: received, float32, not declared"):
        measured_bytes_are_declared(Undeclared())


def test_state_of_entries_refuses_unequal_numbers_per_head():
    class Unequal(STATEFUL):
        def evict(self, kv, step):
            kv.keep_where(kv.get_entry_state("received") > 0)

    with (
        open_session(Unequal(), tiny_model(), Budget("rows", 30)) as session,
        pytest.raises(UserError, match="the state of entries, received, does not follow"),
    ):
        session.prefill(CONTEXT)


def test_the_guide_shows_the_signatures():
    """Of every hook, as the classes have them."""
    text = (EXAMPLES[0].parents[1] / "docs" / "adding_a_method.md").read_text().partition("### Signatures")[2]
    shown = [x.partition(": ...")[0] for x in text.split("```")[1].strip().splitlines()]
    assert len(shown) == 17
    every = [*[Method] * 14, ScoredMethod, RollingMethod, ScoredMethod]
    for line, cls in zip(shown, every, strict=True):
        name = line.removeprefix("def ").partition("(")[0]
        assert line == f"def {name}{inspect.signature(getattr(cls, name))}".replace("'", "")
