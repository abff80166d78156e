"""Claims about inference.py: what becomes of an answer that does not come, who is asked and who gets the key,
and how a server begins and ends. A stand-in of a few lines is vLLM's server. (The real one: test_vllm.py.)"""
import json
import random
import re
from pathlib import Path

import pytest
from conftest import base_folder, run
from helpers import servers
from helpers.processes import naming, torchrun, wait_for

import inference
import lm
from config import UserError
from inference import Chat, Client

BASE = base_folder()


def completion(**choice) -> tuple[int, bytes]:
    """What vLLM's completions answer."""
    return 200, json.dumps({"choices": [choice]}).encode()


def echo(body) -> tuple[int, bytes]:
    """The prompt's tokens, then the end of turn."""
    ids = [*body["prompt"], 3]
    return completion(token_ids=ids, logprobs={"token_logprobs": [-1.0] * len(ids)})


def ask(client, prompts):
    return [sample.ids for sample in lm.together(client.generate(ids, 8, 1.0, 0) for ids in prompts)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(inference, "PAUSE", 0.0)


# ---- answers -----------------------------------------------------------------------------------------------

def test_servers_keep_what_a_sampler_promises(serving):
    """Guards: text that is tokenised again, a lost end of turn, a seed or a temperature that does not arrive,
    a margin with its sign turned. The server samples from the same weights as a model of this process."""
    model = lm.load(BASE)

    def answer(body):
        prompt, pair = body["prompt"], body.get("logprob_token_ids")
        assert pair or body["ignore_eos"] and body["stop_token_ids"] == [3] and body["top_p"] == 1
        if not pair:
            (found,) = model.generate([prompt], body["max_tokens"], body["temperature"], [body["seed"]])
            return completion(token_ids=found.ids, logprobs={"token_logprobs": found.logps})
        (margin,) = model.margins([prompt], [pair[0]], [pair[1]])
        top = {f"token_id:{pair[0]}": margin, f"token_id:{pair[1]}": 0.0}
        return completion(logprobs={"top_logprobs": [top]})

    client, batched = Client([serving(answer).url], BASE), lm.Batched(model)  # of which test_lm says all
    for how in ((8, 0.7, 5), (8, 0.7, 6), (8, 0.0, 5), (2, 0.7, 5)):
        assert run(client.generate([9, 8], *how)) == run(batched.generate([9, 8], *how))
    assert run(client.margin([9, 8], 7, 6)) == run(batched.margin([9, 8], 7, 6))


def test_answers_come_in_the_order_asked_past_a_server_that_ends_and_no_more_than_64_are_open(serving):
    """Guards: rows that are mixed up; one request at a time, or a thousand; a second server that idles; a run
    that ends with one of its servers."""
    prompts = [[10 + k] for k in range(200)]
    echoed = [[*prompt, 3] for prompt in prompts]
    server = serving(echo, lambda: 0.2 + random.random() / 20)
    assert ask(Client([server.url], BASE), prompts) == echoed
    assert 8 < server.most <= 64
    alive = [True]
    first, second = serving(echo), serving(lambda body: echo(body) if alive else None)
    client = Client([first.url.removesuffix("/v1"), second.url + "/"], BASE)
    assert ask(client, prompts[:8]) == echoed[:8] and (client.name, client.context) == ("fake", 4096)
    assert len(first.asked) == len(second.asked) == 4
    alive.clear()
    assert ask(client, prompts[:8]) == echoed[:8] and len(first.asked) == 12
    with pytest.raises(UserError, match="no server lists its models at"):
        Client(["http://127.0.0.1:9"], BASE)


# ---- what fails --------------------------------------------------------------------------------------------

FAILS = [None, (429, b"slow down"), (500, b"oh no"), (302, b"moved"), (200, b"<html>"), (200, b"[]"),
         (200, b'{"choices": [{"token_ids": [5]}]}'), (400, b"max_tokens is too large"),
         (401, b"wrong key")]  # the last two can never work


@pytest.mark.parametrize("failure", FAILS)
def test_what_may_pass_is_tried_again_and_not_for_ever_and_what_never_works_once(serving, failure):
    """Guards: a night's dreams that end with one lost answer, or a dead server that is asked without end;
    patience with a wrong key; an error that does not say which server, or why."""
    fails, tries = [failure] * 3, 1 if failure in FAILS[-2:] else inference.TRIES
    server = serving(lambda body: fails.pop() if fails else echo(body))
    client = Client([server.url], BASE)
    if tries > 1:
        assert ask(client, [[7]]) == [[7, 3]]
    fails[:] = [failure] * 100
    why = f"HTTP {failure[0]}: {failure[1].decode()}" if failure and failure[0] != 200 else ""
    with pytest.raises(UserError, match=f"{server.url}/completions, asked {tries} times .*{why}"):
        ask(client, [[7]])


# ---- messages, and the key ---------------------------------------------------------------------------------

def test_a_chat_server_is_asked_with_messages_that_no_page_can_end(serving):
    """Guards: a page that ends its turn and gives orders; nothing or half an answer read as what the agent
    does; a page too long for the server that ends the run; another model than was named."""
    said = [(200, servers.chat_answer(None)), (200, servers.chat_answer("cut", "length")),
            (400, b"the maximum context length is 4096 tokens"), (413, b"the request is too large")]
    server = serving(lambda body: said.pop(0))
    chat = Chat(f"{server.url}/#mine")
    prompt = chat.template.prompt_ids([{"role": "user", "content": "a <b> <|end|></s>"}])
    found = [run(chat.generate(prompt, 8, 0.5, 7)) for _ in range(4)]
    assert [(it.text, it.truncated, it.refused) for it in found] == [
        ("", False, False), ("cut", True, False), *[("", True, True)] * 2]
    assert server.asked[0] == {"model": "mine", "max_tokens": 8, "temperature": 0.5, "seed": 7, "messages": [
        {"role": "user", "content": "a < b> < |end|>< /s>"}]}
    assert Chat(server.url).name == "fake" and chat.template.read(found[1]) == "cut"


def test_pages_and_keys_go_to_the_host_that_was_named_and_nowhere_else(serving, monkeypatch):
    """Guards: a redirect, or a proxy that the environment names, that gets the pages and the key; the key of
    one kind of server given to the other."""
    other, plain, talks = serving(echo), serving(echo), serving(lambda body: "So.")
    moves = serving(lambda body: (307, b"", {"Location": f"{other.url}/completions"}))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, other.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "ours\n")
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    ask(Client([plain.url], BASE), [[7]])
    run(Chat(talks.url).generate([{"role": "user", "content": "Go."}], 8, 0.0, 0))
    with pytest.raises(UserError, match="HTTP 307"):
        ask(Client([moves.url], BASE), [[7]])
    for server, key in ((plain, "ours"), (talks, "theirs")):
        assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {key}"] * 2
    assert not other.asked and not other.headers


# ---- servers that are started ------------------------------------------------------------------------------

VLLM = '''
import http.server, json, os, sys
flags = dict(zip(sys.argv, [*sys.argv[1:], ""]))
print(json.dumps([flags, dict(os.environ)]), flush=True)
if flags["--model"] == "broken":
    sys.exit("no such model")
address = "127.0.0.1", int(flags["--port"])
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
'''

RANK = '''
import json, os, sys
from pathlib import Path
import distributed, inference
from config import Engine, UserError
from helpers.processes import naming
_, base, given = sys.argv
distributed.init()
there = inference.serve({"one": (base, (), Engine(), 512), "two": (base, (given,), Engine(), 9)}, Path("."))
said = [*[client.servers.urls for client in there.values()], len(naming(f"--model {base} "))]
try:
    inference.serve({"bad": ("broken", (), Engine(), 512)}, Path("."))
except UserError as error:
    Path(os.environ["RANK"]).write_text(json.dumps([*said, str(error)]))
'''


def test_ranks_share_a_server_which_ends_with_the_first_and_raise_together(tmp_path, serving, monkeypatch):
    """Guards: a server for each rank, or that outlives its run; one that takes torchrun's variables or the
    folder's generation_config.json; a rank that waits for ever for one that did not start, or is silent."""
    files = {"vllm/entrypoints/openai/api_server.py": VLLM, "rank.py": RANK, "health": "",
             "v1/models": json.dumps({"data": [{"id": "x", "max_model_len": 512}]})}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    torchrun("rank.py", BASE, given := serving(echo).url)
    (started, named, count, error), other = (json.loads(Path(rank).read_text()) for rank in "01")
    flags, env = json.loads(Path("one.log").read_text().splitlines()[0])
    assert other == [started, named, count, error] and named == [given] and count == 1
    assert started == [f"http://127.0.0.1:{flags['--port']}/v1"]
    assert "the end of bad.log" in error and "no such model" in error
    assert (flags["--model"], flags["--max_model_len"]) == (str(BASE), "512")
    assert (flags["--generation_config"], flags["--logprobs_mode"]) == ("vllm", "processed_logprobs")
    assert not [name for name in env if re.match("RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|TORCHELASTIC", name)]
    wait_for(lambda: not naming(f"--port {flags['--port']} "), 20)
