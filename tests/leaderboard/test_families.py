"""Honest runs of every kind of method are verified, and forgeries of the records that only these have are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.leaderboard.submission.records import RESULT
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify
from kvbench.runs.journal import Line

from .conftest import Done, edit, make_run
from .test_forgeries import READS, Change, forge, in_spec

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lossless": ("prompt-lookup", {}),
    "host": ("vericache", {"mode": "multi-turn", "turns": 4, "visibility": "hidden"}),
    "host, sliding layers": ("vericache", {
        "model": "mini-hybrid", "task": "math-find", "length": 360, "visibility": "hidden",
        "generation": ("max_new_tokens=4",),
    }),
    "factors": ("xkv", {}),
    "reuse": ("cacheblend", {"task": "reuse-order", "length": 512}),
    "no-context": ("no-context", {"task": "reuse-edit", "length": 512}),
    "batch": ("snapkv", {"batch": "2", "samples": 2}),
    "pages": ("quest", {}),
    "allocated": ("snapkv+adakv", {"mode": "multi-turn", "turns": 2, "visibility": "hidden"}),
    "again": ("snapkv", {"mode": "multi-turn", "turns": 2, "visibility": "hidden", "recompress": True}),
    "slots": ("shadowkv", {"length": 512, "mode": "multi-turn", "turns": 2, "visibility": "hidden"}),
    "scales": ("fp8", {"method_settings": ("scale=tensor",)}),
    "shipped": ("ftp", {"budget": "60%"}),
    "trained": ("dms", {"budget": "95%"}),
    "within budget": ("kvzap", {"budget": "999"}),
    "blocks": ("fast-dllm-dual", {"model": "mini-diffusion", "generation": ("block=8", "max_new_tokens=16")}),
    "sections": ("lavida", {"model": "mini-diffusion", "generation": ("max_new_tokens=16",)}),
    "a token per pass": ("wedlm", {
        "model": "mini-diffusion", "generation": ("max_new_tokens=16",), "method_settings": ("entropy=none",),
    }),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Finished runs by kind, made when they are asked for."""
    out, made = tmp_path_factory.mktemp("families"), {}

    def find(kind: str) -> Done:
        if kind not in made:
            method, options = KINDS[kind]
            one = {"samples": 1, "turns": 1, "mode": "single", "visibility": None}
            made[kind] = make_run(out, method, **{**one, **options})
        return made[kind]

    return find


SLOW = (
    "a token per pass", "allocated", "factors", "host", "sections", "shipped", "slots", "trained", "within budget",
)


@pytest.mark.parametrize("kind", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in KINDS])
def test_an_honest_run_is_verified(done, check, kind):
    found = check(done(kind).files)
    known = "flag" if kind == "again" else "ok"  # it stores scores for the next compression, which are not declared
    assert (found["refused"], found["level"], found["bytes"], found["code"]) == ("", "L0", known, "ok")


def forge_reuse(**values: int) -> Change:
    """The record of reuse, and the counters that say the same."""
    counters = {"reused": "entries_reused", "computed": "tokens_computed"}

    def change(x: Line) -> dict[str, Any]:
        facts = {**x.effect.facts, **{counters[name]: value for name, value in values.items() if name in counters}}
        return {**forge("reuse", **values)(x), **forge("effect", facts=facts)(x)}

    return change


def forge_passes(nfe: int) -> Change:
    """Fewer forward passes, with the counters and times that follow."""
    def change(x: Line) -> dict[str, Any]:
        skipped = round(nfe * (x.denoising.sequence_length - x.denoising.computed_tokens))
        facts = {**x.effect.facts, "tokens_skipped": skipped}
        return {**forge("denoising", nfe=nfe)(x), **forge("effect", facts=facts)(x)}

    return change


def forge_baseline(**values: Any) -> Change:
    return forge("denoising", baselines=lambda x: {
        name: plain.model_copy(update=values) for name, plain in x.baselines.items()
    })


FORGERIES: dict[str, tuple[str, Change, str]] = {
    # Drafts
    "a method that drafts, without its drafts": ("lossless", lambda _: {"lossless": None}, "no record of drafts"),
    "more drafts than a round can have": (
        "lossless", forge("lossless", drafted=10**6), "rounds of at most 8 drafted tokens have 1000000",
    ),
    "a plain decoding of hours, which drafts would speed up": (
        "lossless", forge("lossless", plain_s=1e4), "plain decoding of",
    ),
    "a plain decoding in no time": ("lossless", forge("lossless", plain_s=0.0), "plain decoding of"),
    "one round for the whole answer": ("lossless", forge("lossless", rounds=1, accepted=0), "rounds with 0 accepted"),
    "bytes reloaded from no host": ("lossless", forge("lossless", reloaded_bytes=8), "it reloads 8 bytes from a host"),
    "half of the bytes on the host": (
        "host", forge("bytes", host_bytes=lambda x: x.host_bytes // 2), "vericache declares",
    ),
    "more on the host at the end than later tokens take": (
        "host", forge("bytes", end_stored_bytes=lambda x: x.end_bytes + 10**6), "its end_stored_bytes is",
    ),
    "counters of a quantized draft": (
        "lossless", forge("effect", facts={"entries_quantized": 9}), "its counter 'entries_quantized' is none",
    ),
    # Reuse
    "a record of reuse that is missing": ("reuse", lambda _: {"reuse": None}, "no record of reuse in a run of family"),
    "every token taken over and none computed": (
        "reuse", lambda x: forge_reuse(reused=x.reuse.tokens, computed=0)(x), "always computed",
    ),
    "fewer tokens computed than are missing": (
        "reuse", lambda x: forge_reuse(reused=0, computed=x.reuse.tokens // 2)(x), "computed are not",
    ),
    "chunks of an earlier run": ("reuse", forge("reuse", loaded=1), "1 chunks are of earlier runs"),
    "other tokens than its counters": ("reuse", forge("reuse", reused=1), "it has 1 tokens reused, and"),
    "a shorter prompt": ("reuse", forge("reuse", tokens=lambda x: x.tokens // 2), "tokens of 5 layers of"),
    "entries that were never moved": ("reuse", forge("reuse", moved_bytes=0), "moved 0 bytes"),
    "entries moved in a byte": ("reuse", forge("reuse", moved_bytes=1), "chunks in"),
    "chunks of no bytes": ("reuse", forge("reuse", chunk_bytes=0), "chunks in 0 bytes"),
    "more chunks than tokens": ("reuse", forge("reuse", hits=10**6), "1000000 hits"),
    "more chunks refused than computed": ("reuse", forge("reuse", refused=10**6), "1000000 refused chunks"),
    "chunks from nowhere": ("reuse", forge("reuse", hits=0, misses=0, mismatched=0), "tokens of 0 chunks"),
    "chunks of one byte": ("reuse", forge("reuse", chunk_bytes=1), "different tokens or more, and its chunks have 1"),
    "chunks that nobody computed": ("reuse", forge("reuse", misses=0, hits=5, build_s=0.0), "computed no chunk"),
    "more entries moved than the cache has": (
        "reuse", forge("reuse", moved_bytes=lambda x: 100 * x.moved_bytes), "into a cache of",
    ),
    "a prefill that only made chunks": (
        "reuse", lambda x: forge("reuse", build_s=x.times.prefill_s)(x), "which also runs the prompt",
    ),
    "chunks that took longer than the prefill": ("reuse", forge("reuse", build_s=1e4), "its chunks took 10000 s"),
    "chunks computed in no time": ("reuse", forge("reuse", build_s=0.0, misses=9), "9 chunks were computed in 0 s"),
    "reused entries called those of a prefill": (
        "reuse", forge("effect", identity=True), "its journal has identity True, not False",
    ),
    "documents that were read after all": (
        "no-context", forge("effect", facts=lambda x: {**x.facts, "entries_dropped": 0}), "computed are not",
    ),
    "the bytes of fewer documents": (
        "no-context", forge("bytes", stored_bytes=lambda x: x.stored_bytes - 2560), "no-context declares",
    ),
    "a conversation without its documents": (
        "no-context", forge("bytes", end_full_bytes=lambda x: x.end_stored_bytes), "its end_full_bytes is",
    ),
    # Compression at every turn
    "a step that reads a byte, compressed again": (
        "again", forge("bytes", **dict.fromkeys(READS, 1)), "a step reads 1 bytes",
    ),
    "nothing left at the end, compressed again": (
        "again", forge("bytes", **dict.fromkeys((*READS, "end_bytes", "end_stored_bytes"), 8)),
        "possible are",
    ),
    # Batches
    "a batch that is missing": ("batch", lambda _: {"batch": None}, "a line has times unless"),
    "a larger batch than the run's": ("batch", forge("batch", size=64), "a batch of 64 answers"),
    "more tokens that differ than were compared": (
        "batch", forge("batch", tokens=1, different=2), "2 of 1 tokens differ",
    ),
    "a reason of the submitter's": ("batch", forge("batch", alone="<b>best</b>"), "one at a time because '<b>best"),
    "no comparison with single answers": (
        "batch", forge("batch", tokens=None, different=None), "no comparison with single answers, in bfloat16",
    ),
    "a comparison of a million tokens": (
        "batch", forge("batch", tokens=10**6, different=0), "1000000 tokens compared and 0 different, of",
    ),
    # Pages
    "half stored at the end": (
        "pages", forge("bytes", end_stored_bytes=lambda x: x.end_stored_bytes // 2), "its end_stored_bytes is",
    ),
    # Choices
    "choices that are more than certain": (
        "reuse", lambda x: {"facts": {**x.facts, "logprobs": [[y + 99 for y in z] for z in x.facts["logprobs"]]}},
        "is above 0",
    ),
    # Trained methods
    "half of a trained method's bytes": (
        "trained", forge("bytes", stored_bytes=lambda x: x.stored_bytes // 2), "dms declares",
    ),
    # Entries on the host
    "a step that reads a byte of slots": (
        "slots", forge("bytes", **dict.fromkeys(READS, 1), host_read_bytes_per_step=0), "a step reads 1",
    ),
    # Tensors that layers share
    "factors read more often than layers share them": (
        "factors", forge("bytes", read_bytes_per_step=lambda x: 2 * x.read_bytes_per_step), "a step reads",
    ),
    "factors read in one layer of each group": (
        "factors", lambda x: forge("bytes", **dict.fromkeys(READS, x.bytes.stored_bytes))(x),
        "the method reads at least",
    ),
    # Blocks and sections
    "one forward pass for every token": ("blocks", forge_passes(1), "1 forward passes of 4 tokens do not give 16"),
    "half of the forward passes": ("blocks", forge_passes(2), "2 forward passes of 4 tokens do not give 16"),
    "more passes than blocks and steps have": ("sections", forge_passes(6), "6 forward passes in 4 denoising"),
    "more passes than tokens": ("a token per pass", forge_passes(18), "18 forward passes for 16 response tokens"),
    "fewer tokens computed per pass": (
        "blocks", lambda x: {**forge("denoising", computed_tokens=1.0)(x), **forge("effect", entries_kept=(1.0,))(x)},
        "tokens as skipped, its passes",
    ),
    "other blocks than the run's": ("blocks", forge("denoising", block=4), "its block is 4, the run's settings give 8"),
    "no number of steps": ("blocks", forge("denoising", steps=None), "its steps is None"),
    "no baselines": ("blocks", forge("denoising", baselines={}), "its baselines is []"),
    "a baseline of many passes": ("blocks", forge_baseline(nfe=10**4), "baseline none took 10000 forward"),
    "a baseline of one pass": ("blocks", forge_baseline(nfe=1), "baseline none took 1 forward passes"),
    "a baseline of hours": ("blocks", forge_baseline(seconds=1e4), "its turn took"),
    "bytes at the end of a conversation": ("blocks", forge("bytes", end_stored_bytes=8), "keeps no cache between"),
    "a baseline without a score": ("blocks", forge_baseline(score=None), "that of baseline none None"),
    "a baseline of fewer than no tokens": ("blocks", forge_baseline(committed_tokens=-1), "equal tokens of -1"),
    "a larger response than asked": (
        "blocks", forge("denoising", response_length=lambda x: x.response_length * 2), "are not",
    ),
    "a counter of another kind of model": (
        "blocks", forge("effect", facts=lambda x: {**x.facts, "pages_read": 1}), "its counter 'pages_read' is none",
    ),
}


@pytest.mark.parametrize(("kind", "change", "reason"), [
    pytest.param(*x, id=name, marks=pytest.mark.slow if x[0] in SLOW else ()) for name, x in FORGERIES.items()
])
def test_a_forged_record_is_refused(done, check, kind, change, reason):
    run = done(kind)
    found = check(run.with_lines(lambda _, x: x.model_copy(update=change(x))))
    assert reason in found["refused"] and found["level"] is None


def test_a_later_batch_may_be_the_one_compared(done, check):
    """Where the first answer failed when it was decoded alone."""
    def compare_second(number: int, x: Line) -> Line:
        counts = {"tokens": len(x.ids), "different": 0} if number else {"tokens": None, "different": None}
        return x.model_copy(update=forge("batch", **counts)(x))

    assert check(done("batch").with_lines(compare_second))["refused"] == ""


SPECS: dict[str, tuple[str, tuple[str, ...], object, str]] = {
    "compression at every turn, by a method that cannot": ("allocated", ("recompress",), True, "cannot compress again"),
    "chunks of a prompt that every pass runs whole": ("blocks", ("chunk",), 16, "leave --visibility"),
    "a hidden question in a prompt that every pass runs whole": ("blocks", ("visibility",), "hidden", "its visibility"),
    "greedy decoding by a diffusion model": ("blocks", ("generation", "decoding"), "greedy", "generation.decoding is"),
}


@pytest.mark.parametrize(("kind", "path", "value", "reason"), SPECS.values(), ids=SPECS.keys())
def test_a_spec_that_kvbench_run_does_not_write_is_refused(done, check, kind, path, value, reason):
    found = check(in_spec(*path, value=value)(done(kind).files))
    assert found["refused"].startswith("spec: ") and reason in found["refused"]


@pytest.mark.parametrize(("field", "value", "reason"), [
    ("trained_on", "Python's manual", "trained on \"Python's manual\", and that of ftp for mini is"),
    ("trained_on", None, "its budget does not resolve trained_on"), ("part", "f" * 64, "its part is 'ffff"),
    ("schedule", [1.0] * 5, "its budget does not resolve to"), ("schedule", [2.0] * 5, "does not name how much"),
])
def test_another_part_than_the_shipped_one_is_refused(done, check, field, value, reason):
    """A row that was trained on the tasks is not ranked: the submitter's word that it was not is worth nothing."""
    def change(x: Any) -> None:
        x["budget"]["resolved"] = {k: v for k, v in {**x["budget"]["resolved"], field: value}.items() if v is not None}

    assert reason in check(edit(done("shipped").files, RESULT, change))["refused"]


def test_steps_of_a_training_that_did_not_take_place_are_refused(done, check):
    forged = in_spec("method", "settings", "steps", value=7)(done("shipped").files)
    assert "its setting steps is 7, and the part of ftp for mini is shipped" in check(forged)["refused"]


@pytest.mark.slow
def test_a_prefill_within_the_budget_keeps_no_scores(done):
    """Scores that no eviction needs would be stored, and no declaration counts them."""
    line = done("within budget").bundle.lines[0]
    assert line.bytes.stored_bytes == line.bytes.full_bytes


def test_a_draft_reads_each_entry_once(done):
    """So as many bytes are distinct as are read."""
    line = done("lossless").bundle.lines[0]
    assert line.bytes.distinct_read_bytes_per_step == line.bytes.read_bytes_per_step
    assert verify(done("lossless").files, Repository()).level == "L0"
