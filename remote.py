"""Models behind a URL: a world model or a judge on vLLM's servers, and any agent of a chat server.

    judge = Remote(["http://127.0.0.1:8000/v1"], "runs/sft")   # token ids in and out; no GPU is needed here
    agent = Chat("http://127.0.0.1:8000/v1", "name")           # messages in, text out: never trained

Both stand where lm.LM stands (policy.Sampler): `generate`, `margins`, `context`, `concurrency`. Token ids are
never tokenised again. top_p is 1 and top_k is off (lm.py). Each row has its own seed. A turn ends at the
tokenizer's eos_token and at no other token, as in lm.sample, whatever generation_config.json says.
"""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import data
import lm
from data import EngineError

# ---- what all clients share --------------------------------------------------------------------------------


def connections(timeout: float, at_once: int, key: str = "VLLM_API_KEY") -> httpx.Client:
    """A pool of `at_once` connections to models' servers; more requests wait. `timeout`: seconds without a
    byte.

    Not through a proxy that the environment names: the servers stand inside the cluster. Redirects are not
    followed: pages and the key go to the host that the user named. `key` is the variable of the environment
    that holds the API key, if there is one (a vLLM server that has VLLM_API_KEY in its own asks for it).
    """
    headers = {"Authorization": f"Bearer {os.environ[key].strip()}"} if os.environ.get(key) else {}
    # vLLM closes a connection that was idle for 5 s. We let it go earlier, or a request might meet its end.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once, keepalive_expiry=2.0)
    return httpx.Client(timeout=httpx.Timeout(timeout, pool=None), headers=headers, limits=limits,
                        trust_env=False)


# Engine and servers sample from the whole distribution. Only the end of turn, a stop token, ends an answer.
SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}


def _all(ask: Callable, bodies: Sequence, concurrency: int, alone: threading.Event) -> list:
    """[ask(body, given_up) for each body], up to `concurrency` at once. The first failure stops the others:
    it sets the event given_up. `alone`: the event of a single body. It is asked in the thread that asks, so
    that nobody waits at exit for a pool's thread."""
    if len(bodies) == 1:
        return [ask(bodies[0], alone)]
    given_up = threading.Event()
    pool = ThreadPoolExecutor(concurrency)  # `with` would wait, after a failure, for all the others
    answers = [pool.submit(ask, body, given_up) for body in bodies]
    try:
        return [answer.result() for answer in answers]
    finally:
        given_up.set()
        pool.shutdown(wait=False, cancel_futures=True)

# ---- vLLM's servers ----------------------------------------------------------------------------------------


class Remote:
    """The client of vLLM servers that all serve the same model: a request goes to each server in turn.

    A request that fails goes to the next server. Refused or cut connections are tried for `patience` seconds,
    which outlasts a restart by rank 0. Time-outs and answers that say 5xx are tried `tries` times. Then
    EngineError. With `server` (rank 0's own) a time-out restarts it, and a server that was given up stops the
    run at once.

    Threads may ask it side by side, as those of node/dreams.py: a thread a dream. `concurrency`: requests
    that are open at once; more wait.

    `urls`: http://host:port, with or without /v1. `folder`: where the tokenizer is; the servers must have the
    same. `timeout`: seconds for one answer, as long as the longest takes. `context` is the smallest of the
    servers'.
    """

    def __init__(self, urls: Sequence[str], folder: str | Path, server=None,
                 template: lm.Template | None = None, concurrency: int = 64, timeout: float = 900.0,
                 patience: float = 1800.0, tries: int = 4):
        if not urls:
            raise ValueError("a Remote needs the URL of at least one server")
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.tokenizer, self.server, self.concurrency = lm.load_tokenizer(folder), server, concurrency
        self.template = template or lm.Template(self.tokenizer)
        self.timeout, self.patience, self.tries = timeout, patience, tries
        self.http = connections(timeout, concurrency)
        self.turn, self.given_up = itertools.count(), threading.Event()
        with self._of_vllm():
            models = [self._ask([url], "/v1/models", None, self.given_up)["data"][0] for url in self.urls]
            self.context = min(model["max_model_len"] for model in models)
            self.names = {url: model["id"] for url, model in zip(self.urls, models)}

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths."""
        common = SAMPLING | {"temperature": temperature, "max_tokens": max_new_tokens,
                             "stop_token_ids": [self.tokenizer.eos_token_id], "return_token_ids": True}
        answers = self._complete([common | {"prompt": ids, "seed": k} for ids, k in zip(prompts, seeds)])
        with self._of_vllm():
            return [lm.as_sample(self.tokenizer, answer["token_ids"], answer["logprobs"]["token_logprobs"])
                    for answer in answers]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        common = {"max_tokens": 1, "temperature": 0.0, "logprobs": 2, "return_tokens_as_token_ids": True}
        answers = self._complete([common | {"prompt": ids, "logprob_token_ids": [a, b]}
                                  for ids, a, b in zip(prompts, yes, no)])
        with self._of_vllm():
            first = [answer["logprobs"]["top_logprobs"][0] for answer in answers]
            return [at[f"token_id:{a}"] - at[f"token_id:{b}"] for at, a, b in zip(first, yes, no)]

    @contextlib.contextmanager
    def _of_vllm(self) -> Iterator[None]:
        """Where an answer is read: other servers answer without what only vLLM's have."""
        try:
            yield
        except (LookupError, TypeError) as error:
            raise EngineError(f"{', '.join(self.urls)}: an answer cannot be read ({error!r}). Is it a vLLM "
                              "server (0.32 or newer)? Another chat server can be measured, and cannot judge"
                              ) from error

    def _complete(self, bodies: list[dict]) -> list[dict]:
        """The first choice of each completion, in order. The servers are asked in turn."""
        def ask(body: dict, given_up: threading.Event) -> dict:
            k = next(self.turn) % len(self.urls)
            return self._ask(self.urls[k:] + self.urls[:k], "/v1/completions", body, given_up)

        return [answer["choices"][0] for answer in _all(ask, bodies, self.concurrency, self.given_up)]

    def give_up(self) -> None:
        """Tell all threads that ask, each for one dream, to try no more and ask nothing more. They end when
        the requests under way end. This cannot be taken back: the run stops."""
        self.given_up.set()

    def _ask(self, urls: list[str], path: str, body: dict | None, given_up: threading.Event) -> dict:
        """The JSON answer of the first of `urls` that has one."""
        failed_at, failures = None, 0
        for url in itertools.cycle(urls):
            if given_up.is_set():
                raise EngineError(f"{url}{path}: given up, as another request failed")
            seen = self.server.starts if self.server else 0
            try:
                answer = (self.http.post(url + path, json=body | {"model": self.names[url]}) if body else
                          self.http.get(url + path))
                if answer.is_success:
                    return answer.json()
                what = f"HTTP {answer.status_code}: {answer.text[:500]}"
                if answer.status_code < 500:  # the request itself is wrong, and would be wrong again
                    raise EngineError(f"{url}{path} refuses the request ({what}). Is it a vLLM server (0.32 "
                                      "or newer) of the right model and length?")
                failures += 1
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise EngineError(f"{url!r} is no URL like http://host:port ({error})") from error
            except (httpx.RequestError, ValueError) as error:  # refused, timed out, cut off in the middle
                what = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.TimeoutException):
                    failures += 1
                    if self.server:  # it hangs: nobody else would notice
                        self.server.restart(seen)
            failed_at = failed_at or time.monotonic()
            waited = time.monotonic() - failed_at
            if self.server and self.server.error:
                raise self.server.error
            if failures >= self.tries or waited > self.patience:
                raise EngineError(
                    f"{url}{path} gives no answer, for {waited:.0f} s since the first failure, {failures} of "
                    f"them time-outs ({self.timeout:g} s) or server errors; the last: {what}. Look at that "
                    "server's log, start it again, and give the same command: the run goes on from its last "
                    "checkpoint")
            # A server whose engine died says 5xx for a while before it ends and is restarted.
            given_up.wait(5.0 if what.startswith("HTTP") else min(5.0, 0.5 + waited / 10))
        raise AssertionError("unreachable: cycle() does not end")

# ---- any chat server ---------------------------------------------------------------------------------------


class Messages:
    """The template of a model that is asked with messages: the server knows how it is talked to."""

    def prompt_ids(self, messages: list[dict]) -> list[dict]:
        """The messages, without anything that looks like a special token: "<|end|>", "<s>", "</s>"."""
        return [{**message, "content": data.disarm(message["content"])} for message in messages]

    def read(self, sample: lm.Sample) -> str:
        """See lm.Template.read: a server keeps thoughts apart."""
        return sample.text


class Chat:
    """An agent or a world model behind a URL that is asked with messages alone. Any server with OpenAI's
    chat/completions will do. There are no token ids and no log-probs: such an agent is measured, and never
    trained, and such a model cannot judge.

    `url`: with /v1. `model`: the name that the server gives it. max_tokens, temperature and seed are sent
    along, and OPENAI_API_KEY where the environment has it. The server knows the template and the context.

    A page that the server refuses (HTTP 400: it is too long) is an answer that was cut off; `refused` lists
    what the server said. EngineError: when it has refused all that it was asked, which cannot be the pages'
    fault (of pages asked one by one, as dreams do, 32); and for any other 4xx (an unknown model or key).
    Failed connections, answers that cannot be read, 429 and 5xx are tried `tries` times, then EngineError;
    `pause` (seconds) doubles from try to try. `timeout`: seconds for one answer.
    """

    tokenizer, context, template = None, math.inf, Messages()

    def __init__(self, url: str, model: str, concurrency: int = 64, timeout: float = 900.0, tries: int = 8,
                 pause: float = 1.0):
        self.url, self.model, self.concurrency = url.rstrip("/"), model, concurrency
        self.tries, self.pause, self.asked = tries, pause, 0
        self.refused: list[str] = []
        self.given_up, self.counting = threading.Event(), threading.Lock()
        self.http = connections(timeout, concurrency, "OPENAI_API_KEY")
        try:
            self.http.get(f"{self.url}/models")  # whatever it says, a server is there
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise EngineError(f"no server answers at {url!r} ({type(error).__name__}: {error}); give the URL "
                              "of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1") from error

    def generate(self, prompts: list[list[dict]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample. A prompt is the messages of a chat (Messages); a sample has a text and no
        ids."""
        common = {"model": self.model, "max_tokens": max_new_tokens, "temperature": temperature}
        bodies = [common | {"messages": chat, "seed": seed} for chat, seed in zip(prompts, seeds)]
        samples = _all(self._ask, bodies, self.concurrency, self.given_up)
        with self.counting:
            self.asked += len(samples)
        if len(self.refused) == self.asked and (len(samples) > 1 or self.asked >= 32):
            raise EngineError(f"{self.url} refuses all of the {self.asked} pages that it was asked about; "
                              f"the last time: {self.refused[-1]}")
        return samples

    def give_up(self) -> None:
        """See Remote.give_up."""
        self.given_up.set()

    def _ask(self, body: dict, given_up: threading.Event) -> lm.Sample:
        for tried in range(1, self.tries + 1):
            try:
                answer = self.http.post(f"{self.url}/chat/completions", json=body)
                if answer.is_success:
                    choice = answer.json()["choices"][0]
                    said = choice["message"].get("content")  # None: it thought, and said nothing
                    cut = choice.get("finish_reason") == "length"
                    return lm.Sample([], [], said if isinstance(said, str) else "", cut)
                what = f"HTTP {answer.status_code}: {answer.text[:500]}"
                if answer.status_code in (400, 413):
                    self.refused.append(what)
                    return lm.Sample([], [], "", True, refused=True)
                if answer.status_code < 500 and answer.status_code != 429:
                    raise EngineError(f"{self.url}/chat/completions refuses to answer as {self.model!r} "
                                      f"({what}); is that its URL, its name, and is OPENAI_API_KEY set?")
            except (httpx.RequestError, ValueError, LookupError, TypeError, AttributeError) as error:
                # No connection, no answer in time, half an answer, no JSON, or JSON of another shape.
                what = f"{type(error).__name__}: {error}"
            if tried < self.tries and given_up.wait(self.pause * 2 ** (tried - 1)):
                raise EngineError(f"{self.url}: given up, as another request failed")
        raise EngineError(f"{self.url} gives no answer in {self.tries} tries; the last: {what}")


def is_url(folder: str | Path) -> bool:
    return str(folder).startswith(("http://", "https://"))


def chat(url: str) -> Chat:
    """The model behind http://host:port/v1#NAME; without #NAME the first that the server lists."""
    url, _, name = url.partition("#")
    model = Chat(url, name)
    try:
        model.model = name or model.http.get(f"{model.url}/models").json()["data"][0]["id"]
    except (httpx.RequestError, ValueError, LookupError, TypeError) as error:
        why = f"{url} does not say which models it has ({error!r}); name one: {url}#NAME"
        raise EngineError(why) from error
    return model


def grader(options: data.Options) -> Chat | None:
    """Who judges a benchmark's live sites; None where none is named."""
    return Chat(options.grader_url, options.grader_model) if options.grader_url else None
