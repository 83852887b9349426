"""Files of text as documents: every kind of file, in parts, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardweave.launcher.data.errors import DataError
from shardweave.launcher.data.texts import (
    BLOCK,
    Kind,
    TextFile,
    blocks,
    documents,
    find_texts,
    row_group_bytes,
)


def _file(path: Path) -> TextFile:
    (found,) = find_texts(str(path))
    return found


def _read(path: Path, field: str = "text") -> list[str]:
    return list(documents(_file(path), field=field))


def _error(read: Callable[[], object]) -> str:
    with pytest.raises(DataError) as error:
        read()
    assert "\n" not in str(error.value)
    return str(error.value)


def _table(path: Path, texts: list[str | None], group: int, column: str = "text") -> Path:
    numbers = pa.array(range(len(texts)))
    pq.write_table(pa.table({"id": numbers, column: texts}), path, row_group_size=group)
    return path


def test_every_kind_of_file_has_the_same_documents(tmp_path: Path) -> None:
    texts = ["one", "", "dé\r\nzwei\0", "\U0001f600" * 50, " "]
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.JSONL").write_text("\ufeff\n" + lines.replace("\n", "\r\n\n").rstrip(), encoding="utf-8")
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write(lines.encode())
    _table(tmp_path / "d.parquet", [*texts], group=2)
    for name in ("a.jsonl", "b.JSONL", "c.jsonl.gz", "d.parquet"):
        assert _read(tmp_path / name) == texts, name
    (tmp_path / "e.txt").write_bytes(b"\xef\xbb\xbf" + texts[2].encode())
    with gzip.open(tmp_path / "f.txt.gz", "wb") as file:
        file.write(texts[2].encode())
    assert _read(tmp_path / "e.txt") == _read(tmp_path / "f.txt.gz") == [texts[2]]
    kinds = [(file.path.name, file.kind, file.zipped) for file in find_texts(str(tmp_path))]
    assert kinds == [
        ("a.jsonl", Kind.LINES, False), ("b.JSONL", Kind.LINES, False), ("c.jsonl.gz", Kind.LINES, True),
        ("d.parquet", Kind.TABLE, False), ("e.txt", Kind.TEXT, False), ("f.txt.gz", Kind.TEXT, True),
    ]  # fmt: skip


def test_a_directory_has_what_its_links_lead_to_and_each_of_them_once(tmp_path: Path) -> None:
    for name in ("all/b", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "all" / "a").symlink_to("../other")
    (tmp_path / "other" / "up").symlink_to("../all")
    (tmp_path / "other" / "again").symlink_to(".")
    (tmp_path / "all" / "c").symlink_to("b")
    assert [str(file.path.relative_to(tmp_path)) for file in find_texts(str(tmp_path / "all"))] == [
        "all/a/x.txt", "all/b/x.txt",
    ]  # fmt: skip
    (tmp_path / "all" / "gone.txt").symlink_to("nowhere.txt")
    assert "gone.txt is not a regular file" in _error(lambda: find_texts(str(tmp_path / "all")))


def test_parts_have_each_line_once_wherever_their_borders_fall(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "bb"}\r\n{"text": "' + b"c" * 40 + b'"}\n{"text": "d"}'
    )
    file = _file(path)
    whole = ["a", "bb", "c" * 40, "d"]
    assert list(documents(file)) == whole
    for step in (1, 2, 3, 7, 16, 50, file.size):
        borders = [*range(0, file.size, step), file.size]
        found = [text for part in pairwise(borders) for text in documents(file, *part)]
        assert found == whole


def test_a_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    texts = ["x", "long " * BLOCK, "y"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = _file(path)
    assert list(documents(file)) == texts
    middle = file.size // 2
    assert list(documents(file, 0, middle)) == texts[:2]
    assert list(documents(file, middle, file.size - 20)) == []
    assert list(documents(file, middle, file.size)) == texts[2:]


def test_blocks_are_the_text_and_never_half_a_character(tmp_path: Path) -> None:
    text = "aé€\U0001f600\n" * (BLOCK // 5)
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    found = list(blocks(_file(path)))
    assert len(found) > 2
    assert "".join(found) == text
    assert "".join(blocks(_file(path), 3, 11)) == text.encode()[3:11].decode()
    path.write_bytes(b"caf\xe9 \xff" + text.encode()[:2])
    assert "".join(blocks(_file(path))).encode("utf-8", "surrogateescape") == path.read_bytes()


def test_broken_text_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "half \\ud83d a pair \\udc80"}\n{"text": "\\ud83d\\ude00"}\n'
    )
    first, *others = _read(path)
    assert first.encode("utf-8", "surrogateescape") == b"caf\xe9"
    assert others == ["half \ufffd a pair \ufffd", "\U0001f600"]


def test_the_field_of_the_text_is_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "body": "b"}\n{"body": "c", "title": "d"}\n')
    assert _read(path, field="body") == ["b", "c"]
    assert _error(lambda: _read(path)) == (
        f"{path}:2: this line has no text in a field `text`; text is in `body`, `title`"
    )
    table = _table(tmp_path / "a.parquet", ["x"], 1, column="body")
    assert _read(table, field="body") == ["x"]
    assert (
        _error(lambda: row_group_bytes(_file(table), "text"))
        == f"{table} has no column `text`; text is in `body`"
    )
    assert (
        _error(lambda: row_group_bytes(_file(table), "id")) == f"{table}: column `id` holds int64 and no text"
    )
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    assert "has 2 columns `text`; rename all but one" in _error(
        lambda: row_group_bytes(_file(tmp_path / "twice.parquet"), "text")
    )


def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 1000 + '{"text": \n' + '{"text": "a"}\n')
    file = _file(path)
    assert _error(lambda: _read(path)).startswith(f"{path}:1001: not a JSON object: ")
    assert f"{path}:1001: " in _error(lambda: list(documents(file, file.size - 400, file.size)))
    path.write_text('{"text": 3}\n')
    assert f"{path}:1: this line has no text in a field `text`" in _error(lambda: _read(path))
    wide = tmp_path / "wide.txt"
    wide.write_text("wide", encoding="utf-16")
    assert _error(lambda: _read(wide)) == f"{wide} is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    for content in (b"no gzip", packed[:-20], packed[:40] + b"?" + packed[41:]):
        path.write_bytes(content)
        assert _error(lambda: _read(path)).startswith(f"{path} cannot be read: ")
    table = _table(tmp_path / "a.parquet", ["x", None], 1)
    assert _error(lambda: _read(table)) == f"{table}: row 1 has no text"
    table.write_bytes(b"PAR1 and no more")
    assert _error(lambda: row_group_bytes(_file(table), "text")).startswith(f"{table} cannot be read: ")


def test_parts_of_tables_are_their_row_groups(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(10)]
    file = _file(_table(tmp_path / "a.parquet", [*texts], group=4))
    sizes = row_group_bytes(file, "text")
    assert len(sizes) == 3
    assert all(size > 8 for size in sizes)
    assert list(documents(file, 1, 2)) == texts[4:8]
    assert [text for group in range(3) for text in documents(file, group, group + 1)] == texts


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    file = _file(path)
    assert file.is_unchanged()
    path.write_text("three")
    assert not file.is_unchanged()
    path.unlink()
    assert not file.is_unchanged()
