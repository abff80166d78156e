"""A world of your own, learned on, real and dreamed: handed in, not patched in.

    python -m examples.own_world               # 80 s of one core, beside other work; writes runs/own_world/

`Shop` below is the whole fork: a class with reset, step and failures (policy.World). Its pages are text. It
needs no browser, and so shows well what the rest of the repository asks of a world. Then:

    1. record()   clicks at random in the shop, and writes the trajectories down          (data.py's JSONL)
    2. prepare()  fine-tunes a world model and an agent on them, as sft.py does
    3. learn()    is train.py's loop: half of the groups in the shop itself, half in dreams of it, which a
                  judge of our own rewards

A world with a browser or an API behind it differs in `_act` and `_see` alone. Whoever has recorded
trajectories already needs no step 1, and whoever has a fine-tuned agent no step 2.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import a11y
import data
import dream
import finetune
import gspo
import judge
import lm
import measure
import policy
import recipe
import train
import update
import world_model
from data import Action, Obs, Start
from tiny import cpu

# ---- the world ---------------------------------------------------------------------------------------------

ITEMS = ("book", "map", "card", "photo", "phone", "paper", "game", "lamp")


@dataclass
class Visit:
    """What the shop knows of one visitor."""

    item: str
    count: int = 0
    over: bool = False


class Shop:
    """A page with a number, at first 0, and three buttons. The goal: order one of what the shop sells.

    Everything about a visit follows from its seed. So the page that was recorded can be reset for real.
    """

    failures: list[str] = []  # of each visit what broke that is not the agent's doing; here nothing can

    def reset(self, starts: Sequence[Start]) -> list[Obs]:
        self.visits, self.failures = [], [""] * len(starts)
        for start in starts:
            self.visits.append(Visit(random.Random(start.seed).choice(ITEMS)))
            for text in start.prefix:  # a start in the middle: what was done before is done again
                self._act(self.visits[-1], data.parse_action(text))
        return [self._see(visit) for visit in self.visits]

    def step(self, actions: Sequence[Action | None]):
        assert len(actions) == len(self.visits), f"{len(actions)} actions for {len(self.visits)} pages"
        seen, rewards, terminated = [], [], []
        for visit, action in zip(self.visits, actions):
            error, reward = ("", 0.0) if action is None else self._act(visit, action)  # None: it idles
            seen.append(self._see(visit, error))
            rewards.append(reward)
            terminated.append(action is not None and visit.over)
        return seen, rewards, terminated, [False] * len(actions)  # truncated: no limit of the shop's own

    def _act(self, visit: Visit, action: Action) -> tuple[str, float]:
        """(error, reward). What the agent does wrong is an error on its page, and never an exception."""
        assert not visit.over, "a step after the end"
        if action.bid and a11y.find(self._see(visit).page, action.bid) is None:
            return f"{action}: there is no [{action.bid}] on the page", 0.0
        if action.name == "click":
            visit.count = max(0, visit.count + {"2": 1, "3": -1}.get(action.bid, 0))
        visit.over = action.name == "stop" or (action.name, action.bid) == ("click", "4")
        return "", float(visit.over and action.name == "click" and visit.count == 1)

    def _see(self, visit: Visit, error: str = "") -> Obs:
        """The page as BrowserGym writes one: an element a line, its id in brackets, its name in quotes."""
        page = ("RootWebArea 'Shop', focused, url='http://shop/'\n"
                f"\t[1] spinbutton '{visit.item}' value='{visit.count}'\n\t[2] button 'More', clickable\n"
                "\t[3] button 'Less', clickable\n\t[4] button 'Order', clickable")
        return Obs(f"Order 1 {visit.item}.", "http://shop/", page, error)


# ---- 1. record ---------------------------------------------------------------------------------------------


def record(file: Path, visits: int) -> int:
    """Click at random on `visits` visits, and write them as data.read_trajectories reads them. Returns the
    successes.

    Nobody demonstrates anything here. Now and then a visitor who clicks at random orders the right number:
    those few are the experts of the dreams.
    """
    world, successes = Shop(), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as out:
        for seed in range(visits):  # training seeds: below 1,000,000 (data.SEEDS)
            rng, [obs] = random.Random(f"visitor {seed}"), world.reset([data.start("order", seed)])
            row = {"task": "order", "seed": seed, "goal": obs.goal, "pages": [obs.page], "actions": [],
                   "errors": [], "reward": 0, "terminated": False, "truncated": False}
            while len(row["actions"]) < 6 and not row["terminated"]:
                action = Action("click", rng.choice("234"))
                [obs], [reward], [row["terminated"]], _ = world.step([action])
                row["pages"].append(obs.page)
                row["actions"].append(str(action))
                row["errors"].append(obs.error)
                row["reward"] = int(reward)
            row["truncated"] = not row["terminated"]
            successes += row["reward"]
            out.write(json.dumps(row) + "\n")
    return successes


# ---- the judge ---------------------------------------------------------------------------------------------


class Clerk:
    """Who pays for a dream: code, which reads the goal and the dreamed pages.

    In the paper the agent judges itself (judge.Judge). A model of 3 M parameters has to be taught that
    (tiny/lessons.py), which takes longer than this whole example. Where code can tell success from a page,
    code is the better judge.
    """

    def verdicts(self, cases: Sequence[judge.Case]) -> list[judge.Verdict]:
        found = []
        for goal, actions, _, after in cases:  # actions in words; the page before the last is not needed
            item = goal.split()[2].rstrip(".")  # "Order 1 book."
            ordered = actions[-1] == "click [4] where [4] is Order"
            success = ordered and f"spinbutton '{item}' value='1'" in after
            found.append(judge.Verdict(success, 1.0 if success else -1.0, "read off the page by code"))
        return found


def load_models(config: recipe.Train, files: Path) -> tuple[lm.LM, dream.Models]:
    """What train.py loads, with our judge. A world model of one's own, with `predict`, goes the same way.

    dream.Dream waits for all dreams of a step. node/dreams.py does not, and needs to know of judge and world
    model which servers they ask (`lm`): ours asks nobody.
    """
    model, models = train.load_models(config, files)
    return model, replace(models, judge=Clerk(), world=dream.Dream)


# ---- 2. and 3. learn ---------------------------------------------------------------------------------------


SFT = finetune.FineTune(lr=1e-3, floor=0.0, tokens=512)


@dataclass(frozen=True)
class Config:
    """Sizes of the example."""

    out: str = "runs/own_world"
    """Folder of all that is written."""
    visits: int = 120
    """Recorded visits."""
    updates: int = 6
    """Updates of GSPO."""


def prepare(config: Config) -> recipe.Train:
    """Record, and fine-tune world model and agent. Returns the settings of the loop."""
    out = Path(config.out)
    file = out / "trajectories.jsonl"
    print(f"{record(file, config.visits)} of {config.visits} random visits ordered the right number")
    recorded = data.read_trajectories(file)
    shutil.rmtree(out / "agent.run", ignore_errors=True)  # or train.py would go on with the run of before

    # Half of the groups on real pages, half dreamed. Clip and rate are larger than even the laptop's
    # (tiny/lessons.py): trajectories are shorter still, and there are few updates.
    settings = recipe.Train(
        policy=f"{out}/sft", world_model=f"{out}/world_model", out=f"{out}/agent", trajectories=str(file),
        world="both", real_fraction=0.5, updates=config.updates, lr=3e-4, eps_low=0.1,
        eps_high=0.1, tokens=2048, context=512, world_model_context=512,
        sampler="transformers", compute="float32",
        evaluate_every=config.updates, evaluate_seeds="1000000:24", evaluate_horizon=5,  # before and after
        dreaming=dream.Config(tasks=6, group=8, horizon=5, demonstrated=0.3, max_new_tokens=48,
                              world_model_tokens=64, judge="current"))  # loads no third model: ours judges

    # The ordinary fine-tunings, as sft.py does them. The base is the laptop's, of 3 M parameters; a large one
    # needs one pass. float32: a processor without avx512_bf16 takes many times as long for bfloat16.
    drawn = finetune.drawn(settings)  # which recordings: train.py lets only equals meet
    model, counts = cpu.load("tiny/base", context=512, compute=torch.float32), Counter()
    pairs = world_model.examples(model, recorded, counts)  # all transitions, of failures too
    finetune.learn(model, [(pairs, replace(SFT, epochs=2))], "world model", settings.world_model,
                   counts | drawn)
    model, counts = cpu.load("tiny/base", context=512, compute=torch.float32), Counter()
    pairs = policy.examples(model, recorded, counts)  # it learns how a click is written, and no more
    finetune.learn(model, [(pairs, replace(SFT, epochs=2))], "policy", settings.policy, counts | drawn)
    return settings


def learn(settings: recipe.Train,
          coefficients_of: update.Coefficients = gspo.gspo_coefficients) -> list[dict]:
    """The loop, with our world in the place of MiniWoB++'s pages. Returns the lines of metrics.jsonl: an
    update each, and a last look at the shop. A loss of your own is another `coefficients_of` (own_loss.py).
    """
    train.train(settings, coefficients_of, web=Shop(), load=load_models)
    metrics = Path(f"{settings.out}.run/metrics.jsonl").read_text()
    return [json.loads(line) for line in metrics.splitlines()]


def success(folder: str) -> float:
    """The share of 64 visits on dev seeds, which nothing is learned from, in which the agent of `folder`
    orders the right number. It draws its answers, as while it learns: greedy, it would do alike on all pages
    of so small a shop."""
    agent = cpu.load(folder, context=512, compute=torch.float32)
    starts = measure.real_starts(["order"], range(1_000_000, 1_000_064))
    return measure.success(measure.play(Shop(), agent, starts, horizon=5, max_new_tokens=48,
                                        temperature=0.7))["success"]


def report(settings: recipe.Train, metrics: list[dict]) -> None:
    """Print success before and after, and what it took."""
    real, dreamed = (sum(row.get(name, 0) for row in metrics) for name in ("real_trajectories", "dreams"))
    print(f"success in the shop on dev seeds: {success(settings.policy):.2f} before, "
          f"{success(settings.out):.2f} after {settings.updates} updates on {real} real visits and {dreamed} "
          "dreams")


def main():
    settings = prepare(Config())
    report(settings, learn(settings))


if __name__ == "__main__":
    main()
