"""Servers over HTTP that answer what a test says."""

import http.server
import json
import threading
import time


class Replies(http.server.BaseHTTPRequestHandler):
    """A server's half of a request, silent. Tests add what it answers."""

    def reply(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Server:
    """A chat/completions server in a thread. `answer(body)` gives the text of the answer, or (status, bytes),
    or None: it hangs up. What it was asked stands in `asked` and `headers`."""

    def __init__(self, answer, pause: float = 0.0):
        self.answer, self.asked, self.headers, self.together, self.most = answer, [], [], 0, 0
        outer, lock = self, threading.Lock()

        class Handler(Replies):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append(body)
                    outer.headers.append(self.headers)
                    outer.together += 1
                    outer.most = max(outer.most, outer.together)
                time.sleep(pause)
                if self.path != "/v1/chat/completions":
                    said = 404, b"no such path"
                else:
                    said = outer.answer(body)
                with lock:
                    outer.together -= 1
                if said is None:
                    self.close_connection = True
                    return
                status, text = said if isinstance(said, tuple) else (200, chat_answer(said))
                self.reply(status, text)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def chat_answer(text, finish: str = "stop", **more) -> bytes:
    message = {"role": "assistant", "content": text} | more
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]}).encode()
