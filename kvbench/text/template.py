"""Chat templates: a tokenizer's template, cut at the places of the context, the question and the answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Literal

from kvbench.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # noqa: TID251  # its type

Template = Literal["own", "none"]
"""`own`: use the tokenizer's chat template if it and the task have one; `none`: use the text alone."""
DATE = "26 Jul 2024"
"""Today's date for templates that take `date_string`: Llama-3.2's default, so that prompts do not depend on the day."""


@dataclass(frozen=True)
class Frame:
    """The text that a chat template puts around the context, the question and the answer of a conversation."""

    head: str
    """Text before the context."""
    tail: str
    """Text between the question and the answer's prefix (the assistant header)."""
    middle: str | None
    """Text between an answer and the next question; None: the task's separator."""
    sha: str | None
    """Hash of the template and of the text it adds; None without a template."""
    special: bool
    """Whether the tokenizer adds its special tokens to the context (only without a template)."""
    trims: bool = False
    """Whether the template strips white space around messages (Llama-3)."""
    lead: str = ""
    """White space between the assistant header and an answer without prefix (Llama-2 has a space)."""

    @classmethod
    def plain(cls) -> Frame:
        """A frame without any text, for prompts without a chat template."""
        return cls("", "", None, None, special=True)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """Cut the tokenizer's chat template with markers; without a template, return `plain`.

        Raises:
            UserError: the template fails, does something that its sandbox forbids, or leaves out a message's text.
        """
        template = tokenizer.chat_template
        if template is None:
            return cls.plain()
        user, assistant, again = "<kvbench-1>", "<kvbench-2>", "<kvbench-3>"

        def render(*texts: str) -> str:
            talk = [{"role": role, "content": x} for role, x in zip(cycle(("user", "assistant")), texts, strict=False)]
            try:
                return str(
                    tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, date_string=DATE)
                )
            except Exception as error:  # a template can raise anything
                raise UserError(
                    f"the model's chat template cannot be rendered: {first_line(error)}. Use --template none, or "
                    "correct the template in its tokenizer_config.json or chat_template.jinja."
                ) from error

        head, _, tail = render(user).partition(user)
        talk = render(user, assistant, again)
        # Templates of models with images may write nothing of a text; others write the first or the last message alone.
        if not all(x in talk for x in (user, assistant, again)):
            raise UserError(
                "the model's chat template leaves out the text of a message. Use --template none, or correct the "
                "template in its tokenizer_config.json or chat_template.jinja."
            )
        before, _, after = talk.partition(assistant)
        header, middle = before.partition(user)[2], after.partition(again)[0]
        lead = header.removeprefix(tail) if header.startswith(tail) and header.removeprefix(tail).isspace() else ""
        trims = render(*(f"\n {x} \n" for x in (user, assistant, again))) == talk
        texts = (str(template), head, middle, tail, *([lead] if lead else []))
        sha = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
        return cls(head, tail, middle, sha, special=False, trims=trims, lead=lead)


def find_bos(tokenizer: PreTrainedTokenizerBase, frame: Frame) -> Literal["tokenizer", "template", "none"]:
    """Whether the tokenizer or the template adds the token that begins a sequence."""
    token = tokenizer.bos_token_id
    if token is None:
        return "none"
    ids = tokenizer(f"{frame.head}x", add_special_tokens=frame.special).input_ids
    return "none" if ids[:1] != [token] else "tokenizer" if frame.special else "template"


def refuse_ending(tokenizer: PreTrainedTokenizerBase, frame: Frame) -> None:
    """Refuse a tokenizer that puts a token after every text: it would stand between context and question.

    Raises:
        UserError: it does, and there is no chat template to take its special tokens from.
    """
    plain, whole = (tokenizer("x", add_special_tokens=special).input_ids for special in (False, frame.special))
    if whole[-1:] != plain[-1:]:
        raise UserError(
            f"the model's tokenizer puts {tokenizer.decode(whole[-1:])!r} after every text, so the context would end "
            "with it before the question. Set add_eos_token to false in its tokenizer_config.json, correct the "
            "post_processor in its tokenizer.json, or use its chat template, if it has one, in `kvbench run`."
        )
