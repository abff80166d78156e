"""What does a batch of dreams cost whose dreams wait for each other, turn by turn, and one whose dreams do
not? Compare the two in one run: the ratio (the last column).

    python -m bench.bench_dreams [--speed 40] [--repeat 8]        # some four minutes; no GPU, no weights

Real are policy.rollout, node/dreams.py's Dream, WorldModel, the judge's code, remote.Remote, its threads and
HTTP, and a
process for each rank. Only the models behind are scripted. The world model's server and the judge's are two
processes that share their tokens a second among the open requests, by the curves
of STEPS (gpt-oss-120b and Llama-3.1-8B on 8 H100s). How many tokens an answer has is a
function of the seed that it is asked with, so both ways wait for the very same answers. All times are divided
by --speed. Prompts are short, and nobody reads them: reading is left out, and so is that servers and engines
share the GPUs.

- A delta is a share of a page of 9,000 tokens: log-normal, at most the whole page, median .06 and mean .23
  (what two real sites have, NOTES 2.7), and a reason of 200 tokens.
- The agent writes 300 tokens, log-normal (sigma .5, an assumption), in its rank's own engine: a batch that
  ends with its longest answer. In one turn of ten it stops, and is judged, in 300 tokens.
- A dream has 5 turns at most. Of a batch's 32 rows 16 are experts: 8 ranks have 2 dreams each, or as many as
  chance gives them (on average 2), and a single rank has all 16.

Each dream waiting for the others is the same code with a client that takes one question at a time, a batch
(lm.LM.concurrency 1): what every dream did before, and what a model of the own process still does.
"""

import argparse
import heapq
import http.server
import json
import math
import multiprocessing
import random
import statistics
import threading
import time

import dream
import lm
import remote
from data import Start
from judge import Judge
from node import dreams
from world_model import WorldModel

PAGE, REASON, ANSWER = 9_000, 200, 300  # tokens
ROWS = 32  # of a batch: 4 groups of 8
TOKENIZER = "tiny/base"
CONFIG = dream.Config(horizon=5, max_new_tokens=64, world_model_tokens=64, judge_tokens=64)
# ms between two tokens of each answer, where 1, 2, 4, ... 64 are written at once; reckoned (docs/gpu.md).
STEPS = {"world_model": (3.5, 3.61, 3.72, 4.05, 4.83, 5.82, 7.36),
         "judge": (2.4, 2.4, 2.4, 2.4, 2.87, 4.88, 8.9),
         "agent": (7.35, 7.85, 8.86, 10.87, 14.9, 22.95, 39.04)}
START = Start("bench", 0, (), "Press.", "http://x/", "RootWebArea 'x', url='http://x/'\n\t[1] button 'a'", ())
SAID = {"world_model": "It does nothing.\nno change\nover: no", "judge": "so.\nCOMPLETED: NO"}
ACTS = "So. In summary, the next action I will perform is ```click [1]```"
STOPS = "So. In summary, the next action I will perform is ```stop [x]```"


def tokens(name: str, seed: int) -> float:
    """How long an answer is that is drawn with this seed."""
    rng = random.Random(seed)
    if name == "world_model":
        return REASON + PAGE * min(1.0, rng.lognormvariate(math.log(0.06), 2.3))
    return ANSWER * rng.lognormvariate(-0.5**2 / 2, 0.5)


def curve(name: str) -> list[float]:
    """Tokens a second of n answers together, at index n: straight between the points of STEPS."""
    steps, rates = STEPS[name], [0.0]
    for n in range(1, 65):
        k = min(5, n.bit_length() - 1)
        share = (n - 2**k) / 2**k
        rates.append(1000 * n / (steps[k] + share * (steps[k + 1] - steps[k])))
    return rates


# ---- the models behind -------------------------------------------------------------------------------------


class Sharing:
    """A server's speed: n open requests have rate[n] / n tokens a second each."""

    def __init__(self, rate: list[float], speed: float):
        self.rate, self.speed = rate, speed
        self.written, self.at = 0.0, time.monotonic()  # tokens that each open request was given until `at`
        self.ends: list[tuple[float, int, threading.Event]] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _now(self) -> float:
        """Brings `written` up to now; returns the tokens a second of each."""
        n, now = len(self.ends), time.monotonic()
        each = self.speed * self.rate[n] / n if n else 0.0
        self.written, self.at = self.written + (now - self.at) * each, now
        return each

    def write(self, tokens: float) -> None:
        """Returns when so many tokens are written."""
        done = threading.Event()
        with self.changed:
            self._now()
            heapq.heappush(self.ends, (self.written + tokens, id(done), done))
            self.changed.notify()
        done.wait()

    def _run(self) -> None:
        with self.changed:
            while True:
                each = self._now()
                while self.ends and self.ends[0][0] <= self.written + 1e-6:
                    heapq.heappop(self.ends)[2].set()
                    each = self._now()
                self.changed.wait((self.ends[0][0] - self.written) / each if self.ends else None)


def serve(name: str, rate: list[float], speed: float, port) -> None:
    """vLLM's completions, as remote.Remote asks for them."""
    sharing, tokenizer = Sharing(rate, speed), lm.load_tokenizer(TOKENIZER)
    said = tokenizer(SAID[name], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_GET(self):
            self.reply({"data": [{"id": name, "max_model_len": 8192}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "logprob_token_ids" in body:
                sharing.write(1)
                top = {f"token_id:{token}": -1.0 for token in body["logprob_token_ids"]}
                self.reply({"choices": [{"logprobs": {"top_logprobs": [top]}}]})
            else:
                sharing.write(tokens(name, body["seed"]))
                logprobs = {"token_logprobs": [-1.0] * len(said)}
                self.reply({"choices": [{"token_ids": said, "logprobs": logprobs}]})

        def reply(self, value):
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    class Web(http.server.ThreadingHTTPServer):
        request_queue_size, daemon_threads = 256, True

    web = Web(("127.0.0.1", 0), Handler)
    port.send(web.server_port)
    web.serve_forever()


class Agent:
    """The policy's engine in a rank: what a batch takes, and the action of each row."""

    concurrency, context = 1, 8192

    def __init__(self, rate: list[float], speed: float):
        self.rate, self.speed, self.template = rate, speed, lm.Template(lm.load_tokenizer(TOKENIZER))

    def generate(self, prompts, max_new_tokens, temperature, seeds) -> list[lm.Sample]:
        seconds, written = 0.0, 0.0
        lengths = sorted(tokens("agent", seed) for seed in seeds)
        for k, length in enumerate(lengths):  # the short answers first; those that are left are faster
            left = len(lengths) - k
            seconds, written = seconds + (length - written) * left / self.rate[left], length
        time.sleep(seconds / self.speed)
        samples = []
        for seed in seeds:
            text = STOPS if random.Random(~seed).random() < 0.1 else ACTS
            ids = self.template.completion_ids(text)
            samples.append(lm.Sample(ids, [-1.0] * len(ids), text, False))
        return samples


class Batched:
    """A client that takes one question at a time, a batch: all dreams wait for its longest answer."""

    concurrency = 1

    def __init__(self, remote: remote.Remote):
        self.template, self.context = remote.template, remote.context
        self.generate, self.margins = remote.generate, remote.margins


# ---- the batches -------------------------------------------------------------------------------------------


def rank(number: int, ranks: int, drawn: bool, ways: list[tuple[str, int]], rate: list[float], speed: float,
         urls: dict[str, str], together, results) -> None:
    """One rank's share of each batch: (way, seed) of `ways`, one after the other. `drawn`: every row of the
    batch is an expert with even chances, as in dream.trajectories; else every second row of a rank is."""
    agent = Agent(rate, speed)
    remotes = {name: remote.Remote([url], TOKENIZER) for name, url in urls.items()}
    for way, seed in ways:
        models = {name: Batched(remote) if way == "waiting" else remote for name, remote in remotes.items()}
        imagined = WorldModel(models["world_model"], 64, 0.7)
        rows = range(number, ROWS, ranks)  # distributed.shard_rows
        dreamed = lambda n, k, seed=seed: random.Random(lm.mix(seed, k)).random() < 0.5 if drawn else n % 2
        mine = [k for n, k in enumerate(rows) if dreamed(n, k)]
        together.wait()
        began = time.monotonic()
        parts = dream.Models(agent, imagined, Judge(models["judge"], CONFIG.judge_tokens), dreams.Dream)
        made = dream.trajectories(parts, [(START, None)] * len(mine), CONFIG, [lm.mix(seed, k) for k in mine])
        results.put((way, seed, time.monotonic() - began, sum(len(t.steps) for t in made)))


def measure(ranks: int, drawn: bool, repeat: int, speed: float, rates: dict[str, list[float]]) -> list[float]:
    """The ratio of each repetition, whose two batches have the same answers, in either order."""
    # A fork shares what is imported, and is safe here: nothing has run in torch.
    forked, servers, urls = multiprocessing.get_context("fork"), [], {}
    for name in ("world_model", "judge"):
        port, told = forked.Pipe()
        servers.append(forked.Process(target=serve, args=(name, rates[name], speed, told), daemon=True))
        servers[-1].start()
        urls[name] = f"http://127.0.0.1:{port.recv()}"
    order = [("waiting", "going on"), ("going on", "waiting")]  # a slow minute of the machine hits both
    ways = [(way, k) for k in range(repeat) for way in order[k % 2]]
    together, results = forked.Barrier(ranks), forked.Queue()
    workers = [forked.Process(target=rank, args=(k, ranks, drawn, ways, rates["agent"], speed, urls, together,
                                                results), daemon=True) for k in range(ranks)]
    for worker in workers:
        worker.start()
    longest, turns = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for _ in range(len(ways) * ranks):
        way, seed, seconds, steps = results.get(timeout=600)  # or a rank has died
        longest[way, seed] = max(longest[way, seed], seconds)
        turns[way, seed] += steps
    for process in workers + servers:
        process.terminate()
        process.join()
    ratios = []
    for k in range(repeat):
        assert turns["waiting", k] == turns["going on", k], "other dreams"
        before, after = (longest[way, k] * speed for way in ("waiting", "going on"))
        ratios.append(after / before)
        print(f"  {turns['waiting', k]} turns on {ranks} rank(s): waiting {before:6.1f} s, "
              f"going on {after:6.1f} s of the node's time   {ratios[-1]:.2f}", flush=True)
    return ratios


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--speed", type=float, default=40.0, help="all times are divided by it")
    parser.add_argument("--repeat", type=int, default=8, help="batches each way")
    given = parser.parse_args()
    rates = {name: curve(name) for name in STEPS}
    for name, ranks, drawn in (("8 ranks, 2 dreams each", 8, False), ("8 ranks, as drawn", 8, True),
                               ("1 rank, 16 dreams", 1, False)):
        ratios = measure(ranks, drawn, given.repeat, given.speed, rates)
        print(f"{name}: a batch takes {statistics.mean(ratios):.2f} of the time (median "
              f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}; {given.repeat} "
              "batches each way)", flush=True)


if __name__ == "__main__":
    main()
