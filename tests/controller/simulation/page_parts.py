"""What the tests of charts and pages take apart: the SVGs of a page, their marks and texts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from controller.simulation.svg_marks import Box, text_box


def svgs(page: str) -> list[ElementTree.Element]:
    """Return the figures of a page; the keys of its legends are none."""
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return [svg for svg in found if svg.get("role") == "img"]


def by_class(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """Return the elements with a class."""
    return [each for each in svg.iter() if kind in each.get("class", "").split()]


def place(mark: ElementTree.Element) -> tuple[float, float]:
    """Return where a mark stands."""
    if mark.tag == "circle":
        return float(mark.get("cx", "nan")), float(mark.get("cy", "nan"))
    numbers = re.findall(r"-?[\d.]+", mark.get("transform", ""))
    return float(numbers[0]), float(numbers[1])


def texts(svg: ElementTree.Element) -> list[tuple[str, Box]]:
    """Return every text with its extent."""
    return [
        (text, text_box(text, float(each.get("x", "nan")), float(each.get("y", "nan")), anchor))
        for each in svg.iter("text")
        for text in [each.text or ""]
        for anchor in [each.get("class", "").split()[0]]
    ]


def assert_legible(svg: ElementTree.Element) -> None:
    """Every text and mark is in the picture, no text lies on another one, axes have ticks."""
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    picture = Box(0.0, 0.0, width, height)
    found = texts(svg)
    for index, (text, box) in enumerate(found):
        assert box.is_within(picture), text
        for other, other_box in found[:index]:
            assert not box.overlaps(other_box), f"{text!r} lies on {other!r}"
    for dot in by_class(svg, "dot"):
        x, y = place(dot)
        assert 0 <= x <= width
        assert 0 <= y <= height
    assert 2 <= len(by_class(svg, "grid")) <= 24
