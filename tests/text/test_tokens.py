"""The parts of a conversation, tokenized one by one, have the token ids of the whole text."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, LlamaTokenizer

from kvbench.errors import UserError
from kvbench.registry import find_task
from kvbench.task import Example, Mode, Split, Turn, encode
from kvbench.text.template import Frame
from kvbench.text.tokens import tokenize_on

pytestmark = pytest.mark.usefixtures("cache")

MODELS = Path(__file__).parents[2] / "kvbench" / "models"


@pytest.fixture(scope="module")
def llama():
    """A tokenizer like Llama-2's: it puts a space before every text and falls back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    pieces += sorted(set(string.ascii_letters + string.digits + string.punctuation))
    return LlamaTokenizer(vocab={x: i for i, x in enumerate(pieces)}, merges=[])


@pytest.mark.parametrize("name", ["niah_single_1", "kv-short"])
def test_no_space_is_put_between_parts(llama, name):
    """Context, question, reference answer and the next question decode to exactly their own text."""
    task = find_task(name)()
    (example,) = task.examples(
        seed=0, split=Split.TEST, n=1, length=1500, turns=2, mode=Mode.MULTI_TURN, tokenizer=llama
    )
    one, two = example.turns
    first, later = encode(task, example, llama).turns
    ids = encode(task, example, llama).context + first.first + first.answer + later.later
    assert llama.decode(ids, skip_special_tokens=True) == (
        f"{example.context}{task.joint}{one.question}{one.prefix}{one.answer}{task.separator}{two.question}{two.prefix}"
    )


@pytest.mark.parametrize(("prefix", "trims", "expected"), [
    ("", True, ["no", "yes"]), ("=", True, [" no", " yes"]), ("", False, [" no ", " yes "]),
])
def test_choices_are_trimmed_as_the_answer_is(llama, prefix, trims, expected):
    """A template that strips messages strips choices, too; after a prefix the leading space stays."""
    task = find_task("niah_single_1")()
    turn = Turn("q", prefix, " yes ", ("yes",), 0, (" no ", " yes "))
    frame = replace(Frame.plain(), trims=trims)
    (found,) = encode(task, Example("x", "c", (turn,)), llama, frame).turns
    assert ["".join(llama.convert_ids_to_tokens(x)).replace("▁", " ") for x in found.choices] == expected
    assert found.answer in found.choices


@pytest.mark.parametrize("text", ["", "a", " a", "\n\na", "=\n", "</s> a"])
def test_a_continuation_has_the_ids_that_it_has_in_the_whole_text(llama, text):
    whole, head = (llama(x, add_special_tokens=False).input_ids for x in (f"b{text}", "b"))
    assert [*head, *tokenize_on(llama, text)] == whole


def test_a_text_that_merges_with_every_probe_is_refused():
    class Merging:
        def __call__(self, text, **_):
            return SimpleNamespace(input_ids=[len(text)])

        def convert_ids_to_tokens(self, ids):
            return ["▁x" for _ in ids]

    with pytest.raises(UserError, match="merges 'a' with any text before it"):
        tokenize_on(Merging(), "a")


def test_a_tokenizer_without_leading_space_tokenizes_the_text_alone():
    """The bundled model's tokenizer is of this kind."""
    mini = AutoTokenizer.from_pretrained(MODELS / "mini")
    for text in ("a", " a", "\n\na"):
        assert tokenize_on(mini, text) == tuple(mini(text).input_ids)
