"""How the questions about one context are asked: modes, their defaults, and the options that exclude each other."""

from __future__ import annotations

from typing import get_args

from kvbench.errors import MOST_TURNS, UserError, check_number, unknown
from kvbench.runs.spec import History, Record, Visibility
from kvbench.task import Mode

VISIBILITIES: dict[Mode, tuple[Visibility, ...]] = {
    Mode.SINGLE: ("visible", "hidden"),
    Mode.MULTI_TURN: ("first-turn", "hidden"),
    Mode.MULTI_REQUEST: ("hidden",),
}
"""Whether a method sees questions when it compresses, by mode; the first is the default."""


class Protocol(Record):
    """How the questions about one context are asked."""

    mode: Mode
    visibility: Visibility
    history: History
    recompress: bool
    turns: int


def resolve_protocol(
    mode: str, visibility: str | None, history: str | None, turns: int | None, *, recompress: bool, default_turns: int
) -> Protocol:
    """Fill in the defaults of a protocol.

    Raises:
        UserError: an unknown name, or options that exclude each other.
    """
    if mode not in tuple(Mode):
        raise unknown("mode", mode, [str(x) for x in Mode])
    kind = Mode(mode)
    allowed = VISIBILITIES[kind]
    if visibility is not None and visibility not in get_args(Visibility):
        raise unknown("visibility", visibility, get_args(Visibility))
    if visibility is not None and visibility not in allowed:
        reason = {
            Mode.SINGLE: "its one question is visible or hidden",
            Mode.MULTI_TURN: "only the first question can be in the prompt when the context is compressed",
            Mode.MULTI_REQUEST: "every question comes after the shared context is compressed",
        }[kind]
        raise UserError(
            f"visibility '{visibility}' has no meaning in mode {mode}: {reason}. Allowed: {', '.join(allowed)}."
        )
    if history is not None and history not in get_args(History):
        raise unknown("history", history, get_args(History))
    if kind is not Mode.MULTI_TURN and history == "own":
        raise UserError(f"history 'own' has no meaning in mode {mode}: no turn follows another. Use --mode multi-turn.")
    if kind is not Mode.MULTI_TURN and recompress:
        raise UserError(f"--recompress has no meaning in mode {mode}: no turn follows another. Use --mode multi-turn.")
    if turns is not None:
        check_number("turns", turns, most=MOST_TURNS)
    if kind is Mode.SINGLE and turns not in (None, 1):
        raise UserError(
            f"turns {turns} has no meaning in mode single: it asks one question per context. "
            "Leave --turns out, or use --mode multi-turn or multi-request."
        )
    return Protocol(
        mode=kind,
        visibility=next(x for x in allowed if visibility in (None, x)),
        history="own" if history == "own" else "reference",
        recompress=recompress,
        turns=1 if kind is Mode.SINGLE else turns or default_turns,
    )


def make_visible(protocol: Protocol, visibility: str | None, chunk: int | None) -> Protocol:
    """The protocol for a diffusion model, which runs the whole prompt in every pass and keeps no cache between answers.

    visibility, chunk: as requested.

    Raises:
        UserError: an option that does not apply to diffusion models.
    """
    if protocol.mode is Mode.MULTI_REQUEST:
        raise UserError(
            "mode multi-request has no meaning on a diffusion model: no cache remains after an answer for requests to "
            "share. Use --mode single or multi-turn."
        )
    if visibility not in (None, "visible") or protocol.recompress or chunk is not None:
        raise UserError(
            "on a diffusion model every pass runs the whole prompt, and no context is compressed: leave --visibility, "
            "--recompress and --chunk out."
        )
    return protocol.model_copy(update={"visibility": "visible"})
