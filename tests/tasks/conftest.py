"""Tokenizers of the task tests: the bundled model's, and one of single characters whose ids can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

MINI = Path(__file__).parents[2] / "kvbench" / "models" / "mini"


@pytest.fixture(scope="session")
def mini_tokenizer():
    """The bundled model's tokenizer."""
    return AutoTokenizer.from_pretrained(MINI)


@pytest.fixture(scope="session")
def chars():
    """One token per character of ASCII; decoding joins them."""
    vocabulary = {chr(i): i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")

    class Characters(PreTrainedTokenizerFast):
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    return Characters(tokenizer_object=tokenizer)
