"""A server that speaks OpenAI's API, in a thread of the test, and a key that must go nowhere."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-never-to-be-seen"


class APIServer(ThreadingHTTPServer):
    """
    Attributes:
        reply: from path and request to an answer: an object, bytes as they are, or events that are streamed.
        asked: the requests, each with its path.
        keys: authorisations that came with them.
        failures: (status, answer) of the next requests, before `reply` is asked; None as answer asks it all the same.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.asked, self.keys, self.failures = reply, [], set(), []

    def handle_error(self, request, client_address):
        """A client that went away is none."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.asked.append(asked | {"path": self.path})
        server.keys.add(self.headers["authorization"])
        status, answer = server.failures.pop(0) if server.failures else (200, None)
        if answer is None:
            answer = server.reply(self.path, asked)
        self.send_response(status)
        self.send_header("retry-after-ms", "5")
        if isinstance(answer, dict | bytes):
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in answer:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@contextmanager
def serving(reply, tmp_path, monkeypatch):
    """An `APIServer`, whom the environment names, and a cache in `tmp_path`."""
    made = APIServer(reply)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{made.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def assert_secret(folder, server):
    """Neither key nor server is in any file."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content, path
            assert f"127.0.0.1:{server.server_port}".encode() not in content, path
