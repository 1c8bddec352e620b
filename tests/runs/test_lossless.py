"""The fields of a lossless method in the journal and in the result."""

from __future__ import annotations

import pytest

from kvbench.runs.files import read_file, read_lines
from kvbench.runs.results import Result


def test_a_run_counts_rounds_and_compares_with_plain_decoding(kvbench, arguments, tmp_path):
    """Totals of the result are those of the lines, and no token differs from decoding with the full cache."""
    answer = kvbench(*arguments, "--method", "random+vericache", "--set", "window=1", "--budget", "25%",
                     "--mode", "multi-turn")
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [x for x in read_lines(folder / "samples.jsonl") if x.lossless is not None]
    result = read_file(folder / "result.json", Result)
    found = result.lossless
    assert len(lines) == result.n_questions
    assert (found.different, found.tokens) == (0, sum(len(x.ids) for x in lines))
    rounds = sum(x.lossless.rounds for x in lines)
    assert found.accepted_per_round == pytest.approx(sum(x.lossless.accepted for x in lines) / rounds)
    assert found.tokens_per_round * rounds == pytest.approx(found.tokens - len(lines))
    assert found.resident_bytes == result.memory.stored_bytes
    assert result.memory.host_bytes == result.memory.full_bytes
    assert result.memory.ratio_total == pytest.approx(result.memory.ratio + 1)
    assert found.reloaded_bytes_per_token > 0
    assert found.speedup > 0
    assert result.agreement.top1 == 1
