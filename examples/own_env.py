"""An environment of your own, learned on, real and dreamed: handed in, not patched in.

    python lm.py                      # runs/smollm2, once
    python -m examples.own_env        # minutes of two cores; writes runs/own_env/

`Shop` is the whole fork: reset, step and failures (policy.World), over pages that are text. `Imagined` and
`Clerk` are what a dream asks of a world model and of a judge; both are code here. prepare() records random
clicks, and SmolLM2 learns from a few how a click is written. learn() is train.py's loop: half of the groups
in the shop itself, half in dreams of it.
"""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import data
import dream
import finetune
import gspo
import judge
import lm
import policy
import recipe
import train
import world_model
from data import Action, Obs, Start

# ---- the environment ---------------------------------------------------------------------------------------

def page_of(item: str, count: int) -> str:
    """A page as BrowserGym writes one: an element a line, its id in brackets, its name in quotes."""
    return (f"RootWebArea 'Shop', url='http://shop/'\n\t[1] spinbutton '{item}' value='{count}'\n"
            "\t[2] button 'More'\n\t[3] button 'Less'\n\t[4] button 'Order'")


def answer(page: str, action: Action) -> tuple[str, bool]:
    """What the shop does: (the next page, whether it is over)."""
    [(item, count)] = re.findall(r"spinbutton '(\w+)' value='(\d+)'", page)
    more = {"click [2]": 1, "click [3]": -1}.get(str(action), 0)
    return page_of(item, max(0, int(count) + more)), action.name == "stop" or str(action) == "click [4]"


def paid(goal: str, last: str, page: str) -> bool:
    """Whether the last action orders what the goal asks for, as "Order 2 of lamp."."""
    [(wanted, item)] = re.findall(r"Order (\d) of (\w+)\.", goal)
    return last.startswith("click [4]") and f"spinbutton '{item}' value='{wanted}'" in page


class Shop:
    """Order so many. All follows from a start's seed (where starts are no first pages, also its prefix)."""

    failures: Sequence[str] = ()  # of each page what broke that is not the agent's doing; here nothing can

    def reset(self, starts: Sequence[Start]) -> list[Obs]:
        self.failures, self.over, self.seen = [""] * len(starts), [False] * len(starts), []
        for start in starts:
            rng = random.Random(start.seed)
            item, wanted = rng.choice(("lamp", "book")), rng.randint(1, 3)
            page = page_of(item, wanted + rng.randint(-1, 1))
            self.seen.append(Obs(f"Order {wanted} of {item}.", "http://shop/", page))
        return list(self.seen)

    def step(self, actions: Sequence[Action | None]):
        assert len(actions) == len(self.seen), f"{len(actions)} actions for {len(self.seen)} pages"
        rewards, terminated = [0.0] * len(actions), [False] * len(actions)
        for k, action in enumerate(actions):
            obs = self.seen[k] = replace(self.seen[k], error="")
            if action is None:  # it idles
                continue
            assert not self.over[k], "a step after the end"
            if why := world_model.impossible(obs.page, action):  # an error on the page, never an exception
                self.seen[k] = replace(obs, error=why)
                continue
            page, terminated[k] = answer(obs.page, action)
            self.seen[k], self.over[k] = replace(obs, page=page), terminated[k]
            rewards[k] = float(paid(obs.goal, str(action), page))
        return list(self.seen), rewards, terminated, [False] * len(actions)  # truncated: it has no limit


# ---- who dreams --------------------------------------------------------------------------------------------

class Imagined:
    """A world model (world_model.AnyWorldModel) that is code: the shop's own answer."""

    def predict(self, pages, actions, previous, seed) -> list[world_model.Prediction]:
        return [world_model.Prediction(page, error=why) if (why := world_model.impossible(page, action))
                else world_model.Prediction(*answer(page, action)) for page, action in zip(pages, actions)]


class Clerk:
    """A judge (judge.AnyJudge) that is code: it reads the goal, the last action and the page."""
    def verdicts(self, cases: Sequence[judge.Case]) -> list[judge.Verdict]:
        good = [paid(goal, actions[-1], after) for goal, actions, _, after in cases]
        return [judge.Verdict(yes, 1.0 if yes else -1.0, "read by code") for yes in good]


def load_models(config: recipe.Train, files: Path) -> tuple[lm.LM, dream.Models]:
    """In the place of train.load_models: (what is trained, who dreams)."""
    model = lm.load(config.policy, context=config.context, compute=lm.matrix_type(config.compute))
    return model, dream.Models(model, Imagined(), Clerk())


# ---- record, clone, learn ----------------------------------------------------------------------------------

def visit(seed: int) -> dict:
    """An episode of at most four random clicks, as data.read_trajectories reads it."""
    shop, rng, actions, reward, over = Shop(), random.Random(f"visitor {seed}"), [], 0.0, False
    seen = shop.reset([data.start("order", seed)])
    while len(actions) < 4 and not over:
        actions.append(Action("click", rng.choice("234")))
        [obs], [reward], [over], _ = shop.step(actions[-1:])
        seen.append(obs)
    return {"task": "order", "seed": seed, "goal": seen[0].goal, "pages": [obs.page for obs in seen],
            "actions": list(map(str, actions)), "errors": [obs.error for obs in seen[1:]],
            "reward": int(reward), "terminated": over, "truncated": not over}


def prepare(out: str, updates: int = 12, base: str = recipe.SMALLEST) -> recipe.Train:
    """Record, and clone some of the successes. Returns the settings of the loop: the laptop's, smaller."""
    shutil.rmtree(f"{out}/agent.run", ignore_errors=True)  # or train.py would go on with the run of before
    Path(out).mkdir(parents=True, exist_ok=True)
    file = Path(out, "recorded.jsonl")
    file.write_text("".join(json.dumps(visit(seed)) + "\n" for seed in range(120)))  # seeds to learn from
    model, counts = lm.load(base, 512, made_by="python lm.py"), Counter[str]()
    model.tokenizer.init_kwargs["system_prompt"] = "You order in a shop."  # a short one is cheap
    shown = finetune.successes(data.read_trajectories(file))  # some twenty
    sft = finetune.FineTune(lr=2e-4, tokens=512, epochs=4, trained_layers=10)
    finetune.learn(model, policy.examples(model, shown, counts), sft, "policy", f"{out}/sft", counts)
    dreaming = replace(recipe.LAPTOP.dreaming, tasks=4, horizon=4, max_new_tokens=32)
    return replace(recipe.LAPTOP, policy=f"{out}/sft", out=f"{out}/agent", trajectories=str(file),
                   world="both", updates=updates, trained_layers=10, lr=1e-4, context=512,
                   evaluate_every=updates, evaluate_horizon=4, evaluate_seeds="1000000:48", dreaming=dreaming)


def learn(config: recipe.Train, coefficients_of=gspo.gspo_coefficients) -> list[dict]:
    """train.py's loop, with our environment, world model and judge. Returns the lines of metrics.jsonl."""
    train.train(config, coefficients_of, web=Shop(), load=load_models)
    rows = list(map(json.loads, Path(f"{config.out}.run/metrics.jsonl").read_text().splitlines()))
    looks = [f"{row['real_success']:.2f}" for row in rows if "real_success" in row]
    print(f"success in the shop, on seeds that nothing is learned from: {', then '.join(looks)}")
    return rows


if __name__ == "__main__":
    learn(prepare("runs/own_env"))
