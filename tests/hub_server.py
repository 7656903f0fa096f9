"""A stand-in for the Hub, on this machine: what `huggingface_hub` asks of it to push and to load.

It keeps repositories in memory: a branch is a list of commits, a commit is path -> bytes. Small
files come inline with the commit, large ones through LFS first, as on the Hub. Public repositories
can be read without a token. The name of a data set begins with `datasets/`.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any
from urllib.parse import unquote

import pytest

TOKEN = "hf_secret"
LARGEST_REGULAR = 100
"""Bytes; what is larger goes through LFS."""


class Repository:
    def __init__(self, private: bool, files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.private = private
        self.branches: dict[str, list[dict[str, bytes]]] = {"main": [dict(files)]}

    def has(self, revision: str) -> bool:
        """Return whether the revision is a branch or a commit."""
        return revision in self.branches or re.fullmatch("[0-9a-f]{40}", revision) is not None

    def commit(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the hash of a commit or a branch, which is a number, and its files."""
        commits = self.branches.get(revision) or self.branches["main"][: int(revision, 16)]
        return f"{len(commits):040x}", commits[-1]


class HubServer:
    """Use as a context manager.

    Attributes:
        repositories: by name.
        requests: method and path of all that came, in order.
        fail_with: a status with which to answer everything, or None.
        read_only: whether the token may not write.
        fail_after: requests that are answered well all the same, and at once.
        hang: seconds to wait before any answer.
        verify_at: where an upload has to be told of, with the token; nowhere if empty.
        after_commit: what the addresses of commits end with.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.fail_with: int | None = None
        self.fail_after = 0
        self.read_only = False
        self.hang = 0.0
        self.verify_at = ""
        self.after_commit = ""
        self.blobs: dict[str, bytes] = {}
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, token: str | None = TOKEN) -> dict[str, str]:
        """Return variables that make the real client use this server."""
        variables = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return variables if token is None else variables | {"HF_TOKEN": token}

    def lead_here(self, patch: pytest.MonkeyPatch, cache: Path | None = None) -> None:
        """Make the client of this process and of its children use this server."""
        from huggingface_hub import constants  # It has read the variables when it was imported.

        for name, value in self.environment().items():
            patch.setenv(name, value)
        patch.setattr(constants, "ENDPOINT", self.url)
        resolve = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        if cache is not None:
            patch.setattr(constants, "HF_HUB_CACHE", str(cache))

    def serve(self, name: str, directory: Path) -> Repository:
        """Add a public repository with the files of a directory, and return it."""
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        self.repositories[name] = Repository(private=False, files=files)
        return self.repositories[name]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch."""
        return self.repositories[repo_id].branches[revision][-1]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def serve(self) -> None:
        hub = self.hub
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/api/agent-harnesses":  # The client asks it once a day, whatever it does.
            return self.answer(404, {})
        hub.requests.append(f"{self.command} {self.path}")
        is_well = len(hub.requests) <= hub.fail_after
        if hub.hang and not is_well:
            hub.stopping.wait(hub.hang)
        if hub.fail_with is not None and not is_well:
            return self.answer(hub.fail_with, {"error": "as it was told"})
        if self.command == "PUT":  # An address that was given out needs no token, as on S3.
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.blobs[oid] = body
            return self.answer(200, {})
        parts = list(map(unquote, self.path.partition("?")[0].strip("/").split("/")))
        has_token = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if (found := self.read(parts, has_token)) is not None:
            return self.answer(*found)
        if not has_token:
            return self.answer(401, {"error": "Invalid credentials"})
        if hub.read_only:
            return self.answer(403, {"error": "You don't have the rights"})
        return self.answer(*self.respond(parts, body))

    do_GET = do_HEAD = do_POST = do_PUT = serve

    def read(self, parts: list[str], has_token: bool) -> tuple[int, object, dict[str, str]] | None:
        """Return the reply to what may be asked of a public repository; None for other requests."""
        match parts:
            case ["api", "models", owner, name, *what]:
                repo_id = f"{owner}/{name}"
            case ["api", "datasets", owner, name, *what]:
                repo_id = f"datasets/{owner}/{name}"
            case ["datasets", owner, name, "resolve", *what]:
                repo_id, what = f"datasets/{owner}/{name}", ["resolve", *what]
            case [owner, name, "resolve", *what]:
                repo_id, what = f"{owner}/{name}", ["resolve", *what]
            case _:
                return None
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not has_token):
            if "authorization" in self.headers and not has_token:
                wrong = {"X-Error-Message": "Invalid credentials in Authorization header"}
                return 401, {}, wrong
            return (404 if has_token else 401), {}, {"X-Error-Code": "RepoNotFound"}
        if what[:1] and what[0] in ("revision", "tree", "resolve") and not repository.has(what[1]):
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        match self.command, what:
            case "GET", [] | ["revision", _]:
                sha, files = repository.commit(what[1] if what else "main")
                return (
                    200,
                    {
                        "id": repo_id.removeprefix("datasets/"),
                        "private": repository.private,
                        "sha": sha,
                        "siblings": [{"rfilename": name} for name in files],
                    },
                    {},
                )
            case "GET", ["tree", revision, *folder]:
                _, files = repository.commit(revision)
                is_whole = "recursive=true" in self.path
                return 200, _tree(files, "/".join(folder), is_whole), {}
            case "GET" | "HEAD", ["resolve", revision, *file]:
                sha, files = repository.commit(revision)
                content = files.get("/".join(file))
                if content is None:
                    return 404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
                return 200, content, {"X-Repo-Commit": sha, "ETag": f'"{_etag(content)}"'}
            case _:
                return None

    def respond(self, parts: list[str], body: bytes) -> tuple[int, object]:
        hub = self.hub
        match self.command, parts:
            case "POST", ["api", "repos", "create"]:
                wanted = json.loads(body)
                name = f"{wanted['organization']}/{wanted['name']}"
                if name in hub.repositories:
                    return 409, {"error": "exists", "url": f"{hub.url}/{name}"}
                hub.repositories[name] = Repository(wanted.get("visibility") == "private")
                return 200, {"url": f"{hub.url}/{name}"}
            case "POST", ["verify"]:
                return 200, {}
            case "POST", ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
            case "POST", [owner, name, "info", "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                return 200, {
                    "objects": [
                        wanted | ({} if wanted["oid"] in hub.blobs else self.upload(wanted["oid"]))
                        for wanted in objects
                    ]
                }
            case method, ["api", "models", owner, name, *rest]:
                repository = hub.repositories.get(f"{owner}/{name}")
                if repository is None:
                    return 404, {"error": "Repository not found"}
                return self.of_repository(method, f"{owner}/{name}", repository, rest, body)
            case _:
                return 404, {"error": f"not stood in for: {self.command} {self.path}"}

    def upload(self, oid: str) -> dict[str, object]:
        upload: dict[str, object] = {"upload": {"href": f"{self.hub.url}/blobs/{oid}"}}
        told = {"verify": {"href": self.hub.verify_at}} if self.hub.verify_at else {}
        return {"actions": upload | told}

    def of_repository(
        self, method: str, repo_id: str, repository: Repository, rest: list[str], body: bytes
    ) -> tuple[int, object]:
        match method, rest:
            case "POST", ["branch", branch]:
                if branch in repository.branches:
                    return 409, {"error": "exists"}
                repository.branches[branch] = list(repository.branches["main"])
                return 200, {}
            case "POST", ["preupload", branch] if branch in repository.branches:
                return 200, {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["size"] > LARGEST_REGULAR else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                }
            case "POST", ["commit", branch] if branch in repository.branches:
                files = dict(repository.branches[branch][-1])
                for line in body.splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        files[value["path"]] = self.hub.blobs[value["oid"]]
                    else:
                        assert entry["key"] == "header", entry
                repository.branches[branch].append(files)
                oid = f"{len(repository.branches[branch]):040x}"
                return 200, {
                    "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}{self.hub.after_commit}",
                    "commitOid": oid,
                }
            case _:
                return 404, {"error": f"not stood in for: {self.command} {self.path}"}

    def answer(
        self, status: int, value: object, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # Who asked may have given up.
                self.wfile.write(content)


def _tree(files: Mapping[str, bytes], folder: str, is_whole: bool) -> list[dict[str, object]]:
    """Return the entries of a folder, recursively if asked."""
    prefix = f"{folder}/" if folder else ""
    found: list[dict[str, object]] = []
    folders: set[str] = set()
    for name, content in files.items():
        if not name.startswith(prefix):
            continue
        *between, _ = name.removeprefix(prefix).split("/")
        folders |= {prefix + "/".join(between[: n + 1]) for n in range(len(between))}
        if is_whole or not between:
            size, oid = len(content), _etag(content)
            found.append({"type": "file", "path": name, "size": size, "oid": oid})
    seen = sorted(each for each in folders if is_whole or "/" not in each.removeprefix(prefix))
    return [*found, *({"type": "directory", "path": each, "oid": _etag(b"")} for each in seen)]


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
