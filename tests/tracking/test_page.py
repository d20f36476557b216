from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.page import DARK, HERE, LIGHT, NUM_COLOURS, STYLE, details, page, table, text


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
    assert [each.text for each in root.iter("script")] == [f"//\n{(HERE / 'page.js').read_text()}//"]
    assert [each.text for each in root.iter("td")] == [bad if not shown else bad.translate({ord(bad[-1]): "\ufffd"})]


def test_a_page_needs_nothing_from_outside() -> None:
    written = page("t", ["<h1>t</h1>"])
    assert all(word not in written for word in ("http:", "https:", "src=", "href=", "@import", "url("))
    assert 'name="viewport"' in written


@pytest.mark.parametrize("path", sorted(HERE.glob("*.js")), ids=lambda path: path.name)
def test_a_script_is_the_same_to_an_html_and_to_an_xml_parser(path: Path) -> None:
    """Neither the end of CDATA nor of the element stands in it, nor a comment of HTML."""
    assert not any(word in path.read_text() for word in ("]]>", "</script", "<script", "<!--"))
    assert "<" not in STYLE and "&" not in STYLE


@pytest.mark.parametrize("path", sorted(HERE.glob("*.js")), ids=lambda path: path.name)
def test_no_script_makes_markup_of_text(path: Path) -> None:
    """What a model wrote reaches the page as text nodes alone."""
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", path.read_text()
    )


def test_the_policy_names_the_style_and_the_scripts_by_their_hashes_and_nothing_else() -> None:
    written = page("t", ["<p>t</p>"], ["sample_browser.js"])
    root = ElementTree.fromstring(written.encode())
    policy = next(each.get("content") or "" for each in root.iter("meta") if each.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules and "unsafe" not in policy
    assert rules["img-src"] == "data:"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        bodies = re.findall(f"<{tag}>(.*?)</{tag}>", written, re.DOTALL)
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in bodies]
        assert rules[rule].split() == hashes and len(bodies) == {"script": 2, "style": 1}[tag]
    assert "connect-src 'self'" in page("t", [], live={"live": "2"})


def test_colours_are_told_from_the_page_and_from_one_another() -> None:
    for colours, card in ((LIGHT, "#f6f7f9"), (DARK, "#1a2028")):
        assert len(set(colours)) == len(colours)
        assert min(contrast(colour, card) for colour in colours) > 1.9


def test_every_colour_of_a_chart_has_a_rule_and_no_two_are_one() -> None:
    rules = dict(re.findall(r"\.c(\d+) \{ color: ([^;]+); \}", STYLE))
    assert list(map(int, rules)) == list(range(NUM_COLOURS)) and len(set(rules.values())) == NUM_COLOURS == 36
