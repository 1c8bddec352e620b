"""The adapter to transformers, and the only package that uses its internals: attention, rotary embeddings, loading."""

from kvbench.collector import collect_as_usual, collect_rarely

collect_rarely()
try:
    from kvbench.hf.adapter import Forward, attached, bypassing, catching_hidden, narrowing
    from kvbench.hf.find import check_device, find_copy, find_folder
    from kvbench.hf.load import Model, load_model, load_tokenizer
    from kvbench.hf.proof import catch_steps
    from kvbench.hf.rope import Rope
    from kvbench.hf.size import ModelSize, predict_memory
finally:
    collect_as_usual()

__all__ = [
    "Forward", "Model", "ModelSize", "Rope", "attached", "bypassing", "catch_steps", "catching_hidden",
    "check_device", "find_copy", "find_folder", "load_model", "load_tokenizer", "narrowing", "predict_memory",
]
