"""kvbench as a model of lm_eval: importing this module registers it there under the name `kvbench`.

lm_eval's own models run context and continuation in one forward pass, without compression. This model prefills and
compresses the context first, and then generates or scores the continuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, Self

import lm_eval.models  # noqa: F401  # fills the registry; registering a model first would prevent that
import torch
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from kvbench import __version__
from kvbench.budget import Budget
from kvbench.engine.session import Session
from kvbench.errors import UserError, first_line, unknown
from kvbench.hf import load_model
from kvbench.integrations.lmeval.generation import Generation
from kvbench.integrations.lmeval.tally import Tally
from kvbench.log import say
from kvbench.method import Method, Moment
from kvbench.registry import find_method
from kvbench.runs.command import write_setting
from kvbench.runs.request import check_model
from kvbench.settings import configure, jsonable_settings
from kvbench.text.template import Frame, refuse_ending

SETTING = "set."
"""Prefix of model arguments that are settings of the method."""


@register_model("kvbench")
class KvbenchModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model under a method, one request at a time.

    Args:
        pretrained: a bundled model, a local folder or a hub id.
        method: a name of `kvbench list methods`, `inner+outer`, or path/to/file.py:Class.
        budget: a share such as 25%, tokens per KV head such as 1024, or paper.
        chunk: prompt tokens per forward pass; None: all.
        dtype: float32, bfloat16, float16 or auto; None: auto.
        device: cpu, cuda or cuda:N; None: cuda if available.
        max_length: contexts are cut on the left beyond this many tokens; None: the model's maximum.
        batch_size: must be 1, lm_eval's default.
        others: settings of the method, as `set.<key>`.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self, pretrained: str = "mini", method: str | None = None, budget: object = None, *, chunk: int | None = None,
        dtype: str | None = None, device: str | None = None, max_length: int | None = None,
        batch_size: object = 1, **others: object,
    ) -> None:
        super().__init__()
        named = ("pretrained", "method", "budget", "chunk", "dtype", "device", "max_length")
        for key in others:
            if not key.startswith(SETTING):
                raise unknown("model argument", key, named, f"A setting of the method is {SETTING}<key>=<value>.")
        if method is None:
            raise UserError("model 'kvbench' needs a method. Write --model_args pretrained=mini,method=full")
        if str(batch_size) != "1":
            raise UserError(f"batch size {batch_size} needs padding, and kvbench never pads. Leave --batch_size out.")
        for key, value in (("chunk", chunk), ("max_length", max_length)):
            if value is not None and not (isinstance(value, int) and value > 0):
                raise UserError(f"{key}={value} must be a whole number of tokens, 1 or more.")
        settings = {key.removeprefix(SETTING): write_setting(value) for key, value in others.items()}
        made = configure(find_method(method), settings, "set", method)
        if made.card.models != "autoregressive":
            raise UserError(f"{made.card.name} needs a diffusion model, which lm_eval cannot score.")
        if made.reads_parts:
            raise UserError(
                f"{made.card.name} reuses the parts of a prompt, and lm_eval's prompts name none. Use `kvbench run` "
                "with a task of the group reuse (`kvbench list tasks`)."
            )
        self.budget = None if budget is None else Budget.parse(str(budget))
        check_model(pretrained)
        self.model = load_model(pretrained, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype)
        if self.model.random or self.model.kind != "autoregressive":
            raise UserError(
                f"model '{pretrained}' is {'random' if self.model.random else self.model.kind}: lm_eval needs a "
                "trained autoregressive model. Use another one."
            )
        if max_length is not None and max_length > self.model.max_length:
            raise UserError(
                f"max_length={max_length} exceeds the maximum of model {pretrained}, {self.model.max_length} tokens."
            )
        refuse_ending(self.model.tokenizer, Frame.plain())
        self.max_length, self.chunk = max_length or self.model.max_length, chunk
        self.method: Method = made.bind(self.model)
        longest = self.model.shape(self.max_length)
        self.lossless = self.method.fit(self.budget, longest).identity(longest)
        self.tokenizer = self.model.tokenizer
        self.tallies: dict[str, Tally] = {}
        self.drops_system = False
        self._device = self.model.device

    # Interface of lm_eval

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """Create from `--model_args`, which override lm_eval's own options."""
        options = {key: value for key, value in (additional_config or {}).items() if value is not None}
        options |= arg_dict
        if "device" not in arg_dict and options.get("device") == "cuda:0" and not torch.cuda.is_available():
            say("lm_eval selects a GPU by default, and there is none: computing on the CPU.")
            options["device"] = "cpu"
        return cls(**options)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        """Create from `key=value,key=value`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            UserError: the tokenizer has none.
        """
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of {self.model.id} names no token that ends a text, which lm_eval needs for an empty "
                "context. Name it in tokenizer_config.json (eos_token), or use another model."
            )
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token used for an empty context: BOS, or EOS if there is no BOS."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """A name for lm_eval's prompt caches."""
        return self.model.tokenizer_sha256

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation; without a generation prompt its last message is continued.

        A conversation that the template refuses loses its system messages, as in lm_eval: some templates have no place
        for them, and lm_eval puts a task's description there.

        Raises:
            UserError: there is no template, or it refuses the rest, too.
        """
        if self.tokenizer.chat_template is None:
            raise UserError(f"model {self.model.id} has no chat template. Leave --apply_chat_template out.")
        render = partial(
            self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return str(render(chat_history))
        except TemplateError as error:
            rest = [x for x in chat_history if x["role"] != "system"]
            try:
                text = str(render(rest))
            except TemplateError:
                raise UserError(
                    f"the chat template of model {self.model.id} cannot be rendered: {first_line(error)}. "
                    "Leave --apply_chat_template out."
                ) from error
            if not self.drops_system:  # one line for all prompts
                say(f"the chat template takes no system message ({first_line(error)}): prompts leave theirs out.")
                self.drops_system = True
            return text

    def tok_encode(self, string: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids; by default with the tokenizer's special tokens, unless the text begins with them already."""
        if add_special_tokens is None:
            tokens = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            first = [x for x in tokens if x is not None][:1]  # some tokenizers have neither
            add_special_tokens = not (first and string.startswith(str(self.tokenizer.decode(first))))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids)

    def get_model_info(self) -> dict[str, object]:
        """Model, method and effect counters for lm_eval's results."""
        return {"kvbench": {
            "version": __version__, "model_sha256": self.model.sha256, "dtype": self.model.dtype,
            "device": str(self.model.device), "max_length": self.max_length, "visibility": "visible",
            "method": self.method.card.name, "method_version": self.method.card.version,
            "settings": jsonable_settings(self.method), "budget": None if self.budget is None else str(self.budget),
            "requests": {kind: asdict(x) for kind, x in self.tallies.items()},
        }}

    def set_cache_hook(self, cache_hook: object) -> None:
        """Refused: lm_eval's answer cache is keyed by prompt, not by method and budget."""
        del cache_hook
        raise UserError(
            "--use_cache stores answers by prompt only, so answers of another method would be reused. Leave it out."
        )

    # Requests

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Refused: a text that is scored from its first token has no context to compress."""
        del requests
        raise UserError(
            "lm_eval's rolling log-likelihood scores a text from its first token, so there is no context to compress. "
            "Use `kvbench run --task ppl-stdlib`: perplexity after compression."
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], *, disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would produce it.

        Consecutive requests with the same context share its prefill.
        """
        tally = self.tallies["loglikelihood"] = Tally()
        results = []
        cut = [(self._cut(context, len(after), tally), after) for _, context, after in requests]
        with tqdm(total=len(cut), desc="kvbench loglikelihood", disable=disable_tqdm) as bar:
            for _, group in groupby(cut, key=lambda x: x[0]):
                sharing = list(group)
                context = sharing[0][0]
                with self._prefilled(context, max(len(after) for _, after in sharing), tally) as session:
                    for _, after in sharing:
                        with session.fork() as branch:
                            logprobs = branch.force(after)[0].float().log_softmax(-1)
                            self._note(branch, len(after), tally)
                        ids = torch.tensor(after, device=logprobs.device)
                        results.append((
                            float(logprobs.gather(-1, ids[:, None]).sum()), bool((logprobs.argmax(-1) == ids).all())
                        ))
                        bar.update()
        tally.finish(self.method.card.name, "loglikelihood", lossless=self.lossless)
        return results

    def generate_until(self, requests: Sequence[Any], *, disable_tqdm: bool = False) -> list[str]:
        """The greedy answer to each context, up to its first stop text."""
        tally = self.tallies["generate_until"] = Tally()
        results = []
        for request in tqdm(requests, desc="kvbench generate_until", disable=disable_tqdm):
            text, asked = request.args
            generation = Generation.read(asked)
            context = self._cut(self.tok_encode(text), generation.max_new_tokens, tally)
            with self._prefilled(context, generation.max_new_tokens, tally) as session:
                results.append(self._generate(session, generation))
                self._note(session, 1 + session.seen - len(context), tally)  # the last token is not run
        tally.finish(self.method.card.name, "generate_until", lossless=self.lossless)
        return results

    def _generate(self, session: Session, generation: Generation) -> str:
        """Generate token by token, because stop texts are found in the decoded text."""
        stop = self.model.stop_ids | generation.stop_ids(self.tokenizer)
        ids: list[int] = []
        text = ""
        for _ in range(generation.max_new_tokens):
            if ids:
                token = torch.tensor([ids[-1:]], device=self.model.device)
                session.logits = session.forward(token, Moment.DECODE)[:, -1]
            ids += session.method.generate(session, 1, stop).ids[0]
            if ids[-1] in stop:
                break
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            if any(x in text for x in generation.until):
                break
        session.check_logits()
        return generation.cut(text)

    def _cut(self, context: Sequence[int], room: int, tally: Tally) -> tuple[int, ...]:
        """Cut a context on the left so that `room` more tokens fit, as lm_eval does."""
        most = self.max_length - room
        if room < 1 or most < 1:
            raise UserError(
                f"{room} tokens must follow the context, and both together may have {self.max_length}. "
                "Use a greater max_length or a smaller max_gen_toks; a continuation must not be empty."
            )
        if len(context) > most:
            tally.cut += 1
            tally.cut_tokens += len(context) - most
        return tuple(context[-most:])

    @contextmanager
    def _prefilled(self, context: Sequence[int], room: int, tally: Tally) -> Iterator[Session]:
        """A session with a compressed context. A context too short for the budget is kept in full, and counted."""
        shape = self.model.shape(len(context))
        try:
            method = self.method.fit(self.budget, shape)
        except UserError:
            method = self.method.fit(Budget("fraction", 1.0), shape)
            tally.uncompressed += 1
        with Session(self.model, method, capacity=len(context) + room, chunk=self.chunk) as session:
            session.prefill(context)
            memory = session.memory()
            tally.full_bytes += memory.full_bytes
            tally.stored_bytes += memory.stored_bytes
            yield session

    def _note(self, session: Session, tokens: int, tally: Tally) -> None:
        """Count a request with so many tokens after its context."""
        prefilled = tokens == 1 and "generation" not in self.method.card.stages  # else it changes the prefill
        tally.requests += 1
        tally.prefilled += prefilled
        tally.acted += session.effect().acted and not prefilled
