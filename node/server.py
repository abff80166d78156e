"""How vLLM is started, and its server of a frozen model: a process that does not outlive the trainer, and
whose death is noticed.

    server = Server("runs/world_model", 16384, recipe.ServerConfig(), "runs/dream.run/world_model.log")
    server.url                               # http://127.0.0.1:PORT

engine.start() starts the servers of a run; remote.Remote is their client.
"""

import atexit
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import torch
from tqdm import tqdm

import recipe
from remote import EngineError

# ---- how vLLM is started -----------------------------------------------------------------------------------


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed here: pip install -r requirements-gpu.txt "
                          "(its CPU build, for the tests: make test-vllm)")


def environment() -> dict[str, str]:
    """vLLM's environment, where the user has not set it. Without a GPU its thread binding must not move the
    trainer's threads to other cores, and the first request must not wait for g++ (NOTES 7.12)."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return quiet if torch.cuda.is_available() else quiet | on_cpu


def settings(context: int, config: recipe.EngineConfig | recipe.ServerConfig) -> dict:
    """What engine and servers are started with, under vLLM's names.

    On the CPU a prompt is read in one piece. After each piece vLLM winds a seeded row's generator back, which
    the CPU's generator cannot do ("CPU Generator does not use offset"). The engine would die as soon as a
    batch has more tokens than a step takes.
    """
    chosen = {"max_model_len": context, "gpu_memory_utilization": config.memory_fraction,
              "kv_cache_memory_bytes": int(config.kv_cache_gb * 1e9), "enforce_eager": config.eager,
              "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
              "max_num_seqs": config.max_num_seqs}
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":  # the older runner, in its older way (NOTES 7.15)
        chosen["async_scheduling"] = False
    if not torch.cuda.is_available():
        chosen |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(context, 4096)}
    return chosen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- a server ----------------------------------------------------------------------------------------------

# The server's parent and the head of its process group. Its standard input is a pipe that only the trainer
# holds. When the trainer stops the server, or dies in whatever way, the pipe ends, and nothing of the group
# is left. (vLLM's API server leaves its engine behind when it is killed, with all the GPU memory.)
# PR_SET_PDEATHSIG would do less: it reaches one process, and fires when the *thread* that forked ends.
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

RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
         "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def clean_environment() -> dict[str, str]:
    """Ours, without what torchrun and the in-process engine put there. With it, a server takes itself for a
    rank of the trainer."""
    rank = lambda name: name in RANKS or name.startswith("TORCHELASTIC_")
    ours = {name: value for name, value in os.environ.items() if not rank(name)}
    ours.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment() | ours


WATCH = 1.0  # seconds from one look at a server's process to the next; at every tenth it is asked, too
HUNG = 30  # times that it gave no answer, one after the other: five minutes, or seven of time-outs
PAUSE = 2.0  # seconds from one try to start it again to the next
TRIES = 30  # that end before there is a process: a minute

RUNNING: set["Server"] = set()  # of this process, for who must end what a failure has left


class Server:
    """A vLLM server as a child process, ready when the constructor returns. When it dies, or gives no answer
    for minutes, a thread restarts it, at the same URL.

    Its output goes to the file `log`. `port` 0 takes a free port. `error` is None, or why the server was
    given up: a Remote that has this server raises it. Raises EngineError, with the end of the log, when it
    does not come up.
    """

    def __init__(self, folder: str | Path, context: int, config: recipe.ServerConfig, log: str | Path,
                 port: int = 0):
        check_installed()
        self.folder, self.context, self.config, self.log = Path(folder), context, config, Path(log)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None
        self.starts, self.error, self.stopped = 0, None, threading.Event()
        self.lock = threading.RLock()
        atexit.register(self.stop)
        RUNNING.add(self)
        try:
            self._start()
        except BaseException:  # Ctrl-C in the minutes of loading, too
            self.stop()
            raise
        threading.Thread(target=self._watch, daemon=True).start()

    def __str__(self) -> str:
        return f"the server of {self.folder}"

    def _command(self) -> list[str]:
        own = {"model": self.folder, "served_model_name": self.folder.name, "dtype": self.config.dtype,
               "tensor_parallel_size": self.config.tensor_parallel, "host": "127.0.0.1", "port": self.port,
               # As vLLM bounds all models but gpt-oss, for which it captures 1,024 (NOTES 7.10).
               "max_cudagraph_capture_size": min(2 * self.config.max_num_seqs, 512)}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        for name, value in (own | settings(self.context, self.config)).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        return command

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EngineError(f"port {self.port} is taken ({error}): is a server of an earlier run left? "
                                  "Choose another port, or 0 for a free port") from error
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.log_start = log.tell()
            command = [sys.executable, "-c", SUPERVISOR, *self._command()]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                            env=clean_environment(), start_new_session=True)
        self.starts += 1
        self._wait_ready()

    def _wait_ready(self) -> None:
        begun, minutes = time.monotonic(), self.config.start_minutes
        with tqdm(desc=f"{self.folder.name}: server starting (log: {self.log})", unit="s",
                  bar_format="{desc} {elapsed}", mininterval=1) as bar:
            while not self.ready():
                if self.stopped.is_set():
                    raise EngineError(f"{self} was stopped while it started")
                if not self.alive():
                    raise EngineError(f"{self} ended while it started; {self._tail()}")
                if time.monotonic() - begun > 60 * minutes:
                    raise EngineError(f"{self} was not ready after {minutes:g} minutes (start_minutes); "
                                      + self._tail())
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
            answer = httpx.get(f"{self.url}/health", timeout=timeout, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.is_success and self.alive()

    def restart(self, seen: int) -> None:
        """Start it anew, if it is still in its start number `seen` (`starts`, when the caller noticed): many
        requests notice one death.

        Raises EngineError when it has been restarted too often, or does not come up. `error` then stays set.
        """
        with self.lock:
            if self.error:
                raise self.error
            if self.starts != seen or self.stopped.is_set():
                return
            failed = 0  # tries without a process, which `starts` does not count: its port is taken, say
            while True:
                self._end()
                if self.starts > self.config.restarts:
                    self.error = EngineError(f"{self} ended {self.starts} times, and is not started again; "
                                             + self._tail())
                    raise self.error
                before = self.starts
                print(f"{self} is started again ({self.starts} of {self.config.restarts}); why it ended: "
                      f"{self.log}", file=sys.stderr)
                try:
                    return self._start()
                except (EngineError, OSError) as error:  # OSError: no memory to fork, a full disk for the log
                    if self.stopped.is_set():
                        raise
                    failed += self.starts == before
                    if failed == TRIES:
                        self.error = EngineError(f"{self} ended, and cannot be started again: {error}")
                        raise self.error from error
                    print(error, file=sys.stderr)
                    self.stopped.wait(PAUSE)  # the port is the old server's for a moment longer

    def _watch(self) -> None:
        """Rank 0 may wait for the others in a collective while the others wait for the server: a request of
        its own would come too late. Also where the server lives and hangs."""
        seen = silent = looks = 0
        while not self.stopped.wait(WATCH) and self.error is None:
            # With the lock, as nobody may start it meanwhile. An error is in self.error, or it was stopped.
            with self.lock, contextlib.suppress(EngineError, OSError):
                looks += 1
                if self.starts != seen:
                    seen, silent = self.starts, 0
                elif looks % 10 == 0:
                    silent = 0 if self.ready() else silent + 1
                if silent == HUNG:
                    print(f"{self} lives, and gives no answer", file=sys.stderr)
                if silent == HUNG or not self.alive():
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
        """End it and all its processes; no restart. Also at exit. A second call does nothing."""
        self.stopped.set()
        atexit.unregister(self.stop)
        RUNNING.discard(self)
        with self.lock:
            self._end()
            self.process = None
