"""What mkdocs.yml cannot say of the site: its navigation, and the files outside docs/ that its pages link to.

The navigation is the map in docs/README.md: a section for each heading, in which a page stands where the map first
names it.  A file of the repository that a page links to becomes a page too: markdown as it is, any other text as one
block of code.  Nothing is copied into the repository.  mkdocs.yml names this file, and mkdocs calls what begins with
``on_``.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files  # of .venv/docs, which the house's checks do not need

ROOT = Path(__file__).resolve().parents[1]
MAP, OVERVIEW = "README.md", "overview.md"  # of docs/: the first page of the site; where the site has /README.md
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r"""(?:(?<=src=")|(?<=srcset="))([^"#:]+)(#[^"]*)?(?=")""")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->$\n?", re.MULTILINE | re.DOTALL)
STYLE = """.md-grid { max-width: 84rem; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-typeset table:not([class]) td { min-width: 7rem; }
"""  # tables of keys and metrics are wide, and a key is one word
# Lets search work in pages that are opened as files.  The theme names it at a CDN, and the site asks no network.
SHIM = "iframe_worker.js"
SHIM_AT_CDN = "https://unpkg.com/iframe-worker/shim"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}


def navigation(text: str) -> list[dict[str, Any]]:
    """The navigation that the map ``text`` gives, as mkdocs.yml would write it."""
    nav: list[dict[str, Any]] = [{"Overview": OVERVIEW}, {"Map": MAP}]
    seen = {MAP, OVERVIEW}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        targets = [place(from_docs(target, MAP)) for target, _ in LINK.findall(body)]
        pages = [each for each in dict.fromkeys(targets) if each not in seen]
        seen |= set(pages)
        nav.append({title.strip(): pages})
    rest = [each for each in OUTSIDE if each not in seen]
    folders = dict.fromkeys(str(PurePosixPath(each).parent) for each in rest)
    shown = {folder: [each for each in rest if str(PurePosixPath(each).parent) == folder] for folder in folders}
    return [*nav, {"Files": [{folder: pages} for folder, pages in shown.items()]}]


def from_docs(target: str, page: str) -> str:
    """The path from docs/ of what ``page``, another path from there, links to as ``target``."""
    path = normpath(PurePosixPath(page).parent / target)
    return MAP if path == "../docs" else path.removeprefix("../docs/")


def place(path: str) -> str:
    """Where the site has the file ``path``, from docs/."""
    if not path.startswith("../"):
        return path
    path = path.removeprefix("../")
    if path == "README.md":
        return OVERVIEW
    return path if path.endswith(".md") else f"{path}.md"


def outside(docs: Path) -> dict[str, str]:
    """Page of the site -> path from docs/, for each file outside docs/ that a page, or such a file, links to."""
    pages = dict[str, str]()
    todo = [path.name for path in sorted(docs.glob("*.md"))]
    while todo:
        page = todo.pop()
        text = (docs / page).read_text(encoding="utf-8")
        for target, _ in LINK.findall(CODE.sub("", text)):
            path = from_docs(target, page)
            if path.startswith("../") and (docs / path).is_file() and path not in pages.values():
                pages[place(path)] = path
                todo += [path] if path.endswith(".md") else []
    return dict(sorted(pages.items()))


OUTSIDE = outside(ROOT / "docs")


def on_config(config: Any) -> Any:
    """Sets the navigation."""
    config["nav"] = navigation((ROOT / "docs" / MAP).read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "tables.css", content=STYLE))
    files.append(File.generated(config, SHIM, abs_src_path=str(ROOT / "tools" / SHIM)))
    for page, path in OUTSIDE.items():
        text = (ROOT / "docs" / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            shown = path.removeprefix("../")
            text = f"# {Path(path).name}\n\n`{shown}`\n\n```{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page without comments, and with its links as the site has them."""
    here = page.file.src_uri
    there = OUTSIDE.get(here, here)

    def moved(match: re.Match[str]) -> str:
        target = place(from_docs(match[1], there))
        return f"{relpath(target, str(PurePosixPath(here).parent))}{match[2] or ''}"

    pieces = CODE.split(markdown)  # every second one is code
    pieces[::2] = [PICTURE.sub(moved, LINK.sub(moved, COMMENT.sub("", each))) for each in pieces[::2]]
    return "".join(pieces)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page as it is written, with our copy of what the theme would fetch."""
    ours = relpath(SHIM, str(PurePosixPath(page.file.dest_uri).parent))
    return output.replace(SHIM_AT_CDN, ours)
