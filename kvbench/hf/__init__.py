"""The adapter to transformers, and the only package that uses its internals: attention, rotary embeddings, loading."""

import atexit
import gc

# torch and transformers bring a million objects that live as long as the process. Searching them for garbage takes a
# fifth of the import and a quarter of a second in each full collection after it, so the collector leaves them out. At
# exit it has them back: the libraries look for leaks then.
_collects = gc.isenabled()
gc.disable()
try:
    from kvbench.hf.adapter import Forward, attached, bypassing, catching_hidden, narrowing, run_model
    from kvbench.hf.config import DTYPES
    from kvbench.hf.find import check_device, find_copy, find_folder
    from kvbench.hf.load import Model, load_model, load_tokenizer
    from kvbench.hf.proof import catch_steps
    from kvbench.hf.rope import Rope
    from kvbench.hf.size import ModelSize, predict_memory
finally:
    gc.freeze()
    atexit.register(gc.unfreeze)
    if _collects:
        gc.enable()

__all__ = [
    "DTYPES", "Forward", "Model", "ModelSize", "Rope", "attached", "bypassing", "catch_steps", "catching_hidden",
    "check_device", "find_copy", "find_folder", "load_model", "load_tokenizer", "narrowing", "predict_memory",
    "run_model",
]
