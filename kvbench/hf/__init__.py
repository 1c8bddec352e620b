"""The only room that touches transformers' internals: attention, rotary embeddings, loading, architecture facts."""

from kvbench.hf.load import Model, list_bundled, load_model, predict_memory
from kvbench.hf.rope import Rope
from kvbench.hf.seam import Forward, attached, run_model

__all__ = ["Forward", "Model", "Rope", "attached", "list_bundled", "load_model", "predict_memory", "run_model"]
