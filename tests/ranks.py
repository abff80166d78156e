"""What two ranks do under torchrun, or one process: JOB,ARGUMENT ... with the model in FOLDER/model."""
import os
import random
import sys
from pathlib import Path
from unittest import mock

import torch
from conftest import CountingPages, small, start
from helpers.scores import pairs_of

import distributed
import dream
import lm
import sft
import train
from config import SFT, Train
from policy import Rollout, Turn


def agent(folder: Path, offload: bool = False) -> lm.LM:
    """In float32 only the order of sums differs between ranks."""
    return lm.load(folder / "model", 512, torch.float32, sharded=distributed.grouped(), offload=offload)


def state(model: lm.LM) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in distributed.full_tensors(model.net, torch.float32)}


def rollouts_of(rng: random.Random, count: int) -> list[Rollout]:
    """Rollouts of one to three turns with random tokens, which nobody sampled."""
    ragged = lambda turns: pairs_of(rng, [(rng.randrange(3, 30), rng.randrange(1, 10)) for _ in range(turns)])
    return [Rollout(start(), turns=[Turn(*pair, []) for pair in ragged(1 + k % 3)]) for k in range(count)]


def update(folder: Path, how: str) -> tuple[dict, dict]:
    """Three GSPO steps, the second without advantages: no rank makes a backward pass, but momentum moves on.
    `lone`: of one microbatch each, fewer than ranks."""
    model, rollouts = agent(folder, how == "offload"), rollouts_of(random.Random(0), 7)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, 0.3, -0.5])
    advantages[train.split(7, 3, random.Random(3))[1]] = 0.0
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.03, momentum=0.9)
    config = Train(minibatches=3, clip_norm=3, eps_low=0.03, eps_high=0.04,
                   tokens=9999 if how == "lone" else 60)
    return train.update(model, optimizer, rollouts, advantages, config, random.Random(3)), state(model)


def tokenise(folder: Path, what: str):
    config = SFT(str(folder / "model"), str(Path(__file__).with_name("nnetnav_small.jsonl")), context=4096)
    items, counts = sft.tokenised(what, config)
    return [(list(prompt), list(ids)) for [(prompt, ids)] in items], dict(counts)


def fit(folder: Path, checkpoint: str) -> tuple[dict, int, dict]:
    """Six steps of three microbatches, so that a rank of two repeats one; or what follows on a checkpoint:
    two steps."""
    model, rng, passes = agent(folder), random.Random(1), []
    items = [pairs_of(rng, [(rng.randrange(3, 30), rng.randrange(1, 10))]) for _ in range(23)]
    config = SFT(epochs=2, lr=1e-3, tokens=64, microbatches=3, checkpoint_every=4)
    loss = lambda logp, row, which: passes.append(which) or -logp.sum()
    return sft.fit(model, items, config, folder / checkpoint, loss), len(passes), state(model)


def loop(folder: Path, name: str) -> int:
    """train.py, half of its groups on real pages: how many pages were opened. `killed` dies in its first
    life, after a checkpoint and a line: rank 1 by kill -9."""
    batch, pages = dream.batch, CountingPages(end=4)

    def dies(*given):
        life = os.getenv("TORCHELASTIC_RESTART_COUNT")
        if (name, life, distributed.rank(), given[3]) == ("killed", "0", 1, (0, 3)):
            os.kill(os.getpid(), 9)
        return batch(*given)

    config = small(folder, folder / "model", out=str(folder / name), expert_fraction=0.5, real_fraction=0.5,
                   evaluate_seeds="1000000:5", evaluate_horizon=1)
    with mock.patch.object(dream, "batch", dies):
        train.train(config, pages)
    return len(pages.envs)


def run(folder: Path, job: str):
    name, *argument = job.split(",")
    return globals()[name](folder, *argument)


if __name__ == "__main__":
    distributed.init()
    for job in sys.argv[2:]:
        torch.save(run(Path(sys.argv[1]), job), Path(sys.argv[1], f"{job}.{distributed.rank()}"))
