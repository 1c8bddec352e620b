"""The fields of reuse across prompts in the journal and in the result."""

from __future__ import annotations

import pytest

from kvbench.runs.examples import cut_parts
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.results import Result
from kvbench.task import Encoded


@pytest.fixture
def run(kvbench, tmp_path):
    """Run a method on documents in another order, and return its result and lines."""

    def call(method, *more):
        answer = kvbench("run", "--method", method, "--task", "reuse-order", "--samples", "2", "--length", "420",
                         "--out", str(tmp_path / "runs"), *more)
        assert answer.code == 0, answer.err
        (folder,) = (tmp_path / "runs").glob(f"{method}-*")
        return read_file(folder / "result.json", Result), read_lines(folder / "samples.jsonl")

    return call


def test_a_run_counts_tokens_chunks_and_both_clocks(run):
    """Of a method that computes a share of the prompt; the logits are compared with the full cache's."""
    result, lines = run("cacheblend")
    counted = [x.reuse for x in lines]
    tokens = sum(x.tokens for x in counted)
    assert tokens == 5 * sum(x.tokens.context for x in lines)
    assert result.reuse.computed_share == pytest.approx(sum(x.computed for x in counted) / tokens)
    assert 0.4 < result.reuse.computed_share < 1
    assert 0.3 < result.reuse.reused_share < 0.6
    assert (result.reuse.misses, result.reuse.hits) == (2 * 5, 0)
    assert result.reuse.moved_bytes == result.reuse.chunk_bytes
    assert 0 < result.reuse.ttft_in_hand_s < result.latency.ttft_s
    assert all(x.reuse.build_s < x.times.prefill_s for x in lines)
    assert result.agreement is not None and result.agreement.kl > 0
    assert (result.effect.n_acted, result.effect.n) == (2, 2)


@pytest.mark.slow
def test_the_floor_of_the_scale_sees_no_document(run):
    """Its cache is that of the instruction and the question."""
    result, _ = run("no-context")
    assert result.reuse.reused_share == 0
    assert result.reuse.computed_share == pytest.approx(result.memory.ratio, abs=0.01)
    assert result.memory.ratio < 0.5


@pytest.mark.slow
def test_chunks_in_a_folder_are_those_that_a_run_would_compute(run, tmp_path):
    """A later run computes the damaged ones alone and has the same answers, and it knows no time with building."""
    store = ("--chunk-store", str(tmp_path / "chunks"))
    _, first = run("cacheblend", *store)
    (tmp_path / "runs").rename(tmp_path / "first")
    for path in sorted((tmp_path / "chunks").glob("*/*"))[:3]:
        path.write_bytes(path.read_bytes()[:-100])
    result, second = run("cacheblend", *store, "--scorer", "choice-nll@1")
    assert (result.reuse.loaded, result.reuse.hits, result.reuse.misses, result.reuse.mismatched) == (7, 7, 3, 3)
    assert [(x.prediction, x.scores, x.agreement.kl) for x in second] == [
        (x.prediction, x.scores, x.agreement.kl) for x in first
    ]


@pytest.mark.parametrize(("method", "folder", "words"), [
    ("full", "chunks", "--chunk-store keeps chunks of methods that reuse entries across prompts, and full does not"),
    ("epic", "file/chunks", "cannot be made: "),
])
def test_a_chunk_store_that_cannot_be_used_is_refused(kvbench, tmp_path, method, folder, words):
    """In one line, before anything is written."""
    (tmp_path / "file").write_text("")
    answer = kvbench("run", "--method", method, "--task", "reuse-order", "--samples", "1", "--length", "420",
                     "--chunk-store", str(tmp_path / folder))
    assert answer.code == 2
    assert words in answer.err


def test_the_same_requests_run_with_chunks(kvbench, tmp_path):
    """Any context can be cut into parts; the tokens are the same for every method, and questions share the chunks."""
    lines = {}
    for method in ("full", "no-context", "epic"):
        answer = kvbench("run", "--method", method, "--task", "kv-short", "--mode", "multi-request", "--turns", "2",
                         "--samples", "1", "--length", "500", "--parts", "64", "--out", str(tmp_path))
        assert answer.code == 0, answer.err
        (folder,) = tmp_path.glob(f"{method}-*")
        lines[method] = read_lines(folder / "samples.jsonl")
    assert len({tuple(x.prompt_hash for x in made) for made in lines.values()}) == 1
    first, second = lines["epic"]
    context = first.tokens.context
    assert first.reuse.misses == 1 + -(-(context - 1) // 64)
    assert first.reuse.computed < 0.5 * first.reuse.tokens
    assert second.reuse is None
    assert lines["no-context"][0].reuse.computed == 5 * 1


def test_parts_are_the_tokens_of_the_context():
    """The first token, and parts of the size; the last may be shorter. Earlier prompts had them backwards, or moved."""
    whole = Encoded(tuple(range(12)), ())
    found = cut_parts(whole, 4)
    assert found.parts == ((0,), (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11))
    assert found.context == whole.context
    begin, *parts = found.parts
    assert found.earlier == ((begin, *(parts[i] for i in (2, 1, 0))), (begin, *(parts[i] for i in (1, 2, 0))))


def test_a_task_with_parts_of_its_own_is_not_cut(kvbench):
    """In one line."""
    answer = kvbench("run", "--method", "epic", "--task", "reuse-order", "--parts", "64", "--length", "420")
    assert (answer.code, "Leave --parts out" in answer.err) == (2, True)


@pytest.mark.parametrize("how", [("--visibility", "hidden"), ("--mode", "multi-request", "--turns", "2")])
def test_a_method_that_reads_the_question_is_refused_where_it_comes_later(kvbench, tmp_path, how):
    """Before anything is written; every sample would fail."""
    out = tmp_path / "runs"
    answer = kvbench("run", "--method", "fusionrag", "--task", "reuse-order", "--length", "420", *how, "--out", out)
    assert answer.code == 2
    assert "fusionrag reads the question in the prompt, and here it comes later" in answer.err
    assert not out.exists()


def test_a_prompt_without_parts_is_refused(kvbench):
    """In one line that names a task that has them, before anything is written."""
    answer = kvbench("run", "--method", "epic", "--task", "niah", "--samples", "1", "--length", "512")
    assert answer.code == 2
    assert "epic reuses the parts of a prompt, and niah_multikey_1 names none" in answer.err
