from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.page import DARK, LIGHT, NUM_COLOURS, SCRIPT, STYLE, details, page, table, text


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    "bad", ["<script>alert(1)</script>", 'a" onload="x', "a & b", "bell\x07", "\ud800", "\x00", "]]>"]
)
def test_anything_may_be_shown(bad: str) -> None:
    written = page(bad, [table([bad], [[bad]]), details(bad, f'<p title="{text(bad)}">{text(bad)}</p>')])
    root = ElementTree.fromstring(written.encode())
    shown = text(bad).count("\ufffd")
    assert [dict(each.attrib) for each in root.iter("p")] == [{"title": next(root.iter("p")).text}]
    assert [each.tag for each in root.iter() if each.tag == "script"] == ["script"]
    assert [each.text for each in root.iter("td")] == [bad if not shown else bad.translate({ord(bad[-1]): "\ufffd"})]


def test_a_page_needs_nothing_from_outside() -> None:
    written = page("t", ["<h1>t</h1>"])
    assert all(word not in written for word in ("http:", "https:", "src=", "href=", "@import", "url("))
    assert 'name="viewport"' in written


def test_the_script_is_the_same_to_an_html_and_to_an_xml_parser() -> None:
    assert "<" not in SCRIPT and "&" not in SCRIPT


def test_colours_are_told_from_the_page_and_from_one_another() -> None:
    for colours, card in ((LIGHT, "#f6f7f9"), (DARK, "#1a2028")):
        assert len(set(colours)) == len(colours)
        assert min(contrast(colour, card) for colour in colours) > 1.9


def test_every_colour_of_a_chart_has_a_rule_and_no_two_are_one() -> None:
    rules = dict(re.findall(r"\.c(\d+) \{ color: ([^;]+); \}", STYLE))
    assert list(map(int, rules)) == list(range(NUM_COLOURS)) and len(set(rules.values())) == NUM_COLOURS == 36
