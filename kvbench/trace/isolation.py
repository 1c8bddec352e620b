"""Isolation by salt: hit rate lost, and the hits that an attacker can see of other users' prompts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from kvbench.errors import UserError, unknown
from kvbench.trace.cache import PrefixCache, simulate
from kvbench.trace.policies import LRU
from kvbench.trace.requests import PrefixTree, Trace

SALTS = ("none", "user", "session")
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Isolation:
    """One salt."""

    salt: str
    hit_rate: float
    lost: float
    """Hit rate of no salt less this one's."""
    probes: tuple[tuple[float, float, float], ...]
    """(threshold, true positive rate, false positive rate): a prompt counts as seen where this share of it hits.

    Empty where no prompt was probed; with a salt no probe can hit.
    """


def isolate(trace: Trace, salt: str, blocks: float, *, every: int = 10) -> Isolation:
    """Serve a trace with caches separated by a salt, and probe it as another user who guesses whole prompts.

    Every `every`-th prompt that was not sent before is probed before it is served (a detection is a false positive: it
    shares its head with others) and right after (a detection is a true positive). The attacker sees hits exactly,
    which bounds what times to first token can tell; with a salt the attacker's own cache never holds the prompt.

    Raises:
        UserError: an unknown salt, or a trace without its field.
    """
    if salt not in SALTS:
        raise unknown("salt", salt, SALTS)
    if salt != "none" and not trace.has(salt):
        raise UserError(f"salt '{salt}' needs the field {salt}, and trace {trace.name} has none. Allowed here: none.")
    salted = _salt(trace, salt)
    plain = simulate(trace, LRU(), blocks)
    cache = PrefixCache(salted, blocks, LRU())
    found = 0
    before, after = [], []
    sent: set[int] = set()  # last blocks, each of which stands for a whole prompt
    for index, request in enumerate(salted.requests):
        probed = salt == "none" and index % every == 0 and bool(request.blocks) and request.blocks[-1] not in sent
        sent.update(request.blocks[-1:])
        if probed:
            before.append(cache.look_up(request.blocks) / len(request.blocks))
        found += cache.serve(index, request)
        if probed:
            after.append(cache.look_up(request.blocks) / len(request.blocks))
    rate = found / max(1, salted.references)
    return Isolation(
        salt, rate, sum(plain.hits) / max(1, trace.references) - rate,
        tuple((x, _share(after, x), _share(before, x)) for x in THRESHOLDS if before or salt != "none"),
    )


def _share(hits: list[float], threshold: float) -> float:
    return sum(x >= threshold for x in hits) / max(1, len(hits))


def _salt(trace: Trace, salt: str) -> Trace:
    """The same requests in a tree whose roots are apart by user or session."""
    if salt == "none":
        return trace
    tree = PrefixTree()
    requests = []
    for x in trace.requests:
        owner: Hashable = getattr(x, salt)
        requests.append(replace(x, blocks=tree.add([(owner, block) for block in x.blocks])))
    return replace(trace, requests=tuple(requests), parents=tuple(tree.parents))
