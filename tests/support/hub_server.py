"""A small server that speaks as much of the Hub's HTTP API as huggingface_hub's client asks for here.

Written from the client's own requests (huggingface_hub 2.4: hf_api.py, file_download.py, _commit_api.py, lfs.py) and
the Hub's error headers (utils/_http.py, ``hf_raise_for_status``).  Files are served whole or from a byte on, with their
ETag; what is uploaded becomes a new commit.  It knows no Xet, so that the client takes plain HTTP.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repo:
    """files: of the main branch, by name.  gated: readable with TOKEN alone, and known to all.  private: known with
    TOKEN alone.  branches: the files of the others.
    """

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by hash, in order
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)  # of branches, the newest commit

    def __post_init__(self) -> None:
        self.commit()

    def commit(self, branch: str = "main") -> str:
        """Makes the files of ``branch`` its newest commit; its hash."""
        files = self.of(branch)
        text = json.dumps([len(self.commits), sorted((name, sha256(data)) for name, data in files.items())])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.heads[branch] = commit
        return commit

    def of(self, branch: str) -> dict[str, bytes]:
        """The files of ``branch``, to be changed."""
        return self.files if branch == "main" else self.branches[branch]

    @property
    def head(self) -> str:
        """The hash of the newest commit of the main branch."""
        return self.heads["main"]


@dataclass
class HubServer:
    """repos: by ``models/owner/name`` or ``datasets/owner/name``.  cut: names of files whose next answers break off
    after so many bytes.  requests: (method, path, headers) of all that came.  lists: more names that a listing has.
    refused: commits that are refused from now on.  open: cleared, uploads wait.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)  # uploaded, by sha256
    refused: int = 0
    open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open.set()

    def paths(self, method: str) -> list[str]:
        """The paths asked for with ``method``."""
        return [path for made, path, _ in self.requests if made == method]

    def environment(self, home: str, **more: str) -> dict[str, str]:
        """The variables with which a client asks here, with its cache and login in ``home``."""
        asks = {"HF_ENDPOINT": self.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return asks | {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | more


def sha256(data: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    """As git names a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """While open: a server at a port of this machine."""
    hub = HubServer()

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing on standard error."""

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})

    def _handle(self) -> None:
        hub, parts = self.server_hub, urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        hub.requests.append((self.command, path, dict(self.headers)))
        if path.startswith("/api/") and (matched := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path)):
            return self._api(f"{matched[1]}/{matched[2]}", matched[3] or "", body, query)
        if path in ("/api/repos/create", "/api/whoami-v2", "/api/validate-yaml") or ".git/info/lfs" in path:
            return self._account(path, body)
        if path.startswith("/upload/"):
            hub.objects[path.removeprefix("/upload/")] = body
            return self._answer(200)
        if matched := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(f"{'datasets' if matched[1] else 'models'}/{matched[2]}", matched[3], matched[4])
        return self._refuse(404, "NoSuchPath")

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    @property
    def _entered(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str, revision: str, *, read: bool) -> tuple[Repo, str] | None:
        """The repository and its commit; None where that was refused."""
        repo = self.server_hub.repos.get(name)
        if repo is None or (repo.private and not self._entered):
            self._refuse(404 if self._entered else 401, "RepoNotFound")
        elif read and repo.gated and not self._entered:
            self._refuse(401, "GatedRepo")
        elif revision not in repo.heads and revision not in repo.commits:
            self._refuse(404, "RevisionNotFound")
        else:
            return repo, repo.heads.get(revision, revision)
        return None

    def _api(self, name: str, rest: str, body: bytes, query: dict[str, list[str]]) -> None:
        if rest.startswith(("/preupload/", "/commit/", "/branch/")):
            return self._written(name, rest, body)
        _, what, revision = (*rest.split("/"), "", "main")[:3] if rest else ("", "", "main")
        matched = self._repo(name, revision, read=what == "tree")
        if matched is None:
            return None
        repo, commit = matched
        if what == "tree":
            listed = {**repo.commits[commit], **dict.fromkeys(self.server_hub.lists, b"")}
            return self._json(
                [
                    {"type": "file", "path": each, "size": len(data), "oid": git_oid(data)}
                    for each, data in listed.items()
                ]
            )
        siblings = [{"rfilename": each} for each in repo.commits[commit]]
        owned = {"id": name.partition("/")[2], "private": repo.private, "gated": "manual" if repo.gated else False}
        return self._json({**owned, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def _file(self, name: str, revision: str, path: str) -> None:
        matched = self._repo(name, revision, read=True)
        if matched is None:
            return None
        repo, commit = matched
        if path not in repo.commits[commit]:
            return self._refuse(404, "EntryNotFound")
        data = repo.commits[commit][path]
        known = {"X-Repo-Commit": commit, "ETag": f'"{sha256(data)}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked:
            start = int(asked[1])
            known["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._answer(206, data[start:], known)
        if self.command == "GET" and path in self.server_hub.cut:
            sent = self.server_hub.cut.pop(path)
            self._answer(200, data[:sent], known | {"Content-Length": str(len(data)), "Connection": "close"})
            self.close_connection = True
            return None
        return self._answer(200, data, known)

    def _account(self, path: str, body: bytes) -> None:
        hub = self.server_hub
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if not self._entered:
            return self._answer(401, b'{"error": "Invalid username or password."}')
        if path == "/api/whoami-v2":
            return self._json({"name": "tester", "type": "user", "orgs": []})
        asked = json.loads(body)
        if path == "/api/repos/create":
            name = f"{asked.get('type') or 'model'}s/{asked.get('organization') or 'tester'}/{asked['name']}"
            if asked.get("organization") == "closed":
                return self._answer(403, b'{"error": "You don\'t have the rights to create a model under closed"}')
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(
                name, Repo({}, private=bool(asked.get("private") or asked.get("visibility") == "private"))
            )
            return self._json({"url": f"{hub.url}/{name.partition('/')[2]}"}, status)
        objects = [
            {**each, "actions": {"upload": {"href": f"{hub.url}/upload/{each['oid']}", "header": {}}}}
            for each in asked["objects"]
        ]
        return self._json({"transfer": "basic", "objects": objects})

    def _written(self, name: str, rest: str, body: bytes) -> None:
        if not self._entered:
            return self._refuse(401, "RepoNotFound")
        repo, branch = self.server_hub.repos[name], rest.split("/")[2]
        if rest.startswith("/branch/"):
            made = branch not in repo.heads
            if made:
                repo.branches[branch], repo.heads[branch] = dict(repo.files), repo.head
            return self._json({}, 200 if made else 409)
        if branch not in repo.heads:
            return self._refuse(404, "RevisionNotFound")
        files = repo.of(branch)
        if rest.startswith("/preupload/"):
            self.server_hub.open.wait(300.0)
            kinds = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]  # fmt: skip
            return self._json({"files": kinds})
        if self.server_hub.refused:
            self.server_hub.refused -= 1
            return self._refuse(403, "Forbidden")
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server_hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit, shown = repo.commit(branch), name.partition("/")[2]
        url = f"{self.server_hub.url}/{shown}/commit/{commit}"
        return self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
