"""A stand-in for the Hub's upload API, on this machine: what `huggingface_hub` asks of it.

It keeps repositories in memory: a branch is a list of commits, a commit is path -> bytes. Small
files come inline with the commit, large ones through LFS first, as on the Hub.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_secret"
LARGEST_REGULAR = 100
"""Bytes; what is larger goes through LFS."""


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.branches: dict[str, list[dict[str, bytes]]] = {"main": [{}]}


class HubServer:
    """Use as a context manager.

    Attributes:
        repositories: by name.
        requests: method and path of all that came, in order.
        fail_with: a status with which to answer everything, or None.
        hang: seconds to wait before any answer.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.fail_with: int | None = None
        self.hang = 0.0
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
        """Variables that lead the real client here."""
        variables = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return variables if token is None else variables | {"HF_TOKEN": token}

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a branch holds."""
        return self.repositories[repo_id].branches[revision][-1]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def do_PUT(self) -> None:
        self.serve()

    def serve(self) -> None:
        hub = self.hub
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        hub.requests.append(f"{self.command} {self.path}")
        if hub.hang:
            hub.stopping.wait(hub.hang)
        if hub.fail_with is not None:
            return self.answer(hub.fail_with, {"error": "as it was told"})
        if self.command == "PUT":  # An address that was given out needs no token, as on S3.
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.blobs[oid] = body
            return self.answer(200, {})
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        return self.answer(*self.respond(list(map(unquote, self.path.strip("/").split("/"))), body))

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
        return {"actions": {"upload": {"href": f"{self.hub.url}/blobs/{oid}"}}}

    def of_repository(
        self, method: str, repo_id: str, repository: Repository, rest: list[str], body: bytes
    ) -> tuple[int, object]:
        match method, rest:
            case "GET", []:
                return 200, {"id": repo_id, "private": repository.private, "sha": "0" * 40}
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
                    "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}",
                    "commitOid": oid,
                }
            case _:
                return 404, {"error": f"not stood in for: {self.command} {self.path}"}

    def answer(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
