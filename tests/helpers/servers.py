"""Servers over HTTP, each in a thread, that answer what a test says."""

import contextlib
import http.server
import json
import socket
import threading
import time


@contextlib.contextmanager
def served(handler, **own):
    """A server with a `port` and a `url`. Its handler finds it, with `own` as attributes, as self.server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(own, port=server.server_port, url=f"http://127.0.0.1:{server.server_port}")
        # It looks every 20 ms whether it shall end; else each test would wait half a second for that.
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class Replies(http.server.BaseHTTPRequestHandler):
    def reply(self, status: int, text: bytes, headers: dict[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(text))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


# ---- a model behind a URL ----------------------------------------------------------------------------------

class Model(Replies):
    """chat/completions, and vLLM's completions. `answer(body)` gives the text of the answer, or (status,
    bytes) and perhaps headers, or None: it hangs up. The server notes what it was `asked`, with which
    `headers`, over which `connections`, and how many questions were `open` at once at `most`. pause():
    seconds before an answer."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def setup(self):
        super().setup()
        self.server.connections.append(self.connection)

    def do_GET(self):
        self.server.headers.append(self.headers)
        self.reply(200, json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]}).encode())

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append(body)
            server.headers.append(self.headers)
            server.open += 1
            server.most = max(server.most, server.open)
        time.sleep(server.pause())
        right = self.path == ("/v1/completions" if "prompt" in body else "/v1/chat/completions")
        said = server.answer(body) if right else (404, b"no such path")
        with server.lock:
            server.open -= 1
        if said is None:
            self.close_connection = True
        else:
            self.reply(*(said if isinstance(said, tuple) else (200, chat_answer(said))))


@contextlib.contextmanager
def model(answer, pause=lambda: 0.0):
    """A server of Model; its `url` ends in /v1."""
    with served(Model, answer=answer, pause=pause, asked=[], headers=[], connections=[], open=0, most=0,
                lock=threading.Lock()) as server:
        server.url += "/v1"
        yield server


def end(server) -> None:
    """With all its connections, as where its process dies."""
    server.shutdown()
    server.server_close()
    for connection in server.connections:
        with contextlib.suppress(OSError):  # it has ended
            connection.shutdown(socket.SHUT_RDWR)


def chat_answer(text, finish: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode()


# ---- a site ------------------------------------------------------------------------------------------------

class Site(Replies):
    """`pages` of the server: {path: text, or (status, headers, text), or a function of the handler that gives
    one of these}. It notes in `asked` the paths, and "connection"."""

    def setup(self):
        super().setup()
        self.server.asked.append("connection")

    def do_GET(self):
        self.server.asked.append(self.path)
        said = self.server.pages.get(self.path.split("?")[0], (404, {}, "no such page"))
        said = said(self) if callable(said) else said
        status, headers, text = said if isinstance(said, tuple) else (200, {}, said)
        text = text.replace("HERE", f"127.0.0.1:{self.server.port}").encode()
        with contextlib.suppress(OSError):  # nobody waits any more
            self.reply(status, text, {"Content-Type": "text/html; charset=utf-8"} | headers)

    do_POST = do_GET


def site(pages=()):
    return served(Site, pages=dict(pages), asked=[])
