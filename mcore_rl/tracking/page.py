"""The HTML page of a report: one file, no network, light and dark, readable on a phone.

It is well-formed XML, so that a strict parser can read it back.  Style and scripts are files beside this one; the page
has them by their hashes in its content security policy, so that no other script is ever run, wherever it came from.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

# Characters that neither XML nor a screen can show.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

LIGHT = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#7a5195",
    "#8c564b",
    "#2f4b7c",
    "#8fb53a",
    "#e15759",
    "#8a8f98",
)
DARK = (
    "#5ab4e6",
    "#ff9b54",
    "#3fcf9f",
    "#e7a5c9",
    "#e6c34a",
    "#9ad3f5",
    "#b79ae0",
    "#c9a08f",
    "#8fa8e0",
    "#c4e07a",
    "#ff8f91",
    "#9aa0aa",
)
NEUTRAL = len(LIGHT) - 1  # the colour of what is none of the named parts
# Beyond the palette its hues come again, mixed with the ink and then with the paper, in either scheme.
TINTS = ("{hue}", "color-mix(in srgb, {hue} 55%, var(--ink))", "color-mix(in srgb, {hue} 55%, var(--page))")
NUM_COLOURS = len(LIGHT) * len(TINTS)  # of a chart, without repetition


def _colours(hues: Sequence[str]) -> str:
    return "".join(f"--c{index}:{hue};" for index, hue in enumerate(hues))


def _colour(index: int) -> str:
    """The colour of the class ``c{index}``, below ``NUM_COLOURS``."""
    return TINTS[index // len(LIGHT)].format(hue=f"var(--c{index % len(LIGHT)})")


HERE = Path(__file__).parent
STYLE = f"""
:root {{ color-scheme: light dark; --ink:#1c2430; --soft:#5c6675; --page:#fff; --card:#f6f7f9; --rule:#dde1e7;
  --good:#0a7d4f; --bad:#b3261e; {_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink:#e6e9ee; --soft:#9aa4b2; --page:#12161c; --card:#1a2028;
  --rule:#323b47; --good:#4fd19a; --bad:#ff8a80; {_colours(DARK)} }} }}
{"".join(f".c{index} {{ color: {_colour(index)}; }} " for index in range(NUM_COLOURS))}
{(HERE / "page.css").read_text(encoding="utf-8")}"""


def text(value: object) -> str:
    """``value`` as text, escaped for elements and attributes; unprintable characters become U+FFFD."""
    return escape(UNPRINTABLE.sub("\ufffd", str(value)), quote=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of plain values; it scrolls sideways on a narrow screen."""
    heads = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(value)}</td>' for value in row)}</tr>" for row in rows)
    top = f"<thead><tr>{heads}</tr></thead>" if heads else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def details(summary: str, inside: str) -> str:
    """A block that is folded until the reader opens it."""
    return f"<details><summary>{text(summary)}</summary>{inside}</details>"


def page(
    title: str, sections: Sequence[str], scripts: Sequence[str] = (), live: Mapping[str, str] | None = None
) -> str:
    """The whole file.

    A browser that opens it runs the scripts named here and no other, whatever stands in the sections, and loads
    nothing: pictures are in it.  A live page may ask the server that sent it.

    Args:
        sections: HTML, already safe.
        scripts: files of this folder that are run after ``page.js``.
        live: of a page that follows a run: data attributes of its body, which its script reads.
    """
    codes = [f"//<![CDATA[\n{(HERE / name).read_text(encoding='utf-8')}//]]>" for name in ("page.js", *scripts)]
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src {_hash(STYLE)}; "
        f"script-src {' '.join(map(_hash, codes))}" + ("; connect-src 'self'" if live else "")
    )
    attributes = "".join(f' data-{name}="{text(value)}"' for name, value in (live or {}).items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body{attributes}>\n"
        + "\n".join(section for section in sections if section)
        + '\n<div id="tip" hidden="hidden"></div>'
        + "".join(f"<script>{code}</script>" for code in codes)
        + "</body></html>\n"
    )


def _hash(code: str) -> str:
    """What a content security policy calls the text of an element."""
    return f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"
