"""A share has one numerator and one denominator: bytes of the same moment, in the stated width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.analysis.load import find_runs, load_run
from kvbench.analysis.shares import (
    conversation_share,
    cut_share,
    distinct_read_share,
    fill_full_reads,
    read_share,
    reference_width,
    stored_share,
)
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.methods.baseline.full import Full
from kvbench.runs.journal import CacheBytes

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
KV = 2 * 2 * 2 * 16 * 4
"""Bytes of one token in the tiny model: layers, KV heads, key and value, dimensions, bytes of float32."""


@pytest.fixture(scope="module")
def curated():
    """The full cache, Quest and KIVI under one protocol, without the full cache's reads, as of an earlier version."""
    runs = [load_run(x) for name in ("full-niah", "quest", "kivi") for x in find_runs_of(name)]
    place = (runs[0].result.visibility, runs[0].result.task.length)
    return [forget_reads(x) for x in runs if (x.result.visibility, x.result.task.length) == place]


def forget_reads(run):
    """The run without the full cache's reads."""
    memory = run.result.memory.model_copy(update={"full_read_bytes_per_step": None})
    return replace(run, result=run.result.model_copy(update={"memory": memory}))


def find_runs_of(name):
    """Folders of the runs of a method."""
    return find_runs([str(x) for x in sorted(CURATED.glob(f"{name}*"))])


@pytest.mark.parametrize("window", [None, 24])
def test_the_full_cache_stores_and_reads_all_of_itself(window):
    """After every turn, on a fork and not, and where layers have windows."""
    model = tiny_model(window=window)
    with Session(model, Full(), capacity=120) as session:
        session.prefill([3 + i % 20 for i in range(64)])
        for turn in range(2):
            session.ask([5, 6, 7], 4, history=[8, 9] if turn == 0 else None, stop=frozenset())
            found = session.memory()
            assert found.stored_bytes == found.full_bytes
            assert found.end_stored_bytes == found.end_full_bytes > found.full_bytes
            assert found.end_bytes - found.end_stored_bytes == sum(x.spare_bytes() for x in session.layers)
            assert found.read_bytes_per_step == found.distinct_read_bytes_per_step == found.full_read_bytes_per_step
    if window is None:
        assert found.end_full_bytes == (64 + 3 + 2 + 3 + 3) * KV  # the last token of an answer has no entry


def test_shares_compare_bytes_of_the_same_moment(curated):
    """Each share divides by the full cache of its moment, with host memory in the numerator."""
    result = curated[0].result
    memory = result.memory.model_copy(update={
        "full_bytes": 100, "stored_bytes": 20, "host_bytes": 5, "end_stored_bytes": 40,
        "end_full_bytes": 150, "read_bytes_per_step": 90, "distinct_read_bytes_per_step": 30,
        "full_read_bytes_per_step": 120,
    })
    result = result.model_copy(update={"memory": memory})
    shares = (stored_share, conversation_share, read_share, distinct_read_share)
    assert [x(result) for x in shares] == [0.25, 0.3, 0.75, 0.25]
    quantized = {
        "method": result.method.model_copy(update={"family": "quantization"}),
        "model": result.model.model_copy(update={"dtype": "float32"}),
    }
    assert [x(result.model_copy(update=quantized)) for x in shares] == [0.5, 0.6, 1.5, 0.5]


def test_a_quantized_cache_is_compared_with_16_bits(curated):
    """The width of the model's type changes nothing where it has 16 bits."""
    assert {reference_width(x.result) for x in curated} == {1.0}
    assert all(x.result.memory.full_16bit_bytes == x.result.memory.full_bytes for x in curated)


def test_earlier_results_take_the_reads_of_the_full_cache_from_its_run(curated):
    """No method reads more than it, and without such a run there is no share."""
    assert [read_share(x.result) for x in curated] == [None] * len(curated)
    filled = fill_full_reads(curated, curated)
    assert read_share(filled[0].result) == 1.0
    assert all(0 < read_share(x.result) < 1 for x in filled if x.result.method.name == "kivi")
    assert read_share(fill_full_reads(curated, curated[1:])[0].result) is None


def test_the_reads_of_the_full_cache_are_those_of_the_same_conversation(curated):
    """Of several runs of the full cache the first counts; none does where a method continues its own answers."""
    full = curated[0]
    memory = full.result.memory.model_copy(update={"read_bytes_per_step": 2 * full.result.memory.read_bytes_per_step})
    other = replace(full, result=full.result.model_copy(update={"memory": memory}))
    assert [read_share(x.result) for x in fill_full_reads([full], [other, full])] == [0.5]
    own = replace(full, result=full.result.model_copy(update={"history": "own"}))
    assert [read_share(x.result) for x in fill_full_reads([own], [full])] == [None]
    (known,) = fill_full_reads([full], [full])
    assert [read_share(x.result) for x in fill_full_reads([known], [other])] == [1.0]


def test_the_share_of_answers_cut_by_the_length_limit(curated):
    """Of generated answers; choices are compared and not generated."""
    result = curated[0].result
    for reasons, share in (({"stop": 3, "length": 1}, 0.25), ({"choice": 4}, None)):
        output = result.output.model_copy(update={"stop_reasons": reasons})
        assert cut_share(result.model_copy(update={"output": output})) == share


def test_new_fields_of_the_journal_may_be_missing():
    """A journal of an earlier version is read, and summarized without them."""
    old = {name: 1 for name, x in CacheBytes.model_fields.items() if x.is_required()}
    assert CacheBytes.model_validate(old).full_read_bytes_per_step is None
