"""Claims about distributed.py and train.py on several ranks: two real processes (gloo) compute what one computes.

All jobs of tests/ranks.py run in one launch of two ranks and one of one rank; the tests compare what they wrote."""
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import record, recorded
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from test_gptoss import bytes_of, write_folder

import data
import distributed
import gptoss
import lm
import world_model

HERE = Path(__file__).resolve().parent
JOBS = ["gradients", "one_microbatch", "no_advantage", "offload", "finetune", "save", "export", "gptoss", "llama", "nnetnav"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]


def launch(folder: Path, ranks: int, *jobs: str, seconds: float = 200, **environment) -> None:
    """Raises when the jobs fail, or hang: a rank that waits for another is what this file is about."""
    command = (TORCHRUN if ranks == 2 else [sys.executable]) + [str(HERE / "ranks.py"), str(folder), *jobs]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(taught, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(taught, folder / "model")
    write_folder(folder / "gptoss")
    chat = lm.load(taught)
    lm.save(chat, folder / "llama")  # bf16, as the hub's are
    # The laptop's template leaves the system message out; that of a model of the hub does not.
    chat.tokenizer.chat_template = "".join(f"{{% if messages[{k}] %}}<|user|>{{{{ messages[{k}].content }}}}<|end|>{{% endif %}}" for k in range(2)) + "<|assistant|>"
    lm.save(chat, folder / "chat")
    record(folder / "counting.jsonl", [recorded(["click [1]"] * n + ["click [2]"], seed=n) for n in range(4)])
    launch(folder, 1, *JOBS)
    launch(folder, 2, *JOBS, "resume_1", "resume_2")
    launch(folder, 1, "resume_1", "resume_2")
    return folder


def result(folder: Path, ranks: int, job: str) -> dict:
    return torch.load(folder / f"{ranks}-{job}.pt", weights_only=True)


def assert_close(a: dict, b: dict, relative: float, absolute: float = 1e-9) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        scale = float(b[name].abs().max()) + absolute
        assert float((a[name] - b[name]).abs().max()) <= relative * scale, name


def test_gradients_of_two_ranks_are_those_of_one(folder):
    """Guards traps 6 and 11: a denominator of one rank, a mean over ranks, a rank's microbatch left out, a norm of one shard."""
    one, two = result(folder, 1, "gradients"), result(folder, 2, "gradients")
    assert len(one["gradients"]) == len(two["gradients"]) == 3
    for a, b in zip(two["gradients"], one["gradients"]):
        assert_close(a, b, 1e-5)
        assert all(float(g.abs().max()) > 1e-4 for g in b.values())
    assert_close(two["state"], one["state"], 1e-6)
    for name in ("grad_norm", "clip_frac", "ratio_mean", "ratio_max"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5), name


def test_weights_in_host_memory_change_nothing(folder):
    """Guards: an offloaded path that nobody ever ran."""
    one, two = result(folder, 2, "gradients"), result(folder, 2, "offload")
    for a, b in zip(two["gradients"], one["gradients"]):
        assert_close(a, b, 1e-6)
    assert_close(two["state"], one["state"], 1e-7)


def test_a_rank_without_work_takes_part_with_weight_zero_and_is_logged(folder):
    """Guards trap 10 (a hang), and a repeated microbatch that counts twice."""
    one, two = result(folder, 1, "one_microbatch"), result(folder, 2, "one_microbatch")
    assert_close(two["state"], one["state"], 1e-6)
    assert one["metrics"]["idle"] == 0 and two["metrics"]["idle"] == pytest.approx(0.5)


def test_a_batch_without_advantages_moves_nothing_and_hangs_nobody(folder):
    for ranks in (1, 2):
        done = result(folder, ranks, "no_advantage")
        assert done["metrics"]["grad_norm"] == 0 and all(torch.equal(done["state"][name], done["before"][name]) for name in done["before"])


def test_fine_tuning_on_two_ranks_is_fine_tuning_on_one(folder):
    """Guards: a mean over ranks of means over tokens, which weighs a short batch's tokens more."""
    one, two = result(folder, 1, "finetune"), result(folder, 2, "finetune")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4) and len(one["losses"]) > 3
    assert_close(two["state"], one["state"], 1e-4)


@pytest.mark.parametrize("then", [1, 2])
@pytest.mark.parametrize("now", [1, 2])
def test_a_checkpoint_loads_bit_for_bit_on_any_number_of_ranks_and_goes_on(folder, then, now):
    """Guards trap 13: weights without optimizer states; a copy that the next update overwrites while it is still being written."""
    saved, loaded = result(folder, then, "save"), result(folder, now, f"resume_{then}")
    assert loaded["step"] == 3
    assert all(torch.equal(loaded["loaded"][name], saved["saved"][name]) for name in saved["saved"])
    if now == then:
        assert loaded["losses"] == saved["losses"] and all(torch.equal(loaded["state"][name], saved["state"][name]) for name in saved["state"])
    else:
        assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5)


def test_an_export_of_two_ranks_is_a_plain_folder_with_the_same_weights(folder):
    exported = [lm.load(folder / f"export-{ranks}").model.state_dict() for ranks in (1, 2)]
    whole = lm.load(folder / "model").model.state_dict()
    for name in whole:
        assert torch.equal(exported[0][name], exported[1][name]) and torch.equal(exported[1][name], whole[name]), name


# ---- the commands before the loop ------------------------------------------------------------------------------------------


def weight(folder: Path, name: str) -> torch.Tensor:
    with safe_open(gptoss.entries(folder)[name].file, "pt") as file:
        return file.get_tensor(name)


def loss(folder: Path, base: Path, trajectories: Path) -> float:
    """Of the recorded transitions, a token, of the model in `folder` (of base's kind)."""
    net = gptoss.load_sharded(folder, lora=None, compute=torch.float32, checkpointing=False) if base.name == "gptoss" else lm.load(folder).model
    model = lm.LM(net.eval(), lm.load_tokenizer(base), 2048, torch.float32)
    scores = lm.score(model, world_model.examples(model, data.read_trajectories(trajectories), Counter()))
    return -float(torch.cat(scores).mean())


@pytest.mark.parametrize("base", ["gptoss", "llama"])
def test_the_world_model_s_command_on_two_ranks_writes_the_folder_that_it_writes_on_one(folder, base):
    """Guards: a path that only a node of GPUs would have walked (it ended in an assertion at the KL of the merge, after the training, where the base is
    a Llama); a rank that merges before the adapter stands; experts or embeddings that are not the base's; an adapter that is trained and lost."""
    one, two = result(folder, 1, base), result(folder, 2, base)
    assert one["steps"] >= 4 and two["loss"] == pytest.approx(one["loss"], rel=1e-3) and {key: one[key] for key in one if key not in ("loss", "kl of the merge")}.items() <= two.items()
    assert (one["transitions"], one["episodes"], one["tensors"]) == (10, 4, 8)
    for ranks, report in ((1, one), (2, two)):
        assert 0 < report["kl of the merge"] < 0.02 and json.loads((folder / f"{base}-{ranks}" / "training.json").read_text()) == report
        assert not list(folder.glob(f"{base}-{ranks}*.sft")) and (folder / f"{base}-{ranks}.adapter" / "adapter_model.safetensors").exists()
    names = gptoss.entries(folder / base)
    learned = [name for name in names if name.endswith(tuple(f"self_attn.{part}_proj.weight" for part in "qkvo"))]
    for name in names:
        if name in learned:
            was, a, b = (weight(folder / where, name).float() for where in (base, f"{base}-1", f"{base}-2"))
            moved = float((a - was).abs().max())
            # bf16 has 8 bits: one unit in the last place is at most 2^-7 of the number; between 1 and 2 ranks the sums differ in float32 only
            assert ((a - b).abs() <= 2**-7 * torch.maximum(a.abs(), b.abs()) + 1e-3 * moved).all() and moved > 0.01, name
        else:
            assert bytes_of(folder / base, name) == bytes_of(folder / f"{base}-1", name) == bytes_of(folder / f"{base}-2", name), name
    assert len(learned) == 8
    before, after = (loss(folder / where, folder / base, folder / "counting.jsonl") for where in (base, f"{base}-2"))
    assert after < before - 0.1, "what was learned is not in the merged folder"


def test_the_policy_s_command_on_nnetnav_s_rows_is_the_same_on_two_ranks(folder):
    """Guards: rows that rank 0 alone reads, another order of the examples on each rank; and an agent trained under another system message than the
    one that its rows, and the published weights, were made with."""
    one, two = result(folder, 1, "nnetnav"), result(folder, 2, "nnetnav")
    assert two["taught"] == one["taught"] and two["report"]["loss"] == pytest.approx(one["report"]["loss"], rel=1e-4)
    before = lm.load(folder / "chat").model.state_dict()
    for name, value in one["state"].items():  # one rank pads and two pack: where a gradient is nearly 0, Adam makes a step of the difference, so on average
        moved = float((value - before[name]).abs().mean())
        assert float((two["state"][name] - value).abs().mean()) <= 1e-2 * moved and (moved > 1e-4 or "norm" in name), name
    rows = [json.loads(line)["messages"] for line in (HERE / "nnetnav_small.jsonl").read_text().splitlines()]
    asked = {f"<|user|>{system['content']}<|end|><|user|>{user['content']}<|end|><|assistant|>": said["content"] for system, user, said in rows if len(user["content"]) > 20}
    acts, judges = ([pair for pair in one["taught"] if ("QUESTION:" in pair[0]) is judge] for judge in (False, True))
    assert one["report"]["steps"] > one["report"]["recorded steps"] == len(acts) == 5 and len(judges) == 2, "price has three steps, cart two, noise no end; both that end are judged"
    assert sorted(prompt for prompt, _ in acts) == sorted(prompt for prompt in asked if "OBJECTIVE: What" in prompt or "OBJECTIVE: Open" in prompt and "OBSERVATION:\n\n" not in prompt)
    assert all(said.removesuffix("<|end|>") == asked[prompt].removesuffix(".") for prompt, said in acts if "price" in prompt)
    exported = [lm.load(folder / f"nnetnav-{ranks}").model.state_dict() for ranks in (1, 2)]
    for ranks, state in enumerate(exported, 1):
        whole = result(folder, ranks, "nnetnav")["state"]
        assert all(torch.equal(state[name], value.bfloat16().float()) for name, value in whole.items()), "the folder is not what was trained"


# ---- the whole loop --------------------------------------------------------------------------------------------------------


def metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "agent.run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ranks of a killed torchrun live on")
def test_ranks_die_with_their_torchrun(tmp_path):
    """Guards: a torchrun that alone is killed (out of memory, an impatient user), whose ranks then write beside those of the next run."""
    process = subprocess.Popen(TORCHRUN + [str(HERE / "ranks.py"), str(tmp_path), "wait"], env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ranks = [tmp_path / f"rank-{k}" for k in range(2)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in ranks), 60)
        process.kill()
        process.wait()
        wait_for(lambda: not any(running(int(file.read_text())) for file in ranks), 20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def running(pid: int) -> bool:
    """Whether a process lives: one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_the_loop_on_two_ranks_killed_and_started_again_is_the_loop_that_was_not(folder):
    """Guards: dreams that depend on the rank that dreams them, doubled lines, a resume that draws other dreams. kill -9 goes to the launcher
    and both ranks, once the first checkpoint stands."""
    for name in ("straight", "killed", "alone"):
        (folder / name).mkdir()
        record(folder / name / "recorded.jsonl", [recorded(["click [1]", "click [2]"], seed) for seed in range(3)])
    launch(folder, 2, "run", RUN="straight")
    process = subprocess.Popen(TORCHRUN + [str(HERE / "ranks.py"), str(folder), "run"], env=os.environ | {"OMP_NUM_THREADS": "1", "RUN": "killed"}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    limit = time.time() + 120
    while not (folder / "killed" / "agent.run" / "checkpoint" / "step-2").exists():
        assert time.time() < limit and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "killed" / "agent").exists()
    launch(folder, 2, "run", RUN="killed")
    launch(folder, 1, "run", RUN="alone")
    straight, killed, alone = (metrics(folder / name) for name in ("straight", "killed", "alone"))
    assert killed == straight and [row["update"] for row in straight] == list(range(5))
    assert any(row.get("kept") for row in straight), "no update was made, so nothing was compared"
    for row, other in zip(straight, alone):  # one rank dreams the same dreams
        assert {k: row[k] for k in row.keys() & {"dream_success", "kept", "experts"}} == {k: other[k] for k in other.keys() & {"dream_success", "kept", "experts"}}
    weights = [lm.load(folder / name / "agent").model.state_dict() for name in ("straight", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---- who gets what ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_microbatch_is_dealt_once_and_every_rank_gets_as_many(costs, ranks):
    """Guards trap 10: ranks with different numbers of forwards, and a microbatch learned twice or never."""
    hands = distributed.deal(costs, ranks)
    assert len(hands) == ranks and {len(hand) for hand in hands} == {-(-len(costs) // ranks)}
    assert sorted(index for hand in hands for index, real in hand if real) == list(range(len(costs)))


def test_the_dearest_are_dealt_apart():
    assert {tuple(index for index, _ in hand) for hand in distributed.deal([9, 9, 1, 1], 2)} == {(0, 2), (1, 3)}
