"""Files of a run are hostile data: cut anywhere or damaged, what is whole is used and what is broken is said."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvbench.budget import Budget, BudgetKind
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.choice import join
from kvbench.registry import find_method, find_task
from kvbench.runs.files import Journal, finished_samples, read_file, read_lines, write_atomic
from kvbench.runs.journal import CacheBytes, Effect, Line, LosslessLine, Machine
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.results import DiffusionResult, Result
from kvbench.runs.stats import bootstrap_interval, find_interval
from kvbench.runs.summary import (
    _agreement,
    _batch,
    _diffusion,
    _kernels,
    _latency,
    _lossless,
    _required_acted,
    _reuse,
    score_lines,
    summarize,
    summarize_bytes,
    summarize_effect,
)

SAMPLES, TURNS = 3, 2
TOY = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Toy"


def line(index: int, turn: int, **changes: object) -> Line:
    """A line without measurements."""
    values: dict[str, object] = {
        "sample": f"s{index}", "index": index, "turn": turn, "turns": TURNS, "prompt_hash": "h", "prediction": "p é\n",
        "ids": (1, 2), "references": ("r",), "score": 0.1, "scores": {"x": 0.1}, "tokens": None, "stop_reason": "stop",
        "times": None, "bytes": None, "effect": None, "agreement": None, "facts": {"depths": [0.5]}, "started": "now",
        "seconds": 0.25, "error": None,
    }
    return Line.model_validate({**values, **changes})


LINES = [line(index, turn) for index in range(SAMPLES) for turn in range(TURNS)]
WHOLE = "".join(f"{x.model_dump_json()}\n" for x in LINES).encode()
ENDS = [i + 1 for i, byte in enumerate(WHOLE) if byte == ord("\n")]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """The disk's own time is not tested."""
    monkeypatch.setattr("kvbench.runs.files.os.fsync", lambda _: None)


def resume(path: Path) -> list[Line]:
    """Open a journal, run the missing samples, and read it again."""
    journal = Journal(path)
    for index in sorted(set(range(SAMPLES)) - journal.finished):
        journal.append([line(index, turn) for turn in range(TURNS)])
    journal.close()
    return read_lines(path)


@given(cut=st.integers(0, len(WHOLE)))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(cut=ENDS[0])
@example(cut=ENDS[0] - 1)
@example(cut=ENDS[1])
@example(cut=ENDS[1] + 1)
def test_a_journal_cut_at_any_byte_is_completed(tmp_path, cut):
    """No finished sample is lost or duplicated."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(WHOLE[:cut])
    whole_samples = sum(end <= cut for end in ENDS) // TURNS
    journal = Journal(path)
    assert journal.finished == set(range(whole_samples))
    assert path.read_bytes() == WHOLE[: ENDS[whole_samples * TURNS - 1] if whole_samples else 0]
    journal.close()
    assert resume(path) == LINES
    assert path.read_bytes() == WHOLE


def test_a_packed_journal_is_completed(tmp_path):
    """Curated results pack it: the command that continues their run computes no sample again."""
    path, packed = tmp_path / "samples.jsonl", tmp_path / "samples.jsonl.gz"
    packed.write_bytes(gzip.compress(WHOLE[: ENDS[TURNS - 1]]))
    journal = Journal(path)
    assert journal.finished == {0}
    assert (path.read_bytes(), packed.exists()) == (WHOLE[: ENDS[TURNS - 1]], False)
    journal.close()
    assert resume(path) == LINES


@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_journal_is_used_or_refused_but_never_crashes(tmp_path, at, byte):
    """After one changed byte, the other samples remain."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :])
    damaged = {sum(end <= x for end in ENDS) // TURNS for x in (at, at + 1)}  # two where a line's end is changed
    try:
        journal = Journal(path)
        journal.close()
        lines = resume(path)
    except UserError as refused:
        if "schema version" not in str(refused):
            raise
    else:
        assert journal.finished | damaged >= set(range(SAMPLES))
        assert {x.index for x in lines} >= set(range(SAMPLES))


def test_a_cut_line_is_reported(tmp_path, capsys):
    """On standard error, with the number of lines that count."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(WHOLE[: ENDS[2] + 9])
    assert len(read_lines(path)) == 3
    assert "the last line is cut off and skipped; 3 complete lines are used" in capsys.readouterr().err
    path.write_bytes(b"not json\n" + WHOLE)
    assert len(read_lines(path)) == len(LINES)
    assert "line 1 is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad", ["[" * 100_000, "{}", "null", '{"schema_version": true}', '{"schema_version": 1, "x": 1}']
)
def test_hostile_lines_are_not_used(tmp_path, bad):
    """Deep nesting, empty documents, wrong types."""
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{bad}\n")
    assert read_lines(path) == []


def test_a_sample_is_finished_with_all_its_turns_or_its_error():
    """A sample without all turns is not finished."""
    assert finished_samples([line(0, 0)]) == set()
    assert finished_samples([line(0, 1)]) == set()
    assert finished_samples([line(0, 1), line(0, 0)]) == {0}
    assert finished_samples([line(0, 0, error="MemoryError: out")]) == {0}
    assert finished_samples([line(0, 1, error="MemoryError: out")]) == set()


def test_turns_that_cannot_be_make_no_finished_sample():
    """More turns than memory holds, turns beyond the last, and samples before the first one."""
    assert finished_samples([line(0, 0, turns=10**15)]) == set()
    assert finished_samples([line(0, 10**15, error="MemoryError: out")]) == set()
    assert finished_samples([line(0, 10**15, turns=10**15 + 1), line(0, 0), line(0, 1)]) == set()
    assert finished_samples([line(-1, 0), line(-1, 1)]) == set()


def test_an_unknown_schema_version_is_refused(tmp_path):
    """A file of a later kvbench is not read."""
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({"schema_version": 3}) + "\n")
    with pytest.raises(UserError, match="schema version 3; this kvbench reads 1 and 2"):
        read_lines(path)
    with pytest.raises(UserError, match="schema version 3"):
        read_file(path, Result)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', "\x00"])
def test_a_broken_result_is_refused_in_one_line(tmp_path, text):
    """Missing, cut, empty or of another shape."""
    path = tmp_path / "result.json"
    with pytest.raises(UserError, match="cannot be read"):
        read_file(path, Result)
    path.write_text(text)
    with pytest.raises(UserError, match=r"is not a valid file of kvbench: [^\n]+\Z"):
        read_file(path, Result)


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    """A file is replaced completely or not at all."""
    path = tmp_path / "result.json"
    write_atomic(path, "old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvbench.runs.files.os.fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomic(path, "new")
    assert [x.name for x in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"


def test_the_interval_respects_clusters():
    """Turns of one context with equal scores are one observation."""
    apart = bootstrap_interval([[x] for x in [0.0, 1.0] * 20])
    together = bootstrap_interval([[x] * 10 for x in [0.0, 1.0] * 2])
    assert apart[1] - apart[0] < together[1] - together[0]
    assert bootstrap_interval([[0.5], [0.5]]) == (0.5, 0.5)
    assert bootstrap_interval([[x] for x in [0.0, 1.0] * 20]) == apart


def sized(index: int, turn: int, stored: int, read: int, full: int) -> Line:
    """A turn that ends with this many bytes read, and this many of the full cache."""
    return line(index, turn, tokens={"context": 10, "query": 0, "generated": 2, "reference": 2}, bytes=CacheBytes(
        full_bytes=100, stored_bytes=stored, spare_bytes=0, end_bytes=stored, peak_bytes=stored, host_bytes=0,
        read_bytes_per_step=read, end_stored_bytes=read, end_full_bytes=full, full_read_bytes_per_step=full,
    ))


@pytest.mark.parametrize(("forks", "read", "full"), [(False, 40, 200), (True, 60, 150)])
def test_reads_are_compared_with_the_full_caches_reads_of_the_same_turns(forks, read, full):
    """The turn that read most is not divided by the turn in which the full cache would: the share stays a turn's."""
    found = summarize_bytes([sized(0, 0, 50, 80, 100), sized(0, 1, 30, 40, 200)], "float32", forks=forks)
    assert found is not None
    assert (found.read_bytes_per_step, found.full_read_bytes_per_step) == (read, full)
    assert (found.end_stored_bytes, found.end_full_bytes) == (read, full)
    assert found.stored_bytes == 50


def test_a_turn_without_a_decode_step_has_no_reads():
    """Samples whose answer ends at its first token lower no mean; with no step in any, nothing was read."""
    none = sized(1, 0, 50, 0, 0)
    found = summarize_bytes([sized(0, 0, 50, 80, 100), none], "float32", forks=False)
    assert found is not None
    assert (found.read_bytes_per_step, found.full_read_bytes_per_step) == (80, 100)
    unread = summarize_bytes([none], "float32", forks=False)
    assert unread is not None
    assert unread.read_bytes_per_step == 0


def test_bytes_of_every_tier_are_in_the_total():
    """Of contexts of 10 and 30 tokens with 50 and 20 of 100 bytes on the device, 10 on the host and 5 in a file each.

    Spare bytes and those of later tokens are not, nor are lines without bytes or tokens.
    """
    first, second = sized(0, 0, 50, 80, 100), sized(1, 0, 20, 80, 100)
    longer = second.tokens.model_copy(update={"context": 30})
    lines = [
        first, second.model_copy(update={"tokens": longer}), line(2, 0, tokens=longer),
        sized(3, 0, 99, 99, 99).model_copy(update={"tokens": None}),
    ]
    moved = {"host_bytes": 10, "file_bytes": 5, "spare_bytes": 7, "end_bytes": 99}
    found = summarize_bytes(
        [x.model_copy(update={"bytes": x.bytes and x.bytes.model_copy(update=moved)}) for x in lines], "float32",
        forks=False,
    )
    assert found is not None
    assert (found.ratio, found.ratio_total, found.bytes_per_token) == (0.35, 0.5, 1.75)
    assert (found.full_bytes, found.full_16bit_bytes) == (100, 50)


def test_a_count_that_some_lines_lack_is_none():
    """Files of earlier versions."""
    lines = [sized(0, 0, 50, 80, 100), sized(1, 0, 50, 80, 100)]
    counted = lines[0].bytes.model_copy(update={"distinct_read_bytes_per_step": 8})
    found = summarize_bytes([lines[0].model_copy(update={"bytes": counted}), lines[1]], "float32", forks=False)
    assert (found.distinct_read_bytes_per_step, found.read_bytes_per_step) == (None, 80)


def timed(
    index: int, turn: int, seconds: float, steps: int, first: float, prefill: float | None, compress: float | None
) -> Line:
    """A turn whose answer took these seconds and steps after its first token."""
    return line(index, turn, times={
        "prefill_s": prefill, "compress_s": compress, "ttft_s": first, "decode_s": seconds, "steps": steps,
    })


TIMED = [
    timed(0, 0, 2.0, 10, 0.4, 0.3, 0.125), timed(0, 1, 3.0, 30, 0.05, None, None),
    timed(1, 0, 0.0, 0, 0.6, 0.5, 0.25), timed(2, 0, 0.5, 10, 0.5, 0.4, 0.25),
]
"""0.2, 0.1, no and 0.05 seconds per token; the second answer needed no prefill."""


def test_times_are_medians_over_answers():
    """To the first token over first turns, which wait for the prefill; tokens per second over all answers together."""
    found = _latency(TIMED)
    assert (found.prefill_s, found.compress_s, found.ttft_s) == (0.4, 0.25, 0.5)
    assert (found.tpot_s, found.p50, found.n) == (0.1, 0.1, 3)
    assert found.p95 == pytest.approx(0.1 + 0.9 * 0.1)  # between the second and the third of three
    assert found.tokens_per_s == pytest.approx(50 / 5.5)


def test_there_are_no_medians_of_times_that_are_not_a_users():
    """Where a context of two questions took a shared prefill, or an answer came from another machine."""
    shared = [x.model_copy(update={"shared_prefill": x.index == 0}) for x in TIMED]
    found = _latency(shared)
    assert found.untimed == "1 context took a prefill that other runs of the sweep share"
    machines = [Machine(cpu="a", gpu=None, threads=1 + (x.index == 2)) for x in TIMED]
    mixed = _latency([x.model_copy(update={"machine": y}) for x, y in zip(TIMED, machines, strict=True)])
    assert mixed.mixed == "samples ran on a with 1 thread and on a with 2 threads"
    for x in (found, mixed):
        assert (x.prefill_s, x.compress_s, x.ttft_s, x.tpot_s, x.tokens_per_s, x.p50, x.p95, x.n) == (*[None] * 7, 0)


def test_a_speedup_is_the_time_of_plain_decoding_over_that_of_the_method():
    """Over answers with times; and every answer's first token comes without a round."""
    drafts = {"rounds": 4, "drafted": 20, "accepted": 15, "reloaded_bytes": 100, "different": 0, "plain_s": 3.0}
    lines = [x.model_copy(update={"bytes": sized(0, 0, 50, 80, 100).bytes, "ids": tuple(range(9))}) for x in TIMED[:2]]
    found = _lossless([x.model_copy(update={"lossless": LosslessLine(**drafts)}) for x in lines])
    assert found is not None
    assert found.speedup == pytest.approx(6 / 5)
    assert (found.acceptance, found.accepted_per_round, found.tokens_per_round) == (0.75, 3.75, 2.0)
    assert found.reloaded_bytes_per_token == 200 / 16


def test_bytes_of_a_context_count_once_and_its_different_tokens_add_up():
    """Of two contexts, the first with two answers; one that took a shared prefill leaves no speed-up."""
    drafts = {"rounds": 4, "drafted": 20, "accepted": 15, "reloaded_bytes": 100, "plain_s": 3.0}
    lines = [
        x.model_copy(update={
            "bytes": sized(0, 0, 20 if x.index else 50, 80, 100).bytes, "shared_prefill": x.index == 1,
            "lossless": LosslessLine(**drafts, different=1 + number),
        })
        for number, x in enumerate(TIMED[:3])
    ]
    found = _lossless(lines)
    assert (found.resident_bytes, found.different, found.tokens, found.speedup) == (35, 6, 6, None)


def test_a_kernel_that_ran_in_two_implementations_names_both():
    """In different samples; each operation once, in order."""
    ran = [{"quantize.pack": "torch", "attend.one": "triton"}, {"attend.one": "torch", "attend.two": "triton"}]
    found = _kernels("triton", [line(index, 0, kernels=x) for index, x in enumerate(ran)])
    assert (found.implementation, found.ops) == ("triton", ("attend", "quantize"))
    assert found.ran == {"attend.one": join("triton", "torch"), "attend.two": "triton", "quantize.pack": "torch"}
    assert join("triton", "torch") not in ("triton", "torch")


def test_answers_of_one_token_take_no_round():
    """Nothing is drafted, and no later token reloads bytes."""
    drafts = LosslessLine(rounds=0, drafted=0, accepted=0, reloaded_bytes=0, different=0, plain_s=0.0)
    found = _lossless([sized(i, 0, 50, 80, 100).model_copy(update={"ids": (7,), "lossless": drafts}) for i in range(2)])
    assert found is not None
    assert (found.acceptance, found.speedup) == (None, None)
    assert (found.accepted_per_round, found.tokens_per_round, found.reloaded_bytes_per_token) == (0, 0, 0)


def reused(index: int, first: float, build: float, scale: int, **changes: object) -> Line:
    """A prompt with this time to its first token, the time to build chunks in it, and counts of this scale."""
    counts = {"tokens": 100, "computed": 40, "reused": 70, "hits": 1, "misses": 2, "mismatched": 3, "refused": 4,
              "loaded": 5, "chunk_bytes": 1000, "moved_bytes": 500}
    times = {"prefill_s": first, "compress_s": 0.0, "ttft_s": first, "decode_s": 1.0, "steps": 1}
    reuse = {**{name: scale * x for name, x in counts.items()}, "build_s": build}
    return line(index, 0, **{"times": times, "reuse": reuse, **changes})


def test_counts_of_reuse_add_up_and_its_times_are_medians():
    """Shares are those of all prompts together, and bytes are means of a prompt."""
    longer = {"tokens": 500, "computed": 110, "reused": 420}  # in place of 200, 80 and 140
    second = reused(1, 9.0, 1.0, 2)
    second = second.model_copy(update={"reuse": second.reuse.model_copy(update=longer)})
    found = _reuse([reused(0, 1.0, 0.25, 1), second, reused(2, 2.25, 0.75, 3), line(2, 1)])
    assert (found.computed_share, found.reused_share) == (270 / 900, 700 / 900)
    assert (found.hits, found.misses, found.mismatched, found.refused, found.loaded) == (6, 12, 18, 24, 30)
    assert (found.chunk_bytes, found.moved_bytes) == (2000, 1000)
    assert (found.ttft_in_hand_s, found.build_s) == (1.5, 0.75)  # of 0.75, 8 and 1.5 s; of 0.25, 1 and 0.75 s


def test_reuse_of_samples_without_a_time_of_their_own_has_counts_alone():
    """One of them ran on another machine."""
    machines = ({"cpu": "a", "gpu": None, "threads": x} for x in (1, 2))
    found = _reuse([reused(i, 1.0, 0.25, 1, machine=x) for i, x in enumerate(machines)])
    assert (found.hits, found.ttft_in_hand_s, found.build_s) == (2, None, None)


def test_batches_are_summed_up_by_the_largest_and_by_all_that_was_compared():
    """Two runs of the command compared an answer each; the reason is the first one."""
    batches = [{"size": 3, "tokens": 5, "different": 2}, {"size": 4}, {"size": 1, "alone": "a"},
               {"size": 1, "alone": "b"}, {"size": 2, "tokens": 7, "different": 0}]
    found = _batch([line(i, 0, batch=x) for i, x in enumerate(batches)])
    assert (found.size, found.alone, found.tokens, found.different) == (4, "a", 12, 2)
    assert (_batch([line(0, 0, batch={"size": 4})]).tokens, _batch(LINES)) == (None, None)


def test_a_run_with_a_turn_that_was_not_compared_has_no_agreement():
    """A mean over the others would be of another set of questions."""
    whole = [line(i, 0, agreement={"top1": 0.5, "kl": 1.0, "n": 8}) for i in range(2)]
    assert _agreement(whole).n == 16
    assert _agreement([*whole, line(2, 0)]) is None


def denoised(index: int, seconds: float, baselines: dict[str, object], **cost: object) -> Line:
    """An answer of a diffusion model."""
    return line(
        index, 0, denoising={"baselines": baselines, **cost},
        times={"prefill_s": None, "compress_s": None, "ttft_s": seconds, "decode_s": seconds, "steps": 1},
    )


DENOISED = [
    denoised(
        0, 1.0, {"none": {"score": 1.0, "seconds": 6.0, "nfe": 8, "committed_tokens": 8, "same_tokens": 1.0},
                 "half-steps": {"score": 0.0, "seconds": 2.0, "nfe": 4, "committed_tokens": 4, "same_tokens": 0.5}},
        response_length=16, steps=8, block=16, nfe=4, computed_tokens=30.0, sequence_length=40, committed_tokens=6,
    ),
    denoised(
        1, 3.0, {"none": {"score": 0.0, "seconds": 2.0, "nfe": 6, "committed_tokens": 2, "same_tokens": 0.5}},
        response_length=8, steps=4, block=4, nfe=12, computed_tokens=10.0, sequence_length=60, committed_tokens=2,
    ),
]
"""4 passes over 30 of 40 positions, and 12 over 10 of 60."""


def diffuse(lines: list[Line], threshold: float | None = None) -> DiffusionResult:
    """The result of these answers of a fixed number of steps, or of a threshold."""
    asked = SimpleNamespace(threshold=threshold, remasking="low-confidence", temperature=0.0)
    job = SimpleNamespace(spec=SimpleNamespace(generation=SimpleNamespace(denoising=asked)))
    return _diffusion(job, lines)


def test_the_cost_of_a_pass_is_the_mean_over_passes():
    """Of 880 positions the 16 passes computed 240, which is 140 more than each position once."""
    found = diffuse(DENOISED)
    assert (found.steps, found.block, found.response_length, found.committed_tokens) == (6, 10, 12, 4)
    assert (found.nfe, found.computed_tokens_per_step, found.recomputed_tokens) == (8, 15, 70)
    assert found.computed_share == 240 / 880


def test_a_policy_is_compared_with_the_baselines_that_ran_for_every_answer():
    """8 seconds of no cache against 4, for 10 tokens; half of the steps ran for one answer alone."""
    found = diffuse(DENOISED).baselines
    assert found.keys() == {"none"}
    plain = found["none"]
    assert (plain.mean, plain.nfe, plain.same_tokens) == (0.5, 7, 0.75)
    assert (plain.speedup, plain.tokens_per_s) == (2, 1.25)


def test_a_threshold_has_no_number_of_steps():
    """It decides; and a baseline without scores has no mean."""
    plain = DENOISED[0].denoising.baselines["none"].model_copy(update={"score": None})
    cost = DENOISED[0].denoising.model_copy(update={"baselines": {"none": plain}})
    found = diffuse([DENOISED[0].model_copy(update={"denoising": cost})], 0.9)
    assert (found.steps, found.threshold, found.baselines["none"].mean) == (None, 0.9, None)


def test_bytes_per_token_of_a_diffusion_model_are_those_of_prompt_and_response():
    """50 bytes for the 40 positions of its passes."""
    stored = sized(0, 0, 50, 80, 100)
    lines = [DENOISED[0].model_copy(update={"bytes": stored.bytes, "tokens": stored.tokens})]
    assert summarize_bytes(lines, "float32", forks=False).bytes_per_token == 1.25


def test_tokens_per_second_of_two_machines_are_not_mixed():
    """A speed-up is of two times on one machine each."""
    machines = ({"cpu": "a", "gpu": None, "threads": x} for x in (1, 2))
    lines = [x.model_copy(update={"machine": Machine(**y)}) for x, y in zip(DENOISED, machines, strict=True)]
    plain = diffuse(lines).baselines["none"]
    assert (plain.speedup, plain.tokens_per_s) == (2, None)


def test_a_score_is_the_mean_over_questions():
    """Three right answers about one context, and a wrong one about another; a failed sample leaves a partial mean."""
    metric = find_task("niah")().scorers[0]
    scores = {(0, 0): 1.0, (0, 1): 1.0, (0, 2): 1.0, (1, 0): 0.0}
    lines = [line(*key, score=x) for key, x in scores.items()]
    found = score_lines(metric, lines, lambda x: x.score)
    assert (found.mean, found.partial_mean, [(x.mean, x.n) for x in found.by_turn]) == (
        0.75, 0.75, [(0.5, 2), (1.0, 1), (1.0, 1)]
    )
    clusters = [[1.0, 1.0, 1.0], [0.0]]
    early = score_lines(metric, lines, lambda x: x.score, "bootstrap")
    assert (found.interval, found.ci95) == ("exact", find_interval(clusters))
    assert (early.interval, early.ci95) == ("bootstrap", bootstrap_interval(clusters))
    failed = score_lines(metric, [*lines, line(2, 0, score=None, error="MemoryError: out")], lambda x: x.score)
    assert (failed.mean, failed.partial_mean, failed.ci95) == (None, 0.75, None)


@pytest.fixture
def job(model_folder, tmp_path):
    """A run of three contexts with two questions each."""
    return prepare(Request(
        "snapkv", TOY, model=str(model_folder), samples=SAMPLES, turns=TURNS, mode="multi-turn", length=180,
        device="cpu", out=tmp_path,
    ))


def answered(index: int, turn: int, score: float | None, *, acted: bool = True, **changes: object) -> Line:
    """An answer of 2 or 3 tokens, in samples that ran in reverse order."""
    effect = Effect(acted=acted, identity=False, entries_seen=9, entries_kept=(9.0,), facts={})
    tokens = {"context": 10, "query": 5, "generated": 2 + turn, "reference": 7 + turn}
    scores = {} if score is None else {"toy-odd@1": score, "toy-length@1": score / 4}
    return line(index, turn, **{
        "score": score, "scores": scores, "tokens": tokens, "effect": effect, "started": f"2027-01-0{9 - index}",
        "bytes": sized(index, turn, 50 - 10 * index, 80, 100).bytes, **changes,
    })


def test_samples_that_failed_count_nowhere_but_in_the_time(job):
    """Nor do their earlier answers; the first in the order of samples is named."""
    lines = [
        answered(2, 0, None, error="MemoryError: out"), answered(1, 0, 1.0),
        answered(1, 1, None, error="ValueError: b"), answered(0, 0, 1.0), answered(0, 1, 0.0),
    ]
    found = summarize(job, lines)
    assert (found.status, found.error) == ("failed", "2 of 3 samples failed; the first: ValueError: b")
    assert (found.n_failed, found.n_scored, found.n_questions, found.scores) == (2, 1, 2, {})
    assert (found.score.mean, found.score.partial_mean, found.score.ci95) == (None, 0.5, None)
    assert (found.output.tokens, found.memory.stored_bytes, found.effect.n) == (5, 50, 1)
    assert (found.environment.started, found.environment.seconds) == ("2027-01-07", 5 * 0.25)
    stated = found.environment.model_copy(update={"started": "", "seconds": 0.0})
    assert summarize(job, lines, stated).environment == found.environment


def test_a_result_counts_contexts_questions_and_tokens(job):
    """One context of three has no score; both questions of another were shortened, and one answer was cut."""
    cut = {"facts": {"cut_tokens": 3}}
    lines = [
        answered(0, 0, 1.0, **cut), answered(0, 1, 0.0, **cut), answered(1, 0, 1.0), answered(1, 1, 1.0),
        answered(2, 0, None), answered(2, 1, None, stop_reason="length"),
    ]
    found = summarize(job, lines)
    assert (found.status, found.n_samples, found.n_scored, found.n_questions, found.n_failed) == ("ok", 3, 2, 6, 0)
    assert (found.score.mean, found.scores) == (0.75, {"toy-odd@1": 0.75, "toy-length@1": 0.1875})
    output = found.output
    assert (output.tokens, output.reference_tokens, output.truncated) == (15, 7.5, 1)
    assert output.stop_reasons == {"stop": 5, "length": 1}
    assert (found.memory.stored_bytes, found.memory.full_16bit_bytes) == (40, 50)
    lines[0] = answered(0, 0, 1.0, tokens={"context": 10, "query": 5, "generated": 2})  # of a file without references
    assert summarize(job, lines).output.reference_tokens is None


def test_a_method_must_act_in_every_sample(job):
    """Acting in one of three fails the run."""
    lines = [answered(index, turn, 1.0, acted=index == 1) for index in range(SAMPLES) for turn in range(TURNS)]
    found = summarize(job, lines)
    assert found.status == "failed"
    assert found.error.startswith("snapkv acted in 1 of 3 samples, ")


@pytest.mark.parametrize(("denoising", "needed"), [
    (None, 3), (SimpleNamespace(threshold=None), 3), (SimpleNamespace(threshold=0.9), 1),
])
def test_only_where_a_threshold_decides_one_sample_is_enough(denoising, needed):
    """If any must act."""
    spec = SimpleNamespace(generation=SimpleNamespace(denoising=denoising))
    assert (_required_acted(spec, 3), _required_acted(spec, 0)) == (needed, 0)


def test_a_result_names_the_machine_of_its_samples_if_it_is_one(job):
    """Otherwise the one that writes it."""
    elsewhere = [Machine(cpu="elsewhere", gpu=None, threads=x) for x in (1000, 2000)]
    lines = [answered(index, 0, 1.0, machine=elsewhere[0]) for index in range(SAMPLES)]
    environment = summarize(job, lines).environment
    assert (environment.cpu, environment.threads) == ("elsewhere", 1000)
    lines[2] = answered(2, 0, 1.0, machine=elsewhere[1])
    assert summarize(job, lines).environment.threads not in (1000, 2000)


def test_facts_add_up_over_samples_and_distinct_codes_do_not():
    """Two samples in 2 bits have at most 4 distinct codes, as one of them has."""
    facts = [{"entries_quantized": 7, "distinct_codes": 4}, {"entries_quantized": 5, "distinct_codes": 3}]
    lines = [
        line(i, 0, effect=Effect(acted=True, identity=False, entries_seen=9, entries_kept=(9.0,), facts=x))
        for i, x in enumerate(facts)
    ]
    assert summarize_effect("bits", lines).facts == {"entries_quantized": 12, "distinct_codes": 4}


def test_a_method_acts_in_a_sample_if_it_acts_in_any_turn():
    """And need not where every turn is lossless; what was kept is a mean over first turns."""
    turns = [
        (0, 0, 10, (4.0, 2.0), True, False), (0, 1, 99, (0.0, 0.0), True, True),
        (1, 0, 20, (6.0, 4.0), True, False), (1, 1, 99, (0.0, 0.0), True, False),
        (2, 0, 30, (11.0, 9.0), False, True), (2, 1, 99, (0.0, 0.0), False, False),
    ]
    found = summarize_effect("stored", [
        line(index, turn, effect=Effect(acted=acted, identity=identity, entries_seen=seen, entries_kept=kept, facts={}))
        for index, turn, seen, kept, identity, acted in turns
    ])
    assert (found.n, found.n_acted, found.n_identity) == (2, 2, 1)
    assert (found.entries_seen, found.entries_kept, found.entries_kept_by_layer) == (20, 6.0, (7.0, 5.0))


def read(turn: int, **facts: int) -> Line:
    """A question of which the store counted these pages and dropped entries."""
    return line(0, turn, effect=Effect(
        acted=True, identity=False, entries_seen=9, entries_kept=(9.0,), facts=facts, restarts=("pages_read",),
    ))


def test_what_every_fork_counts_from_0_adds_up_over_the_forks_of_a_context():
    """Pages read by each question are a sum; entries that the context dropped, which each fork counts, are not.

    In a conversation without forks the counters of the last turn cover the turns before it.
    """
    lines = [read(0, entries_dropped=5, pages_read=3), read(1, entries_dropped=5, pages_read=4)]
    assert summarize_effect("read", lines, forks=True).facts == {"entries_dropped": 5, "pages_read": 7}
    assert summarize_effect("read", lines).facts == {"entries_dropped": 5, "pages_read": 4}


def test_a_counter_that_is_named_and_missing_adds_nothing():
    """A journal of another's may name any."""
    assert summarize_effect("read", [read(0, entries_dropped=5)], forks=True).facts == {"entries_dropped": 5}


def test_a_journal_of_before_the_forks_counters_were_named_is_summarized_as_it_was():
    """Finished results follow from their journals: the last turn counts, as when they were made."""
    lines = [read(turn, pages_read=3 + turn) for turn in range(2)]
    early = [x.model_copy(update={"effect": x.effect.model_copy(update={"restarts": ()})}) for x in lines]
    assert summarize_effect("read", early, forks=True).facts == {"pages_read": 4}


@pytest.mark.parametrize("name", ["quest", "prompt-lookup", "leoam", "rocketkv", "snapkv", "kivi"])
def test_a_counter_that_a_fork_sets_to_0_says_so(name):
    """Every counter of which a fork has less than the session that it left is named, and no other."""
    model = tiny_model()
    method = find_method(name)().bind(model)
    budget = None if method.budget_kind in (BudgetKind.NONE, BudgetKind.BITS) else Budget("fraction", 0.5)
    with Session(model, method.fit(budget, model.shape(120)), capacity=200) as session:
        session.prefill([x % VOCABULARY for x in range(120)])
        session.ask([1, 2, 3], 9, stop=frozenset())
        before = session.effect()
        with session.fork() as branch:
            after = branch.effect().facts
    assert {x for x, value in before.facts.items() if after.get(x, 0) < value} == set(before.restarts) & {
        x for x, value in before.facts.items() if value
    }


@pytest.mark.parametrize("name", ["h2o", "tova", "streaming-llm"])
def test_entries_evicted_for_a_question_count_as_an_effect(name):
    """A budget that holds the whole context does not hold the question: evicting then counts as acting."""
    model = tiny_model()
    fitted = find_method(name)().bind(model).fit(Budget("rows", 120), model.shape(120))
    lines = []
    with Session(model, fitted, capacity=200) as session:
        session.prefill([x % VOCABULARY for x in range(120)])
        for turn, question in enumerate((1, 20)):
            session.question(list(range(question)), 1)
            proof = session.effect().model_dump()
            lines.append(line(0, turn, effect=Effect(**proof)))
    assert lines[0].effect.identity
    found = summarize_effect("stored", lines)
    assert (found.n, found.n_acted, found.n_identity) == (1, 1, 0)
