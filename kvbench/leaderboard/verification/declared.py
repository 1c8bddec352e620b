"""Checks bytes, kept entries and reads against what the model's shape and the method's formulas allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic_core import to_jsonable_python

from kvbench.budget import BudgetKind, Shape
from kvbench.errors import UndeclaredError
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote, refusing_errors
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.replay import Replay, find_shapes, fit_budget
from kvbench.method import Method
from kvbench.runs.examples import Made
from kvbench.runs.journal import CacheBytes, Effect, Line, TokenCounts
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.task import Encoded, Mode
from kvbench.techniques.parts import find_shipped, sets_steps

DROPPED = "entries_dropped"
"""The counter of every store; any other counter above 0 shows that entries may take fewer bytes, or be read less."""
SKIPPED = "entries_skipped"
"""The counter of entries that tokens do not have in layers that they skip; of other methods, of entries not read."""
REUSED = "entries_reused"
"""The counter of entries that were taken over from another prompt."""
ONCE_BYTES = ("stored_bytes", "spare_bytes", "host_bytes")
ONCE_EFFECT = ("identity", "entries_seen", "entries_kept")
"""Measured at the end of the context, so the same on every turn of a sample."""
ROUNDING = 1e-6


@dataclass(frozen=True)
class AnsweredTurn:
    """A line that was answered, and the number of tokens since the end of the context."""

    name: str
    index: int
    """Of its sample."""
    context: int
    """Tokens of prompt and response block for a diffusion model."""
    bytes: CacheBytes
    effect: Effect
    after: int
    """Tokens of questions and answers so far, in the cache at most."""
    asked: int
    """Tokens of questions so far, in the cache at least."""
    first: bool
    steps: int
    """Decode steps; 0 also where a choice was the answer."""


def check_bytes(
    replay: Replay, method: Method | None, result: Result, lines: Sequence[Line], made: Sequence[Made], folder: Path
) -> Check:
    """Compare bytes, entries and reads with the model's shape, and with what the method declares for its budget.

    Raises:
        RefusedError: they contradict each other; the reason states both numbers.
    """
    spec = replay.spec
    turns = list_turns(lines, made, spec.mode)
    if method is not None and result.budget.kind != method.budget_kind.value:
        raise RefusedError(
            "bytes", f"its budget is of kind {quote(result.budget.kind)}, {spec.method.name} has {method.budget_kind}"
        )
    first = [x for x in turns if x.first]
    shapes = find_shapes(spec, folder, [x.context for x in turns])
    for x in turns:
        full = shapes[x.context].full_bytes
        if x.bytes.full_bytes != full:
            raise RefusedError(
                "bytes", f"{x.name}: a full cache of {x.context} tokens has {full} bytes, not {x.bytes.full_bytes}"
            )
    if spec.model.kind == "autoregressive":
        _check_later(turns)
    if method is None or spec.model.kind == "diffusion":
        return (flag if method is None else ok)(
            "bytes", f"full-cache bytes match {spec.model.id}; the method's declared bytes are not known"
        )
    undeclared: UndeclaredError | None = None
    more = 0
    fitted = {length: _fit(replay, method, result, shape) for length, shape in shapes.items()}
    run = {x.index: find_run_shape(method, shapes[x.context], made[x.index][1]) for x in first}
    for x in first:
        shape, bound = run[x.index], fitted[x.context]
        stored = x.bytes.stored_bytes, x.bytes.host_bytes, x.bytes.file_bytes
        with refusing_errors("bytes", f"the bytes that {spec.method.name} declares"):
            identity = bound.identity(shape) and not (bound.reads_parts and _mixes_prompts(x.effect))
            try:
                declared = tuple(
                    f(shape) for f in (bound.declared_bytes, bound.declared_host_bytes, bound.declared_file_bytes)
                )
            except UndeclaredError as error:
                undeclared, declared = error, stored
        if spec.recompress and stored != declared and min(a - b for a, b in zip(stored, declared, strict=True)) >= 0:
            more += 1  # it may keep data for the next compression, on top of the declared bytes
        elif declared != stored:
            raise RefusedError(
                "bytes", f"{x.name}: {spec.method.name} declares {declared[0]} bytes (and {declared[1]} on the host) "
                f"for {shape.length} tokens at this budget, its journal has {stored[0]} (and {stored[1]})"
            )
        if identity != x.effect.identity:
            raise RefusedError("bytes", f"{x.name}: its journal has identity {x.effect.identity}, not {identity}")
        check_entries(x, bound, shapes[x.context], shape)
    for x in turns:
        if undeclared is None:
            check_reads(x, fitted[x.context], run[x.index], recompress=spec.recompress)
        _check_end(x, fitted[x.context], shapes[x.context], run[x.index])
    known = {x.name for x in fields(method) if x.metadata.get("resolved")}
    if strange := sorted(result.budget.resolved.keys() - known):
        raise RefusedError("bytes", f"its budget resolves {quote(strange[0])}, which {spec.method.name} does not have")
    _check_part(spec, method, known, result.budget.resolved)
    resolved = [to_jsonable_python(fitted[x.context].resolution) for x in first if x.index == 0]
    if any(not _is_same(result.budget.resolved.get(key), value) for found in resolved for key, value in found.items()):
        raise RefusedError("bytes", "its budget does not resolve to the values in its result")
    if undeclared is not None:
        return flag("bytes", f"full-cache bytes match {spec.model.id}; stored bytes were not checked: {undeclared}")
    if more:
        return flag(
            "bytes", f"{more} of {len(first)} samples store more than {spec.method.name} declares, as is allowed with "
            "--recompress: the excess was not checked"
        )
    return ok("bytes", f"stored bytes of {len(first)} samples equal those that {spec.method.name} declares")


def _check_later(turns: Sequence[AnsweredTurn]) -> None:
    """Refuse bytes or entries of the context on a later turn that are not the first turn's: they are measured once."""
    first = {x.index: x for x in turns if x.first}
    for x in (x for x in turns if not x.first):
        if x.index not in first:
            raise RefusedError("bytes", f"{x.name} has bytes, and turn 0 of its sample has none")
        head = first[x.index]
        for name, found, before in (
            *((name, getattr(x.bytes, name), getattr(head.bytes, name)) for name in ONCE_BYTES),
            *((name, getattr(x.effect, name), getattr(head.effect, name)) for name in ONCE_EFFECT),
        ):
            if found != before:
                raise RefusedError("bytes", f"{x.name}: its {name} is {found}, that of turn 0 {before}")


def _is_same(stated: object, found: object) -> bool:
    """Whether two values are equal and of one type: 55.0 and true are no number of entries."""
    return stated == found and type(stated) is type(found)


def _check_part(spec: RunSpec, method: Method, known: AbstractSet[str], resolved: Mapping[str, object]) -> None:
    """Refuse another part, or other data or steps of its training, than those that are shipped for the model."""
    if "part" not in known:
        return
    if missing := sorted({"part", "trained_on"} - resolved.keys()):
        raise RefusedError("bytes", f"its budget does not resolve {missing[0]}")
    shipped = find_shipped(spec.method.name, spec.model.id, spec.model.sha256)
    if shipped is not None and (resolved["part"], resolved["trained_on"]) != (shipped.sha256, shipped.data):
        raise RefusedError(
            "bytes", f"its part is {quote(resolved['part'])}, trained on {quote(resolved['trained_on'])}, and that of "
            f"{spec.method.name} for {spec.model.id} is {shipped.sha256}, trained on {shipped.data}"
        )
    if shipped is not None and sets_steps(type(method), spec.method.settings["steps"]):
        raise RefusedError(
            "bytes", f"its setting steps is {quote(spec.method.settings['steps'])}, and the part of {spec.method.name} "
            f"for {spec.model.id} is shipped, not trained in a run"
        )


def list_turns(lines: Sequence[Line], made: Sequence[Made], mode: Mode) -> list[AnsweredTurn]:
    """The answered lines, in order."""
    found: list[AnsweredTurn] = []
    after = asked = 0
    for x in lines:
        after = after if x.turn else 0
        asked = asked if x.turn and mode is Mode.MULTI_TURN else 0
        if x.tokens is None or x.bytes is None or x.effect is None:
            continue
        after += _count_after(x.tokens, len(made[x.index][1].turns[x.turn].answer))
        asked += x.tokens.query
        context = x.tokens.context if x.denoising is None else x.denoising.sequence_length
        name = f"sample {x.index} turn {x.turn}"
        steps = max(0, x.tokens.generated - 1)
        found.append(
            AnsweredTurn(name, x.index, context, x.bytes, x.effect, after, asked, first=x.turn == 0, steps=steps)
        )
    return found


def _count_after(tokens: TokenCounts, reference: int) -> int:
    """Tokens that a turn adds to the cache, whether later turns see the reference answer or the generated one."""
    return tokens.query + max(tokens.generated, reference)


def _fit(replay: Replay, method: Method, result: Result, shape: Shape) -> Method:
    with refusing_errors("bytes", "its resolved budget"):
        bound = method.rebind(result.budget.resolved, shape)
    return fit_budget(bound, replay.spec, shape)


def find_run_shape(method: Method, shape: Shape, encoded: Encoded) -> Shape:
    """The shape of the part of a context that the method runs: all of it, unless it leaves out documents."""
    return replace(shape, length=shape.length - method.skipped_tokens([len(x) for x in encoded.parts]))


def _mixes_prompts(found: Effect) -> bool:
    """Whether entries are not those of a prefill of the whole prompt."""
    return any(found.facts.get(x, 0) for x in (REUSED, DROPPED))


def check_entries(x: AnsweredTurn, method: Method, shape: Shape, run: Shape) -> None:
    """Compare the entries that a turn keeps of its context with the model's layers, the budget, and the counters.

    run: the shape of the part of the context that is run.

    Raises:
        RefusedError: they contradict each other.
    """
    def refuse(reason: str) -> RefusedError:
        return RefusedError("bytes", f"{x.name}: {reason}")

    held = [shape.entries(layer) for layer in shape.layers]
    kept = x.effect.entries_kept
    if x.effect.entries_seen != max(held) or len(kept) != len(held):
        raise refuse(f"{len(kept)} layers of {x.effect.entries_seen} entries, the model has {len(held)} of {max(held)}")
    for i, (n, most) in enumerate(zip(kept, held, strict=True)):
        if n > most + ROUNDING:
            raise refuse(f"layer {i} keeps {n:g} entries of {most}")
    budgets = _budget_entries(method, run)
    if budgets is not None and abs(sum(kept) - sum(budgets)) > ROUNDING * sum(held):
        raise refuse(f"its layers keep {sum(kept):g} entries per KV head in all, at this budget {sum(budgets)}")
    alone = budgets if budgets is not None and method.card.heads == "independent" else kept
    for i, (n, wanted) in enumerate(zip(kept, alone, strict=True)):
        if abs(n - wanted) > ROUNDING * held[i]:
            raise refuse(f"layer {i} keeps {n:g} entries per KV head, at this budget {wanted}")
    heads = [layer.kv_heads for layer in shape.layers]
    gone = sum(n * (most - some) for n, most, some in zip(heads, held, kept, strict=True))
    counted = x.effect.facts.get(DROPPED, 0) + (x.effect.facts.get(SKIPPED, 0) if method.skips_layers else 0)
    if gone > counted + ROUNDING * max(1, gone) or counted > sum(heads) * (max(held) + x.after):
        raise refuse(f"it keeps {gone:.0f} entries fewer than the full cache, and counts {counted} as dropped")
    if not x.effect.acted and counted:
        raise refuse(f"{counted} entries were dropped, and the method is said not to have acted")
    size = [layer.kv_heads * (layer.key_dim + layer.value_dim) * shape.itemsize for layer in shape.layers]
    least = sum(n * some for n, some in zip(size, kept, strict=True))
    if _is_exact(x.effect) and x.bytes.stored_bytes + x.bytes.off_device_bytes < math.floor(least):
        raise refuse(
            f"{sum(kept):.0f} unquantized entries take {least:.0f} bytes, its journal has {x.bytes.stored_bytes}"
        )


def check_reads(x: AnsweredTurn, method: Method, shape: Shape, *, recompress: bool) -> None:
    """Compare the bytes that a decode step reads with the bytes that are stored, or declared to be read.

    Raises:
        RefusedError: a step reads more than there is, or less than the method reads.
    """
    read, off = x.bytes.read_bytes_per_step, x.bytes.off_device_bytes
    with refusing_errors("bytes", "the bytes that its method declares to read"):
        declared = method.declared_read_bytes(shape)
        if method.generates_alone:
            most = declared * (1 + x.after)  # a later token adds at most an entry to each of its reads
        elif method.budget_kind is BudgetKind.READ:
            token = replace(shape, length=1).full_bytes
            most = declared + x.after * token
        else:
            most = x.bytes.end_bytes if off or x.bytes.end_stored_bytes is None else x.bytes.end_stored_bytes
            most += max(0, declared - method.declared_bytes(shape))  # tensors that several layers read, stored once
        if method.generates_alone or method.budget_kind in (BudgetKind.READ, BudgetKind.PROMPT):
            least = method.least_read_bytes(shape)
        elif _is_exact(x.effect):
            least = max(method.least_read_bytes(shape), _least_at_end(x, method, shape))
        else:
            least = _least_packed(method, shape, x.asked)
            if read < least:
                least = min(_least_packed(method, shape, n) for n in range(x.asked, x.after + 1))
    if read > most:
        raise RefusedError("bytes", f"{x.name}: a step reads {read} bytes, and at most {most} are possible")
    if read and read < least and not recompress:
        raise RefusedError(
            "bytes", f"{x.name}: a step reads {read} bytes, and the method reads at least {least} of its context"
        )


def _least_packed(method: Method, shape: Shape, after: int) -> int:
    """Bytes that are read after this many more tokens, which may complete a block of full precision that is packed."""
    longer, kept = replace(shape, length=shape.length + after), _budget_entries(method, shape)
    if kept is not None:
        packed = sum(method.layer_bytes(i, longer, n + after) for i, n in enumerate(kept))
        before = sum(method.layer_bytes(i, shape, n) for i, n in enumerate(kept))
    elif method.budget_kind is BudgetKind.BITS:  # every entry is kept, so a longer context reads as much
        packed, before = method.least_read_bytes(longer), method.least_read_bytes(shape)
    else:
        return 0
    # Later entries may stay exact, which takes fewer bytes where an encoded one takes more than an exact one.
    return min(packed, before + after * replace(shape, length=1).full_bytes)


def _budget_entries(method: Method, shape: Shape) -> list[int] | None:
    """Entries per KV head of each layer at this budget; None if heads share a budget, by the method's own formula."""
    if type(method).declared_bytes is not Method.declared_bytes:
        return None
    found = []
    for i, layer in enumerate(shape.layers):
        budget, held = method.entries_in(i, layer.window), shape.entries(layer)
        found.append(held if budget is None else min(held, budget))
    return found


def _check_end(x: AnsweredTurn, method: Method, shape: Shape, run: Shape) -> None:
    """Refuse bytes at the end of a turn, and of the full cache there, that the number of tokens rules out.

    run: the shape of the part of the context that is run, which the conversation continues.
    """
    size = x.bytes
    token = replace(shape, length=1).full_bytes
    longest, shortest = shape.full_bytes + x.after * token, max(shape.full_bytes, run.full_bytes + x.asked * token)
    sharing = max(layer.query_heads / layer.kv_heads for layer in shape.layers)  # query heads that may read one entry
    once = math.floor(size.read_bytes_per_step / sharing) - len(shape.layers)
    on_host = 0
    if size.host_bytes:  # `end_bytes` leaves them out; later tokens are stored there as those of the context are
        with refusing_errors("bytes", "the bytes that its method declares on the host"):
            longer = replace(shape, length=shape.length + x.after)
            on_host = method.declared_host_bytes(longer) - method.declared_host_bytes(shape)
        sliding = tuple(layer for layer in shape.layers if layer.window is not None)
        on_host += x.after * replace(shape, length=1, layers=sliding).full_bytes  # the window drops no later token
    # Steps that read a part count by themselves, those of a question and of an answer that is not part of the end.
    read_at = longest if size.end_full_bytes is None or method.budget_kind is BudgetKind.READ else size.end_full_bytes
    selects = method.budget_kind is BudgetKind.READ or method.generates_alone
    context = size.stored_bytes if method.budget_kind is BudgetKind.READ else 0  # it drops nothing
    limits = {
        "end_stored_bytes": (max(context, _least_at_end(x, method, shape)), size.end_bytes + on_host),
        "end_full_bytes": (shortest, longest),
        "distinct_read_bytes_per_step": (once if selects else size.read_bytes_per_step, size.read_bytes_per_step),
        "full_read_bytes_per_step": (shape.full_bytes if x.steps else 0, read_at),
    }
    for name, (least, most) in limits.items():
        found = getattr(size, name)
        if found is not None and not least <= found <= most:
            raise RefusedError("bytes", f"{x.name}: its {name} is {found}, possible are {least} to {most}")
    if not selects and size.full_read_bytes_per_step != size.end_full_bytes:
        raise RefusedError(
            "bytes", f"{x.name}: the full cache has {size.end_full_bytes} bytes at its end, and reads "
            f"{size.full_read_bytes_per_step} in a step"
        )
    if not selects and _is_exact(x.effect) and size.end_stored_bytes not in (None, size.read_bytes_per_step):
        raise RefusedError(
            "bytes", f"{x.name}: a step reads {size.read_bytes_per_step} bytes, and {size.end_stored_bytes} are stored"
        )


def _least_at_end(x: AnsweredTurn, method: Method, shape: Shape) -> int:
    """Bytes of all entries of a conversation without those that were dropped; 0 where entries may take fewer bytes.

    It can be negative, because every dropped entry is taken for one of the widest layer.

    shape: of the context, or of the part of it that is run.
    """
    windows = any(layer.window is not None for layer in shape.layers)
    if windows or x.bytes.off_device_bytes or method.generates_alone or not _is_exact(x.effect):
        return 0
    grown = x.bytes.end_full_bytes or shape.full_bytes + x.asked * replace(shape, length=1).full_bytes
    entry = max((layer.key_dim + layer.value_dim) * shape.itemsize for layer in shape.layers)
    return grown - x.effect.facts.get(DROPPED, 0) * entry


def _is_exact(found: Effect) -> bool:
    """Whether no counter but that of dropped entries is above 0: every entry that is kept has all its bytes."""
    return not any(value for name, value in found.facts.items() if name != DROPPED)
