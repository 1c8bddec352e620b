"""A method file of the user that raises: one line that names the file and the line, on every command."""

from __future__ import annotations

import pytest

RAISES = '''
from dataclasses import dataclass

from kvbench.methods.eviction.knorm import Knorm


@dataclass(frozen=True)
class Mine(Knorm):
    """Raises in one of its functions."""

    card = Knorm.card.model_copy(update={{"name": "mine"}})

    def {}(self, *given, **named):
        raise RuntimeError("no scale\\nfor this layer")
'''


@pytest.mark.parametrize(("function", "line"), [
    ("declared_bytes", "plan --method {} --model mini --length 64"),
    ("bind", "run --method {} --task kv-short --device cpu --samples 1"),
])
def test_the_line_that_raised_is_named(kvbench, tmp_path, function, line):
    """Exit code 2 and no traceback."""
    path = tmp_path / "mine.py"
    path.write_text(RAISES.format(function))
    answer = kvbench(*line.format(path).split())
    assert answer.code == 2
    assert answer.err.endswith(
        "kvbench: RuntimeError: no scale (mine.py, line 14). Correct the file; `kvbench check` of it tries every "
        "invariant.\n"
    )


def test_a_failed_sample_names_the_line_that_raised(kvbench, tmp_path):
    """In the table of the run."""
    (tmp_path / "mine.py").write_text(RAISES.format("evict"))
    line = f"run --method {tmp_path / 'mine.py'} --task kv-short --device cpu --samples 1 --out {tmp_path / 'runs'}"
    answer = kvbench(*line.split())
    assert answer.code == 1
    assert "RuntimeError: no scale (mine.py, line 14)" in " ".join(answer.out.replace("│", " ").split())
