"""Consistent forgeries by an attacker who read the code: journal, summary, spec, hashes and manifest all agree.

Each forges one thing in a copy of an honest run. The assertion is the true reason for which it is found.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.leaderboard.site.build import build_site
from kvbench.leaderboard.site.listed import ListedRun, read_listed
from kvbench.leaderboard.submission.archive import read_files, write_folder
from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.records import (
    MANIFEST,
    METHOD,
    RESULT,
    SAMPLES,
    VERIFICATION,
    OtherScore,
    RerunResult,
    Verification,
)
from kvbench.leaderboard.submission.seal import CURATED, RESULTS, is_curated, seal
from kvbench.leaderboard.verification import replay, repository
from kvbench.leaderboard.verification.repository import JournalFingerprint, Repository, RunIdentity
from kvbench.leaderboard.verification.verify import verify
from kvbench.registry import HERE
from kvbench.runs.files import write_record
from kvbench.runs.journal import AgreementPart, BatchLine, Line, LosslessLine
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.results import LosslessResult
from kvbench.runs.runner import run

from .conftest import GPU, as_own_method, edit, edit_spec, on_gpu, repack, scale_times

Change = Callable[[Line], dict[str, Any]]


def forge(part: str, **values: Any) -> Change:
    """Changes fields of one part of every line; a function receives the part and gives the new value."""
    def change(x: Line) -> dict[str, Any]:
        found = getattr(x, part)
        new = {name: value(found) if callable(value) else value for name, value in values.items()}
        return {part: found.model_copy(update=new)}

    return change


def forge_facts(**counts: int) -> Change:
    return forge("effect", facts=lambda x: {**x.facts, **counts})


def shift(x: Any, count: int = 500) -> tuple[float, ...]:
    """As many entries in all, in other layers."""
    first, second, *rest = x.entries_kept
    return (first + count, second - count, *rest)


READS = ("read_bytes_per_step", "distinct_read_bytes_per_step")

DRAFTS = LosslessLine(rounds=2, drafted=8, accepted=8, reloaded_bytes=0, different=0, plain_s=9.0)

LOSSLESS = LosslessResult(
    accepted_per_round=8.0, tokens_per_round=9.0, acceptance=1.0, resident_bytes=0, reloaded_bytes_per_token=0.0,
    different=0, tokens=40, speedup=9.0,
)


LATER = (
    "end_stored_bytes", "end_full_bytes", "distinct_read_bytes_per_step", "full_read_bytes_per_step",
    "host_read_bytes_per_step", "file_read_bytes_per_step",
)
"""Bytes that lines of an early kvbench lack."""


def cut(x: Line) -> dict[str, Any]:
    """The answer without its end: no tokens, and no stop token."""
    return {
        "ids": (), "prediction": "", "stop_reason": "length", "score": 0.0, "scores": dict.fromkeys(x.scores, 0.0),
        **forge("tokens", generated=0)(x), **forge("times", steps=0)(x),
    }


def lengthen(x: Line) -> dict[str, Any]:
    """One token and step more, with the same text."""
    assert x.tokens is not None
    return {
        "ids": (*x.ids[:-1], 10**6, *x.ids[-1:]), **forge("tokens", generated=x.tokens.generated + 1)(x),
        **forge("times", steps=lambda y: y.steps + 1)(x),
    }


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    # Bytes
    "the peak is below the end of the turn": (forge("bytes", peak_bytes=lambda x: x.end_bytes - 1), "its peak of"),
    "the peak is the stored bytes without spare bytes": (
        forge("bytes", peak_bytes=lambda x: x.stored_bytes), "its peak of",
    ),
    "fewer bytes at the end than the context takes": (
        forge("bytes", end_bytes=lambda x: x.stored_bytes - 8), "it ends with",
    ),
    "steps that read nothing": (forge("bytes", read_bytes_per_step=0), "it reads no bytes in"),
    "steps that read half of what is stored": (
        forge("bytes", read_bytes_per_step=lambda x: x.stored_bytes // 2), "a step reads",
    ),
    "steps that read what the context takes, without the conversation": (
        forge("bytes", read_bytes_per_step=lambda x: x.stored_bytes), "a step reads",
    ),
    "a conversation that takes no bytes": (
        lambda x: forge("bytes", **dict.fromkeys((*READS, "end_stored_bytes"), x.bytes.stored_bytes))(x),
        "a step reads",
    ),
    "a full cache that a conversation does not lengthen": (
        lambda x: forge("bytes", end_full_bytes=x.bytes.full_bytes, full_read_bytes_per_step=x.bytes.full_bytes)(x),
        "its end_full_bytes is",
    ),
    "a full cache that reads more than it has at the end": (
        forge("bytes", full_read_bytes_per_step=lambda x: x.end_full_bytes - 8), "the full cache has",
    ),
    "bytes at the end on some lines only": (
        lambda x: forge("bytes", end_stored_bytes=None)(x) if x.index else {}, "have no end_stored_bytes",
    ),
    "steps that read more than there is": (
        forge("bytes", read_bytes_per_step=lambda x: x.end_bytes + 8), "a step reads",
    ),
    "half of the stored bytes called spare": (
        forge("bytes", stored_bytes=lambda x: x.stored_bytes // 2, spare_bytes=lambda x: x.stored_bytes),
        "snapkv declares",
    ),
    "half of the stored bytes on the host": (
        forge("bytes", stored_bytes=lambda x: x.stored_bytes // 2, host_bytes=lambda x: x.stored_bytes // 2),
        "snapkv declares",
    ),
    "a full cache of twice its size, which halves the ratio": (
        forge("bytes", full_bytes=lambda x: 2 * x.full_bytes), "a full cache of",
    ),
    "a full cache of half its size": (forge("bytes", full_bytes=lambda x: x.full_bytes // 2), "a full cache of"),
    "a full cache of twice its size on a later turn": (
        lambda x: forge("bytes", full_bytes=lambda y: 2 * y.full_bytes)(x) if x.turn else {}, "turn 1: a full cache of",
    ),
    "fewer stored bytes of the context on a later turn": (
        lambda x: forge("bytes", stored_bytes=lambda y: y.stored_bytes - 8)(x) if x.turn else {},
        "turn 1: its stored_bytes is",
    ),
    "a full cache that reads twice as much per step": (
        forge("bytes", full_read_bytes_per_step=lambda x: 2 * x.full_bytes), "its full_read_bytes_per_step is",
    ),
    "a full cache that grows twice as much": (
        forge("bytes", end_full_bytes=lambda x: 2 * x.full_bytes), "a step reads",
    ),
    "more stored at the end than there is": (
        forge("bytes", end_stored_bytes=lambda x: x.end_bytes + 8), "its end_stored_bytes is",
    ),
    # Entries and counters
    "half of the entries kept": (
        forge("effect", entries_kept=lambda x: tuple(y / 2 for y in x.entries_kept)), "its layers keep",
    ),
    "all entries kept in an evicting run": (
        forge("effect", entries_kept=lambda x: (x.entries_seen,) * len(x.entries_kept)), "its layers keep",
    ),
    "more entries kept than seen": (
        forge("effect", entries_kept=lambda x: (x.entries_seen + 1.0,) * len(x.entries_kept)), "it keeps",
    ),
    "a layer that keeps a negative number": (forge("effect", entries_kept=shift), "has a negative amount"),
    "twice as many entries seen": (forge("effect", entries_seen=lambda x: 2 * x.entries_seen), "5 layers of"),
    "one layer fewer": (forge("effect", entries_kept=lambda x: x.entries_kept[1:]), "4 layers of"),
    "an effect without a counter": (forge_facts(entries_dropped=0), "the method acted, but no counter is above 0"),
    "fewer entries dropped than are missing": (forge_facts(entries_dropped=9), "it keeps 1640 entries fewer"),
    "more entries dropped than the model has": (forge_facts(entries_dropped=10**6), "it keeps 1640 entries fewer"),
    "a negative counter": (forge_facts(entries_dropped=-1), "a counter of -1 entries"),
    "no effect with entries dropped": (forge("effect", acted=False), "entries were dropped, and the method is said"),
    "a lossless run with entries dropped": (forge("effect", identity=True), "its journal has identity True"),
    # Agreement with the full cache
    "a top-1 agreement above 1": (forge("agreement", top1=1.5), "a top-1 agreement of 1.5 is not a share"),
    "a top-1 agreement between two shares": (forge("agreement", top1=0.999), "a top-1 agreement of 0.999"),
    "a negative divergence": (forge("agreement", kl=-0.5), "a KL divergence of -0.5"),
    "an agreement over no position": (forge("agreement", top1=0.0, n=0), "a KL divergence of"),
    "an agreement over ten times as many positions": (
        forge("agreement", n=lambda x: 10 * x.n), "its agreement has",
    ),
    "parts of the agreement that leave positions out": (
        forge("agreement", top1=1.0, n=64, by_distance=(AgreementPart(start=0, top1=1.0, kl=0.0, n=1),)),
        "its agreement by distance does not cover",
    ),
    "parts of the agreement with a better mean": (
        forge("agreement", top1=1.0, kl=0.5, n=64, by_distance=(AgreementPart(start=0, top1=1.0, kl=0.1, n=64),)),
        "its agreement by distance has a mean kl",
    ),
    "a long answer's agreement without its parts": (
        forge("agreement", top1=1.0, n=64), "its agreement over 64 positions has 0 parts by distance",
    ),
    # Times
    "decoding in no time": (forge("times", decode_s=1e-9), "are faster than any machine"),
    "prompts in no time": (
        lambda x: forge("times", prefill_s=0.0, compress_s=0.0)(x) if x.turn == 0 else {}, "its prefill took 0 s",
    ),
    "compression longer than the prefill": (
        lambda x: forge("times", compress_s=lambda y: 2 * y.prefill_s)(x) if x.turn == 0 else {},
        "its compression took",
    ),
    "the first token of a later turn in no time": (
        lambda x: forge("times", ttft_s=0.0)(x) if x.turn else {}, "its first token came after 0 s",
    ),
    "the first token before the end of the prefill": (
        lambda x: forge("times", ttft_s=lambda y: y.prefill_s / 2)(x) if x.turn == 0 else {}, "its first token came",
    ),
    "a prefill on a later turn": (forge("times", prefill_s=0.001, compress_s=0.0), "the context is timed on"),
    "no prefill at all": (forge("times", prefill_s=None, compress_s=None), "the context is timed on the first turn"),
    "twice as many steps, which doubles the speed": (
        forge("times", steps=lambda x: 2 * x.steps), "decode steps do not give",
    ),
    "no times": (lambda _: {"times": None}, "a line has times unless its sample took the prefill"),
    "a turn shorter than its parts": (lambda x: {"seconds": x.times.decode_s / 2}, "its turn took"),
    "a turn of no time": (lambda _: {"seconds": 0.0}, "its turn took 0 s"),
    "the same good times in every sample": (
        lambda x: {
            **forge("times", decode_s=0.01)(x), "seconds": x.seconds + 1, "started": "2026-11-22T12:00:00+00:00",
        }, "8 measured times are only 1",
    ),
    # Dates
    "samples of the future": (lambda _: {"started": "2999-01-01T00:00:00+00:00"}, "it started at '2999"),
    "samples older than kvbench": (lambda _: {"started": "2020-01-01T00:00:00+00:00"}, "before the first commit"),
    "dates without a time zone": (lambda _: {"started": "2026-11-22T00:00:00"}, "which is not a time with a time zone"),
    "one sample of the future": (
        lambda x: {"started": "2999-01-01T00:00:00+00:00"} if x.index else {}, "sample 1 started at '2999",
    ),
    "samples that still run": (lambda _: {"seconds": 1e7}, "it had not ended when it was packed"),
    # Records of drafts, batches and kernels
    "drafts of a method that drafts nothing": (lambda _: {"lossless": DRAFTS}, "a record of drafts, and a method"),
    "negative drafts": (
        lambda _: {"lossless": DRAFTS.model_copy(update={"rounds": -1})}, "has a negative amount",
    ),
    "more drafts accepted than made": (
        lambda _: {"lossless": DRAFTS.model_copy(update={"accepted": 99})}, "a record of drafts, and a method",
    ),
    "a batch in a run without": (
        lambda _: {"batch": BatchLine(size=8), "times": None}, "a record of a batch, and batches of 1",
    ),
    "reads from a host that stores nothing": (forge("bytes", host_read_bytes_per_step=100), "it fetches 100 bytes"),
    "a kernel of another implementation": (
        lambda _: {"kernels": {"dense_attention": "triton"}}, "ran as triton, and its kernels are torch",
    ),
    "a kernel of no operation": (lambda _: {"kernels": {"fast_attention": "torch"}}, "is no operation of kvbench"),
    "a kernel with markup for a name": (lambda _: {"kernels": {"<b>x</b>": "torch"}}, "which is no name of a kernel"),
    "nothing stored at the end": (forge("bytes", end_stored_bytes=0), "and at most 0 are possible"),
    "half stored at the end": (forge("bytes", end_stored_bytes=lambda x: x.stored_bytes // 2), "a step reads"),
    "a full cache that reads nothing": (forge("bytes", full_read_bytes_per_step=0), "its full_read_bytes_per_step is"),
    "fewer distinct reads than heads can share": (
        forge("bytes", distinct_read_bytes_per_step=1), "its distinct_read_bytes_per_step is",
    ),
    "tokens outside the vocabulary, which print as nothing": (lengthen, "a token id outside the vocabulary of 4096"),
    # Fields that only some lines have, or that no line of this code lacks
    "kernels on some samples only": (lambda x: {"kernels": {}} if x.index else {}, "3 of its 4 lines have no kernels"),
    "reference tokens on some lines only": (
        lambda x: forge("tokens", reference=None)(x) if x.index else {}, "6 of its 8 lines have no reference tokens",
    ),
    "no kernels": (lambda _: {"kernels": {}}, "those of the verifier's own code, and no line has kernels"),
    "no machine": (lambda _: {"machine": None}, "those of the verifier's own code, and no line has machine"),
    "no questions": (lambda _: {"question": None}, "those of the verifier's own code, and no line has question"),
    "no bytes at the end": (
        forge("bytes", **dict.fromkeys(LATER)), "own code, and no line has end_stored_bytes",
    ),
    "no bytes from the host": (
        forge("bytes", host_read_bytes_per_step=None), "own code, and no line has host_read_bytes_per_step",
    ),
    "one of the task's scores left out": (
        lambda x: {"scores": {"ruler-string-match-all@1": x.scores["ruler-string-match-all@1"]}},
        "its 'ruler-string-match-all-strict@1' is None",
    ),
    "kernels of a later turn": (
        lambda x: {"kernels": {"dense_attention": "torch"}} if x.turn else {}, "belong to a sample's first turn",
    ),
    "a later turn that started on another day": (
        lambda x: {"started": "2026-11-22T12:00:00+00:00"} if x.turn else {}, "its started is 2026-11-22T12",
    ),
    "a prefill shared by one turn": (
        lambda x: {"shared_prefill": True, "times": None} if x.turn else {}, "its shared_prefill is True, that of turn",
    ),
    "a function of no operation": (
        lambda x: {"kernels": {**x.kernels, "fast.attention": "torch"}}, "'fast.attention', which is no operation",
    ),
    "a function of another implementation": (
        lambda x: {"kernels": {**x.kernels, "dense_attention.prompt": "triton"}}, "ran as triton, and its kernels are",
    ),
    "a function of another implementation on some layers": (
        lambda x: {"kernels": {**x.kernels, "dense_attention.prompt": "sdpa_flash+triton"}}, "ran as sdpa_flash+triton",
    ),
    "an answer cut short": (cut, "its answer ends after 0 of 128 tokens without a stop token"),
    "a maximum that is no counter": (forge("effect", maxima=("gift",)), "its maxima are ('gift',), and of its"),
    "a sum that is called a maximum": (
        lambda x: {"effect": x.effect.model_copy(update={"acted": False, "maxima": ("entries_dropped",)})},
        "its maxima are ('entries_dropped',)",
    ),
    "five entries more in one layer and fewer in another": (
        forge("effect", entries_kept=lambda x: shift(x, 5)), "layer 0 keeps 60 entries per KV head, at this budget 55",
    ),
    "half of the distinct reads": (
        forge("bytes", distinct_read_bytes_per_step=lambda x: x.read_bytes_per_step // 2),
        "its distinct_read_bytes_per_step is",
    ),
    # Hardware
    "a GPU in the journal of a CPU run": (
        lambda x: (x.machine and forge("machine", gpu=GPU)(x)) or {}, "it ran on device 'cpu', its journal names GPU",
    ),
    "samples of no machine": (
        lambda x: {"machine": None} if x.index else {}, "its journal names the machine of 1 of 4 samples",
    ),
    "another processor in the journal": (
        lambda x: (x.machine and forge("machine", cpu="theirs")(x)) or {}, "its result names",
    ),
    "more threads in the journal": (
        lambda x: (x.machine and forge("machine", threads=64)(x)) or {}, "its result names",
    ),
}


@pytest.mark.parametrize(("change", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_journal_is_refused(snapkv, check, change, reason):
    found = check(snapkv.with_lines(lambda _, x: x.model_copy(update=change(x))))
    assert reason in found["refused"] and found["level"] is None


def in_environment(**values: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: edit(files, RESULT, lambda x: x["environment"].update(values))


def in_spec(*path: str, value: object) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def change(spec: Any) -> None:
        for name in path[:-1]:
            spec = spec[name]
        spec[path[-1]] = value

    return lambda files: edit_spec(files, change)


def of_version(name: str, value: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """The version of a package, in spec and environment."""
    return lambda files: in_environment(**{name: value})(in_spec("versions", name, value=value)(files))


def in_manifest(**values: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: edit(files, MANIFEST, lambda x: x.update(values))


def on_machine(**values: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """Processor or number of threads, in journal and result."""
    def change(files: dict[str, bytes]) -> dict[str, bytes]:
        lines = [json.loads(x) for x in gzip.decompress(files[SAMPLES]).splitlines()]
        for line in lines:
            line["machine"] = line["machine"] and {**line["machine"], **values}
        data = gzip.compress("".join(f"{json.dumps(x)}\n" for x in lines).encode(), mtime=0)
        return in_environment(**values)(repack(files, {SAMPLES: data}))

    return change


STATED: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "a commit by the name of a branch": (
        in_environment(git={"commit": "main", "dirty": False}), "machine: its commit 'main' is not a hash",
    ),
    "a short commit": (in_environment(git={"commit": "c" * 12, "dirty": False}), "machine: its commit 'cccccccccccc'"),
    "a model hash that is none": (in_spec("model", "sha256", value="abc"), "machine: its model.sha256 'abc' is not"),
    "a source hash that is none": (
        in_spec("sources", "harness", value="F" * 64), "machine: its sources.harness 'FFF",
    ),
    "a template hash that is none": (
        in_spec("task", "chat_template_sha", value="x"), "machine: its task.chat_template_sha 'x'",
    ),
    "a kvbench that is not written yet": (of_version("kvbench", "9.9.9"), "machine: kvbench '9.9.9' is later than"),
    "a torch that nobody knows": (of_version("torch", "99.0"), "machine: torch '99.0' is not known"),
    "a version that is a command": (of_version("torch", "2.11; rm -rf"), "machine: its version of torch is '2.11; rm"),
    "a version that a pattern could split in many ways": (
        of_version("torch", f"2.11{'a' * 40}!"), "machine: its version of torch is '2.11aaa",
    ),
    "a packer's version that a pattern could split in many ways": (
        in_manifest(kvbench=f"0.1{'1' * 40}!"), "machine: kvbench '0.1111",
    ),
    "versions in the environment only": (in_environment(torch="2.11.9"), "machine: the versions in its environment"),
    "a Python on which kvbench does not run": (in_environment(python="2.7.18"), "machine: it ran on Python '2.7.18'"),
    "a faster processor in the result": (in_environment(cpu="EPYC 9999"), "machine: its result names 'EPYC 9999"),
    "fewer threads in the result": (in_environment(threads=64), "machine: its result names"),
    "a GPU on a CPU run": (in_environment(gpu=GPU), "machine: it ran on device 'cpu', its environment names GPU"),
    "packed before it ran": (
        in_manifest(created="2026-11-21T01:00:00+00:00"), "it had not ended when it was packed",
    ),
    "packed in the future": (in_manifest(created="2999-01-01T00:00:00+00:00"), "machine: it was packed at '2999"),
    "packed at no time": (in_manifest(created="yesterday"), "machine: it was packed at 'yesterday'"),
    "a million samples": (in_spec("samples", value=10**6), "schema: spec.json: samples 1000000 is not between"),
    "a seed that no run can have": (in_spec("seed", value=-1), "schema: spec.json: seed -1 is not between"),
    "an unknown protocol of questions": (in_spec("mode", value="single"), "schema: spec.json: turns 2 has no meaning"),
    "turns beyond the model": (in_spec("turns", value=900), "prompts: "),
    "a batch that no line has": (in_spec("batch", value=64), "no record of a batch, and batches of 64"),
    "another first token": (in_spec("task", "bos", value="template"), "its prompts begin as bos template says"),
    "a resolved value that the method lacks": (
        lambda files: edit(files, RESULT, lambda x: x["budget"]["resolved"].update(gift=1)),
        "its budget resolves 'gift'",
    ),
    "a resolved value of another type": (
        lambda files: edit(files, RESULT, lambda x: x["budget"]["resolved"].update(
            rows=float(x["budget"]["resolved"]["rows"]),
        )), "bytes: its budget does not resolve to",
    ),
    "packed by a kvbench of before the first": (in_manifest(kvbench="0.0.1"), "machine: kvbench '0.0.1' packed it"),
    "drafts in the result only": (
        lambda files: edit(files, RESULT, lambda x: x.update(lossless=LOSSLESS.model_dump())),
        "summary: its lossless is",
    ),
    "no threads": (on_machine(threads=0), "machine: it ran on 0 threads"),
    "a billion threads": (on_machine(threads=10**9), "machine: it ran on 1000000000 threads"),
    "a processor with control characters": (on_machine(cpu="EPYC\x1b[31m"), "is not the name of one"),
    "a processor of 100,000 characters": (on_machine(cpu="x" * 10**5), "is not the name of one"),
    "parts of the model on a GPU": (
        in_environment(device_map={"model": "cuda:7"}), "it ran on device 'cpu', parts of its model on 'cuda:7'",
    ),
    "a kvbench of before the first": (of_version("kvbench", "0.0.1"), "machine: kvbench '0.0.1' is older than any"),
    "a torch that is too old": (of_version("torch", "2.9.0"), "machine: torch '2.9.0' is older than any"),
    "a Python that is not written yet": (in_environment(python="3.99.0"), "machine: it ran on Python '3.99.0'"),
    "packed by a kvbench that is not written yet": (in_manifest(kvbench="9.9.9"), "machine: kvbench '9.9.9' packed it"),
    "a stop token more, which cuts answers short": (
        lambda files: edit_spec(files, lambda x: x["task"]["stop"].append(7)), "tokenizer: its answers end at token 7",
    ),
    "no stop token": (in_spec("task", "stop", value=[]), "tokenizer: its answers do not end at token"),
    "a budget in another form": (in_spec("budget", value="25.00%"), "spec: its budget is '25.00%', kvbench run writes"),
    "no budget": (in_spec("budget", value=None), "spec: its budget is None, kvbench run writes '25%'"),
    "chunks of a negative size": (in_spec("chunk", value=-5), "spec: kvbench run does not make this run"),
    "kernels for a GPU on a CPU": (
        lambda files: edit(in_spec("kernels", value="flash")(files), RESULT, lambda x: x["kernels"].update(
            implementation="flash",
        )), "UserError: kernels 'flash' need a GPU",
    ),
    "denoising by an autoregressive model": (
        in_spec("generation", "decoding", value="denoising"), "spec: its generation.decoding is 'denoising'",
    ),
    "denoising settings of an autoregressive model": (
        in_spec("generation", "denoising", value={"steps": 3}), "spec: its generation.denoising is DenoisingSpec",
    ),
    "answers of at most no tokens": (in_spec("generation", "max_new_tokens", value=0), "spec: kvbench run does not"),
    "a stop token twice": (
        lambda files: edit_spec(files, lambda x: x["task"].update(stop=2 * x["task"]["stop"])), "its task.stop is",
    ),
    "the hash of weights that no setting names, which gives another run id": (
        in_spec("weights_sha256", value="0" * 64), "spec: its weights_sha256 is '000",
    ),
    "a setting as another type, which gives another run id": (
        in_spec("method", "settings", "window", value=32.0), "method: snapkv does not accept its settings: window is",
    ),
    "a setting left out": (
        lambda files: edit_spec(files, lambda x: x["method"]["settings"].pop("pool")), "its method has no setting pool",
    ),
    "parts that its prompts do not have": (in_spec("parts", value=64), "prompts: sample 0 turn 0: its prompt hash is"),
    "a card without the deviations": (
        lambda files: edit(files, RESULT, lambda x: x["method"]["card"].update(deviations=[])),
        "code: its source hashes are those of the verifier's own code, and its card differs in deviations",
    ),
    "a version in other digits than 0 to 9": (
        in_environment(python="3.1\u0662.4"), "machine: its version of python is '3.1\\u0662.4', which is not a",
    ),
    "a kvbench of the submitter's": (of_version("kvbench", "0.1.0+best"), "own code, and its kvbench is '0.1.0+best'"),
    "a device map of no model": (
        in_environment(device_map={"<b>": "cpu"}), "machine: its device map puts '<b>' on 'cpu'",
    ),
    "another implementation in the result only": (
        lambda files: edit(files, RESULT, lambda x: x["kernels"].update(implementation="triton")),
        "summary: its kernels",
    ),
    "a budget of another kind": (
        lambda files: edit(files, RESULT, lambda x: x["budget"].update(kind="bits")), "its budget is of kind 'bits'",
    ),
}


@pytest.mark.parametrize(("change", "reason"), STATED.values(), ids=STATED.keys())
def test_a_false_statement_is_refused(snapkv, check, change, reason):
    found = check(change(snapkv.files))
    assert reason in found["refused"] and found["level"] is None


def test_another_gpu_in_the_result_is_refused(snapkv, check):
    found = check(in_environment(gpu="NVIDIA B300")(on_gpu(snapkv)))
    assert found["refused"].startswith("machine: its result names 'NVIDIA B300 with 1 threads', its journal")


@pytest.mark.parametrize("name", ["niahh", "NIAH", "niah:train", "c4"])
def test_tuning_data_that_are_no_task_are_flagged(snapkv, check, name):
    """Nobody can tell whether they are the row's own examples."""
    found = check(in_manifest(tuned_on=["niah_single_1:dev", name])(snapkv.files))
    assert (found["split"], found["level"], found["refused"]) == ("flag", "L0", "")
    known = check(in_manifest(tuned_on=["niah_single_1", "list-copy:dev", "niah:dev"])(snapkv.files))
    assert known["split"] == "ok"


def test_a_journal_of_other_code_without_later_fields_is_flagged(snapkv, check):
    """Kernels that only the result names are flagged, too."""
    def age(_, x):
        return x.model_copy(update={"kernels": {}, "machine": None, **forge("bytes", **dict.fromkeys(LATER))(x)})

    ran = {"dense_attention": "torch"}
    files = edit(snapkv.with_lines(age), RESULT, lambda x: x["kernels"].update(ops=[], ran=ran))
    found = check(in_spec("sources", "harness", value="1" * 64)(files))
    assert (found["fields"], found["code"], found["kernels"], found["level"]) == ("flag", "flag", "flag", "L0")


def test_an_operation_may_have_run_in_several_kernels(snapkv, check):
    """A layer with a window runs another one than a layer without."""
    both = {"dense_attention.prompt": "sdpa_flash+sdpa_math"}
    found = check(snapkv.with_lines(lambda _, x: x.model_copy(update={"kernels": x.kernels and {**x.kernels, **both}})))
    assert (found["measurements"], found["level"]) == ("ok", "L0")


def test_a_file_that_goes_by_the_name_of_a_task_has_no_level(snapkv, check):
    found = check(in_spec("task", "code", value="f" * 64)(snapkv.files))
    assert (found["prompts"], found["level"]) == ("flag", None)


def test_an_agreement_of_the_full_cache_is_refused(runs, snapkv, check):
    """It is not compared with itself."""
    theirs = snapkv.bundle.lines[0].agreement
    files = runs["full"].with_lines(lambda _, x: x.model_copy(update={
        "agreement": theirs.model_copy(update={"top1": 1.0, "n": x.tokens.reference}),
    }))
    assert check(files)["refused"].startswith("agreement: full is not compared with the full cache")


def test_a_later_torch_is_flagged(snapkv, check):
    found = check(of_version("torch", "2.999.0")(snapkv.files))
    assert (found["machine"], found["level"], found["refused"]) == ("flag", "L0", "")


def test_an_agreement_left_out_is_flagged(snapkv, check):
    found = check(snapkv.with_lines(lambda _, x: x.model_copy(update={"agreement": None})))
    assert (found["agreement"], found["level"]) == ("flag", "L0")


def test_a_context_beyond_the_model_is_refused_before_any_prompt_is_made(snapkv, check, monkeypatch):
    """The prompt alone would take minutes."""
    def make(*_: object) -> None:
        raise AssertionError("a prompt was made")

    monkeypatch.setattr(replay, "make_examples", make)
    found = check(edit_spec(snapkv.files, lambda x: x["task"].update(length=1 << 21)))
    assert found["refused"].startswith("model: mini supports 8192 tokens, and its contexts and turns need 2097152")


@pytest.fixture
def published(snapkv, tmp_path) -> Repository:
    """A repository that holds the honest run, by ada."""
    put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    return Repository([tmp_path])


def by_eve(files: dict[str, bytes]) -> dict[str, bytes]:
    return in_manifest(submitter="eve")(files)


@pytest.mark.parametrize(("factor", "outcome", "reason"), [
    (lambda _: 1 + 1e-9, "refused", "by ada by one factor, within"),
    (lambda _: 0.9, "refused", "by ada by one factor, within"),
    (lambda x: 1 + 1e-4 * (x.index + x.turn), "refused", "by ada by one factor, within"),
    (lambda x: 1 + 4e-3 * (x.index + x.turn), "flag", "by ada by one factor, within 0."),
    (lambda x: 1 - 0.05 * (x.index + x.turn), "ok", "differs from 1 other runs"),
], ids=["tiny", "constant", "small noise", "noise", "another run"])
def test_times_with_one_factor_between_them_are_a_copy(snapkv, published, factor, outcome, reason):
    """Also with other changes; a repeated run has other times."""
    files = by_eve(snapkv.with_lines(lambda _, x: scale_times(x, factor(x))))
    copies = verify(files, published).conclude().checks[-1]
    assert (copies.name, copies.outcome) == ("copies", outcome) and reason in copies.reason


@pytest.mark.parametrize("mended", [0, 1])
def test_wrong_answers_of_another_method_are_flagged(snapkv, runs, published, monkeypatch, mended):
    """Even with other times, and with one answer mended."""
    monkeypatch.setattr(repository, "MIN_SHARED_ERRORS", 1)
    wrong = [i for i, x in enumerate(snapkv.bundle.lines) if x.score == 0][:mended]
    names = ("prediction", "ids", "score", "scores", "tokens", "stop_reason")
    right = runs["full"].bundle.lines

    def copy(number: int, x: Line) -> Line:
        answer = {name: getattr(right[number], name) for name in names} if number in wrong else {}
        steps = {"times": x.times.model_copy(update={"steps": answer["tokens"].generated - 1})} if answer else {}
        return scale_times(x.model_copy(update={**answer, **steps}), 1 - 0.05 * (x.index + x.turn))

    files = edit_spec(by_eve(snapkv.with_lines(copy)), lambda x: x["method"]["settings"].update(pool="avg"))
    left = sum(x.score == 0 for x in snapkv.bundle.lines) - mended
    copies = verify(files, published).conclude().checks[-1]
    assert copies.outcome == "flag"
    assert f"{left} wrong answers that the full cache does not give equal those of" in copies.reason


def test_errors_of_the_full_cache_are_no_sign_of_a_copy(snapkv, monkeypatch):
    """All methods that lose nothing make them; only a rerun can tell such a run from a copy of the full cache's."""
    monkeypatch.setattr(repository, "MIN_SHARED_ERRORS", 1)
    mine = RunIdentity.of(snapkv.bundle)
    same = replace(JournalFingerprint.of(snapkv.bundle), times=frozenset(), clocks=frozenset(), speeds=({}, {}))
    other = replace(mine, run_id="other", method="other")
    full = replace(mine, run_id="full", method="full", full=True)

    def look(*present: RunIdentity) -> str:
        known = Repository()
        known._runs = {Path(x.run_id): x for x in present}
        known._fingerprints = {Path(x.run_id): same for x in present}
        found = known.check_copies(snapkv.bundle)
        return f"{found.outcome}: {found.reason}"

    assert "equal those of other by ada, another method" in look(other)
    assert "equal those of full by ada: a method that loses nothing gives these" in look(other, full)
    assert "another method" not in look(other, full)


def claim_level(files: dict[str, bytes]) -> Verification:
    """A record in which a submitter awards the run the highest level and a perfect score."""
    record = verify(files, Repository(), own=True).conclude()
    best = record.score.model_copy(update={"mean": 1.0, "ci95": (1.0, 1.0)})
    return record.model_copy(update={"level": "L3", "score": best, "commit": "c" * 40})


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_one(folder: Path) -> ListedRun:
    """The only run below a folder, as the site sees it."""
    (found,), problems = read_listed(folder)
    assert not problems
    return found


@pytest.mark.parametrize("sealed", [None, "0" * 64])
def test_a_verification_that_comes_with_the_folder_is_not_believed(snapkv, tmp_path, sealed):
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    record = claim_level(snapkv.files).model_copy(update={"seal": sealed})
    write_record(folder / VERIFICATION, record)
    listed = list_one(tmp_path)
    assert (listed.verification, listed.counted) == (None, False)
    assert listed.result.score.mean == snapkv.bundle.result.score.mean < 1


def test_a_changed_field_breaks_the_seal(snapkv, tmp_path):
    """A record that this verifier wrote counts, and no other that quotes its seal."""
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    record = seal(verify(snapkv.files, Repository()).conclude())
    write_record(folder / VERIFICATION, record)
    assert list_one(tmp_path).counted
    write_record(folder / VERIFICATION, record.model_copy(update={"level": "L2"}))
    assert not list_one(tmp_path).counted


@pytest.mark.parametrize("change", [
    {"submitter": "eve"}, {"tuned_on": ["niah:dev"]}, {"code_url": "https://eve.example/x"}, None,
])
def test_a_verification_does_not_move_to_another_manifest(snapkv, tmp_path, change):
    """A copy of all files with a manifest of its own, or without one, is unverified."""
    files = dict(snapkv.files)
    record = seal(verify(files, Repository()).conclude())
    folder = put_in_folder(files, snapkv.bundle.manifest, tmp_path)
    write_record(folder / VERIFICATION, record)
    assert list_one(tmp_path).counted
    if change is None:
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_bytes(edit(files, MANIFEST, lambda x: x.update(change))[MANIFEST])
    listed = list_one(tmp_path)
    assert (listed.verification, listed.counted) == (None, False)


def test_a_record_of_a_verifier_with_another_key_is_not_believed(snapkv, tmp_path, monkeypatch):
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    write_record(folder / VERIFICATION, seal(verify(snapkv.files, Repository()).conclude()))
    assert list_one(tmp_path).counted
    monkeypatch.setenv("KVBENCH_VERIFIER_KEY", "a secret of two machines")
    assert not list_one(tmp_path).counted


def test_a_folder_without_manifest_is_no_curated_run(snapkv, tmp_path):
    """Only runs that are committed with the code are believed without a seal."""
    folder = tmp_path / "cpu-2-cores" / "run"
    shutil.copytree(snapkv.folder, folder)
    write_record(folder / VERIFICATION, claim_level(snapkv.files).model_copy(update={"submitter": None}))
    assert not list_one(tmp_path).counted


@pytest.mark.parametrize("place", ["cpu-2-cores/run", "cpu-2-cores/other", "CPU-2-CORES/run", "x/cpu-2-cores/run"])
@pytest.mark.parametrize("manifest", [True, False])
def test_only_runs_on_the_list_are_curated(snapkv, tmp_path, monkeypatch, place, manifest):
    """A pull request can add folders, with a record that awards itself the highest level, but not to the list."""
    monkeypatch.setattr("kvbench.leaderboard.submission.seal.RESULTS", tmp_path)
    folder = tmp_path / place
    shutil.copytree(snapkv.folder, folder)
    if manifest:
        shutil.rmtree(folder)
        write_folder(snapkv.files, folder)
    files = read_files(folder)
    write_record(folder / VERIFICATION, claim_level(files).model_copy(update={"submitter": None}))
    (tmp_path / CURATED).write_text(f"{hash_file(folder / VERIFICATION)}  cpu-2-cores/run/verification.json\n")
    curated = place == "cpu-2-cores/run" and not manifest
    assert list_one(tmp_path).counted is curated
    refused = [x.reason for x in verify(folder, Repository()).checks if x.outcome == "refused"]
    assert (refused == []) is (curated or manifest), refused


def test_a_changed_record_of_a_curated_run_is_not_believed(snapkv, tmp_path, monkeypatch):
    """Nor one behind a link, which the list does not mean."""
    monkeypatch.setattr("kvbench.leaderboard.submission.seal.RESULTS", tmp_path)
    folder = tmp_path / "cpu-2-cores" / "run"
    shutil.copytree(snapkv.folder, folder)
    path = folder / VERIFICATION
    record = claim_level(read_files(folder)).model_copy(update={"submitter": None})
    write_record(path, record)
    (tmp_path / CURATED).write_text(f"{hash_file(path)}  cpu-2-cores/run/verification.json\n")
    assert list_one(tmp_path).counted
    path.rename(tmp_path / "record")
    path.symlink_to(tmp_path / "record")
    assert not is_curated(folder)
    path.unlink()
    write_record(path, record.model_copy(update={"kvbench": "9.9"}))
    assert not list_one(tmp_path).counted


def test_the_list_of_curated_runs_names_them_with_their_present_records():
    places = [x.parent for x in RESULTS.glob("*/*/spec.json") if not (x.parent / MANIFEST).exists()]
    records = {(x / VERIFICATION).relative_to(RESULTS).as_posix(): x / VERIFICATION for x in places}
    lines = [f"{hash_file(records[x])}  {x}" for x in sorted(records)]
    assert (RESULTS / CURATED).read_text().splitlines() == lines, "say: make curated"
    assert all(map(is_curated, places))


def test_ranks_use_the_scores_of_the_rerun(snapkv, tmp_path):
    """They come from single answers, and those that a rerun scored otherwise are replaced."""
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    record = verify(snapkv.files, Repository()).conclude()
    right = next(x for x in snapkv.bundle.lines if x.score == 1)
    rerun = RerunResult(
        share=1.0, seed=0, samples=4, answers=8, same_answers=7, tokens=80, same_tokens=79, submitted_mean=1.0,
        mean=0.9, differs=(), cpu="x", gpu=None,
        other_scores=(OtherScore(index=right.index, turn=right.turn, score=0.0),),
    )
    write_record(folder / VERIFICATION, seal(record.model_copy(update={"level": "L2", "rerun": rerun})))
    scores = {(x.index, x.turn): x.score for x in list_one(tmp_path).run.lines.values()}
    submitted = {(x.index, x.turn): x.score for x in snapkv.bundle.lines}
    assert scores == submitted | {(right.index, right.turn): 0.0} != submitted


def without_source(files: dict[str, bytes]) -> dict[str, bytes]:
    files = in_manifest(source=None)(files)
    return repack({name: data for name, data in files.items() if name != METHOD}, {})


SOURCES: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "no source": (lambda x: without_source(as_own_method(x)), "source: method 'mine' comes without its source"),
    "a harmless source in place of the one that ran": (
        lambda x: repack(as_own_method(x), {METHOD: b"# harmless"}), "source: 'mine.py' is not the code that ran",
    ),
    "a new method without the hash of its code": (
        lambda x: in_spec("method", "code", value=None)(as_own_method(x)), "source: method 'mine' is not registered",
    ),
    "the name of a registered method": (
        lambda x: as_own_method(x, name="snapkv"), "source: a method of the submitter's own has the registered name",
    ),
    "a name that looks like a registered one": (
        lambda x: as_own_method(x, name="5napkv"), "method: its name '5napkv' can be taken for the registered method",
    ),
    "a registered name with a + in it": (
        lambda x: as_own_method(x, name="sn+apkv"), "method: its name 'sn+apkv' can be taken for the registered method",
    ),
    "a composition with another sign": (
        lambda x: as_own_method(x, name="snapkv-adakv"), "method: its name 'snapkv-adakv' can be taken for",
    ),
    "a row of registered names that is deeper than Python's stack": (
        lambda x: as_own_method(x, name="cur" * 2000), "method: its name 'curcurcur",
    ),
    "a registered name before a +": (
        lambda x: as_own_method(x, name="snapkv+"), "method: its name 'snapkv+' has a + without a method on both sides",
    ),
    "a composition after a +": (
        lambda x: as_own_method(x, name="+knorm+adakv"), "method: its name '+knorm+adakv' has a + without a method",
    ),
    "two letters that look like one": (
        lambda x: as_own_method(x, name="window-diffusi0n"), "method: its name 'window-diffusi0n' can be taken for",
    ),
    "a source next to a registered method": (
        lambda x: in_manifest(source="mine.py")(repack(x, {METHOD: b"# mine"})),
        "source: method 'snapkv' is registered",
    ),
    "a source that the manifest does not name": (
        lambda x: in_manifest(source=None)(as_own_method(x)), "manifest: its source is None",
    ),
    "a source by a path": (
        lambda x: in_manifest(source="../mine.py")(as_own_method(x)), "schema: manifest.json: 'source'",
    ),
    "a source that is no text": (lambda x: as_own_method(x, b"\xff\xfe"), "source: 'mine.py': UnicodeDecodeError"),
}


@pytest.mark.parametrize(("change", "reason"), SOURCES.values(), ids=SOURCES.keys())
def test_a_method_of_ones_own_comes_with_the_source_that_ran(snapkv, check, change, reason):
    found = check(change(snapkv.files))
    assert found["refused"].startswith(reason) and found["level"] is None


def test_a_method_of_ones_own_is_submitted_with_its_source_and_has_no_rank(kvbench, snapkv, tmp_path):
    """From the run to the site: the source is stored and shown, and the run stands apart."""
    mine = tmp_path / "mine.py"
    mine.write_text((HERE.parent / "examples" / "my_method.py").read_text())
    asked = Request(
        str(mine), "niah", samples=1, length=384, mode="multi-turn", turns=2, device="cpu", out=tmp_path / "runs",
    )
    folder = run(prepare(asked, snapkv.job.loaded)).folder
    submit = ("submit", folder, "--submitter", "ada", "--to", tmp_path / "results")
    assert "Give it with --source" in kvbench(*submit).err
    assert "is not the code that ran" in kvbench(*submit, "--source", __file__).err
    assert "belongs to no run" in kvbench("submit", snapkv.folder, *submit[2:], "--source", mine).err
    assert kvbench(*submit, "--source", mine).code == 0
    assert kvbench("leaderboard", "verify", tmp_path / "results", "--write", "--json").json[0]["level"] == "L0"
    listed = list_one(tmp_path / "results")
    assert (listed.verification.level, listed.counted) == ("L0", False)
    build_site(tmp_path / "results", tmp_path / "site")
    (shown,) = (tmp_path / "site").glob("runs/*/method.py")
    assert shown.read_text() == mine.read_text()
    assert 'href="method.py"' in (shown.parent / "index.html").read_text()
