"""strict_yaml against the tables of YAML 1.2's core schema and against its own round trip."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.launcher.strict_yaml import YamlError, dump, load, path_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.0e-3", 1e-3),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("+12", 12),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("12:30:00", "12:30:00"),
        ("1:30", "1:30"),
        ("2026-11-29", "2026-11-29"),
        ("1_000", "1_000"),
        ("0b101", "0b101"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ('"3"', "3"),
        ("'true'", "true"),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
        ("{a: {b: [1]}}", {"a": {"b": [1]}}),
        ("<<", "<<"),
        ("=", "="),
        ("!!float 3", 3.0),
        ("!!str 3", "3"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    got = load(text, "x.yaml").value
    assert got == value
    assert type(got) is type(value)


def test_nan() -> None:
    assert math.isnan(load(".nan", "x.yaml").value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3: `a` is given twice (first in line 1)"),
        ("a:\n  b: 1\n  b: 1\n", "run.yaml:3: `a.b` is given twice"),
        ("a: [1\nb: 2", "run.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 1\n", "run.yaml:2: not valid YAML"),
        ("a: 1\n\tb: 1\n", "run.yaml:2: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "run.yaml:1: the tag"),
        ("a: !!int x", "run.yaml:1: `x` is not a int"),
        ("a: !thing 3", "run.yaml:1: the tag !thing"),
        ("? [1]\n: 2", "run.yaml:1: a key must be a word"),
        ("&a [*a]", "run.yaml:1: an alias refers to the collection it stands in"),
        ("a: *missing", "run.yaml:1: not valid YAML"),
        (b"a: 1\nb: \xff\xfe\n", "run.yaml:2: not UTF-8"),
        ("a: 1\nb: \x07", "run.yaml:2: not valid YAML: the character U+0007"),
        ("a: " + "9" * 5000, "run.yaml:1: a number of 5000 characters"),
        ("[" * 5000, "run.yaml: nested too deeply"),
    ],
)
def test_refusals_name_file_and_line(text: str | bytes, message: str) -> None:
    with pytest.raises(YamlError) as error:
        load(text, "run.yaml")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_alias_bomb_ends_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(YamlError, match="more than 100000 values"):
        load("\n".join(lines), "bomb.yaml")


def test_plain_aliases_work() -> None:
    assert load("a: &x [1, 2]\nb: *x\n", "x.yaml").value == {"a": [1, 2], "b": [1, 2]}


def test_marks_point_at_the_key() -> None:
    document = load("run:\n  steps: 3\nparallel:\n  tensor:\n    - 1\n    - x\n", "run.yaml")
    assert str(document.mark(("run", "steps"))) == "run.yaml:2"
    assert str(document.mark(("parallel", "tensor"))) == "run.yaml:4"
    assert str(document.mark(("parallel", "tensor", 1))) == "run.yaml:6"
    assert str(document.mark(("parallel", "nothing", "there"))) == "run.yaml:3"
    assert document.mark(("run", "steps")).column == 3  # type: ignore[union-attr]
    assert load("", "x.yaml").mark(("run",)) is None


def test_path_text() -> None:
    assert path_text(("optimizer", "betas", 0)) == "optimizer.betas[0]"
    assert path_text(()) == ""


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn"]))
    | st.sampled_from(
        ["3e-4", "on", "12:30:00", "0o17", "~", "1_0", ".inf", "", " x", "a: b", "#", "!x", "*a"]
    )
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "3", "on", "null", "1.5"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_values)
def test_dump_and_load_are_inverse(value: object) -> None:
    assert load(dump(value), "dumped").value == value
