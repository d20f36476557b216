"""The site of the pages: every page is in its navigation, links lead somewhere, and search finds our words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.house.source import ROOT, repository_files
from tests.support.browser import browser, needs_chromium
from tests.support.skips import not_installed
from tools import docs_site

MKDOCS = shutil.which("mkdocs", path=f"{ROOT / '.venv/docs/bin'}{os.pathsep}{os.environ['PATH']}")
BUILD = re.findall(r"/mkdocs (.+)", (ROOT / "Makefile").read_text(encoding="utf-8"))[0].split()
MAP = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def pages(nav: list[dict[str, object]]) -> list[str]:
    """Every page of a navigation, in order."""
    listed = list[str]()
    for entry in nav:
        for below in entry.values():
            for each in below if isinstance(below, list) else [below]:
                listed += pages([each]) if isinstance(each, dict) else [str(each)]
    return listed


def test_every_page_is_in_the_navigation_once() -> None:
    listed = pages(docs_site.navigation(MAP))
    assert len(listed) == len(set(listed))
    ours = {path.removeprefix("docs/") for path in repository_files() if re.fullmatch(r"docs/\w+\.md", path)}
    assert set(listed) == ours | set(docs_site.OUTSIDE)
    recipes = {path for path in repository_files() if re.fullmatch(r"launch/recipes/\w+\.yaml", path)}
    shown = {path.removesuffix(".md") for path in listed if path.startswith("launch/recipes/")}
    taught_here = ("arithmetic", "products")  # of docs/first_run.md and docs/agents.md
    published = {path for path in recipes if not any(name in path for name in taught_here)}
    assert shown >= published, "docs/baselines.md links to them"


def test_the_navigation_is_the_map() -> None:
    text = (
        "# Map\n\n## One\n\n| a | [x](rollout.md#speed), [y](sync.md) |\n\n## Two\n\n[x](rollout.md) [c](../LICENSE)\n"
    )
    nav = docs_site.navigation(text)
    assert nav[2:4] == [{"One": ["rollout.md", "sync.md"]}, {"Two": ["LICENSE.md"]}]


@pytest.mark.parametrize(
    ("target", "page", "there"),
    [
        ("rollout.md", "sync.md", "rollout.md"),
        ("../CONTRIBUTING.md", "sync.md", "CONTRIBUTING.md"),
        ("../launch/recipes/x.yaml", "sync.md", "launch/recipes/x.yaml.md"),
        ("../README.md", "sync.md", "overview.md"),
        ("docs/sync.md", "../README.md", "sync.md"),
        ("docs/", "../README.md", "README.md"),
        ("LICENSE", "../README.md", "LICENSE.md"),
    ],
)
def test_a_link_is_moved_to_where_the_site_has_it(target: str, page: str, there: str) -> None:
    assert docs_site.place(docs_site.from_docs(target, page)) == there


@dataclass
class Shown:
    """A page and its file, as mkdocs hands them over."""

    src_uri: str

    @property
    def file(self) -> Shown:
        return self


def test_pictures_of_the_readme_are_where_the_site_has_them() -> None:
    page = '<source srcset="docs/pictures/a.png">\n<img src="docs/pictures/b.png" width="1">\n<a href="docs/x.md">'
    moved = docs_site.on_page_markdown(page, Shown("overview.md"), None, None)  # type: ignore[arg-type]
    assert moved == '<source srcset="pictures/a.png">\n<img src="pictures/b.png" width="1">\n<a href="docs/x.md">'
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(pictures) == 2 and all((ROOT / each).stat().st_size < 150_000 for each in pictures)


def test_the_site_fails_for_what_leads_nowhere() -> None:
    class Loader(yaml.SafeLoader):
        """Takes mkdocs' Python names for what they are, texts."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    assert settings["strict"] is True and settings["hooks"] == ["tools/docs_site.py"]
    assert {level for kind in settings["validation"].values() for level in kind.values()} == {"warn"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MKDOCS is None:
        pytest.skip(not_installed("mkdocs, as `make docs` does, into .venv/docs"))
    out = tmp_path_factory.mktemp("site")
    subprocess.run([str(MKDOCS), *BUILD, "--site-dir", str(out)], cwd=ROOT, check=True, timeout=600)
    return out


@pytest.mark.tier("full")
def test_it_builds_with_every_page_and_every_word(site: Path) -> None:
    for page in pages(docs_site.navigation(MAP)):
        shown = re.sub(r"(^|/)README\.md$", r"\1index.md", page).removesuffix(".md")
        assert (site / f"{shown}.html").is_file(), page
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for word in ("rung", "shadow"):
        assert any(each["location"].startswith("glossary.html") and word in each["text"] for each in index)
    assert any(each["location"] == "configuration.html#actoroptim" for each in index)


@pytest.mark.tier("full")
def test_a_link_that_leads_nowhere_fails(site: Path, tmp_path: Path) -> None:
    for name in ("docs", "mkdocs.yml", "tools", "launch", "mcore_rl", "model_configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "docs" else shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "sync.md").open("a") as page:
        page.write("\nSee [nothing](nothing.md) and [no place](rollout.md#no-place).\n")
    build = subprocess.run([str(MKDOCS), *BUILD], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert build.returncode != 0
    assert "'nothing.md'" in build.stderr and "'#no-place'" in build.stderr


@pytest.mark.tier("full")
@needs_chromium
def test_search_finds_a_word_in_the_glossary_of_the_opened_file(site: Path) -> None:
    """From the file, as `make docs` leaves it; mkdocs' own search needs a server."""
    hrefs = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"
    with browser() as chromium:
        for word in ("rung", "shadow"):
            chromium.open(f"{(site / 'index.html').as_uri()}?q={word}")
            chromium.until(f"{hrefs}.length > 0")
            assert all(each.startswith(("file:", "data:")) for each in chromium.requests())
            assert any("glossary.html" in link for link in chromium.ask(hrefs)), word
