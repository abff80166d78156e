"""rivals/webrl.py under torchrun, small: an FSDP2 trainer and a vLLM engine on each of two ranks, servers for
world model and reward model, two phases in dreams."""
import json
import subprocess

from test_loop import ENVIRONMENT, HERE, command, folder  # noqa: F401 (a fixture)


def words(folder) -> list[str]:  # noqa: F811
    torchrun = command(folder)[: command(folder).index("train.py")]
    servers = [word for server in ("--world-model-server", "--judge-server") for word in (
        f"{server}.tensor-parallel", "1", f"{server}.kv-cache-gb", "0.1", f"{server}.eager",
        f"{server}.dtype", "float32")]
    return [*torchrun, "-m", "rivals.webrl", "dream", "--policy", str(folder / "sft"), "--orm",
            str(folder / "sft"), "--world-model", str(folder / "world_model"), "--out", str(folder / "webrl"),
            "--demonstrations", "5", "--updates", "2", "--goals", "6", "--batch", "8",
            "--evaluate-every", "0", "--sampler", "vllm",
            "--compute", "float32", "--policy-engine.kv-cache-gb", "0.1", "--policy-engine.eager",
            "--drop-limit", "1", *servers]


def test_two_phases_on_two_ranks_with_engines_and_servers(folder):  # noqa: F811
    """Guards: a weight sync that does not arrive behind a phase (the sampler gap of the next tells), and a
    reward model that nobody serves. The same command again has nothing left to do."""
    for _ in range(2):
        done = subprocess.run(words(folder), cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True,
                              timeout=1500)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = [json.loads(line) for line in (folder / "webrl.run/metrics.jsonl").read_text().splitlines()]
        learned = [row for row in rows if "turns" in row]
        assert [row["update"] for row in learned] == [0, 1]
        assert all(row["sampler_gap"] < 0.01 and row["judged"] for row in learned)
