"""The check of bytes for methods whose declaration depends on the run, or that cannot declare bytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic_core import to_jsonable_python

from kvbench.budget import Budget, LayerShape, Shape
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.verification import declared
from kvbench.leaderboard.verification.declared import (
    AnsweredTurn,
    _budget_entries,
    _check_end,
    _check_later,
    _check_part,
    _is_exact,
    _least_at_end,
    check_entries,
    check_reads,
    list_turns,
)
from kvbench.methods.baseline.full import Full
from kvbench.methods.channels.mustafar import Mustafar
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.methods.lossless.prompt_lookup import PromptLookup
from kvbench.methods.merging.kvmerger import KVMerger
from kvbench.methods.prefill.ftp import FTP
from kvbench.methods.quantization.kivi import Kivi
from kvbench.methods.quantization.xkv import XKV
from kvbench.methods.retrieval.quest import Quest
from kvbench.methods.reuse.cacheblend import CacheBlend
from kvbench.runs.journal import CacheBytes, Effect, TokenCounts
from kvbench.task import Mode

FULL = LayerShape(4, 8, 256, 256, None)
GEMMA = Shape(8000, (replace(FULL, window=4096), FULL) * 3, 2)
"""Alternating sliding and full layers, as in Gemma-2."""
ORDER = tuple(sorted(((layer, head) for layer in range(6) for head in range(4)), key=lambda x: (x[1], -x[0])))
"""A ranking of heads as `bind` may return it: full heads spread over layers, not in the most expensive ones first."""


def look(
    method, fitted, budget, monkeypatch, *, stored=None, resolved=None, identity=False, recompress=False, file=0,
    facts=(), called=(),
):
    """Run the check on one sample with these stored bytes; default: the bytes that the method declares."""
    monkeypatch.setattr(declared, "find_shapes", lambda *_: {GEMMA.length: GEMMA})
    for name in ("check_entries", "check_reads", "_check_end"):  # test_forgeries.py has cases of them
        monkeypatch.setattr(declared, name, lambda *_, of=name, **__: called and called.append(of))
    line = SimpleNamespace(
        turn=0, index=0, denoising=None, tokens=SimpleNamespace(context=GEMMA.length, query=0, generated=0),
        bytes=SimpleNamespace(
            full_bytes=GEMMA.full_bytes, stored_bytes=fitted.declared_bytes(GEMMA) if stored is None else stored,
            host_bytes=0, file_bytes=file, off_device_bytes=file,
        ),
        effect=SimpleNamespace(identity=identity, facts=dict(facts)),
    )
    spec = SimpleNamespace(
        budget=budget, recompress=recompress, model=SimpleNamespace(id="tiny", kind="autoregressive"),
        method=SimpleNamespace(name=method.card.name), mode=Mode.SINGLE,
    )
    found = to_jsonable_python(fitted.resolution) if resolved is None else resolved
    result = SimpleNamespace(budget=SimpleNamespace(resolved=found, kind=method.budget_kind.value))
    made = [(None, SimpleNamespace(turns=[SimpleNamespace(answer=())], parts=()))]
    return declared.check_bytes(SimpleNamespace(spec=spec), method, result, [line], made, None)


@pytest.mark.parametrize("kind", [DuoAttention, RazorAttention])
@pytest.mark.parametrize("budget", ["25%", "50%", "75%"])
def test_declared_bytes_use_the_head_order_of_the_run(kind, budget, monkeypatch):
    """The layers of the full heads determine the bytes, and only the run knows their order."""
    method = kind()
    fitted = replace(method, order=ORDER).fit(Budget.parse(budget), GEMMA)
    assert look(method, fitted, budget, monkeypatch).outcome == "ok"
    with pytest.raises(RefusedError) as refusal:
        look(method, fitted, budget, monkeypatch, stored=fitted.declared_bytes(GEMMA) - 2)
    assert "declares" in refusal.value.check.reason


def test_bytes_in_a_file_that_the_method_does_not_declare_are_refused(monkeypatch):
    with pytest.raises(RefusedError, match="full declares"):
        look(Full(), Full(), None, monkeypatch, identity=True, file=8)


@pytest.mark.parametrize(("method", "facts", "identity"), [
    (Full(), {"entries_dropped": 5}, True), (CacheBlend(), {}, True), (CacheBlend(), {"entries_reused": 5}, False),
    (CacheBlend(), {"entries_dropped": 5}, False),
])
def test_only_entries_of_another_prompt_make_a_method_without_a_budget_lossy(method, facts, identity, monkeypatch):
    """Layers with a window drop entries of the full cache, too."""
    assert look(method, method, None, monkeypatch, facts=facts, identity=identity).outcome == "ok"
    with pytest.raises(RefusedError, match=f"has identity {not identity}, not {identity}"):
        look(method, method, None, monkeypatch, facts=facts, identity=not identity)


@pytest.mark.parametrize("order", [
    [[1, 0]] * 24, [list(x) for x in ORDER[1:]], [[9, 9], *(list(x) for x in ORDER[1:])], "x", [1], [[0, "a"]],
])
def test_an_invalid_head_order_is_refused(order, monkeypatch):
    """Every head must occur exactly once."""
    fitted = replace(DuoAttention(), order=ORDER).fit(Budget.parse("50%"), GEMMA)
    found = to_jsonable_python({**fitted.resolution, "order": order})
    with pytest.raises(RefusedError, match="its resolved budget"):
        look(DuoAttention(), fitted, "50%", monkeypatch, resolved=found)


def test_a_part_that_is_not_shipped_is_trained_in_any_number_of_steps():
    """Steps are a false statement only where no training took place."""
    method, resolved = FTP(steps=7), {"part": "a" * 64, "trained_on": "the standard library"}
    stated, model = SimpleNamespace(name="ftp", settings={"steps": 7}), SimpleNamespace(id="org/model", sha256="f" * 64)
    spec = SimpleNamespace(method=stated, model=model)
    assert find_reason(_check_part, spec, method, resolved.keys(), resolved) == ""
    assert find_reason(_check_part, spec, method, resolved.keys(), {}) == "its budget does not resolve part"
    assert find_reason(_check_part, spec, method, set(), {}) == ""


def test_undeclarable_bytes_are_flagged(monkeypatch):
    """With a threshold the bytes depend on the text; everything else is still checked."""
    method = KVMerger(mode="eps")
    fitted = method.fit(None, GEMMA)
    called = ["nothing yet"]
    found = look(method, fitted, None, monkeypatch, stored=12345, called=called)
    assert (found.outcome, "the text decides" in found.reason) == ("flag", True)
    assert called[1:] == ["check_entries", "_check_end"]  # what a step reads depends on the text, too
    with pytest.raises(RefusedError, match="its journal has identity"):
        look(method, fitted, None, monkeypatch, stored=12345, identity=True)


def test_excess_bytes_under_recompress_are_flagged(monkeypatch):
    """Between compressions a method may store more than declared, never less."""
    method = DuoAttention()
    fitted = replace(method, order=ORDER).fit(Budget.parse("50%"), GEMMA)
    declared = fitted.declared_bytes(GEMMA)

    def found(stored, **said):
        return look(method, fitted, "50%", monkeypatch, stored=stored, recompress=True, **said)

    assert found(declared).outcome == "ok"
    assert (found(declared + 2).outcome, "1 of 1 samples store more" in found(declared + 2).reason) == ("flag", True)
    with pytest.raises(RefusedError, match="declares"):
        found(declared - 2)
    with pytest.raises(RefusedError, match="its journal has identity"):
        found(declared, identity=True)


SMALL = Shape(100, (LayerShape(2, 4, 16, 16, None),) * 2, 2)
"""A context of 25,600 bytes, 256 per token."""
KEEPING = SnapKV().fit(Budget.parse("40"), SMALL)
READING = Quest(page=4).fit(Budget.parse("25%"), SMALL)
PACKING = Kivi().fit(None, SMALL)
FACTORING = XKV(key_rank=1.0, value_rank=1.0).fit(None, SMALL)
"""Factors of a token, which both layers read, take more bytes than its entries."""
PRUNING = Mustafar(key_sparsity=0.0, value_sparsity=0.1).fit(None, SMALL)
"""31 elements and two bitmaps take more bytes than 32 elements."""
DROPPED = {"entries_dropped": 240}
"""By `KEEPING`: 60 of each of four heads."""


def make_turn(**values):
    """The first turn of the full cache: four tokens of a question and six of an answer follow the context."""
    end = SMALL.full_bytes + 8 * 256
    at_end = ("end_bytes", "peak_bytes", "read_bytes_per_step", "end_stored_bytes", "end_full_bytes")
    reads = ("distinct_read_bytes_per_step", "full_read_bytes_per_step")
    size = {
        "full_bytes": SMALL.full_bytes, "stored_bytes": SMALL.full_bytes, "spare_bytes": 0, "host_bytes": 0,
        **dict.fromkeys((*at_end, *reads), end),
    }
    effect = {"acted": True, "identity": False, "entries_seen": 100, "entries_kept": (100.0, 100.0), "facts": {}}
    turn = {
        "name": "sample 0 turn 0", "index": 0, "context": 100, "after": 10, "asked": 4, "first": True, "steps": 5,
    }
    found = [{name: values.pop(name, x) for name, x in fields.items()} for fields in (size, effect, turn)]
    assert not values
    return AnsweredTurn(bytes=CacheBytes(**found[0]), effect=Effect(**found[1]), **found[2])


def keep(**values):
    """A turn of `KEEPING`."""
    stored = {"stored_bytes": 10_240, **dict.fromkeys((*READS, "end_stored_bytes"), 12_288), **values}
    return make_turn(**{"entries_kept": (40.0, 40.0), "facts": DROPPED, **stored})


READS = ("read_bytes_per_step", "distinct_read_bytes_per_step")


def find_reason(check, *arguments, **options):
    """Why a check refuses; empty if it does not."""
    try:
        check(*arguments, **options)
    except RefusedError as error:
        return error.check.reason
    return ""


@pytest.mark.parametrize(("mode", "asked"), [(Mode.MULTI_TURN, [3, 6]), (Mode.MULTI_REQUEST, [3, 3])])
def test_the_tokens_of_a_turn_are_its_question_and_the_longer_of_two_answers(mode, asked):
    """By mode, questions of earlier turns are certainly in the cache, or not."""
    made = [(None, SimpleNamespace(turns=[SimpleNamespace(answer=(7,) * n) for n in (2, 3, 4)]))] * 2
    lines = [
        SimpleNamespace(
            index=index, turn=turn, denoising=None, bytes=None if turn == 2 else make_turn().bytes,
            tokens=TokenCounts(context=100, query=3, generated=generated), effect=make_turn().effect,
        ) for index in (0, 1) for turn, generated in enumerate((5, 0, 1))
    ]
    found = list_turns(lines, made, mode)
    assert [x.after for x in found] == [3 + 5, 3 + 5 + 3 + 3] * 2
    assert [x.asked for x in found] == asked * 2
    assert [(x.first, x.steps) for x in found] == [(True, 4), (False, 0)] * 2


@pytest.mark.parametrize("name", ["stored_bytes", "spare_bytes", "host_bytes"])
@pytest.mark.parametrize("more", [-8, 8])
def test_bytes_of_the_context_are_those_of_the_first_turn(name, more):
    first = make_turn(**{name: 800})
    assert find_reason(_check_later, [first, replace(first, first=False)]) == ""
    later = make_turn(**{name: 800 + more}, first=False)
    assert f"its {name} is {800 + more}, that of turn 0 800" in find_reason(_check_later, [first, later])
    assert "turn 0 of its sample has none" in find_reason(_check_later, [later])


@pytest.mark.parametrize(("name", "value"), [
    ("identity", True), ("entries_seen", 99), ("entries_kept", (100.0, 99.0)),
])
def test_entries_of_the_context_are_those_of_the_first_turn(name, value):
    """They are counted once, at the end of the context."""
    later = make_turn(**{name: value}, first=False)
    assert f"its {name} is {value}, that of turn 0 " in find_reason(_check_later, [make_turn(), later])


@pytest.mark.parametrize(("values", "reason"), [
    ({}, ""), ({"facts": {"entries_dropped": 4 * 110}}, ""),
    ({"facts": {"entries_dropped": 4 * 110 + 1}}, "counts 441"),
    ({"facts": {"entries_dropped": 140, "entries_skipped": 100}}, "counts 140"),
    ({"stored_bytes": 10_240 - 1}, "80 unquantized entries take 10240 bytes"),
    ({"stored_bytes": 10_000, "host_bytes": 240}, ""),
    ({"stored_bytes": 100, "facts": {**DROPPED, "entries_quantized": 1}}, ""),
    ({"entries_kept": (101.0, 40.0)}, "layer 0 keeps 101 entries of 100"),
    ({"entries_kept": (40.0 + 1e-9, 40.0 - 1e-9)}, ""),  # means over heads are rounded
])
def test_entries_are_dropped_once_and_have_all_their_bytes(values, reason):
    """Those of the context and of ten later tokens, on four heads."""
    found = find_reason(check_entries, keep(**values), KEEPING, SMALL, SMALL)
    assert reason in found and bool(reason) == bool(found)


def list_reads(method, least, most, **values):
    """Reasons for reads at and beyond both bounds."""
    reads = (least, most, least - 1, most + 1)
    turns = (make_turn(**{**values, "read_bytes_per_step": x}) for x in reads)
    return [find_reason(check_reads, x, method, SMALL, recompress=False) for x in turns]


@pytest.mark.parametrize(("method", "least", "most", "values"), [
    # All that is stored at the end, and no less than the entries of 64 bytes that were not dropped
    (KEEPING, 27_648 - 240 * 64, 20_000, {"facts": DROPPED, "end_stored_bytes": 20_000}),
    # On the host, where entries of the conversation need not stay: the context as it is declared
    (KEEPING, 10_240, 27_648, {"facts": DROPPED, "host_bytes": 8, "end_stored_bytes": 20_000}),
    # Pages that are declared to be read, and ten later tokens
    (READING, 18_688, 18_688 + 10 * 256, {"facts": {"pages_read": 1}}),
    # Packed entries: 100 tokens and the four of the question
    (PACKING, 9_728, 20_000, {"facts": {"entries_quantized": 1}, "end_stored_bytes": 20_000}),
    # The 128th token of a group is the last of 28 later ones, and completes a block
    (PACKING, 10_240, 20_000, {
        "facts": {"entries_quantized": 1}, "end_stored_bytes": 20_000, "asked": 10, "after": 28,
    }),
    # Factors of 100 tokens, and the four of the question, which stay exact
    (FACTORING, 68_096 + 4 * 256, 42_496 + 8 * 256 + 25_600, {
        "facts": {"entries_factored": 1}, "end_stored_bytes": 42_496 + 8 * 256,
    }),
    # 68 pruned entries and 32 exact ones, and the four of the question, which stay exact
    (PRUNING, 27_232 + 4 * 256, 30_000, {"facts": {"elements_dropped": 1}, "end_stored_bytes": 30_000}),
])
def test_a_step_reads_as_much_as_its_method_can(method, least, most, values):
    """Neither more nor less, by a byte."""
    found = list_reads(method, least, most, **values)
    assert found[:2] == ["", ""]
    assert f"the method reads at least {least} of" in found[2]
    assert f"at most {most} are possible" in found[3]


def test_drafts_read_every_entry_at_most_once_per_token():
    """A drafting method reads once per round, which ends with up to ten tokens."""
    most = PromptLookup().declared_read_bytes(SMALL) * (1 + 10)
    assert [bool(x) for x in list_reads(PromptLookup(), 1, most)] == [False, False, False, True]


def test_no_step_reads_nothing_and_a_step_may_read_less_after_another_compression():
    assert find_reason(check_reads, keep(read_bytes_per_step=0), KEEPING, SMALL, recompress=False) == ""
    assert find_reason(check_reads, keep(read_bytes_per_step=1), KEEPING, SMALL, recompress=True) == ""
    assert find_reason(check_reads, keep(read_bytes_per_step=1), KEEPING, SMALL, recompress=False) != ""


def check_end(turn, method):
    """The reason for which the bytes at the end are refused."""
    return find_reason(_check_end, turn, method, SMALL, SMALL)


def test_a_full_cache_grows_by_the_tokens_of_a_turn():
    """By four of the question at least, and by all ten at most."""
    def grown(size):
        own = dict.fromkeys((*READS, "end_stored_bytes"), size - 240 * 64)
        return check_end(keep(**own, end_full_bytes=size, full_read_bytes_per_step=size), KEEPING)

    least, most = 104 * 256, 110 * 256
    assert [grown(least), grown(most)] == ["", ""]
    assert f"its end_full_bytes is {least - 1}, possible are {least} to {most}" in grown(least - 1)
    assert f"its end_full_bytes is {most + 1}, possible are {least} to {most}" in grown(most + 1)


@pytest.mark.parametrize(("name", "least", "most"), [
    ("end_stored_bytes", 25_600, 27_648), ("distinct_read_bytes_per_step", 18_688 // 2 - 2, 18_688),
    ("full_read_bytes_per_step", 25_600, 110 * 256),
])
def test_bytes_at_the_end_of_a_turn_that_reads_pages_are_bounded(name, least, most):
    """Two query heads may read one entry, in two layers of rounded counts; the full cache reads later tokens, too."""
    def found(size):
        given = {**dict.fromkeys(READS, 18_688), name: size}
        return check_end(make_turn(facts={"pages_read": 1}, **given), READING)

    assert [found(least), found(most)] == ["", ""]
    for beyond in (least - 1, most + 1):
        assert f"its {name} is {beyond}, possible are {least} to {most}" in found(beyond)


def test_the_layer_with_the_most_query_heads_per_head_decides_how_many_share_an_entry():
    other = replace(SMALL, layers=(SMALL.layers[0], replace(SMALL.layers[1], query_heads=2)))
    size = {"read_bytes_per_step": 18_688, "distinct_read_bytes_per_step": 18_688 // 2 - 2}
    assert find_reason(_check_end, make_turn(facts={"pages_read": 1}, **size), READING, other, other) == ""


def test_a_quantized_conversation_may_end_with_less_than_its_context_took():
    """And read less than it stores, after another compression."""
    size = {"end_stored_bytes": 5_000, **dict.fromkeys(READS, 4_000)}
    assert check_end(keep(facts={**DROPPED, "entries_quantized": 1}, **size), KEEPING) == ""


def test_nothing_more_is_stored_without_a_host_than_there_is():
    """Not even in layers with a window, whose later entries a host may keep."""
    shape = replace(SMALL, layers=(replace(SMALL.layers[0], window=50), SMALL.layers[1]))
    full = dict.fromkeys(("end_full_bytes", "full_read_bytes_per_step"), shape.full_bytes + 8 * 256)
    turn = make_turn(facts={"pages_read": 1}, **full, **dict.fromkeys(READS, 18_688))
    assert find_reason(_check_end, turn, READING, shape, shape) == ""
    more = replace(turn, bytes=turn.bytes.model_copy(update={"end_stored_bytes": turn.bytes.end_bytes + 1}))
    assert "its end_stored_bytes is" in find_reason(_check_end, more, READING, shape, shape)


def test_entries_at_the_end_take_their_bytes_where_none_may_take_fewer():
    """Layers with a window drop entries that no counter has, and drafts are read by rounds."""
    first, second = SMALL.layers
    window = replace(SMALL, layers=(replace(first, window=50), second))
    assert _least_at_end(make_turn(), KEEPING, SMALL) == 27_648
    assert _least_at_end(make_turn(end_full_bytes=None), KEEPING, SMALL) == 104 * 256
    assert _least_at_end(make_turn(), KEEPING, window) == 0
    assert _least_at_end(make_turn(), PromptLookup(), SMALL) == 0
    narrow = replace(SMALL, layers=(replace(first, value_dim=8), second))
    assert _least_at_end(keep(), KEEPING, narrow) == 27_648 - 240 * 64  # each may be of the wider layer


def test_a_budget_keeps_no_more_entries_than_there_are():
    """And in a layer with a window the same share of it."""
    assert _budget_entries(KEEPING, replace(SMALL, length=30)) == [30, 30]
    assert _budget_entries(SnapKV().fit(Budget.parse("25%"), GEMMA), GEMMA) == [1024, 2000] * 3


def test_a_turn_without_steps_reads_no_full_cache():
    none = dict.fromkeys((*READS, "full_read_bytes_per_step"), 0)
    assert check_end(make_turn(facts={"pages_read": 1}, **none, steps=0), READING) == ""
    assert "its full_read_bytes_per_step is 0" in check_end(make_turn(facts={"pages_read": 1}, **none), READING)


def test_a_round_reads_no_more_of_the_full_cache_than_there_is():
    most = 27_648
    assert check_end(make_turn(full_read_bytes_per_step=most), PromptLookup()) == ""
    less = dict.fromkeys(READS, 20_000)
    assert check_end(make_turn(full_read_bytes_per_step=25_600, **less), PromptLookup()) == ""
    assert f"25600 to {most}" in check_end(make_turn(full_read_bytes_per_step=most + 1), PromptLookup())


def test_a_counter_of_0_changes_no_entry():
    assert _is_exact(make_turn(facts={**DROPPED, "entries_quantized": 0}).effect)
    assert not _is_exact(make_turn(facts={"entries_quantized": 1}).effect)
