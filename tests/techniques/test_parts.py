"""Trained parts: when a file is read again."""

from __future__ import annotations

import torch

from kvbench.hf.tiny import tiny_model
from kvbench.techniques.parts import find_part, get_part, write_part


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    """In one process: the path is the same, and the weights are not."""
    path, model = tmp_path / "part.safetensors", tiny_model()
    for count in (1, 2):
        write_part(path, "some", model, {"x": torch.ones(count)}, "data")
        found = [find_part("some", model, str(path), dict, "not trained") for _ in range(2)]
        assert found[0] == found[1]
        assert get_part(found[0]).weights["x"].equal(torch.ones(count))
