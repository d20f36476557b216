"""The HTML page of a report: one file, no network, light and dark, readable on a phone.

It is well-formed XML, so that a strict parser can read it back; the script therefore has no ``<`` and no ampersand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

# Characters that neither XML nor a screen can show.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9",
         "#7a5195", "#8c564b", "#2f4b7c", "#8fb53a", "#e15759", "#8a8f98")  # fmt: skip
DARK = ("#5ab4e6", "#ff9b54", "#3fcf9f", "#e7a5c9", "#e6c34a", "#9ad3f5",
        "#b79ae0", "#c9a08f", "#8fa8e0", "#c4e07a", "#ff8f91", "#9aa0aa")  # fmt: skip
NEUTRAL = len(LIGHT) - 1  # the colour of what is none of the named parts
# Beyond the palette its hues come again, mixed with the ink and then with the paper, in either scheme.
TINTS = ("{hue}", "color-mix(in srgb, {hue} 55%, var(--ink))", "color-mix(in srgb, {hue} 55%, var(--page))")
NUM_COLOURS = len(LIGHT) * len(TINTS)  # of a chart, without repetition


def _colours(hues: Sequence[str]) -> str:
    return "".join(f"--c{index}:{hue};" for index, hue in enumerate(hues))


def _colour(index: int) -> str:
    """The colour of the class ``c{index}``, below ``NUM_COLOURS``."""
    return TINTS[index // len(LIGHT)].format(hue=f"var(--c{index % len(LIGHT)})")


STYLE = f"""
:root {{ color-scheme: light dark; --ink:#1c2430; --soft:#5c6675; --page:#fff; --card:#f6f7f9; --rule:#dde1e7;
  --good:#0a7d4f; --bad:#b3261e; {_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink:#e6e9ee; --soft:#9aa4b2; --page:#12161c; --card:#1a2028;
  --rule:#323b47; --good:#4fd19a; --bad:#ff8a80; {_colours(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1360px; padding: 1.25rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .75rem; }}
p {{ margin: .4rem 0; max-width: 75ch; }}
.soft {{ color: var(--soft); }}
.verdict {{ border-left: 5px solid var(--soft); background: var(--card); padding: .6rem 1rem; border-radius: 4px; }}
.verdict.good {{ border-color: var(--good); }}
.verdict.bad {{ border-color: var(--bad); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }}
th, td {{ text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }}
th {{ font-weight: 600; color: var(--soft); }}
thead + tbody td, th {{ white-space: nowrap; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: 8px; min-width: 0; }}
figcaption {{ font-size: .95rem; margin-bottom: .25rem; }}
figcaption span {{ color: var(--soft); }}
figure ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .25rem 0 0; padding: 0;
  font-size: .8rem; color: var(--soft); }}
figure i {{ display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }}
svg {{ display: block; width: 100%; height: auto; touch-action: pan-y; }}
svg text {{ font-size: 11px; fill: var(--soft); }}
text.x {{ text-anchor: middle; }}
text.y {{ text-anchor: end; }}
.grid {{ stroke: var(--rule); stroke-width: 1; }}
.axis {{ stroke: var(--soft); stroke-width: 1; }}
.rule {{ stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; visibility: hidden; }}
.series polyline {{ fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }}
.series circle {{ fill: currentColor; }}
.series .interval {{ stroke: currentColor; stroke-width: 1.2; opacity: .55; }}
rect {{ fill: currentColor; }}
{"".join(f".c{index} {{ color: {_colour(index)}; }} " for index in range(NUM_COLOURS))}
figure i {{ background: currentColor; }}
#tip {{ position: fixed; z-index: 2; pointer-events: none; white-space: pre; font-size: .8rem; padding: .35rem .6rem;
  background: var(--ink); color: var(--page); border-radius: 6px; max-width: 95vw; overflow: hidden; }}
details {{ margin: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
pre {{ margin: .25rem 0; padding: .6rem .75rem; background: var(--card); border-radius: 6px; font-size: .82rem;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 22rem; overflow-y: auto; }}
.pair {{ border-top: 1px solid var(--rule); padding-top: .75rem; margin-top: 1rem; }}
.sides {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 1rem; }}
.sides > div {{ min-width: 0; }}
.right {{ color: var(--good); font-weight: 600; }}
.wrong {{ color: var(--bad); font-weight: 600; }}
@media (max-width: 480px) {{ body {{ padding: .75rem; }} figure {{ padding: .5rem; }} svg text {{ font-size: 13px; }} }}
@media print {{ .charts {{ display: block; }} figure {{ break-inside: avoid; }} }}
"""

SCRIPT = """
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const rows = JSON.parse(svg.dataset.hover), rule = svg.querySelector(".rule");
  const show = event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const row = rows.reduce((best, each) => Math.abs(best[0] - x) > Math.abs(each[0] - x) ? each : best);
    rule.setAttribute("x1", row[0]);
    rule.setAttribute("x2", row[0]);
    rule.style.visibility = "visible";
    tip.textContent = row[1];
    tip.hidden = false;
    const side = event.clientX > window.innerWidth / 2 ? event.clientX - tip.offsetWidth - 14 : event.clientX + 14;
    tip.style.left = Math.max(4, Math.min(side, window.innerWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY - 10, window.innerHeight - tip.offsetHeight - 4)) + "px";
  };
  const hide = () => { tip.hidden = true; rule.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
"""


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


def page(title: str, sections: Sequence[str]) -> str:
    """The whole file.  sections: HTML, already safe."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(section for section in sections if section)
        + f'\n<div id="tip" hidden="hidden"></div><script>{SCRIPT}</script></body></html>\n'
    )
