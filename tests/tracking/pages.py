"""Reads a page back as a strict parser sees it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree


def parsed(path: Path) -> ElementTree.Element:
    """The page, by a parser that forgives nothing."""
    return ElementTree.fromstring(path.read_bytes())


def words(element: ElementTree.Element) -> str:
    """The text of an element, in one line."""
    return " ".join("".join(element.itertext()).split())


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """The elements of a class."""
    return [each for each in root.iter() if name in (each.get("class") or "").split()]


def numbers_under_the_pointer(svg: ElementTree.Element) -> list[tuple[str, dict[str, str]]]:
    """(steps, label -> number as text) of every position of a chart, as the page's script is to show them."""
    chart = json.loads(svg.get("data-hover") or "")
    labels = [label for label, _ in chart["names"]]
    rows = []
    for first, last, *texts in chart["rows"]:
        if chart.get("unit") == "h":
            hours = " to ".join(f"{each:.5f}".rstrip("0").rstrip(".") for each in dict.fromkeys((first, last)))
            steps = f"after {hours} h"
        else:
            steps = f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"
        rows.append((steps, {label: text for label, text in zip(labels, texts, strict=True) if text}))
    return rows
