"""What the small agent is taught beside the demonstrations, and the laptop's settings.

The paper's agent starts from Llama-3.1-8B, which finds an element by its name and can say whether two strings
are the same. An agent of 3 M parameters learns that here, by three kinds of examples of the same recorded
pages:

    renamed copies   the demonstrations again with other words (rename.py), so that it copies off the page
    grounding        one-step goals that name an element of a recorded page: `Click "Submit".`
    judging          what was asked beside what was done, then the verdict (verdicts.py)

All is learned in two lessons: everything together, then at a lower rate acting once more, with a share of the
judging (`again`).
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import a11y
import data
import dream
import finetune
import lm
import policy
import recipe
from data import Action, Step, Trajectory
from tiny import verdicts
from tiny.rename import renamed

# ---- the laptop's settings ---------------------------------------------------------------------------------

RECORDED = "tiny/pages.jsonl.gz"  # of miniwob.TASKS
SFT = finetune.FineTune(epochs=1, lr=1e-3, floor=0.0, tokens=1536)


@dataclass(frozen=True)
class Policy(recipe.PolicySFT):
    """Supervised fine-tuning of the laptop's policy, which is also its judge."""

    base: str = "tiny/base"
    trajectories: str = RECORDED
    out: str = "runs/tiny/sft"
    demonstrations: int = 2
    context: int = 1024
    renamed: int = 8
    """Copies of each demonstration with its own words exchanged (tiny/rename.py)."""
    grounding: int = 1000
    """Examples of finding an element by its name, made from that many pages of failures."""
    judged: int = 60
    """Failures of each task that the judge learns from, beside the demonstrations. 0 takes all. -1: nothing
    is learned of judging (the plain baseline: a clone and no more)."""
    judge_copies: int = 2
    """Wrong versions of each judged success, made by changing what its goal asks for."""
    # Adam moves the embedding of a rare piece of a word as far as any weight, though nothing pulls at it but
    # that it is not the next one. At the full rate the pieces grow alike, and one is written for another
    # (NOTES 11.16). At none the tokens of our prompts that the base has never seen cannot be told apart.
    # Of 1, 2 and 3 passes three had the best mean of three seeds on dev pages, by little (docs/LOG.md).
    sft: finetune.FineTune = replace(SFT, epochs=3, embeddings=0.1)
    lr_again: float = 3e-4
    """Peak of the learning rate in the second lesson."""
    renamed_again: int = 48
    """Copies in the second lesson, with other words than those of the first."""
    judged_again: float = 0.25
    """Share of the judging that the second lesson repeats."""
    prepared: ClassVar[bool] = False


@dataclass(frozen=True)
class WorldModel(recipe.WorldModelSFT):
    """Fine-tuning of the laptop's world model."""

    base: str = "tiny/base"
    transitions: str = RECORDED
    out: str = "runs/tiny/world_model"
    context: int = 1024
    lora_rank: int = 0
    per_task: int = 60
    """Recorded trajectories of each task to learn from (with `demonstrations`: failures); 0 takes all."""
    demonstrations: int = 2
    """Learn from failures, and of the successes only from this many of each task: those that the agent is
    cloned from (sft.py policy). 0: learn from whatever was recorded."""
    demonstrations_seed: int = 0
    """Which demonstrations: the number that sft.py policy was given."""
    renamed: int = 2
    """Copies of each trajectory with its own words exchanged (tiny/rename.py)."""
    sft: finetune.FineTune = SFT  # embeddings too: the dots of a password are new to the base (NOTES 11.16)
    prepared: ClassVar[bool] = False


TRAIN = recipe.Train(
    policy="runs/tiny/sft", world_model="runs/tiny/world_model", out="runs/tiny/dream",
    trajectories=RECORDED, demonstrations=2, updates=80,
    # 3 M parameters, not 8 B: a hundred times the paper's rate. With 64 dreams a batch it took back what they
    # teach; 256 bear it (docs/LOG.md).
    lr=1e-4,
    # A laptop trajectory has about 40 tokens where the paper's has thousands, and s_i is a mean over them.
    # Its noise, and what one step moves it by, are that much larger. At 3e-4 half of such short sequences
    # are clipped after the first step (NOTES 4.10).
    eps_low=0.03, eps_high=0.04,
    trained_share=0.5,  # 1.9 points over the last weights on four pairs, -.2 on a fifth (docs/LOG.md)
    tokens=2048, context=1024, world_model_context=1024, judge_context=1024, evaluate_every=20,
    evaluate_horizon=14,  # the longest pages take nine or ten steps
    sampler="transformers", compute="auto",
    # Most groups succeed or fail as a whole, so many are dreamed, at a temperature that parts them. Of the
    # judge's YES on real tries a third is wrong, more often near the line (docs/fidelity.md). What it is not
    # sure of is left out: in an earlier recipe, without that (and with a worse grammar), 80 updates gained
    # 3.8 points in the place of ten (docs/LOG.md).
    dreaming=dream.Config(tasks=32, group=8, horizon=5, expert_fraction=0.5, demonstrated=0.3, focus=True,
                          temperature=1.0, max_new_tokens=64, world_model_tokens=160,
                          world_model_temperature=0.5, judge_tokens=280, judge_unsure=2.0),
)

# ---- what is learned ---------------------------------------------------------------------------------------


def policy_lessons(config: Policy, model: lm.LM, recorded: Sequence[Trajectory],
                   counts: Counter) -> list[tuple[list[lm.Pair], finetune.FineTune]]:
    """What the agent learns, lesson by lesson: (examples, settings). Adds to `counts`."""
    shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
    counts["demonstrations"] += len(shown)
    cloned = policy.examples(model, shown, counts)
    acting, judging = taught(config, model, recorded, shown, renamed(shown, config.renamed, config.seed),
                             counts)
    return [(cloned + acting + judging, config.sft), again(config, model, recorded, shown, counts)]


def again(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
          counts: Counter) -> tuple[list[lm.Pair], finetune.FineTune]:
    """(examples, settings) of the second lesson: acting once more, by copies with other words and at a lower
    rate, with a share of the judging. Adds to `counts`.

    Other words at a lower rate raise the agent, and the clone that learns nothing of judging (docs/LOG.md).
    The share is there so that judging is not forgotten; and only here does the judge meet agents that stop
    early. Put into the first lesson, these examples took 16 points from seed 0's agent.
    """
    copies = renamed(shown, config.renamed + config.renamed_again, config.seed)[config.renamed * len(shown) :]
    found: Counter = Counter()
    acting, judging = taught(config, model, recorded, shown, copies, found, early=True)
    repeated = random.Random(config.seed).sample(judging, round(config.judged_again * len(judging)))
    pairs = policy.examples(model, shown, Counter()) + acting + repeated
    counts["second lesson"] = len(pairs)
    counts.update({f"second lesson, {what}": count for what, count in found.items() if "judge: " in what})
    return pairs, replace(config.sft, lr=config.lr_again)


def taught(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
           copies: Sequence[Trajectory], counts: Counter,
           early: bool = False) -> tuple[list[lm.Pair], list[lm.Pair]]:
    """(acting, judging): examples of what a lesson teaches beside `shown`, by these renamed copies; judging
    by as many of them as config.renamed says, and with `early` by agents that stop early. Adds to `counts`.
    """
    failed = failures(recorded, config.judged, config.demonstrations_seed) if config.judged >= 0 else []
    unrewarded = [trajectory for trajectory in recorded if trajectory.reward < 1]
    grounding = grounding_examples(model, unrewarded, config.grounding, config.seed)
    counts.update({"judged failures": len(failed), "grounding": len(grounding)})

    judged = [*shown, *copies[: config.renamed * len(shown)], *failed]
    judging = [] if config.judged < 0 else verdicts.judge_examples(
        model, judged, config.judge_copies, config.seed, counts, early)
    return policy.examples(model, copies, counts) + grounding, judging


def chosen(config: WorldModel, recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories whose transitions the world model learns, with their renamed copies behind them.

    With config.demonstrations these are failures, and the few successes that the agent is cloned from. Only
    those show what a success does to a page, so they are repeated until a task has about 16.
    """
    if config.demonstrations:
        failed = [trajectory for trajectory in recorded if trajectory.reward < 1]
        shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
        kept = first_of_each_task(failed, config.per_task) + shown * max(1, 16 // config.demonstrations)
    else:
        kept = first_of_each_task(recorded, config.per_task)
    return kept + renamed(kept, config.renamed, config.sft.seed)


def failures(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """`count` failures of every task that ended by themselves; all of them when count is 0."""
    return finetune.draw([t for t in trajectories if t.reward == 0 and t.terminated], count, seed)


def first_of_each_task(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """The first `count` trajectories of every task, in file order; all of them when count is 0."""
    seen: Counter = Counter()
    kept = []
    for trajectory in trajectories:
        seen[trajectory.task] += 1
        if not count or seen[trajectory.task] <= count:
            kept.append(trajectory)
    return kept


# ---- grounding ---------------------------------------------------------------------------------------------


def grounding_examples(model: lm.LM, trajectories: Sequence[Trajectory], count: int,
                       seed: int) -> list[lm.Pair]:
    """(prompt, completion) of goals that name elements of up to `count` recorded pages: `Click "Submit".`

    They need neither a reward nor a demonstration, as NNetNav's labels in hindsight need none (arXiv
    2410.02907): the pages are there, and the goal is written afterwards. A model that was pretrained on the
    web needs no such goals. Ours is weak at looking up ids (docs/LOG.md).
    """
    rng, pairs = random.Random(seed), []
    pages = sorted({step.page for trajectory in trajectories for step in trajectory.steps})
    for page in rng.sample(pages, min(count, len(pages))):
        made = _grounding_step(rng, page)
        if made is not None:
            prompt, completion = policy.step_pair(model, *made)
            if len(prompt) + len(completion) <= model.context:
                pairs.append((prompt, completion))
    return pairs


def _grounding_step(rng: random.Random, page: str) -> tuple[str, Step] | None:
    """(goal, the next step towards it) for elements whose labels stand once on the page, if there are any:
    for one, or for up to four in turn of which some are done.

    >>> page = "[1] checkbox 'tea', checked='false'\\n[2] button 'No'\\n[3] button 'No'\\n[4] button 'Go'"
    >>> goal, step = _grounding_step(random.Random(3), page)
    >>> goal, step.previous, str(step.action)
    ('Click tea, Go.', ('click [1] where [1] is tea',), 'click [4]')
    >>> step.page.split("\\n")[0]
    "[1] checkbox 'tea', checked='true'"
    """
    nodes = {node.bid: node for node in a11y.parse(page) if node.bid and node.role != "LabelText"}
    labels = {bid: data.label(page, bid) for bid in nodes}
    times = Counter(labels.values())
    unique = [bid for bid, label in labels.items() if times[label] == 1]
    if not unique:
        return None
    bid, past = rng.choice(unique), []
    if nodes[bid].role == "textbox":
        action = Action("type", bid, rng.choice(sorted(labels.values())), enter=False)
        goal = f'Type "{action.text}" into "{labels[bid]}".'
    else:
        more = [other for other in unique if other != bid and nodes[other].role != "textbox"]
        wanted = [bid, *rng.sample(more, min(len(more), rng.choice((0, 0, 1, 2, 3))))]
        quote = rng.choice(('"', ""))
        goal = f"Click {', '.join(quote + labels[one] + quote for one in wanted)}."
        for one in wanted[: rng.randrange(len(wanted))]:
            past.append(data.describe(Action("click", one), page))
            page = re.sub(rf"(\[{one}\] (?:checkbox|radio) .*checked=)'false'", r"\1'true'", page)
        action = Action("click", wanted[len(past)])
    return goal, Step(data.root_url(page), page, data.write_thought(goal, page, action), action, tuple(past))
