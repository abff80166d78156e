"""Dreams of the counting web by scripts: who writes what, and dreams of such models."""

import re
import threading

from conftest import act, counting_page, start

import dream
import lm
from judge import Judge
from node.dreams import Dream
from world_model import WorldModel

CONFIG = dream.Config(tasks=2, group=4, horizon=5, max_new_tokens=60, judge_tokens=60)


def kind(prompt: str) -> str:
    if "\nQUESTION: completed?" in prompt:
        return "judge"
    return "world" if "\nACTION: " in prompt else "policy"


def count(prompt: str) -> int:
    return int(re.search(r"'Count (\d+)'", prompt)[1])


def counted(prompt: str) -> str:
    """The world model of the counting web: [1] leads to the next page, [2] ends."""
    if "\nACTION: click [1]" in prompt:
        after = "\n".join("| " + line for line in counting_page(count(prompt) + 1).split("\n"))
        return f"It counts.\npage\n{after}\nover: no"
    return "It ends.\nno change\nover: yes"


def spoiled_at(*numbers):
    """A world model that writes nonsense on these pages, and counts on the others."""
    return lambda prompt: "nonsense" if count(prompt) in numbers else counted(prompt)


def script(world=counted, judge=lambda prompt: "so.\nCOMPLETED: YES",
           agent=lambda prompt: act("click [1]")):
    writers = {"world": world, "judge": judge, "policy": agent}
    return lambda prompt: writers[kind(prompt)](prompt)


def who(agent, world=None, judge=None) -> dream.Models:
    """These three; where one is left out, the agent."""
    return dream.Models(agent, WorldModel(world or agent, 200, 0.5),
                        Judge(judge or agent, CONFIG.judge_tokens))


def turn(prompt: str) -> int:
    """Which turn the policy is asked for: how many actions its prompt lists."""
    return len(re.findall(r"^\d+: ", prompt.partition("PREVIOUS ACTIONS:\n1: None")[2], re.MULTILINE))

SLOW = 100  # the page whose answer the server keeps back


class Here(lm.LM):
    """A model of this process, which belongs to the main thread. It writes what `write(prompt text)` says, or
    samples, when it has weights. `asked` holds (temperature, prompt, seed)."""

    write, asked = None, ()

    def generate(self, prompts, max_new_tokens, temperature, seeds):
        assert threading.current_thread() is threading.main_thread(), "this process's model, in a thread"
        self.asked += tuple((temperature, prompt, seed) for prompt, seed in zip(prompts, seeds))
        if self.write is None:
            return super().generate(prompts, max_new_tokens, temperature, seeds)
        return [written(self, self.write(self.tokenizer.decode(ids))) for ids in prompts]

    def margins(self, prompts, yes, no):
        assert threading.current_thread() is threading.main_thread(), "this process's model, in a thread"
        return super().margins(prompts, yes, no) if self.write is None else [1.0] * len(prompts)


def written(model, text: str) -> lm.Sample:
    ids = model.template.completion_ids(text)
    return lm.Sample(ids, [-1.0] * len(ids), text, False)


def dreams(agent, world, judge, pages, config=CONFIG, temperature=0.5):
    """A dream from each page; row k has the seed k."""
    imagined = WorldModel(world, 60, temperature)
    rows = [(start(n), None) for n in pages]
    parts = dream.Models(agent, imagined, Judge(judge, CONFIG.judge_tokens), Dream)
    return dream.trajectories(parts, rows, config, range(len(rows)))
