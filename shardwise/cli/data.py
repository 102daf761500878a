"""`shardwise data prepare`: tokenise once, then train many times."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.arguments import AsJson

data = typer.Typer(no_args_is_help=True, help="Prepare training data.")


@data.callback()
def _group() -> None:
    """Group the commands that prepare training data."""
    # Without a callback, typer makes a single command the group itself, without its name.


@data.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="A text, JSONL, Parquet or Arrow file, a folder, or a quoted glob.")
    ],
    folder: Annotated[str, typer.Argument(help="Where the shards go; give it to a job as data.source.")],
    tokenizer: Annotated[
        str, typer.Option(help="`bytes`, or the path of a Hugging Face tokenizer.json.")
    ] = "bytes",
    end_of_document: Annotated[
        str | None,
        typer.Option(
            help="The token that closes each document; left out: the first usual one that there is."
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    json: AsJson = False,
) -> None:
    """Tokenise SOURCE into memory-mapped shards in FOLDER. An interrupted run continues where it stopped."""
    import json as json_module

    from shardwise.data import prepare as prepare_shards
    from shardwise.library.progress import preparing
    from shardwise.plurals import counted

    with preparing() as progress:
        index = prepare_shards(
            source, tokenizer, folder, text_field, progress=progress, end_of_document=end_of_document
        )
    prepared = {
        "folder": folder,
        "tokens": index.tokens,
        "documents": index.documents,
        "shards": len(index.shards),
    }
    if json:
        print(json_module.dumps(prepared))
    else:
        documents, shards = counted(index.documents, "document"), counted(len(index.shards), "shard")
        typer.echo(f"{counted(index.tokens, 'token')} of {documents} in {shards}: {folder}", err=True)
