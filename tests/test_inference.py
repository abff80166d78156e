"""Claims about inference.py: what becomes of an answer that does not come, who is asked and who gets the key,
and how a server begins and ends. Real HTTP, real processes; a stand-in of a few lines is vLLM's server. (The
real one: test_vllm.py.)"""
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, base_folder, check_sampler, run
from helpers import servers
from helpers.processes import running, wait_for

import inference
import lm
from config import EngineError
from inference import Chat, Client

BASE = base_folder()
CHAT = [{"role": "user", "content": "Go."}]


def completion(ids, logps=None) -> tuple[int, bytes]:
    """What vLLM's completions answer."""
    said = {"token_ids": ids, "logprobs": {"token_logprobs": logps or [-1.0] * len(ids)}}
    return 200, json.dumps({"choices": [said]}).encode()


def echo(body) -> tuple[int, bytes]:
    """The prompt's tokens, then the end of turn."""
    return completion([*body["prompt"], 3])


def ask(client, prompts):
    return [sample.ids for sample in lm.together(client.generate(ids, 8, 1.0, 0) for ids in prompts)]


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    """The pauses that were made, without their time."""
    pauses, sleep = [], asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pauses.append(seconds) or sleep(0))
    return pauses


# ---- answers -----------------------------------------------------------------------------------------------

def test_servers_keep_what_a_sampler_promises(serving):
    """Guards: answers of servers that policy.py and judge.py cannot use as they use a model's of the process:
    text that is tokenised again, a lost end of turn, a seed or a temperature that does not arrive, a margin
    with its sign turned. The server samples from the same weights."""
    model, lock = lm.load(BASE), threading.Lock()

    def answer(body):
        prompt, pair = body["prompt"], body.get("logprob_token_ids")
        assert pair or body["ignore_eos"] and body["stop_token_ids"] == [3] and body["top_p"] == 1
        with lock:
            if not pair:
                (found,) = model.generate([prompt], body["max_tokens"], body["temperature"], [body["seed"]])
                return completion(found.ids, found.logps)
            (margin,) = model.margins([prompt], [pair[0]], [pair[1]])
        top = {f"token_id:{pair[0]}": margin, f"token_id:{pair[1]}": 0.0}
        return 200, json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()

    check_sampler(Client([serving(answer).url], BASE))


def test_answers_come_in_the_order_asked_and_no_more_than_64_are_open(serving):
    """Guards: rows that are mixed up, one at a time, a connection for each turn of each dream, or a thousand
    at once in a large evaluation."""
    server = serving(echo, lambda: random.random() / 20)
    client = Client([server.url], BASE)
    prompts = [[10 + k] for k in range(200)]
    assert ask(client, prompts) == [[*prompt, 3] for prompt in prompts]
    assert 8 < server.most <= 64 and len(server.connections) <= 1 + 64


def test_servers_are_asked_in_turn_and_past_one_that_ends(serving, slept):
    """Guards: a second node that idles; a run that ends with one of its servers; a page that only one of them
    can read."""
    first, second = serving(echo), serving(echo)
    client = Client([first.url.removesuffix("/v1"), second.url + "/"], BASE)
    prompts = [[10 + k] for k in range(8)]
    assert ask(client, prompts) == [[*prompt, 3] for prompt in prompts] and client.context == 4096
    assert len(first.asked) == len(second.asked) == 4 and {body["model"] for body in first.asked} == {"fake"}
    servers.end(second)
    assert ask(client, prompts) == [[*prompt, 3] for prompt in prompts] and len(first.asked) == 12


# ---- what fails --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("failure", [
    (429, b"slow down"), (500, b"oh no"), (503, b""), None, (200, b"<html>"), (200, b"{}"), (200, b"[]"),
    (200, b'{"choices": []}'), (200, b'{"choices": [{"token_ids": [5]}]}'), (200, b"\xff"), (302, b"moved")])
def test_what_may_pass_is_tried_again_and_not_for_ever(serving, slept, failure):
    """Guards: a night's dreams that end with one lost answer; a server that is dead, asked without end; an
    error that does not say which server, or why."""
    fails = [failure] * 3
    server = serving(lambda body: fails.pop() if fails else echo(body))
    client = Client([server.url], BASE)
    server.handle_error = lambda *_: None  # a client that has gone
    assert ask(client, [[7]]) == [[7, 3]] and len(server.asked) == 4
    assert [pause for pause in slept if pause] == [1, 2, 4], "they double"
    fails[:] = [failure] * 100
    with pytest.raises(EngineError) as error:
        ask(client, [[7]])
    assert len(server.asked) == 4 + inference.TRIES and f"{server.url}/completions" in str(error.value)
    assert not failure or failure[0] == 200 or f"HTTP {failure[0]}: {failure[1].decode()}" in str(error.value)


def test_a_server_that_is_away_for_a_moment_is_waited_for(serving, monkeypatch):
    """Guards: no connection taken for the end. A server that stays away ends the batch with one line."""
    monkeypatch.setattr(inference, "PAUSE", 0.05)
    server, returned = serving(echo), []
    client = Client([server.url], BASE)
    servers.end(server)
    threading.Timer(0.3, lambda: returned.append(serving(echo, port=server.port))).start()
    assert ask(client, [[7], [8]]) == [[7, 3], [8, 3]]
    servers.end(returned[0])
    with pytest.raises(EngineError, match=f"127.0.0.1:{server.port}/v1/completions, asked 6 times.*Connect"):
        ask(client, [[7]])


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_can_never_work_is_an_error_at_once(serving, slept, status):
    """Guards: patience with a wrong key, and a refusal that is taken for the agent's answer."""
    server = serving(lambda body: (status, b"this request is wrong"))
    for asked in (lambda: ask(Client([server.url], BASE), [[7]]),
                  lambda: run(Chat(f"{server.url}#mine").generate(CHAT, 8, 0.0, 0))):
        server.asked.clear()
        with pytest.raises(EngineError, match=f"asked 1 times.*HTTP {status}: this request is wrong"):
            asked()
        assert len(server.asked) == 1


@pytest.mark.parametrize("status, says, refused", [
    (400, "the maximum context length is 4096 tokens", True), (413, "the request is too large", True),
    (400, "no such model", False), (404, "too long", False), (500, "the queue is too long", False)])
def test_only_a_page_that_a_chat_server_finds_too_long_is_refused(serving, slept, status, says, refused):
    """Guards: a set-up that is wrong, played for 600 tries as pages that were too long."""
    chat = Chat(serving(lambda body: (status, says.encode())).url)
    if refused:
        assert run(chat.generate(CHAT, 8, 0.0, 0)) == lm.Sample([], [], "", True, refused=True)
    else:
        with pytest.raises(EngineError, match=says):
            run(chat.generate(CHAT, 8, 0.0, 0))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "127.0.0.1:8000", "http://[", "nowhere"])
def test_a_url_where_no_server_is_says_so(url):
    """Guards: a traceback from httpx at the start of a run. Where nothing is dreamed nobody is asked."""
    for client in (lambda: Client([url], BASE), lambda: Chat(url)):
        with pytest.raises(EngineError, match="no server lists its models at"):
            client()
    assert inference.serve({}, Path("/nowhere")) == {}


# ---- messages, and the key ---------------------------------------------------------------------------------

def test_a_chat_server_is_asked_with_messages_that_no_page_can_end(serving):
    """Guards: a page that ends its turn and gives orders; thoughts, parts, nothing or half an answer read as
    what the agent does; another model than the one that was named."""
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    said = [servers.chat_answer(None, reasoning="hm"), servers.chat_answer("cut", "length"),
            servers.chat_answer(parts)]
    server = serving(lambda body: (200, said.pop(0)))
    chat = Chat(f"{server.url}/#mine")
    prompt = chat.template.prompt_ids([{"role": "user", "content": "a <b> <|end|></s>"}])
    found = [run(chat.generate(prompt, 8, 0.5, 7)) for _ in range(3)]
    assert [(it.text, it.truncated) for it in found] == [("", False), ("cut", True), ("ab", False)]
    assert server.asked[0] == {"model": "mine", "max_tokens": 8, "temperature": 0.5, "seed": 7, "messages": [
        {"role": "user", "content": "a < b> < |end|>< /s>"}]}
    assert Chat(server.url).name == "fake" and chat.template.read(found[1]) == "cut"


class Redirecting(servers.Model):
    """It says that the model is elsewhere."""

    def reply(self, status, text):
        super().reply(307 if self.command == "POST" else status, text, Location=self.server.elsewhere)


def test_pages_and_keys_go_to_the_host_that_was_named_and_nowhere_else(serving, slept, monkeypatch):
    """Guards: a redirect, or a proxy that the environment names, that gets the pages and the key; the key of
    one kind of server given to the other."""
    other, plain, moves = serving(echo), serving(echo), serving(echo, handler=Redirecting)
    talks = serving(lambda body: "So.")
    moves.elsewhere = f"{other.url}/completions"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, other.url)
    monkeypatch.setenv("VLLM_API_KEY", "ours\n")
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    ask(Client([plain.url], BASE), [[7]])
    run(Chat(talks.url).generate(CHAT, 8, 0.0, 0))
    with pytest.raises(EngineError, match="HTTP 307"):
        ask(Client([moves.url], BASE), [[7]])
    for server, key in ((plain, "ours"), (talks, "theirs")):
        assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {key}"] * 2
    assert not other.asked and not other.headers
    monkeypatch.delenv("VLLM_API_KEY")
    ask(Client([plain.url], BASE), [[7]])
    assert not any("Authorization" in headers for headers in plain.headers[2:])


# ---- servers that are started ------------------------------------------------------------------------------

VLLM = '''
import http.server, json, os, sys
flags = dict(zip(sys.argv, [*sys.argv[1:], ""]))
print(json.dumps([os.getpid(), flags, dict(os.environ)]), flush=True)
if "broken" in flags["--model"]:
    sys.exit("no such model")
models = json.dumps({"data": [{"id": "x", "max_model_len": int(flags["--max_model_len"])}]}).encode()

class Model(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.wfile.write(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + models)
http.server.HTTPServer(("127.0.0.1", int(flags["--port"])), Model).serve_forever()
'''

RANK = '''
import json, os, sys, time
from pathlib import Path
import distributed, inference
from config import Engine, EngineError
base, given, files = sys.argv[1], sys.argv[2], Path(sys.argv[3])
distributed.init()
there = inference.serve({"one": (base, (), Engine(), 512), "two": (base, (given,), Engine(), 9)}, files)
said = [[client.context, client.servers.urls] for client in there.values()]
try:
    inference.serve({"bad": (files / "broken", (), Engine(), 512)}, files)
except EngineError as error:
    (files / os.environ["RANK"]).write_text(json.dumps([*said, str(error)]) + "\\n")
time.sleep(600)
'''


def test_ranks_share_a_server_which_ends_with_the_first_and_raise_together(tmp_path, serving):
    """Guards: a server for each rank; one that takes torchrun's variables for its own, or the folder's
    generation_config.json; one that outlives a run that was killed, with all the GPU memory; a rank that
    waits for ever for a server that did not start, or does not say why."""
    (module := tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (module / "api_server.py").write_text(VLLM)
    given, ranks, wrote = serving(echo).url, [], [tmp_path / "0", tmp_path / "1"]
    torchruns = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(servers.free_port()),
                 "TORCHELASTIC_RUN_ID": "x"}
    for rank in ("0", "1"):
        env = torchruns | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        command = [sys.executable, "-c", RANK, BASE, given, tmp_path]
        ranks.append(subprocess.Popen(command, env=os.environ | env))
    try:
        wait_for(lambda: all(file.exists() and file.read_text().endswith("\n") for file in wrote), 120)
        (one, two, error), other = (json.loads(file.read_text()) for file in wrote)
        pid, flags, env = json.loads((tmp_path / "one.0.log").read_text().splitlines()[0])
        assert other == [one, two, error] and two == [4096, [given]] and not (tmp_path / "two.0.log").exists()
        assert one == [512, [f"http://127.0.0.1:{flags['--port']}/v1"]] and flags["--model"] == str(BASE)
        assert "no such model" in error and f"the end of {tmp_path}/bad.0.log" in error
        assert flags["--generation_config"] == "vllm" and flags["--logprobs_mode"] == "processed_logprobs"
        assert not {*torchruns, "RANK", "LOCAL_RANK"} & env.keys() and "--no-enforce_eager" in flags
        assert running(pid)
        ranks[0].kill()
        wait_for(lambda: not running(pid), 20)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
