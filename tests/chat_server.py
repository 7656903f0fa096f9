"""A stand-in for an OpenAI-compatible server, for time and failure; integration has vLLM's own."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

HANG = object()
"""No reply until the server ends."""
CUT = object()
"""A reply that breaks off."""
Reply: TypeAlias = Callable[[dict[str, Any]], object]
"""From a request to an answer's text, a status, (status, headers), bytes, HANG or CUT."""


class ChatServer:
    """What was asked, in the order in which it came."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.ending = threading.Event()
        self.lock = threading.Lock()
        self.most = self.now = 0

    @property
    def prompts(self) -> list[str]:
        return [asked["messages"][-1]["content"] for asked in self.asked]


def completion(text: object, finish_reason: str = "stop") -> bytes:
    """Return the body of a reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return json.dumps({"choices": [choice | {"finish_reason": finish_reason}]}).encode()


@contextlib.contextmanager
def chat_server(reply: Reply) -> Iterator[ChatServer]:
    """Answer every request with what `reply` returns for it."""
    server = ChatServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.now += 1
                server.most = max(server.most, server.now)
                server.asked.append(body)
                server.keys.append(self.headers["Authorization"])
                made = server.reply(body) if self.path == "/v1/chat/completions" else 404
            if made is HANG:
                server.ending.wait()
                return
            with server.lock:
                server.now -= 1
            status, headers = made if isinstance(made, tuple) else (made, {})
            content = status if isinstance(status, bytes) else b""
            if isinstance(status, str):
                content = completion(status)
            self.send_response(status if isinstance(status, int) else 200)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) + 10 * (status is CUT)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{httpd.server_port}/v1"
    try:
        yield server
    finally:
        server.ending.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()
