"""Servers over HTTP, each in a thread, that answer what a test says. An answer: (status, body), perhaps with
headers."""

import contextlib
import http.server
import json
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    """server.reply(request, body) gives the answer, or None: it hangs up."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def setup(self):
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (said := self.server.reply(self, body)) is None:
            self.close_connection = True
            return
        status, text, *headers = said
        with contextlib.suppress(OSError):  # nobody waits any more
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text)), **dict(*headers)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(reply):
    """A server at a `url`. It notes its `connections`, and its maker what it was `asked`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.reply, server.url = reply, f"http://127.0.0.1:{server.server_port}"
        server.connections, server.asked = [], []
        # It looks every 20 ms whether it shall end; else each test would wait half a second for that.
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def model(answer, pause=lambda: 0.0):
    """chat/completions, and vLLM's completions; the `url` ends in /v1. answer(body) gives the text of the
    answer, or an answer as above, or None. `asked` has the bodies, `headers` those of all requests, `most` is
    how many questions were open at once. pause(): seconds before an answer."""
    lock, opened = threading.Lock(), []

    def reply(request, body):
        server.headers.append(request.headers)
        if request.command == "GET":
            return 200, json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]}).encode()
        body = json.loads(body)
        with lock:
            server.asked.append(body)
            opened.append(request)
            server.most = max(server.most, len(opened))
        time.sleep(pause())
        right = request.path == ("/v1/completions" if "prompt" in body else "/v1/chat/completions")
        said = answer(body) if right else (404, b"no such path")
        with lock:
            opened.remove(request)
        return (200, chat_answer(said)) if isinstance(said, str) else said

    with served(reply) as server:
        server.url, server.headers, server.most = f"{server.url}/v1", [], 0
        yield server


def chat_answer(text, finish: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode()


@contextlib.contextmanager
def site(pages=()):
    """A site of `pages`: {path: text, or an answer, or a function that gives one}. `asked` has the paths."""
    def reply(request, _):
        server.asked.append(request.path)
        said = server.pages.get(request.path.split("?")[0], (404, "no such page"))
        said = said() if callable(said) else said
        status, text, *headers = said if isinstance(said, tuple) else (200, said)
        return status, text.encode(), {"Content-Type": "text/html; charset=utf-8", **dict(*headers)}

    with served(reply) as server:
        server.pages = dict(pages)
        yield server
