"""``shardweave data inspect`` and ``shardweave data merge``: built files are looked at, and become one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardweave.launcher.data.indexed import IndexedTokens, Sidecar
    from shardweave.launcher.data.indexed.inspection import Inspection
    from shardweave.launcher.data.tokenizer import Tokenizer

__all__ = ["inspect", "merge"]

SHOWN = 200
"""Tokens of a document."""


@click.command()
@click.argument("prefix", metavar="PREFIX")
@click.option(
    "--documents", type=click.IntRange(min=0), default=0, help="Show the first N documents as text."
)
@click.option(
    "--tokenizer",
    metavar="T",
    help="That built the files, where PREFIX.json does not say, or lies elsewhere.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Look at every token, not at a sample of a large corpus."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def inspect(prefix: str, documents: int, tokenizer: str | None, everything: bool, as_json: bool) -> None:
    """Says what is in PREFIX.bin and PREFIX.idx, and checks them; status 1 when nobody should train on it.

    \b
    Example:
      shardweave data inspect corpora/wiki --documents 3
      shardweave data inspect my-gpt2_text_document --tokenizer gpt2/tokenizer.json --all
    """
    from shardweave.launcher.data.errors import DataError
    from shardweave.launcher.data.indexed import IndexedTokens, prefix_of
    from shardweave.launcher.data.indexed.inspection import inspect as look

    try:
        corpus = IndexedTokens(prefix_of(prefix) or prefix)
        words = _words(corpus.sidecar, tokenizer, needed=documents > 0)
        found = look(corpus, everything=everything, vocab=words.vocab if words and tokenizer else None)
    except DataError as error:
        raise click.ClickException(str(error)) from None
    texts = list(_texts(corpus, documents, words))
    if as_json:
        click.echo(json.dumps(found.to_json() | ({"texts": texts} if documents else {})))
    else:
        rows = list(_rows(found))
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            click.echo(f"{label:<{width}}  {text}")
        for number, text in enumerate(texts):
            length = corpus.start_of(number + 1) - corpus.start_of(number)
            more = f", the first {SHOWN}" if length > SHOWN else ""
            click.echo(f"\n--- document {number}: {length:,} tokens{more}\n{text}")
    for problem in found.problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(1 if found.problems else 0)


@click.command()
@click.argument("prefixes", metavar="PREFIX...", nargs=-1, required=True)
@click.option(
    "--out", metavar="PREFIX", required=True, type=click.Path(path_type=Path), help="Of the files to write."
)
@click.option("--overwrite", is_flag=True, help="Replace files of this name.")
def merge(prefixes: tuple[str, ...], out: Path, overwrite: bool) -> None:
    """Writes the documents of several built corpora, in this order, into one.

    \b
    Example:
      shardweave data merge corpora/wiki corpora/books --out corpora/both
    """
    from shardweave.launcher.data.errors import DataError
    from shardweave.launcher.data.indexed import prefix_of
    from shardweave.launcher.data.indexed.merging import merge as join

    try:
        corpus = join([prefix_of(prefix) or Path(prefix) for prefix in prefixes], out, overwrite=overwrite)
    except DataError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{corpus.documents:,} documents, {len(corpus):,} tokens ({corpus.dtype.name}) in {out}.bin and .idx"
    )
    if corpus.sidecar is None or corpus.sidecar.tokenizer is None:
        click.echo(
            "warning: not each of them names its tokenizer in PREFIX.json, so the new one names none",
            err=True,
        )


def _words(record: Sidecar | None, name: str | None, *, needed: bool) -> Tokenizer | None:
    """The tokenizer that is named, or the recorded one where it can be found and is still the same."""
    from shardweave.launcher.data.errors import DataError
    from shardweave.launcher.data.tokenizer import AUTO, open_tokenizer

    told = record.tokenizer if record else None
    if name is None and (told is None or not needed):
        return None
    end_of_text = AUTO if told is None or told.end_of_text is None else told.end_of_text
    try:
        words = open_tokenizer(name or (told.name if told else ""), end_of_text)
        if told and words.fingerprint != told.fingerprint:
            raise DataError(f"{words.name} is not the tokenizer that built the files, {told.name}")
    except DataError as error:
        if name is not None:
            raise DataError(f"--tokenizer: {error}") from None
        click.echo(f"warning: documents are shown as tokens: {error}; name it with --tokenizer", err=True)
        return None
    return words


def _texts(corpus: IndexedTokens, documents: int, words: Tokenizer | None) -> Iterator[str]:
    for number in range(min(documents, corpus.documents)):
        first, last = corpus.start_of(number), corpus.start_of(number + 1)
        tokens = corpus.read(first, min(last - first, SHOWN)).tolist()
        yield words.decode(tokens) if words else " ".join(map(str, tokens))


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    lengths, values, ends, record = found.lengths, found.values, found.ends, found.record
    empty = f", {found.empty_documents:,} empty ones left out" if found.empty_documents else ""
    yield "corpus", f"{found.name}: .bin {found.bytes:,} bytes, .idx {found.index_bytes:,} bytes"
    yield "documents", f"{found.documents:,}{empty}"
    if found.sequences != found.documents:
        yield "sequences", f"{found.sequences:,}"
    yield "tokens", f"{found.tokens:,}, {found.dtype}"
    yield (
        "lengths",
        f"{lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,.10g}, mean {lengths.mean:,.1f}"
        + _of(lengths.seen, found.documents, "documents"),
    )
    yield "values", f"{values.lowest} to {values.highest}" + _of(values.seen, found.tokens, "tokens")
    yield "last token", f"{ends.token} in {ends.share:.1%}" + _of(ends.seen, found.documents, "documents")
    if not found.in_order:
        yield "order", "sequences lie scattered over the .bin: 8 bytes of memory each"
    if found.has_modes:
        yield "modes", "one for each sequence, which training does not read"
    if record is None:
        yield "tokenizer", "not recorded: there is no PREFIX.json"
    elif record.tokenizer is None:
        yield "tokenizer", "not recorded in PREFIX.json"
    else:
        told = record.tokenizer
        yield "tokenizer", f"{told.name}: vocabulary {told.vocab:,}, end of text {told.end_of_text}"
    if record and record.text_bytes:
        yield "text", f"{record.text_bytes:,} bytes, {record.text_bytes / found.tokens:.2f} a token"
    if record and record.sources:
        more = f" and {len(record.sources) - 3:,} more" if len(record.sources) > 3 else ""
        yield "sources", ", ".join(record.sources[:3]) + more
    yield "fingerprint", found.fingerprint
    yield "checks", "; ".join(found.problems) or "sizes, lengths, offsets and borders of the whole index hold"


def _of(seen: int, total: int, what: str) -> str:
    return f" (all {what})" if seen == total else f" ({seen:,} {what}, evenly spread)"
