"""SVG and PNG: what is in them, read back."""

from __future__ import annotations

import re
import struct
import zlib
from xml.etree import ElementTree

import pytest

from shardweave.pipeline import BUILDERS, Costs, Schedule, schedule
from shardweave.pipeline.draw.colours import HATCH, IDLE, INK, KINDS, PAPER, Colour
from shardweave.pipeline.draw.glyphs import GLYPHS, HEIGHT, WIDTH, strokes
from shardweave.pipeline.draw.picture import CHUNKS, picture
from shardweave.pipeline.draw.png import COLUMN as PNG_COLUMN
from shardweave.pipeline.draw.svg import COLUMN

SVG = "{http://www.w3.org/2000/svg}"
COLOUR = {its.rgb: kind for kind, its in KINDS.items()}


def read_png(data: bytes) -> list[list[Colour]]:
    """The dots of a PNG of 8 bits and a table of colours whose lines are not filtered; checks every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    position = 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        name, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        assert struct.unpack_from(">I", data, position + 8 + length) == (zlib.crc32(name + body),)
        chunks[name] = body
        position += 12 + length
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 3, 0, 0, 0]
    table = [tuple(chunks[b"PLTE"][at : at + 3]) for at in range(0, len(chunks[b"PLTE"]), 3)]
    packed = zlib.decompress(chunks[b"IDAT"])
    assert len(packed) == height * (width + 1)
    lines = [packed[row * (width + 1) : (row + 1) * (width + 1)] for row in range(height)]
    assert all(line[0] == 0 for line in lines)
    return [[(table[dot][0], table[dot][1], table[dot][2]) for dot in line[1:]] for line in lines]


def runs(line: list[Colour]) -> str:
    """The kinds along a line of dots, a dot for idle time; edges and text left out, repeats once."""
    marks = [COLOUR.get(dot, "." if dot in (IDLE, HATCH) else "") for dot in line]
    return re.sub(r"(.)\1+", r"\1", "".join(marks))


@pytest.mark.parametrize("name", BUILDERS)
def test_an_svg_has_a_box_for_every_action_at_its_time(name: str) -> None:
    plan = schedule(name, ranks=2, micro_batches=5)
    costs = Costs(forward=1, backward=2.5, message=0.25)
    root = ElementTree.fromstring(plan.svg(costs))
    boxes = {group.findtext(f"{SVG}title"): group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g")}
    timeline = plan.simulate(costs)
    timings = [timing for row in timeline.timings for timing in row]
    unit = min(timing.end - timing.start for timing in timings)
    assert boxes.keys() == {str(timing.action) for timing in timings}
    left = min(float(box.attrib["x"]) for box in boxes.values() if box is not None)
    for timing in timings:
        box = boxes[str(timing.action)]
        assert box is not None
        assert float(box.attrib["x"]) - left == pytest.approx(COLUMN * timing.start / unit, abs=0.2)
        assert float(box.attrib["width"]) == pytest.approx(
            COLUMN * (timing.end - timing.start) / unit, abs=0.1
        )
        assert box.attrib["fill"] == "#{:02x}{:02x}{:02x}".format(*KINDS[timing.action.kind].rgb)


def test_idle_time_is_hatched_and_the_figures_are_said() -> None:
    plan = schedule("1f1b", stages=4, micro_batches=8)
    root = ElementTree.fromstring(plan.svg())
    assert len([rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "url(#idle)"]) == 4 + 1
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words[0] == "1f1b: 4 ranks, 8 micro-batches; bubble 27.3%, peak 4"
    assert {"rank 3", "bubble 27.3%  peak 1", "F forward", "B backward", "idle"} <= set(words)


def test_names_in_an_svg_are_escaped() -> None:
    plan = schedule("1f1b", stages=1, micro_batches=1)
    named = Schedule("<a & b>", 1, 1, plan.rank_of_stage, plan.actions)
    assert ElementTree.fromstring(named.svg()).findtext(f"{SVG}title", "").startswith("<a & b>: 1 ranks")


def test_a_png_shows_the_actions_and_idle_time_in_their_order() -> None:
    lines = read_png(schedule("1f1b", stages=3, micro_batches=3).png())
    found = [text for text in map(runs, lines) if "F" in text]
    # rank 0  F0 F1 F2 .  .  .  .  B0 -- .  B1 -- .  B2 --
    # rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- .  .
    # rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  .  .
    for expected in ("F.B.B.B", ".F.BFB.B.", ".FBFBFB."):
        assert any(text == expected for text in found), (expected, sorted(set(found)))
    assert found[-1] == "FB."  # the legend


def test_a_png_of_a_v_underlines_the_second_stage_of_a_rank() -> None:
    lines = read_png(schedule("zb-v", ranks=2, micro_batches=4).png())
    (title, *rest) = picture(schedule("zb-v", ranks=2, micro_batches=4).simulate()).rows
    assert [box.chunk for box in title.boxes if box.name in ("0F0", "3F0")] == [0, 1]
    assert len(rest) == 1
    longest = max(
        len(run)
        for line in lines
        for run in re.findall("#+", "".join("#" if d == INK else " " for d in line))
    )
    assert longest >= 2 * PNG_COLUMN


@pytest.mark.parametrize("name", BUILDERS)
def test_eight_ranks_and_thirty_two_micro_batches_are_labelled(name: str) -> None:
    """Every number has its room, in a picture no wider than a few thousand dots."""
    drawn = picture(schedule(name, ranks=8, micro_batches=32).simulate())
    assert all(len(box.label) <= 2 for row in drawn.rows for box in row.boxes)
    assert 2 * (WIDTH + 1) - 1 + 3 <= PNG_COLUMN
    width, height = struct.unpack_from(">II", schedule(name, ranks=8, micro_batches=32).png(), 16)
    assert width < 7000
    assert height < 500


def test_pictures_are_the_same_each_time() -> None:
    plan = schedule("zb-h2", stages=3, micro_batches=4)
    assert plan.png() == plan.png()
    assert plan.svg() == plan.svg()


def test_thousands_of_micro_batches_make_a_picture_of_bounded_width() -> None:
    data = schedule("gpipe", stages=2, micro_batches=3000).png()
    (width,) = struct.unpack_from(">I", data, 16)
    assert width < 17_000
    lines = read_png(schedule("1f1b", stages=1, micro_batches=2).png())
    assert lines[0][0] == PAPER


def test_measured_costs_and_stages_that_take_no_time_are_drawn() -> None:
    plan = schedule("1f1b", stages=2, micro_batches=3)
    for costs in (Costs(forward=[1e-7, 1], backward=[0, 2]), Costs(forward=0, backward=0)):
        root = ElementTree.fromstring(plan.svg(costs))
        assert 200 < float(root.attrib["width"]) < 2000
        assert read_png(plan.png(costs))


def test_every_letter_of_a_picture_can_be_drawn() -> None:
    for name in BUILDERS:
        drawn = picture(schedule(name, ranks=2, micro_batches=4).simulate())
        texts = [drawn.title, CHUNKS, *(text for _, text in drawn.legend)]
        texts += [text for row in drawn.rows for text in (row.name, row.figures)]
        assert set("".join(texts).upper()) - GLYPHS.keys() == {" "}


def test_letters_differ_and_keep_to_their_columns() -> None:
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    assert all(len(rows) == HEIGHT and {len(row) for row in rows} == {WIDTH} for rows in GLYPHS.values())
    assert all(set("".join(rows)) == {"#", " "} for rows in GLYPHS.values())
    assert list(strokes("a-")) == list(strokes("A-"))
    assert max(end for _, end, _ in strokes("8 8")) == 2 * (WIDTH + 1) + WIDTH
