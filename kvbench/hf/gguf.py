"""Turns a GGUF file into a folder that transformers loads, and measures whether the result is right."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvbench.errors import UserError, first_line
from kvbench.hf.config import quiet
from kvbench.hf.load import load_model
from kvbench.machine import load_extra

TEXT = """\
The lighthouse stands at the end of a narrow road that follows the cliffs for three miles. When the first keeper
came there with his family, the road did not exist, and everything they needed arrived by boat: flour, oil for
the lamp, coal for the stove, and once a year a crate of books. In the winter the sea was often too rough for
the boat to land, and the family learned to store enough food for two months.

The lamp had to be lit every evening at sunset and put out every morning. The keeper climbed the hundred and
twelve steps of the tower, cleaned the glass with a soft cloth, and wound the clockwork that turned the lens. He
wrote the time and the weather in a book that is now in the museum of the town. On most days the entry is one
line long. On the night of the great storm it fills two pages, because a ship had lost its way and the keeper
and his eldest daughter rowed out to bring the crew ashore.

Today the lamp is electric and nobody lives in the tower. Visitors can climb the steps in summer, look out over
the water, and read a copy of the two pages about the storm."""
"""A text written for this check, so no model was trained on it."""
QUESTION = "The capital of France is"
ANSWER_TOKENS = 2
MOST_BITS = 2.0
"""Per byte of TEXT; SmolLM2-135M needs 1.13, random weights 5 and more."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DIGIT_SPLITS = {"codeshell", "command-r", "refact", "smollm", "starcoder"}
"""Names of `tokenizer.ggml.pre` with single digits and GPT-2's words, which transformers 5.23 does not know."""
WORD_SPLITS = {"gpt-2", "phi-2"}
"""Names with GPT-2's words alone, which is what transformers falls back on."""


@dataclass(frozen=True)
class GgufFile:
    """The facts in the header of a GGUF file."""

    architecture: str
    quantization: str
    """The file's own name for its mixture of types, such as Q4_K_M."""
    dtype: torch.dtype
    """Element type of the converted weights: the file's, or bfloat16 for quantized weights."""
    params: int
    split: str | None
    """Rule by which a byte-level tokenizer splits text; None: another tokenizer, or not said."""

    @property
    def converted_bytes(self) -> int:
        """Bytes of the converted weights."""
        return self.params * self.dtype.itemsize


@dataclass(frozen=True)
class Measurement:
    """How a converted model predicts text, in float32."""

    perplexity: float
    """Per token of TEXT."""
    bits_per_byte: float
    answer: str
    """Greedy continuation of QUESTION."""


def read_gguf(path: Path) -> GgufFile:
    """The header, after a check that the file is whole and that every tensor can be dequantized.

    Raises:
        UserError: no such file, a truncated or foreign file, or an unsupported quantization.
    """
    gguf = load_extra("gguf", extra="gguf", what="a GGUF file")
    if not path.is_file():
        raise UserError(f"GGUF file '{path}' does not exist.")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever numpy does
        if "GGMLQuantizationType" in str(error):
            raise UserError(f"{path} has an unsupported quantization: {first_line(error)}.") from error
        raise UserError(f"{path} is not a whole GGUF file ({first_line(error)}). Fetch it again.") from error
    first = {x.tensor_type: x for x in reversed(reader.tensors)}
    for kind, tensor in first.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except Exception as error:
            raise UserError(f"{path} has an unsupported quantization, {kind.name}: {first_line(error)}.") from error

    def read(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    counts = Counter[str]()
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    if not counts or (architecture := read("general.architecture")) is None:
        raise UserError(f"{path} holds no model: no architecture, or no tensors.")
    most = counts.most_common(1)[0][0]
    named = {x.value: x.name.removeprefix("MOSTLY_") for x in gguf.LlamaFileType}.get(read("general.file_type"), most)
    return GgufFile(
        architecture=architecture, quantization=most if most in FLOATS else named, params=sum(counts.values()),
        dtype=FLOATS.get(most, torch.bfloat16),
        split=read("tokenizer.ggml.pre") if read("tokenizer.ggml.model") == "gpt2" else None,
    )


def convert_gguf(path: Path, folder: Path) -> GgufFile:
    """Write a GGUF model as safetensors with configuration and tokenizer.

    transformers' loader undoes what the format changes, such as the interleaved rotary pairs of Llama.

    Raises:
        UserError: a file that cannot be read, or that transformers does not load completely.
    """
    header = read_gguf(path)
    try:
        from transformers import GgufConfig
    except ImportError as error:
        raise UserError("GGUF files need transformers 5.23 or newer: pip install 'kvbench[gguf]'") from error
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, **options, dtype=header.dtype, quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
            module, info = loaded
            wrong = sorted(str(x) for key in ("missing_keys", "mismatched_keys", "unexpected_keys") for x in info[key])
            if wrong:
                raise UserError(
                    f"{path} does not fit the architecture {header.architecture}: {len(wrong)} tensors are missing or "
                    f"unknown, for example {wrong[0]}."
                )
            _set_split(tokenizer, header.split, path)
            module.save_pretrained(folder, max_shard_size="1000GB")
            tokenizer.save_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # as in load_model
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; those of transformers have no number
            raise
        raise UserError(f"{path} cannot be loaded: {first_line(error)}.") from error
    for name in ("config.json", "generation_config.json"):
        _drop_versions(folder / name)
    return header


def measure(folder: Path) -> Measurement:
    """Perplexity on TEXT and the answer to QUESTION, in float32; loading includes kvbench's check of the attention.

    Raises:
        UserError: the tokenizer loses text, the model predicts English no better than chance, or it is not supported.
    """
    model = load_model(str(folder), dtype="float32")
    tokenizer = model.tokenizer
    ids = tokenizer(TEXT, return_tensors="pt").input_ids

    def decode(found: Tensor) -> str:
        return str(tokenizer.decode(found, skip_special_tokens=True))

    if decode(ids[0]).strip() != TEXT:
        raise UserError("the converted tokenizer does not give back the text that it encoded: not used.")
    ids = ids[:, : model.max_length]
    size = len(decode(ids[0]).encode())
    asked = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model.module(input_ids=ids, use_cache=False).logits[0].float()
        loss = cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").item()
        answer = asked
        for _ in range(ANSWER_TOKENS):
            best = model.module(input_ids=answer, use_cache=False).logits[:, -1:].argmax(-1)
            answer = torch.cat([answer, best], dim=1)
    bits = loss / math.log(2) / size
    if not bits <= MOST_BITS:
        raise UserError(
            f"the converted model needs {bits:.2f} bits per byte of an English text, more than {MOST_BITS}: its "
            "weights or its tokenizer are not what the file means. Not used."
        )
    return Measurement(math.exp(loss / (ids.shape[1] - 1)), bits, decode(answer[0, asked.shape[1] :]))


def _set_split(tokenizer: PreTrainedTokenizerBase, split: str | None, path: Path) -> None:
    """Give a byte-level tokenizer the file's rule for splitting text, where transformers does not."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if split is None or split in WORD_SPLITS or split in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if split not in DIGIT_SPLITS:
        raise UserError(f"{path} splits text by the rule '{split}', which neither transformers nor kvbench knows.")
    inner: Any = tokenizer
    inner.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _drop_versions(path: Path) -> None:
    """Remove what differs between machines and says nothing of the model: the hash of the files names it."""
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: x for key, x in document.items() if key != "transformers_version" and not key.startswith("_")}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
