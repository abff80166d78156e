"""Dreams of the counting web by scripts: who writes what, and dreams of such models."""

import re

from conftest import act, counting_page

import dream
from config import Train
from judge import Judge
from world_model import WorldModel

CONFIG = Train(groups=2, group_size=4, horizon=5, max_new_tokens=60, world_model_tokens=200, judge_tokens=60)


def kind(prompt: str) -> str:
    judges = "\nQUESTION: completed?" in prompt
    return "judge" if judges else "world" if "\nACTION: " in prompt else "policy"


def count(prompt: str) -> int:
    return int(re.search(r"'Count (\d+)'", prompt)[1])


def counted(prompt: str) -> str:
    """The world model of the counting web: [1] leads to the next page, [2] ends."""
    if "\nACTION: click [1]" in prompt:
        after = "\n".join("| " + line for line in counting_page(count(prompt) + 1).split("\n"))
        return f"It counts.\npage\n{after}\nover: no"
    return "It ends.\nno change\nover: yes"


def script(world=counted, judge=lambda _: "so.\nCOMPLETED: YES", agent=lambda _: act("click [1]")):
    writers = {"world": world, "judge": judge, "policy": agent}
    return lambda prompt: writers[kind(prompt)](prompt)


def who(sampler) -> dream.Models:
    """One sampler as all three."""
    return dream.Models(sampler, WorldModel(sampler, 200, 0.5), Judge(sampler, 60))


def turn(prompt: str) -> int:
    """Which turn the policy is asked for: how many actions its prompt lists."""
    return len(re.findall(r"^\d+: ", prompt.partition("PREVIOUS ACTIONS:\n1: None")[2], re.MULTILINE))
