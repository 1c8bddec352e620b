"""EpiCache: one compressed cache per topic of a long context, built in blocks; a question takes the nearest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.hf.embedder import embed
from kvbench.kernels.blocks import fit_block, float_products
from kvbench.method import Budget, BudgetKind, Card, Method, Moment, Shape, Step, Upstream, resolved
from kvbench.selection import hide_unseen, top_entries
from kvbench.store import LayerKV
from kvbench.store.episodic import EpisodicKV
from kvbench.text.template import Frame
from kvbench.text.tokens import find_last, tokenize

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

INSTRUCTION = "\n\nExtract the essential information from this part of the conversation:\n"
EMBEDDER_WIDTH = 384
CENTER_BYTES = 4
MOST_CHANNELS = 1 << 16
"""Of a model's embeddings, in a result that is verified without the model."""
TRIES, ROUNDS, SEED = 10, 100, 42


@dataclass(frozen=True)
class EpiCache(Method):
    """Keeps, for every episode, the entries that the episode's most typical segments attend to, block by block."""

    episodes: Positive = 4
    segment: Positive = 64
    """Tokens of a segment, the unit that is clustered."""
    medoids: Positive = 8
    """Segments nearest to an episode's center, whose queries score entries."""
    block: Positive = 2048
    """Tokens that are run between two evictions."""
    embedder: Literal["own", "minilm"] = "own"
    """The vector of a segment: the mean of the model's token embeddings, or that of a sentence embedder
    (`kvbench trace add minilm`)."""

    held: int | None = resolved()
    """Episodes of a context of this length: at most one per segment."""
    width: int | None = resolved(by_bind=True)
    """Channels of a segment's vector."""

    card: ClassVar[Card] = Card(
        name="epicache",
        version="3",
        title="EpiCache: Episodic KV Cache Management for Long Conversational Question Answering",
        idea="The segments of a long conversation are clustered into episodes, and each episode gets a compressed "
        "cache of the whole conversation, built in blocks so that memory stays bounded. Each question uses one.",
        arxiv="2509.17396",
        year=2025,
        family="eviction",
        stages=("generation", "compression", "loading"),
        budget=BudgetKind.STORED,
        heads="independent",
        upstream=Upstream(repo="apple/ml-epicache", commit="b742661", license=None),
        deviations=(
            ("Segments are equal numbers of tokens, the chat template's before the context included; the authors take "
            "four utterances, which a plain context lacks, and leave the system prompt out."),
            ("Segments are embedded by the model's own token embeddings by default, and not by a sentence embedder of "
            "0.6 billion parameters; the paper's ablation has a variant with the model's embeddings."),
            ("Every KV head keeps equally many entries (the authors' `pair-uniform`), and every layer too; the authors "
            "divide the budget over layers by how much a window of attention changes their keys on one document."),
            ("The segments that score entries follow the block at the next position; the authors' code gives their "
            "first token the position of the block's last one."),
            "Scores are float32; the authors' are in the model's type, in which many are equal.",
            "The words of the instruction before the segments are kvbench's.",
        ),
        limits=(
            ("The context is run once per episode. Between evictions a block and the segments that score it are "
            "stored in addition to the budget."),
            ("The budget holds for the active episode; the caches of all episodes are in host memory, and count there. "
            "On a CPU the host is simulated."),
            "Where the context has more than one block, the prefill is not exact: later blocks see compressed ones.",
            "A visible question belongs to the context, and the episode of the context's last segment answers it.",
            "Entries after the context are kept and shared by the episodes.",
        ),
    )

    recompressible: ClassVar[str | None] = "the caches of all episodes are built once, at the end of the context."

    def bind(self, model: Model) -> Self:
        """Note the width of the vectors."""
        own = model.module.get_input_embeddings().weight
        assert isinstance(own, Tensor)
        return replace(self, width=own.shape[1] if self.embedder == "own" else EMBEDDER_WIDTH)

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the width from a result (`UserError` unless it is a number of channels)."""
        del shape
        width = resolution.get("width")
        if width is None:
            return self
        if not isinstance(width, int) or not 0 < width <= MOST_CHANNELS:
            raise UserError(f"epicache: width {width} must be a whole number from 1 to {MOST_CHANNELS}.")
        return replace(self, width=width)

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget and the number of episodes."""
        fitted = super().fit(budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, held=None)
        return replace(fitted, held=min(self.episodes, -(-shape.length // self.segment)))

    def layer(self, index: int) -> LayerKV:
        """A store of episodes."""
        del index
        return LayerKV() if self.held is None else EpisodicKV(ragged=True)

    def declared_host_bytes(self, shape: Shape) -> int:
        """Bytes of the entries of every episode."""
        total = 0
        for index, layer in enumerate(shape.layers):
            held, budget = shape.entries(layer), self.entries_in(index, layer.window)
            if self.held is not None and budget is not None:
                store = LayerKV(track=layer.window is not None)
                total += self.held * store.bytes_for(layer, shape, min(held, budget))
        return total

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Cluster the context, build the cache of every episode, and load that of the last segment. [B, V]"""
        parts = list(chunks)
        ids = torch.cat(parts, dim=1)
        if self.held is None or self.rows is None or self.rows >= ids.shape[1]:
            return super().prefill(session, parts)
        built, centers, logits, last = [], [], [], []
        for row in ids:  # sequences have clusters of their own
            segments = list(row.split(self.segment))
            started = now(ids.device)
            vectors = self.embed(session.model, segments)
            center, labels = cluster(vectors, min(self.held, len(segments)))
            session.compress_seconds += now(ids.device) - started
            prompts = [self.make_prompt(session.model, segments, vectors @ x, labels == e)
                       for e, x in enumerate(center)]
            episodes = [self.build(session, row[None], x) for x in prompts]
            built.append([entries for entries, _, _ in episodes])
            centers.append(center)
            last.append(int(labels[-1]))
            logits.append(episodes[last[-1]][2])
        session.take_positions(ids)
        places = episodes[0][1]  # a model that is spread over several GPUs has layers on each
        for index, (store, layer) in enumerate(zip(session.layers, session.model.layers, strict=True)):
            assert isinstance(store, EpisodicKV)
            by_episode = [
                {name: torch.cat([row[e][index][name] for row in built]) for name in built[0][e][index]}
                for e in range(len(built[0]))
            ]
            store.adopt(by_episode, seen=ids.shape[1], window=layer.window, device=places[index])
            store.load(last)
        session.layers[0].state["centers"] = torch.stack(centers)
        return torch.cat(logits)

    def begin_question(self, session: Session, ids: Tensor) -> None:
        """Load the cache of the episode whose center is nearest to the question."""
        centers = session.layers[0].state.get("centers")  # [B, episodes, D]
        if centers is None:
            return
        vectors = self.embed(session.model, [cut_template(session.model, x) for x in ids])
        chosen = (centers @ vectors[..., None])[..., 0].argmax(1).tolist()
        for store in session.layers:
            assert isinstance(store, EpisodicKV)
            store.load(chosen)

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the active episode, and of the centers of all."""
        centers = 0 if self.held is None or self.width is None else self.held * self.width * CENTER_BYTES
        return super().declared_bytes(shape) + centers

    def embed(self, model: Model, texts: list[Tensor]) -> Tensor:
        """Unit vectors of token ids. [texts, D] float32"""
        if self.embedder == "minilm":
            vectors = torch.from_numpy(embed([str(model.tokenizer.decode(x.tolist())) for x in texts]))
        else:
            tokens = model.module.get_input_embeddings()
            vectors = torch.stack([tokens(x).float().mean(0) for x in texts])
        return F.normalize(vectors.to(texts[0].device), dim=-1)

    def make_prompt(self, model: Model, segments: list[Tensor], similarity: Tensor, mine: Tensor) -> Tensor:
        """Instruction, the answer's header, and the episode's segments nearest to its center in their order. [1, T]"""
        found = similarity.masked_fill(~mine, -torch.inf).topk(min(self.medoids, int(mine.sum()))).indices
        start, header = (
            segments[0].new_tensor(tokenize(model.tokenizer, x, special=False))
            for x in (INSTRUCTION, Frame.of(model.tokenizer).tail)
        )
        return torch.cat([start, header, *(segments[x] for x in sorted(found.tolist()))])[None]

    def build(
        self, session: Session, ids: Tensor, prompt: Tensor
    ) -> tuple[list[dict[str, Tensor]], list[torch.device], Tensor]:
        """Run the context in blocks and evict after each.

        Returns entries by layer, on the host, the layers' devices, and the last logits [1, V].
        """
        room = prompt.shape[1]
        if ids.shape[1] + room > session.model.max_length:
            raise UserError(
                f"epicache runs {room} tokens of segments after a context of {ids.shape[1]}, and model "
                f"{session.model.id} takes at most {session.model.max_length} positions. Use a smaller --length, or "
                f"--set medoids below {self.medoids}."
            )
        with session.fork() as branch:
            branch.batch, branch.method = 1, Method()
            for part in ids.split(self.block, dim=1):
                for store in branch.layers:
                    store.capacity = branch.seen + part.shape[1] + room
                    if branch.seen:
                        store.reserve(part.shape[1] + room, part.shape[1])
                logits = branch.run_chunks(part.split(session.chunk or part.shape[1], dim=1), Moment.CONTEXT_CHUNK)
                started = now(ids.device)
                self.evict_block(branch, prompt, session.chunk)
                session.compress_seconds += now(ids.device) - started
            session.credit(branch)
            layers = zip(branch.layers, session.model.layers, strict=True)
            places = [x.keys.device for x in branch.layers]
            return [take_entries(x, layer.window) for x, layer in layers], places, logits

    def evict_block(self, branch: Session, prompt: Tensor, chunk: int | None) -> None:
        """Score the stored entries by the prompt, whose own entries are dropped, and keep the budget's best."""
        with branch.fork() as probe:
            probe.method = EpisodePass(branch.seen)
            probe.run_chunks(prompt.split(chunk or prompt.shape[1], dim=1), Moment.TURN_END)
            branch.credit(probe)
            scores = [x.state.pop("score") for x in probe.layers]
        for index, (store, found) in enumerate(zip(branch.layers, scores, strict=True)):
            window = branch.model.layers[index].window
            entries = self.entries_in(index, window)
            assert entries is not None
            if entries < store.n:
                store.keep(top_entries(hide_unseen(found, store, window), entries))


@dataclass(frozen=True)
class EpisodePass(Method):
    """The pass over an episode's segments: records the highest attention to each entry before them on the store."""

    context: int = 0
    """Tokens before the prompt."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; scores are normalized over the entries before the prompt. [B, H_q, T, D_v]"""
        before = kv.n - (step.seen - self.context)
        found = self.weigh(kv, step, before)
        kv.state["score"] = torch.maximum(kv.state["score"], found) if "score" in kv.state else found
        return kv.attend(step)

    def weigh(self, kv: LayerKV, step: Step, before: int) -> Tensor:
        """The highest weight of each of the first entries over new queries and the heads of the group. [B, H_kv, n]"""
        keys, count = kv.keys[:, :, :before], step.query.shape[2]
        best = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        queries = step.query.unflatten(1, (keys.shape[1], -1))
        positions = kv.logical_positions()[..., :before]
        size = fit_block(queries.shape[:3].numel() * before, queries)
        for start in range(0, count, size):
            some = queries[:, :, :, start : start + size]
            logits = float_products(some.flatten(2, 3), keys).unflatten(2, some.shape[2:4]) * step.scale
            logits = step.cap(logits)
            if step.window is not None:
                at = torch.arange(step.seen - count, step.seen, device=keys.device)[start : start + size]
                seen = at[:, None] - positions[..., None, :] < step.window  # [B, H_kv, t, n] or [t, n]
                logits = logits.masked_fill(~(seen if seen.dim() == 2 else seen[:, :, None]), -torch.inf)
            best = torch.maximum(best, logits.softmax(-1).nan_to_num().amax((2, 3)))
        return best


def cut_template(model: Model, ids: Tensor) -> Tensor:
    """The question without the chat template's text around it and the start of the answer. [T]"""
    frame, found = Frame.of(model.tokenizer), tuple(ids.tolist())
    middle, tail = (tokenize(model.tokenizer, x or "", special=False) for x in (frame.middle, frame.tail))
    if middle and found[: len(middle)] == middle:
        found = found[len(middle) :]
    return ids.new_tensor(found[: find_last(found, tail)])


def take_entries(store: LayerKV, window: int | None) -> dict[str, Tensor]:
    """Entries of the dense block, copied to the host, with positions where they are stored or a window needs them."""
    found = {"key": store.keys, "value": store.values}
    if store.positions is not None or window is not None:
        found["position"] = store.logical_positions().to(torch.int32).expand(store.keys.shape[:3])
    return {name: x.to("cpu", copy=True).contiguous() for name, x in found.items()}


def cluster(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """K-means from several starts. vectors: [n, D], n >= count. Returns centers [count, D] and labels [n].

    No cluster is empty: one that lost its last vector takes the vector that is farthest from its own center.
    """
    generator = torch.Generator().manual_seed(SEED)
    points = vectors.double().cpu()
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(TRIES):
        centers = choose_starts(points, count, generator)
        labels = torch.full((len(points),), -1)
        for _ in range(ROUNDS):
            distances = torch.cdist(points, centers)
            new = distances.argmin(1)
            own = distances.gather(1, new[:, None])[:, 0]
            for empty in (torch.bincount(new, minlength=count) == 0).nonzero().flatten().tolist():
                alone = torch.bincount(new, minlength=count)[new] == 1
                far = int(own.masked_fill(alone, -1).argmax())
                new[far], own[far] = empty, 0
            if new.equal(labels):
                break
            labels = new
            centers = torch.stack([points[labels == x].mean(0) for x in range(count)])
        inertia = (points - centers[labels]).square().sum().item()
        if best is None or inertia < best[0]:
            best = inertia, centers, labels
    assert best is not None
    return best[1].to(vectors), best[2].to(vectors.device)


def choose_starts(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """K-means++: each next start is drawn by its squared distance to the nearest one before. [count, D]"""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < count:
        squared = torch.cdist(points, points[chosen]).amin(1).square()
        squared[chosen] = 0
        rest = squared if squared.sum() > 0 else torch.ones_like(squared).index_fill(0, torch.tensor(chosen), 0)
        chosen.append(int(torch.multinomial(rest, 1, generator=generator)))
    return points[chosen]
