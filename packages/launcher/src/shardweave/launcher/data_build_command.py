"""``shardweave data build`` and ``shardweave data train-tokenizer``: from a person's words to the work, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["build", "train_tokenizer"]

_INPUTS = click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
_FIELD = click.option(
    "--field",
    default="text",
    show_default=True,
    help="Where the text is in a line of .jsonl or a row of .parquet.",
)


@click.command()
@_INPUTS
@click.option(
    "--out",
    required=True,
    metavar="PREFIX",
    type=click.Path(path_type=Path),
    help="Of the files: PREFIX.bin, PREFIX.idx, PREFIX.json.",
)
@click.option(
    "--tokenizer",
    default="byte",
    show_default=True,
    help="byte, a tokenizer.json, or a directory with the files of one.",
)
@click.option(
    "--end-of-text", default="auto", show_default=True, help="The token that closes documents, or its number."
)
@click.option("--no-end-of-text", is_flag=True, help="No token closes documents.")
@_FIELD
@click.option("--workers", type=click.IntRange(min=1), help="Processes; default: one for each core.")
@click.option("--overwrite", is_flag=True, help="Replace files of this prefix.")
@click.option(
    "--piece", "piece", type=click.IntRange(min=1 << 17), default=8 << 20, hidden=True
)  # tests: smaller
def build(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: str,
    end_of_text: str,
    no_end_of_text: bool,
    field: str,
    workers: int | None,
    overwrite: bool,
    piece: int,
) -> None:
    """Makes tokens of text, for a run to map: files of Megatron's layout, at PREFIX.

    INPUT is a file, a directory or a glob of .txt files (a document each), .jsonl files (a document a line) and
    .parquet files (a document a row); the first two also as .gz. Documents stay in the order of the inputs and their
    names. The files are the same for any number of workers. A build that was interrupted goes on when the same
    command is given again; its pieces are in PREFIX.parts until it is done.

    \b
    Example:
      shardweave data build texts/ --out corpora/texts
      shardweave data build wiki/*.jsonl.gz --tokenizer Llama-3.1-8B --out corpora/wiki
      shardweave train data.source=corpora/wiki data.tokenizer=Llama-3.1-8B
    """

    def work() -> None:
        from shardweave.launcher.data.build import build as build_files
        from shardweave.launcher.data_progress import Progress

        words = _opened(tokenizer, end_of_text)
        progress = Progress(out)
        try:
            built = build_files(
                inputs, out, words, field=field, end_of_text=not no_end_of_text, workers=workers,
                overwrite=overwrite, watcher=progress, smallest_piece=piece,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt(progress.interrupted()) from None
        progress.say(built, words)

    sys.exit(_status(work))


@click.command("train-tokenizer")
@_INPUTS
@click.option(
    "--vocab", type=int, required=True, help="Tokens, the 256 bytes and the end of text among them."
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The directory, which is made.",
)
@_FIELD
def train_tokenizer(inputs: tuple[str, ...], vocab: int, out: Path, field: str) -> None:
    """Learns a tokenizer from text: byte-level BPE, as GPT-2's, in files that Hugging Face's libraries read.

    INPUT is as for `data build`. The same texts give the same tokenizer. Its end of text is <|endoftext|>.

    \b
    Example:
      shardweave data train-tokenizer texts/ --vocab 8192 --out my-tokenizer
      shardweave train data.source=texts data.tokenizer=my-tokenizer
    """

    def work() -> None:
        from shardweave.launcher.data.tokenizer_training import train

        trained = train(inputs, vocab, out, field=field)
        click.echo(
            f"{out} has a tokenizer of {trained.vocab:,} tokens, learned from {trained.documents:,} documents"
        )
        for warning in trained.warnings:
            click.echo(f"warning: {warning}", err=True)

    sys.exit(_status(work))


def _opened(name: str, end_of_text: str) -> Tokenizer:
    from shardweave.launcher.data.errors import DataError, EndOfTextError
    from shardweave.launcher.data.tokenizer import open_tokenizer

    try:
        return open_tokenizer(name, end_of_text)
    except EndOfTextError as error:
        raise DataError(f"--end-of-text: {error}") from None
    except DataError as error:
        raise DataError(f"--tokenizer: {error}") from None


def _status(work: Callable[[], None]) -> int:
    """The exit status of what a command does; what went wrong is said on stderr."""
    from shardweave.launcher.data.errors import BuildError, DataError, DiskError
    from shardweave.launcher.exit_status import INTERRUPTED, MACHINE_UNFIT, USAGE_ERROR

    try:
        work()
    except DiskError as error:
        status, text = MACHINE_UNFIT, f"error: {error}"
    except DataError as error:
        status, text = USAGE_ERROR, f"error: {error}"
    except BuildError as error:
        status, text = 1, f"error: {error}"
    except KeyboardInterrupt as error:
        status, text = INTERRUPTED, str(error) or "interrupted"
    else:
        return 0
    click.echo(text, err=True)
    return status
