"""Dreams that wait for each other, turn by turn, beside dreams that do not: what does a batch of either cost?

    python -m bench.bench_dreams [--speed 40] [--repeat 8]        # some two minutes; no GPU, no weights

Compare the two in one run: the ratio (the last column). Real are policy.rollout, node/dreams.py's Dream,
WorldModel, remote.Remote with its threads and HTTP, and a process for each of 8 ranks. Scripted are the world
model's server, which shares its tokens a second among the open requests, and each rank's engine. How many
tokens an answer has is a function of its seed, so both ways wait for the same. A delta is a share of a
page of 9,000 tokens: log-normal, median .06 and mean .23 (NOTES 2.7), and a reason of 200 tokens. The agent
writes 300 tokens, log-normal (sigma .5, an assumption). A rank has 2 dreams of 5 turns, which nobody ends or
judges. All times are divided by --speed. Reading prompts is left out.
"""

import http.server
import json
import math
import multiprocessing
import random
import statistics
import time
from types import SimpleNamespace

import tyro

import dream
import lm
import remote
from data import Start
from judge import Judge
from node import dreams
from world_model import WorldModel

RANKS, ROWS = 8, 16  # dreams of a batch
TOKENIZER = "tiny/base"
CONFIG = dream.Config(horizon=5, max_new_tokens=64, world_model_tokens=64)
# Tokens a second of 1, 2, 4, .. 64 answers together on H100s: gpt-oss-120b on 8 (InferenceX #828, vLLM), and
# Llama-3.1-8B on one (reckoned from bytes and flops).
RATES = {"world_model": (286, 554, 1075, 1975, 3313, 5498, 8696),
         "agent": (136, 255, 451, 736, 1074, 1395, 1639)}
START = Start("bench", 0, (), "Press.", "http://x/", "RootWebArea 'x', url='http://x/'\n\t[1] button 'a'", ())
TURN = "In summary, the next action I will perform is ```click [1]```"


def tokens(name: str, seed: int) -> float:
    """How long an answer is that is drawn with this seed."""
    rng = random.Random(seed)
    if name == "world_model":
        return 200 + 9_000 * min(1.0, rng.lognormvariate(math.log(0.06), 2.3))
    return 300 * rng.lognormvariate(-0.5**2 / 2, 0.5)


def each(name: str, n: int) -> float:
    """Tokens a second that one of n answers gets, between the measured sizes by a straight line."""
    k = min(int(math.log2(n)), 5)
    low, high = RATES[name][k:k + 2]
    return (low + (high - low) * (n / 2**k - 1)) / n


def serve(speed: float, port) -> None:
    """vLLM's completions, as remote.Remote asks for them."""
    tokenizer, opened = lm.load_tokenizer(TOKENIZER), []
    said = tokenizer("It does nothing.\nno change\nover: no").input_ids + [tokenizer.eos_token_id]

    logprobs = {"token_logprobs": [-1.0] * len(said)}

    def write(left: float) -> None:
        """Returns when so many tokens are written; looks every 2 ms how many share the server."""
        opened.append(None)  # a list's own operations are atomic
        at = time.monotonic()
        while left > 0:
            time.sleep(0.002)
            now = time.monotonic()
            left, at = left - (now - at) * speed * each("world_model", len(opened)), now
        opened.pop()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm, log_message = "HTTP/1.1", True, lambda *_: None

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            write(tokens("world_model", asked["seed"]))
            self.do_GET({"choices": [{"token_ids": said, "logprobs": logprobs}]})

        def do_GET(self, answer=None):
            text = json.dumps(answer or {"data": [{"id": "scripted", "max_model_len": 8192}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(web.server_port)
    web.serve_forever()


class Agent:
    """The policy's engine in a rank: what a batch takes, and the action of each row."""

    concurrency, context = 1, 8192

    def __init__(self, speed: float):
        self.speed, self.template = speed, lm.Template(lm.load_tokenizer(TOKENIZER))

    def generate(self, prompts, max_new_tokens, temperature, seeds) -> list[lm.Sample]:
        seconds, written = 0.0, 0.0
        for k, length in enumerate(sorted(tokens("agent", seed) for seed in seeds)):  # the short ones first
            seconds, written = seconds + (length - written) / each("agent", len(seeds) - k), length
        time.sleep(seconds / self.speed)
        ids = self.template.completion_ids(TURN)
        return [lm.Sample(ids, [-1.0] * len(ids), TURN, False) for _ in seeds]


def rank(number: int, ways: list[tuple[str, int]], speed: float, url: str, together, results) -> None:
    """One rank's share of each batch: (way, seed) of `ways`, one after the other."""
    agent, client = Agent(speed), remote.Remote([url], TOKENIZER)
    # One question at a time, a batch: all dreams wait for its longest answer.
    batched = SimpleNamespace(concurrency=1, template=client.template, context=client.context,
                              generate=client.generate)
    parts = {way: dream.Models(agent, WorldModel(model, 64, 0.7), Judge(model, 64), dreams.Dream)
             for way, model in (("waiting", batched), ("going on", client))}
    for way, seed in ways:
        mine = [lm.mix(seed, k) for k in range(number, ROWS, RANKS)]  # distributed.shard_rows
        together.wait()
        began = time.monotonic()
        dream.trajectories(parts[way], [(START, None)] * len(mine), CONFIG, mine)
        results.put((way, seed, time.monotonic() - began))


def main(speed: float = 40.0, repeat: int = 8) -> None:
    # A fork shares what is imported, and is safe here: nothing has run in torch.
    forked = multiprocessing.get_context("fork")
    port, told = forked.Pipe()
    forked.Process(target=serve, args=(speed, told), daemon=True).start()
    url = f"http://127.0.0.1:{port.recv()}"
    ways = [(way, k) for k in range(repeat) for way in sorted(("waiting", "going on"), reverse=k % 2)]
    together, results = forked.Barrier(RANKS), forked.Queue()
    for number in range(RANKS):
        forked.Process(target=rank, args=(number, ways, speed, url, together, results), daemon=True).start()
    longest = dict.fromkeys(ways, 0.0)  # of the ranks' times: a batch ends with its last dream
    for _ in range(len(ways) * RANKS):
        way, seed, seconds = results.get(timeout=600)  # or a rank has died
        longest[way, seed] = max(longest[way, seed], speed * seconds)
    ratios = [longest["going on", k] / longest["waiting", k] for k in range(repeat)]
    for k, ratio in enumerate(ratios):
        print(f"waiting {longest['waiting', k]:.1f} s, going on {longest['going on', k]:.1f} s   {ratio:.2f}")
    print(f"the mean of {repeat} batches each way: {statistics.mean(ratios):.2f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
