"""Nothing in the repository knows the machine it was written on, or where packages are fetched from."""

from __future__ import annotations

import re

from tests.house.source import ROOT, refuse, repository_files

# Put together here so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w.~-])/(?:work|root|home/(?!mcore_rl\b)\w+|Users/\w+|opt/(?:wheels|pypi)\S*)(?=[/\s\"'`):]|$)"
)
REGISTRY_HOSTS = re.compile("|".join(re.escape(f"{name}.{top}") for name, top in (
    ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("deb.debian", "org"), ("proxy.golang", "org"),
    ("index.crates", "io"), ("static.crates", "io"), ("download.pytorch", "org"),
)))  # fmt: skip


def foreign_place(path: str, text: str) -> list[str]:
    places = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in ((MACHINE_PATHS, "a path of one machine"), (REGISTRY_HOSTS, "the host of a registry")):
            if match := pattern.search(line):
                places.append(f"{path}:{number}: {match.group()} is {what}. Take it as an argument or say it in words")
    return places


def is_text(path: str) -> bool:
    return b"\0" not in (ROOT / path).read_bytes()[:8192]


def test_no_file_names_a_machine_or_a_registry() -> None:
    paths = [path for path in repository_files() if is_text(path) and path != "tests/house/test_repository.py"]
    refuse(foreign_place, paths)


def test_the_rule_refuses_paths_and_hosts() -> None:
    for bad in ("cd /work/main", 'open("/root/x")', "see /home/ada/notes", "`/work`", "https://pypi" + ".org/simple"):
        assert len(foreign_place("README.md", bad)) == 1, bad


def test_the_rule_allows_relative_paths_and_the_system() -> None:
    for good in ("cd ../work/main", "/proc/self/status", "teamwork/root/x", "~/work/x", "/tmp/x", "/homepage"):
        assert foreign_place("README.md", good) == [], good
