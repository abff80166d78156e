"""Claims about node/server.py and node/engine.py's Remote: answers over HTTP are the model's, and no death of
a server is the end or goes unseen."""
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import base_folder
from helpers import real_vllm
from helpers import servers as serving
from helpers.real_vllm import SERVER, gap
from safetensors.torch import load_file
from transformers import GptOssConfig, GptOssForCausalLM

import lm
from node import gptoss
from node import server as servers
from remote import EngineError, Remote

pytestmark = real_vllm.MARKS
folder, model, prompts = real_vllm.folder, real_vllm.model, real_vllm.prompts  # fixtures


def group(pid: int) -> list[str]:
    """Command lines of the living processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgid = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgid) == pid and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended while we looked
    return found


def gone(pid: int, seconds: float = 20) -> bool:
    limit = time.monotonic() + seconds
    while group(pid) and time.monotonic() < limit:
        time.sleep(0.2)
    return not group(pid)


# ---- against the real server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    server = servers.Server(folder, 512, SERVER, tmp_path_factory.mktemp("server") / "log.txt")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def world(server, folder):
    return Remote([server.url + "/v1"], folder, server=server, timeout=300)


def test_greedy_answers_of_a_server_are_the_models(world, model, prompts):
    """Guards: text that is tokenised again, a lost end of turn, answers in the order in which they came, the
    generation_config of the folder."""
    assert world.context == 512
    ours, theirs = lm.sample(model, prompts, 12, 0.0, seed=0), lm.sample(world, prompts, 12, 0.0, seed=0)
    assert [(a.ids, a.text, a.truncated) for a in ours] == [(a.ids, a.text, a.truncated) for a in theirs]
    assert gap(model, prompts, theirs, 1.0) < 1e-4


def test_sampled_log_probs_of_a_server_are_the_scored_ones_and_a_seed_gives_one_sample(world, model, prompts):
    """Guards: the same of a server: log-probs before the temperature, and copies inside a group."""
    samples = lm.sample(world, prompts, 30, 0.7, list(range(len(prompts))))
    assert gap(model, prompts, samples, 0.7) < 1e-4
    (again,) = lm.sample(world, prompts[:1], 30, 0.7, [0])
    assert again.ids == samples[0].ids
    # Hot, because a base that is sure of itself says the same with any seed.
    others = lm.sample(world, prompts[:1] * 8, 30, 2.0, list(range(8)))
    assert len({tuple(other.ids) for other in others}) > 4


def test_margins_of_a_server_are_differences_of_the_models_log_probs(world, model, prompts):
    """Guards: a margin between other tokens than those asked for, or with its sign turned."""
    yes, no = list(range(10, 10 + len(prompts))), list(range(400, 400 + len(prompts)))
    assert world.margins(prompts, yes, no) == pytest.approx(model.margins(prompts, yes, no), abs=1e-4)


def test_a_server_has_the_users_environment_without_the_ranks(monkeypatch):
    """Guards: a server of 8 GPUs that takes itself for one rank of the trainer (vLLM 0.32 on a CPU starts all
    the same)."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
                 "TORCHELASTIC_RUN_ID", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    environment = servers.clean_environment()
    for word in ("RANK", "WORLD", "MASTER", "ELASTIC", "MULTIPROCESSING"):
        assert not [name for name in environment if word in name]
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,2" and environment["PATH"] == os.environ["PATH"]


def test_a_request_that_can_never_work_is_refused_at_once(world):
    """Guards: half an hour of patience with a prompt that is too long."""
    with pytest.raises(EngineError, match="refuses the request.*512"):
        world.generate([[5] * 600], 8, 0.0, [0])


def test_a_server_killed_in_the_middle_of_a_batch_is_restarted_and_the_batch_stays_the_same(
        server, folder, world, prompts, monkeypatch):
    """Guards: dreams that are lost with a server, a restart for each of the requests that saw one death, an
    engine process that outlives its server (with all the GPU memory), and a client on another rank (without
    the server) that gives up."""
    seeds = list(range(200))
    asked = [prompts[seed % len(prompts)] for seed in seeds]
    before, old = lm.sample(world, asked, 100, 1.0, seeds), server.process.pid
    other = Remote([server.url], folder, timeout=300, patience=600)
    processes = Path("/proc").glob("[0-9]*")
    victim = next(int(process.name) for process in processes if _is_api_server(process, old))
    answered = itertools.count(1)

    def kill_after_60(answer):  # httpx calls it when the head of an answer is there
        if next(answered) == 60:
            os.kill(victim, signal.SIGKILL)

    for remote in (world, other):
        monkeypatch.setattr(remote.http, "event_hooks", {"response": [kill_after_60]})
    found = {}

    def sample(who, remote):
        found[who] = lm.sample(remote, asked, 100, 1.0, seeds)

    threads = [threading.Thread(target=sample, args=pair) for pair in (("world", world), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for samples in (found["world"], found["other"]):
        assert [sample.ids for sample in samples] == [sample.ids for sample in before]
    assert server.starts == 2 and server.process.pid != old and gone(old)


def _is_api_server(process: Path, parent: int) -> bool:
    try:
        ppid = (process / "stat").read_text().rpartition(")")[2].split()[1]
        return ppid == str(parent) and b"api_server" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stopped_server_leaves_no_process(server):
    """Guards: an engine that stays on the GPU. (The last test that uses this server.)"""
    pid = server.process.pid
    assert len(group(pid)) >= 2
    server.stop()
    assert gone(pid) and not server.alive() and not server.ready()
    time.sleep(2.5)  # the watching thread must not bring it back
    assert server.starts == 2 and server.process is None


def test_a_server_whose_trainer_is_killed_ends_by_itself(folder, tmp_path):
    """Guards: the next run finds its GPUs full."""
    code = f"""
import recipe
from node.server import Server
wait = Server._wait_ready
def told(self):
    print(self.process.pid, flush=True)
    wait(self)
Server._wait_ready = told
config = recipe.ServerConfig(tensor_parallel=1, kv_cache_gb=.06, dtype="float32", eager=True)
Server({str(folder)!r}, 512, config, {str(tmp_path / "log")!r})
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    limit = time.monotonic() + 60
    while not any("api_server" in line for line in group(pid)[1:]) and time.monotonic() < limit:
        time.sleep(0.2)
    assert len(group(pid)) >= 2
    trainer.kill()
    trainer.wait()
    assert gone(pid)


def test_a_servers_graphs_are_bounded_also_those_of_gpt_oss(folder):
    """Guards: 83 CUDA graphs at each start and restart of the world model's server, for which vLLM forgets
    --max-num-seqs (NOTES 7.10). By vLLM's own parser and hook; there are no graphs on a CPU."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.model_executor.models.config import GptOssForCausalLMConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = object.__new__(servers.Server)
    server.folder, server.context, server.port = folder, 512, 8000
    for sequences, bound in ((64, 128), (1000, 512)):
        server.config = dataclasses.replace(SERVER, eager=False, max_num_seqs=sequences)
        words = server._command()[3:]
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(words).max_cudagraph_capture_size
        for asked, left in ((given, bound), (None, 1024)):
            graphs = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=asked)
            GptOssForCausalLMConfig.verify_and_update_config(SimpleNamespace(
                structured_outputs_config=SimpleNamespace(reasoning_parser=""), compilation_config=graphs))
            assert graphs.max_cudagraph_capture_size == left


def test_the_older_runner_goes_without_asynchronous_scheduling(monkeypatch):
    """Guards: a way out that leaves half of what may have failed (NOTES 7.15)."""
    assert "async_scheduling" not in servers.settings(512, SERVER)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert servers.settings(512, SERVER)["async_scheduling"] is False


def test_a_server_that_cannot_start_says_why(tmp_path):
    """Guards: half an hour of waiting for a process that ended, and an error without its reason."""
    broken = {"model_type": "llama", "architectures": ["NoSuchModelForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(broken))
    begun = time.monotonic()
    with pytest.raises(EngineError, match="(?s)ended while it started.*NoSuchModelForCausalLM"):
        servers.Server(tmp_path, 512, SERVER, tmp_path / "log.txt")
    assert time.monotonic() - begun < 120


def test_a_taken_port_is_named(folder, tmp_path):
    """Guards: minutes of loading before vLLM says "address already in use"."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} is taken"):
            servers.Server(folder, 512, SERVER, tmp_path / "log.txt", port=port)


def write_tiny_gptoss(folder, tokenizer) -> None:
    """In bf16, without MXFP4: vLLM's CPU build has no kernel for that."""
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128}
    config = GptOssConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                          intermediate_size=64, num_local_experts=4,
                          num_experts_per_tok=2, sliding_window=32, max_position_embeddings=512,
                          initializer_range=0.15, pad_token_id=0, eos_token_id=3, rope_parameters=yarn)
    made = GptOssForCausalLM._from_config(config, dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if "sinks" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)  # zeros would not tell whether they are read
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_merged_tiny_gpt_oss_served_scores_as_transformers_does(model, prompts, tmp_path):
    """Guards: a world model whose sinks, sliding window or experts are not those that were trained; a merged
    folder that the server cannot load, or whose adapter it does not see."""
    base, merged = tmp_path / "base", tmp_path / "merged"
    write_tiny_gptoss(base, model.tokenizer)

    def read(folder) -> lm.LM:
        net = GptOssForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return lm.LM(net.eval(), model.tokenizer, 512, torch.float32)

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(gptoss.PROJECTIONS))
    adapted = peft.get_peft_model(read(base).model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    gptoss.merge(base, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), 8 / 4, merged)
    server = servers.Server(merged, 512, SERVER, tmp_path / "log.txt")
    try:
        samples = lm.sample(Remote([server.url], merged, server=server), prompts, 20, 1.0, seed=0)
    finally:
        server.stop()
    assert gap(read(merged), prompts, samples, 1.0) < 1e-4
    # peft's own merge, rounded once. The unmerged adapter itself may send a token to another expert, and then
    # its log-prob jumps.
    beside = adapted.merge_and_unload()
    for name, parameter in beside.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    theirs = lm.LM(beside.eval(), model.tokenizer, 512, torch.float32)
    assert gap(theirs, prompts, samples, 1.0) < 1e-4
    assert gap(read(base), prompts, samples, 1.0) > 0.25  # the whole adapter


# ---- against a server that misbehaves on purpose -----------------------------------------------------------


@pytest.fixture
def fake():
    """fake(script): a server that answers each completion with what `script(n)` says of the n-th: "ok",
    "500", "cut" (the connection), "hang" (for 2 s)."""
    def start(script, port: int = 0):
        numbers = itertools.count()

        def answer(body):
            what = script(next(numbers))
            if what == "hang":
                time.sleep(2)
            if what in ("500", "cut"):
                return (500, b"EngineDeadError") if what == "500" else None
            ids = [*body["prompt"], 3]
            said = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
            return 200, json.dumps({"choices": [said]}).encode()

        server = there.enter_context(serving.model(answer, port=port))
        server.handle_error = lambda *_: None  # a client that has gone
        return server

    with contextlib.ExitStack() as there:
        yield start


def end(server) -> None:
    """With all its connections, as where its process dies."""
    server.shutdown()
    server.server_close()
    for connection in server.connections:
        with contextlib.suppress(OSError):  # it has ended
            connection.shutdown(socket.SHUT_RDWR)


def echo(remote, count: int) -> None:
    prompts = [[10 + k] for k in range(count)]
    samples = remote.generate(prompts, 8, 1.0, list(range(count)))
    assert [sample.ids for sample in samples] == [[*prompt, 3] for prompt in prompts]


def test_connections_are_kept_and_no_more_than_asked_for(fake):
    """Guards: a connection for each turn of each dream, and 1,000 at once in a large evaluation."""
    server = fake(lambda n: "ok")
    remote = Remote([server.url], base_folder(), concurrency=4)
    for _ in range(3):
        echo(remote, 40)
    assert len(server.asked) == 120 and 1 <= len(server.connections) <= 4


def test_what_is_no_url_is_said_at_once():
    """Guards: half an hour of patience with localhost:8000."""
    for wrong in ("localhost:8000", "http://127.0.0.1:port", ""):
        with pytest.raises(EngineError, match="is no URL like http://host:port"):
            Remote([wrong], base_folder())


def test_requests_go_to_each_server_in_turn_and_past_a_server_that_ends(fake):
    """Guards: a second node that idles, and a run that ends with one of its servers."""
    first, second = fake(lambda n: "ok"), fake(lambda n: "cut" if n == 3 else "ok")
    remote = Remote([first.url.removesuffix("/v1"), second.url + "/"], base_folder())
    echo(remote, 8)
    assert (len(first.asked), len(second.asked)) == (5, 4), "the cut request was not asked of the other"
    end(second)
    echo(remote, 4)


def test_a_rank_without_the_server_waits_for_it_to_come_back_and_not_for_ever(fake):
    """Guards: a run of eight ranks that ends because seven did not wait for the first to restart its
    server."""
    server, back = fake(lambda n: "ok"), []
    remote = Remote([server.url], base_folder(), patience=15)
    end(server)
    threading.Timer(3, lambda: back.append(fake(lambda n: "ok", server.port))).start()
    echo(remote, 3)
    end(back[0])
    remote.patience = 1
    with pytest.raises(EngineError, match=f"(?s)127.0.0.1:{server.port}.*refused.*start it again"):
        echo(remote, 3)


def test_time_outs_and_server_errors_are_tried_a_bounded_number_of_times(fake):
    """Guards: a server that accepts everything and answers nothing, waited for without end."""
    server = fake(lambda n: "hang" if n < 2 else "ok")
    echo(Remote([server.url], base_folder(), timeout=1, tries=3), 1)
    assert len(server.asked) == 3
    server = fake(lambda n: "hang" if n % 2 else "500")
    with pytest.raises(EngineError, match="2 of them time-outs"):
        echo(Remote([server.url], base_folder(), timeout=1, tries=2), 1)
    assert len(server.asked) == 2
