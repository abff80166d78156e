"""Small runs of train.py in the counting web, and what they leave."""

import dataclasses
import json
import random
import sys
from pathlib import Path

import torch
from conftest import CountingWorld, record, recorded, start
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dream
import measure
import recipe
from helpers.scores import own_logits
from policy import TokenTrajectory
from worlds import benchmarks

DREAMING = dream.Config(tasks=3, group=4, horizon=3, max_new_tokens=16, world_model_tokens=48,
                        judge_tokens=16, temperature=1.0, expert_fraction=0.25)


def some(n: int, seed: int = 0) -> list[TokenTrajectory]:
    """n trajectories of one to three turns with random tokens, 1 to 9 to a completion."""
    rng = random.Random(seed)

    def draw(count):
        return [rng.randrange(4, 600) for _ in range(count)]

    trajectories = []
    for _ in range(n):
        pairs = [(draw(rng.randrange(3, 30)), draw(rng.randrange(1, 10))) for _ in range(rng.randrange(1, 4))]
        trajectories.append(TokenTrajectory(start(), pairs=pairs, logps=[[] for _ in pairs], terminated=True))
    return trajectories


def config(**changes) -> recipe.Train:
    given = {"dreaming": DREAMING, "minibatches": 3, "clip_norm": 1e9, "eps_low": 0.03, "eps_high": 0.04}
    return dataclasses.replace(recipe.Train(), **(given | changes))


def token_logps(model, trajectories, temperature):
    """(log-probs (N,) from the model's own logits, one turn at a time; the trajectory of each token (N,))."""
    found, index = [], []
    for i, trajectory in enumerate(trajectories):
        for prompt, completion in trajectory.pairs:
            logits = own_logits(model, prompt + completion)[len(prompt) - 1 : -1] / temperature
            tokens = torch.arange(len(completion)), torch.tensor(completion)
            found.append(logits.log_softmax(-1)[tokens])
            index += [i] * len(completion)
    return torch.cat(found), torch.tensor(index)


class Web(CountingWorld):
    """The counting web in the place of MiniWoB++'s. It knows one task."""

    knows = staticmethod(lambda task: task == "count")

    def __init__(self, timeout=10.0):
        super().__init__(end=4)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Paying(Web):
    """Done pays on page 1 alone, as the taught judge has it: or nearly all would succeed."""

    def _act(self, k, action):
        seen, reward, *ended = super()._act(k, action)
        return seen, reward * (self.n[k] == 1), *ended


def in_counting_web(monkeypatch, web=Web) -> None:
    """Programs that learn do so in the counting web, and draw no curve."""
    monkeypatch.setattr(benchmarks, "Browser", web)
    monkeypatch.setattr(measure, "plot", lambda *_: None)


# Flags of a small run there, on two recordings.
SMALL = {"demonstrations": 0, "context": 256, "world-model-context": 256, "judge-context": 256,
         "compute": "float32", "dreaming.horizon": 3, "dreaming.max-new-tokens": 16,
         "dreaming.world-model-tokens": 48, "dreaming.judge-tokens": 16, "dreaming.temperature": 1}


def typed(monkeypatch, main, *words, **flags) -> None:
    """main(), as a command with these words and flags calls it."""
    flags = [word for name, value in flags.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", [main.__code__.co_filename, *map(str, [*words, *flags])])
    main()


def tiny_run(folder: Path, taught, **changes) -> recipe.Train:
    """The config of a run of four updates in the counting web; writes what it learns from."""
    folder.mkdir(exist_ok=True)
    succeeded = recorded(["click [1]", "click [2]"], 0)
    failed = recorded(["click [1]", "click [1]", "click [2]"], 1, reward=0)
    record(folder / "recorded.jsonl", [succeeded, failed])
    return dataclasses.replace(recipe.Train(
        policy=str(taught), world_model=str(taught), out=str(folder / "agent"),
        trajectories=str(folder / "recorded.jsonl"), updates=4, minibatches=2, lr=2e-4, eps_low=0.03,
        eps_high=0.04, tokens=600, context=256, world_model_context=256, judge_context=256, evaluate_every=2,
        evaluate_seeds="1000000:1",
        evaluate_horizon=3, checkpoint_every=2, sampler="transformers", dreaming=DREAMING), **changes)


def logged(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "agent.run/metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in metrics.items() if not key.startswith("seconds")}
            for metrics in lines]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "agent.run/checkpoint").iterdir())


def last_state(folder: Path) -> list:
    """All values of the last checkpoint: weights, optimizer, run.json."""
    step = folder / "agent.run/checkpoint/step-4"
    dcp_to_torch_save(step, folder / "step-4.pt")
    state = torch.load(folder / "step-4.pt")
    return torch.utils._pytree.tree_flatten(state)[0]
