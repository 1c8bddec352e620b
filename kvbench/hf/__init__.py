"""The only room that touches transformers' internals: attention, rotary embeddings, loading, architecture facts."""

from kvbench.hf.adapter import Forward, attached, run_model
from kvbench.hf.config import DTYPES
from kvbench.hf.find import check_device, find_copy, find_folder
from kvbench.hf.load import Model, load_model, load_tokenizer
from kvbench.hf.proof import catch_steps
from kvbench.hf.rope import Rope
from kvbench.hf.size import Prediction, predict_memory

__all__ = [
    "DTYPES", "Forward", "Model", "Prediction", "Rope", "attached", "catch_steps", "check_device", "find_copy",
    "find_folder", "load_model", "load_tokenizer", "predict_memory", "run_model",
]
