"""Semantic caches: answers are returned for similar questions. Precision and recall on labeled pairs of questions.

The first questions of all pairs are cached, then the second ones are asked. Each is looked up by cosine similarity; a
hit is right if the labels say that the question found and the one asked have the same answer. Pairs say nothing of
questions that they do not join: such a hit counts as wrong, so that precision is a lower bound.

Sources: GPTCache (NLP-OSS 2023) for the single threshold; MeanCache (IPDPS 2025, arXiv 2403.02694) for the learned
threshold, the reduced embedding and the comparison of conversations; category-aware caching (arXiv 2510.26835) for a
threshold per category and the break-even hit rate; IC-Cache (SOSP 2025) for examples selected through clusters.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvbench.errors import UserError
from kvbench.trace.paraphrases import Pair, Question

Matrix = npt.NDArray[np.float32]
THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
GPTCACHE_THRESHOLD = 0.8
"""GPTCache's default `similarity_threshold`."""
BETA = 0.5
"""MeanCache's F-score weighs precision twice as much as recall."""
DIMENSIONS = 64
"""MeanCache's principal components."""
FEWEST = 10
"""Pairs of a category below which it has the threshold of all."""
EXAMPLES = 5
"""Examples that IC-Cache's first stage hands on."""
WORDS = 4096
"""Hashed words of `embed_words`."""
ROUNDS = 10
"""Rounds of k-means."""
CACHES = ("gptcache", "meancache", "category")


@dataclass(frozen=True)
class Questions:
    """Pairs with unit vectors of their questions and conversations. Each: [pairs, D]"""

    pairs: tuple[Pair, ...]
    cached: Matrix
    asked: Matrix
    cached_context: Matrix
    asked_context: Matrix

    def take(self, index: npt.NDArray[np.int64]) -> Questions:
        """The pairs with these indices."""
        return Questions(
            tuple(self.pairs[i] for i in index), self.cached[index], self.asked[index], self.cached_context[index],
            self.asked_context[index],
        )


@dataclass(frozen=True)
class Lookups:
    """The nearest cached question of every question asked."""

    similarity: Matrix
    """[pairs]"""
    right: npt.NDArray[np.bool_]
    """Whether its answer serves the question asked. [pairs]"""
    answerable: npt.NDArray[np.bool_]
    """Whether any cached answer does. [pairs]"""
    categories: tuple[str, ...]


@dataclass(frozen=True)
class CacheQuality:
    """Quality of a cache over the questions asked."""

    cache: str
    threshold: str
    hit_rate: float
    precision: float | None
    """Right hits over hits; None: no hit."""
    recall: float
    """Right hits over questions that a cached answer serves."""

    @property
    def score(self) -> float:
        """F-score with `BETA`."""
        precision = self.precision or 0.0
        below = BETA**2 * precision + self.recall
        return (1 + BETA**2) * precision * self.recall / below if below else 0.0


def embed_words(texts: list[str]) -> Matrix:
    """Word counts, hashed: a baseline without a model. [texts, WORDS]"""
    vectors = np.zeros((len(texts), WORDS), np.float32)
    for row, text in zip(vectors, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            row[zlib.crc32(word.encode()) % WORDS] += 1
    return vectors


def embed_pairs(pairs: Sequence[Pair], embed: Callable[[list[str]], Matrix]) -> Questions:
    """Embed every distinct text once."""
    texts = sorted({t for x in pairs for t in (x.cached, x.asked, x.cached_context, x.asked_context)})
    place = {text: i for i, text in enumerate(texts)}
    vectors = embed(texts)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    parts = [
        vectors[[place[getattr(x, name)] for x in pairs]]
        for name in ("cached", "asked", "cached_context", "asked_context")
    ]
    return Questions(tuple(pairs), *parts)


def split(questions: Questions, seed: int) -> tuple[Questions, Questions]:
    """Halves to learn thresholds on and to evaluate. Pairs of one cached question stay together.

    Raises:
        UserError: a half has pairs of one label only.
    """
    names = sorted({x.cached for x in questions.pairs})
    order = np.random.default_rng(seed).permutation(len(names))
    first = {names[i] for i in order[: len(names) // 2]}
    is_first = np.array([x.cached in first for x in questions.pairs])
    halves = questions.take(np.flatnonzero(is_first)), questions.take(np.flatnonzero(~is_first))
    if any(len({x.same for x in half.pairs}) < 2 for half in halves):
        raise UserError(f"{len(questions.pairs)} pairs are too few to learn on one half. Give more pairs.")
    return halves


def look_up(questions: Questions, *, contexts: bool) -> Lookups:
    """Find the nearest cached question of each question asked; `contexts`: the conversations must be as similar."""
    groups = _group(questions.pairs)
    cached = [groups[x.cached_question] for x in questions.pairs]
    asked = [groups[x.asked_question] for x in questions.pairs]
    known = set(cached)
    similarity = np.empty(len(questions.pairs), np.float32)
    right = np.zeros(len(questions.pairs), bool)
    for i in range(len(questions.pairs)):
        near = questions.cached @ questions.asked[i]
        if contexts:
            near = np.minimum(near, _compare_contexts(questions, i))
        found = int(near.argmax())
        similarity[i], right[i] = near[found], cached[found] == asked[i]
    answerable = np.array([x in known for x in asked])
    return Lookups(similarity, right, answerable, tuple(x.category for x in questions.pairs))


def _compare_contexts(questions: Questions, asked: int) -> Matrix:
    """Similarity of the conversations: 1 if there is none on either side, 0 if there is one on one side."""
    alone = not questions.pairs[asked].asked_context
    others = np.array([not x.cached_context for x in questions.pairs])
    compared = questions.cached_context @ questions.asked_context[asked]
    return np.where(others & alone, 1.0, np.where(others | alone, 0.0, compared)).astype(np.float32)


def _group(pairs: Sequence[Pair]) -> dict[Question, int]:
    """Numbers of the questions; those that labels join, also through others, have the same number."""
    parent: dict[Question, Question] = {}

    def root(x: Question) -> Question:
        while parent.setdefault(x, x) != x:
            parent[x] = x = parent[parent[x]]
        return x

    for pair in pairs:
        first, other = root(pair.cached_question), root(pair.asked_question)
        if pair.same:
            parent[first] = other
    numbers = {x: i for i, x in enumerate(parent)}
    return {x: numbers[root(x)] for x in parent}


def measure_threshold(cache: str, found: Lookups, threshold: float) -> CacheQuality:
    """Hits at one threshold."""
    return _measure(cache, f"{threshold:.2f}", found, found.similarity >= threshold)


def _measure(cache: str, threshold: str, found: Lookups, hits: npt.NDArray[np.bool_]) -> CacheQuality:
    right = int((hits & found.right).sum())
    count, wanted = int(hits.sum()), int(found.answerable.sum())
    return CacheQuality(
        cache, threshold, count / max(1, len(hits)), right / count if count else None, right / max(1, wanted)
    )


def learn_threshold(found: Lookups) -> float:
    """The threshold with the best F-score, in steps of 0.01; the lowest of equals."""
    steps = [round(0.3 + 0.01 * i, 2) for i in range(70)]
    return max(steps, key=lambda x: (measure_threshold("", found, x).score, -x))


def evaluate(cache: str, learn: Questions, test: Questions) -> CacheQuality:
    """A cache's quality on the second half, after learning on the first half where it learns."""
    if cache == "gptcache":
        return measure_threshold(cache, look_up(test, contexts=False), GPTCACHE_THRESHOLD)
    if cache == "meancache":
        learn, test = _reduce(learn, test)
        threshold = learn_threshold(look_up(learn, contexts=True))
        return measure_threshold(cache, look_up(test, contexts=True), threshold)
    seen, found = look_up(learn, contexts=False), look_up(test, contexts=False)
    overall = learn_threshold(seen)
    own = {x: _learn_category(seen, x) for x in set(seen.categories)}
    limits = np.array([own.get(x) or overall for x in found.categories])
    text = f"{limits.min():.2f} to {limits.max():.2f}"
    return _measure(cache, text, found, found.similarity >= limits)


def _learn_category(seen: Lookups, category: str) -> float | None:
    index = np.flatnonzero(np.array(seen.categories) == category)
    if len(index) < FEWEST:
        return None
    return learn_threshold(replace(
        seen, similarity=seen.similarity[index], right=seen.right[index], answerable=seen.answerable[index]
    ))


def _reduce(learn: Questions, test: Questions) -> tuple[Questions, Questions]:
    """Project all vectors to the principal components of the first half's questions."""
    known = np.concatenate([learn.cached, learn.asked])
    basis = np.linalg.svd(known - known.mean(0), full_matrices=False)[2][:DIMENSIONS].T

    def project(x: Matrix) -> Matrix:
        small: Matrix = (x - known.mean(0)) @ basis
        return np.asarray(small / np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-12), np.float32)

    return tuple(  # type: ignore[return-value]  # two
        Questions(x.pairs, *(project(y) for y in (x.cached, x.asked, x.cached_context, x.asked_context)))
        for x in (learn, test)
    )


@dataclass(frozen=True)
class Selection:
    """IC-Cache's first stage: examples near the question, found through clusters."""

    recall: float
    """Questions asked whose answer is among the examples, over those that a cached answer serves."""
    exhaustive_recall: float
    """The same if all cached questions are compared."""
    compared: float
    """Mean share of the cached questions that is compared."""


def select_examples(questions: Questions, seed: int) -> Selection:
    """Take the EXAMPLES nearest cached questions of the nearest of sqrt(n) clusters."""
    groups = _group(questions.pairs)
    place = {x.cached_question: i for i, x in enumerate(questions.pairs)}
    index = np.array(sorted(place.values()))
    vectors = questions.cached[index]
    answers = np.array([groups[questions.pairs[i].cached_question] for i in index])
    centers, member = _cluster(vectors, max(1, round(len(index) ** 0.5)), seed)
    hits = all_hits = wanted = compared = 0
    for i, pair in enumerate(questions.pairs):
        answer = groups[pair.asked_question]
        if answer not in answers:
            continue
        wanted += 1
        near = vectors @ questions.asked[i]
        inside = np.flatnonzero(member == int((centers @ questions.asked[i]).argmax()))
        compared += len(inside) + len(centers)
        hits += answer in answers[inside[np.argsort(-near[inside], kind="stable")[:EXAMPLES]]]
        all_hits += answer in answers[np.argsort(-near, kind="stable")[:EXAMPLES]]
    count = max(1, wanted)
    return Selection(hits / count, all_hits / count, compared / count / len(index))


def _cluster(vectors: Matrix, count: int, seed: int) -> tuple[Matrix, npt.NDArray[np.int64]]:
    """Spherical k-means: centers [count, D] and the center of each vector."""
    centers = vectors[np.random.default_rng(seed).choice(len(vectors), count, replace=False)]
    for _ in range(ROUNDS):
        member = (vectors @ centers.T).argmax(1)
        sums = np.zeros_like(centers)
        np.add.at(sums, member, vectors)
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        centers = np.where(length > 0, sums / np.maximum(length, 1e-12), centers)
    return centers, (vectors @ centers.T).argmax(1)


def break_even(lookup_seconds: float, answer_seconds: float) -> float:
    """The hit rate above which a cache saves time: every question pays the lookup, a hit saves the answer."""
    return lookup_seconds / answer_seconds
