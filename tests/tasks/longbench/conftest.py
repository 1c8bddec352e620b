"""Tokenizers as Llama's, records of LongBench v1, and examples made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbench.registry import find_task
from kvbench.task import Example, Mode, Split, Task

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def octets():
    """One token per byte, and one before all, as Llama's tokenizers have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="session")
def chatty(octets):
    """The same tokenizer with a chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=octets.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def line() -> Callable[..., dict[str, object]]:
    """A record of a task."""

    def make(kind: str = "qasper", **changes: object) -> dict[str, object]:
        answers = ["Paragraph 1", "1"] if kind.startswith("passage") else ["One", "1"]
        return {
            "input": "The input?", "context": "The text.", "answers": answers, "length": 3999, "dataset": kind,
            "language": "en", "all_classes": ["One", "Two"] if kind in {"trec", "lsht"} else None, "_id": "abc",
        } | changes

    return make


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    """Records in a file of JSON lines."""

    def write(name: str, *found: object) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(x) + "\n" for x in found), encoding="utf-8")
        return path

    return write


@pytest.fixture
def open_task(write, line) -> Callable[..., Task]:
    """A task over one record in a file."""
    return lambda kind, **changes: find_task(f"longbench_{kind}")(data=str(write("x.jsonl", line(kind, **changes))))


@pytest.fixture
def make() -> Callable[..., Example]:
    """The first example of a task."""

    def make(task: Task, tokenizer: Any, length: int = 10_000) -> Example:
        (example,) = task.examples(
            seed=0, split=Split.TEST, n=1, length=length, turns=1, mode=Mode.SINGLE, tokenizer=tokenizer
        )
        return example

    return make
