"""What the small agent is taught beside the demonstrations, and the laptop's settings.

The paper's agent starts from Llama-3.1-8B, which finds an element by its name and can say whether two strings
are the same. An agent of 3 M parameters learns that here, by three kinds of examples of the same recorded
pages:

    renamed copies   the demonstrations again with other words (rename.py), so that it copies off the page
    grounding        one-step goals that name an element of a recorded page: `Click "Submit".`
    judging          what was asked beside what was done, then the verdict: the completions of judge.py

Code writes the judge's completions. It reads the goal and the pages, and knows no task. All is learned in two
lessons: everything together, then at a lower rate acting once more, with a share of the judging (`again`).
"""

import random
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import a11y
import data
import dream
import finetune
import judge
import lm
import policy
import recipe
from data import Action, Step, Trajectory
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
    # Its noise, and what one step moves it by, are that much larger. At 3e-4 nearly every trajectory would be
    # clipped after the first minibatch (docs/LOG.md).
    eps_low=0.03, eps_high=0.04,
    tokens=2048, context=1024, world_model_context=1024, judge_context=1024, evaluate_every=20,
    evaluate_horizon=14,  # the longest pages take nine or ten steps
    sampler="transformers", compute="auto",
    # Most groups succeed or fail as a whole, so many are dreamed, at a temperature that parts them. The
    # judge is wrong in a third of its YES, more often near the line. What it is not sure of is left out:
    # without that (and with a worse grammar) 80 updates gained 3.8 points in the place of ten (docs/LOG.md).
    dreaming=dream.Config(tasks=32, group=8, horizon=5, expert_fraction=0.5, demonstrated=0.3, focus=True,
                          temperature=1.0, max_new_tokens=64, world_model_tokens=160,
                          world_model_temperature=0.5, judge_tokens=160, judge_unsure=2.0),
)

# ---- what is learned ---------------------------------------------------------------------------------------


def policy_lessons(config: Policy, model: lm.LM, recorded: Sequence[Trajectory],
                   counts: Counter) -> list[tuple[list[lm.Pair], finetune.FineTune]]:
    """What the agent learns, lesson by lesson: (examples, settings). Adds to `counts`."""
    shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
    counts["demonstrations"] += len(shown)
    first = policy.examples(model, shown, counts) + beside(config, model, recorded, shown, counts)
    return [(first, config.sft), again(config, model, recorded, shown, counts)]


def beside(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
           counts: Counter) -> list[lm.Pair]:
    """(prompt, completion) of all that is learned beside `shown`, the demonstrations that are
    cloned: renamed copies, grounding, judging. Adds to `counts`."""
    copies = renamed(shown, config.renamed, config.seed)
    acting, judging = taught(config, model, recorded, shown, copies, counts)
    return acting + judging


def again(config: Policy, model: lm.LM, recorded: Sequence[Trajectory], shown: Sequence[Trajectory],
          counts: Counter) -> tuple[list[lm.Pair], finetune.FineTune]:
    """(examples, settings) of the second lesson: acting once more, by copies with other words and at a lower
    rate, with a share of the judging. Adds to `counts`.

    Other words at a lower rate raise the agent, and the clone that learns nothing of judging (docs/LOG.md).
    The share is there so that judging is not forgotten; and only here does the judge meet agents that stop
    early. In the first lesson these examples cost seed 0 16 points of acting.
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
    judging = [] if config.judged < 0 else judge_examples(
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


# ---- judging: the examples ---------------------------------------------------------------------------------


def judge_examples(model: lm.LM, trajectories: Sequence[Trajectory], copies: int, seed: int, counts: Counter,
                   early: bool = False, ending: Callable = judge.ending) -> list[lm.Pair]:
    """(prompt, completion) of the judge for every goal of every trajectory; with `early`, also for every
    success stopped early. `ending`: what it is shown (as judge.ending). Adds to `counts`.

    A made-up failure without a fault is left out: the same words would then stand before a yes and before a
    no. (A recorded failure stays: there the page said no. An agent that stopped early stays: the stop that
    the judge reads is what is wrong.) A success with a fault is left out too: it would teach to overlook
    faults.
    """
    rng, pairs, moot = random.Random(seed), [], moot_kinds(trajectories)
    for recorded in trajectories:
        cases = [(recorded, goal, success) for goal, success in judged_goals(rng, recorded, copies)]
        if early and (stopped := stopped_early(rng, recorded)):
            cases.append((stopped, stopped.goal, False))
        for trajectory, goal, success in cases:
            made_up = trajectory is recorded and goal != recorded.goal
            faults = _faults(goal, trajectory, moot[recorded.task])
            if made_up and not success and not faults:
                counts["judge: a made-up failure without a fault"] += 1
                continue
            if success and faults:
                counts["judge: a success with a fault"] += 1
                continue
            prompt = model.template.prompt_ids(judge.messages(goal, *ending(trajectory)))
            said = write_verdict(goal, trajectory.steps, trajectory.final_page, success, moot[recorded.task])
            completion = model.template.completion_ids(said)
            if len(prompt) + len(completion) <= model.context:
                pairs.append((prompt, completion))
                counts[f"judge: {'YES' if success else 'NO'}"] += 1
    return pairs


def moot_kinds(trajectories: Sequence[Trajectory]) -> dict[str, set[str]]:
    """{task: kinds of clause (kind_of) that find fault with half of its successes; "different" with more than
    half}. What is wrong there is no reason to say no: a goal to press an icon does not name it, and "extra"
    would stand before every yes. But what differs from what was asked is luck in one of two demonstrations:
    a spinner takes "-7 with" for -7, and no number would be compared by that.
    """
    won, found = Counter(t.task for t in trajectories if t.reward), Counter()
    for t in trajectories:
        if t.reward:
            found.update((t.task, kind) for kind in {kind_of(said) for said in _faults(t.goal, t)})
    return {t.task: {kind for (task, kind), count in found.items()
                     if task == t.task and 2 * count >= won[task] + (kind == "different")}
            for t in trajectories}


def _faults(goal: str, trajectory: Trajectory, moot: Collection[str] = ()) -> list[str]:
    """The clauses that find something wrong, but for those of a moot kind."""
    clauses = _clauses(*_items(goal, trajectory.steps, trajectory.final_page))
    clauses += _place_clauses(goal, trajectory.steps)
    return [said for said, well in clauses if not well and kind_of(said) not in moot]


def judged_goals(rng: random.Random, trajectory: Trajectory, copies: int) -> list[tuple[str, bool]]:
    """The goals for which one trajectory is judged, and whether it reached each.

    Its own goal has the environment's verdict. A failure has also reached another goal, if one can be made.
    For each goal that was reached there are up to `copies` that were not. Without those a judge learns what a
    finished form looks like, not whether the right thing stands in it: it said yes to 20 of 20 wrong forms
    (NOTES 11.5).

        asked for "tea", typed "tea"     "tea" YES, "tfa" NO, "te0" NO
        asked for "tea", typed "milk"    "tea" NO, "milk" YES, "mplk" NO, "milM" NO
    """
    goals = [(trajectory.goal, bool(trajectory.reward))]
    if not trajectory.reward and (reached := hindsight_goal(trajectory)):
        goals.append((reached, True))
    wrong = []
    for goal, success in goals:
        if success:
            others = [other_goal(rng, replace(trajectory, goal=goal)) for _ in range(copies)]
            wrong += [(other, False) for other in others if other]
    return goals + wrong


def stopped_early(rng: random.Random, trajectory: Trajectory) -> Trajectory | None:
    """A success whose agent stops before its last step, and says what it had to type: a failure. None for
    other trajectories, and where stop itself was asked for.

    Recordings never show it with the right words, and agents do it. A judge that had not seen it called `stop
    [Korean]` right where Korean had to be typed and sent, and dreams then taught just that (docs/LOG.md).

    >>> page = "[1] textbox ''\\n[2] button 'Send'"
    >>> actions = [Action("type", "1", "tea"), Action("click", "2")]
    >>> steps = [Step("", page, "", action, ()) for action in actions]
    >>> recorded = Trajectory("t", 0, 'Send "tea".', steps, page, 1, True, False, "", ())
    >>> [str(step.action) for step in stopped_early(random.Random(1), recorded).steps]
    ['stop [tea]']
    """
    if not trajectory.reward or trajectory.steps[-1].action.name == "stop":
        return None
    k = rng.randrange(len(trajectory.steps))
    typed = [step.action.text for step in trajectory.steps if step.action.name == "type" and not step.error]
    stop = replace(trajectory.steps[k], action=Action("stop", text=rng.choice(typed or [""])), error="")
    return replace(trajectory, steps=[*trajectory.steps[:k], stop], final_page=stop.page, reward=0)


# ---- judging: what is read off goal and pages --------------------------------------------------------------

Asked = tuple[list[str], list[str]]  # texts to type or to answer; names of elements
Done = tuple[list[str], list[str], list[str]]  # texts; names chosen (ticked, selected); names pressed
Box = tuple[str, str]  # a text box: (id, value as it is quoted on the page)
NUMBER = r"(?<![\w.])-?\d+(?::\d+)?(?: [AP]M)?(?!\w)|(?<=#)\w+"  # and times, and colours
NOT_PRESSED = ("checkbox", "radio", "option", "textbox", "combobox", "LabelText", "cell", "InputTime", "Date",
               "DateTime")  # when clicked


def _whole(text: str) -> str:
    """The pattern of `text` as whole words: "tea", but not in "teapot"."""
    return rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"


def asked_items(goal: str, page: str) -> Asked:
    """(texts, names): what the goal has in quotes, its numbers, and what it or a text box wants read from a
    table; the elements that it names.

    >>> asked_items('Enter "tea" and press Send.', "[1] textbox ''\\n[2] button 'Send'")
    (['tea'], ['Send'])
    >>> asked_items("What is the Year?", "[1] cell 'Year'\\n[2] cell '1990'")
    (['1990'], [])
    >>> asked_items("Enter 9:37 PM.", "")
    (['9:37 PM'], [])
    >>> asked_items("Fill in.", "[1] textbox 'Year'\\n[2] cell 'Year'\\n[3] cell '1990'")
    (['1990'], [])
    """
    texts = [(match.start(), match[1]) for match in re.finditer(r'"([^"]+)"', goal)]
    names: list[tuple[int, str]] = []
    rest = re.sub(r'"[^"]*"', lambda match: " " * len(match[0]), goal)  # blanked: the positions stay
    nodes = [node for node in a11y.parse(page) if node.bid and node.name]
    # The longest name first: "South Africa" before "Africa".
    for k in sorted(range(len(nodes)), key=lambda k: -len(nodes[k].name)):
        match = re.search(_whole(nodes[k].name), rest, re.IGNORECASE)
        if match:
            rest = rest[: match.start()] + " " * len(match[0]) + rest[match.end() :]
            if "cell" in (nodes[k].role or "") and k + 1 < len(nodes):  # a label stands for what is beside it
                texts.append((match.start(), nodes[k + 1].name))
            else:
                names.append((match.start(), nodes[k].name))
    texts += [(match.start(), match[0]) for match in re.finditer(NUMBER, rest)]
    value = {cell.name: beyond.name for cell, beyond in zip(nodes, nodes[1:]) if "cell" in (cell.role or "")}
    for place, (bid, _) in enumerate(text_boxes(page) if value else ()):
        if (label := data.label(page, bid).strip(":")) in value:
            texts.append((len(goal) + place, value[label]))
    return [text for _, text in sorted(texts)], [name for _, name in sorted(names)]


def done_items(steps: Sequence[Step], after: str) -> Done:
    """(texts, chosen, pressed) of steps that ended on the page `after`. What was refused was not done.

    texts: the last text that was typed into each element, in page order, the numbers of spinners, then the
    answer. chosen: what is chosen on `after`, in page order. pressed: in the order of the presses.

    >>> page = "[1] textbox 'Name'\\n[2] radio 'tea', checked='true'\\n[3] button 'Send'"
    >>> actions = [Action("type", "1", "Zo"), Action("type", "1", "Zoe"), Action("click", "3")]
    >>> done_items([Step("", page, "", action, ()) for action in actions], page)
    (['Zoe'], ['tea'], ['Send'])
    """
    actions = [step.action for step in steps if not step.error]
    order = {node.bid: k for k, node in enumerate(a11y.parse(after)) if node.bid}
    typed = {action.bid: action.text for action in actions if action.name == "type"}
    texts = [typed[bid] for bid in sorted(typed, key=lambda bid: order.get(bid, len(order)))]
    texts += [value.strip("'") for bid, value in text_boxes(after, ("spinbutton",)) if bid not in typed]
    texts += [action.text for action in actions if action.name == "stop"]
    chosen = [node.name or "" for node in a11y.parse(after) if _is_chosen(node)]
    return texts, chosen, [name for _, name in presses(steps)]


def presses(steps: Sequence[Step]) -> list[tuple[Step, str]]:
    """(the step, what it presses), in their order."""
    found = [(step, a11y.find(step.page, step.action.bid)) for step in steps
             if step.action.name == "click" and not step.error]
    return [(step, data.label(step.page, step.action.bid)) for step, node in found
            if node is not None and node.role not in NOT_PRESSED]


def text_boxes(page: str, roles: Sequence[str] = ("textbox", "spinbutton")) -> list[Box]:
    nodes = [node for node in a11y.parse(page) if node.bid]
    once = Counter(node.bid for node in nodes)  # a box for times has the id of its parts
    return [(node.bid, node.attributes.get("value", "''"))
            for node in nodes if node.role in roles and once[node.bid] == 1]


def _is_chosen(node: a11y.Node) -> bool:
    return node.attributes.get("checked") == "'true'" or node.attributes.get("selected") == "True"


def readings(goal: str, asked_texts: Sequence[str], steps: Sequence[Step], after: str) -> list[str]:
    """What must be read before anything can be compared.

    What the goal quotes comes first: beside what was typed, a small model copies that. Then table labels that
    the goal names, with their values; then what is chosen in the end, whatever was clicked on the way.

    >>> table, radio = "[3] cell 'Language'\\n[4] cell 'Korean'", "[6] radio 'tea', checked='true'"
    >>> send = Step("", table + "\\n[7] button 'Send'", "", Action("click", "7"), ())
    >>> readings("Enter the value of Language", ["Korean"], [send], radio)
    ["'Language' 'Korean'", "[6] 'tea' chosen", "'Send' pressed"]
    """
    before = steps[-1].page
    wanted = [f"'{text}' wanted" for text in asked_texts if text in goal]
    nodes = a11y.parse(before)
    table = [f"'{label.name}' '{value.name}'" for label, value in zip(nodes, nodes[1:])
             if label.name and "cell" in (label.role or "") and value.name in asked_texts
             and value.name not in goal]
    chosen = [f"[{node.bid}] '{node.name or ''}' chosen" for node in a11y.parse(after) if _is_chosen(node)]
    pressed = [f"'{name}'{place_of(step.page, step.action.bid)} pressed" for step, name in presses(steps)]
    return wanted + table + chosen + pressed


def place_of(page: str, bid: str) -> str:
    r"""Where an element stands whose name does not say which it is: the first of the texts before it (or the
    text behind it), and its place among those without a name; '' for any other.

    >>> page = "StaticText 'Ada'\n\tStaticText 'Hello'\n[4] image ''\n[5] image ''\n[6] link 'x'"
    >>> place_of(page, "5"), place_of(page, "6")
    (" 2 by 'Ada'", '')
    """
    place, text = _stands(page, bid)
    return (f" {place}" if place > 1 else "") + (f" by '{text}'" if text else "")


def _stands(page: str, bid: str) -> tuple[int, str]:
    """(place, text) of place_of(); (1, "") where it has none."""
    nodes = a11y.parse(page)
    k = next((k for k, node in enumerate(nodes) if node.bid == bid), None)
    if k is None:  # it shares its id with others
        return 1, ""
    name, first = nodes[k].name, k
    if name and sum(node.name == name and bool(node.bid) for node in nodes) == 1 and nodes[k].role != "link":
        return 1, ""
    while first and not name and nodes[first - 1].role == nodes[k].role and not nodes[first - 1].name:
        first -= 1
    place, text = k - first + 1, ""
    while first and nodes[first - 1].role == "StaticText":
        first -= 1
        text = nodes[first].name
    behind = nodes[k + 1 : k + 2]
    if not text and behind and behind[0].role == "StaticText" and behind[0].depth == nodes[k].depth:
        text = behind[0].name
    return place, text


def _places_asked(goal: str, page: str) -> list[str]:
    """The texts by which there stands something to press, and which the goal names outside of quotes."""
    rest = re.sub(r'"[^"]*"', "", goal)
    return [text for text in dict.fromkeys(_texts_beside(page))
            if re.search(_whole(text.strip(":")), rest, re.IGNORECASE)]


def _texts_beside(page: str) -> list[str]:
    """The text by which each element stands that can be pressed, where it stands by one."""
    pressed = [node.bid for node in a11y.parse(page) if node.bid and node.role not in NOT_PRESSED]
    return [text for bid in pressed if (text := _stands(page, bid)[1])]


# ---- judging: what is written before the verdict -----------------------------------------------------------

Clause = tuple[str, bool]  # (what is said, whether all is well with it)


def write_verdict(goal: str, steps: Sequence[Step], after: str, success: bool,
                  moot: Collection[str] = ()) -> str:
    """The judge's completion: what was read, what was asked beside what was done, and the verdict, which is
    known. `after` is the page behind the last step. Of faults of a `moot` kind (moot_kinds) nothing is said.

    >>> page = "[1] textbox '' value='ten'\\n[2] button 'Send'"
    >>> actions = [Action("type", "1", "ten"), Action("click", "2")]
    >>> steps = [Step("", page, "", action, ()) for action in actions]
    >>> print(write_verdict('Enter "tea" and press Send.', steps, page, False))
    'tea' wanted; 'Send' pressed; [1] is 'ten'; asked 'tea' did 'ten' different.
    COMPLETED: NO
    """
    asked, done, boxes = _items(goal, steps, after)
    read = readings(goal, asked[0], steps, after)
    said = compare(asked, done, success, boxes, read, moot, _place_clauses(goal, steps))
    return f"{said}\nCOMPLETED: {'YES' if success else 'NO'}"


def _items(goal: str, steps: Sequence[Step], after: str) -> tuple[Asked, Done, list[Box]]:
    page = steps[-1].page
    return asked_items(goal, page), done_items(steps, after), text_boxes(page)


def kind_of(clause: str) -> str:
    """Of a fault: different, none, extra or empty.

    >>> kind_of("asked 'tea' did 'milk' different"), kind_of("[3] empty")
    ('different', 'empty')
    """
    return clause.rsplit(" ", 1)[-1]


def compare(asked: Asked, done: Done, success: bool, boxes: Sequence[Box] = (),
            read: Sequence[str] = (), moot: Collection[str] = (), places: Sequence[Clause] = ()) -> str:
    """What was read, then what was asked beside what was done. Of a failure only up to the first wrong thing,
    which then stands right before the verdict: a small model never learns "all of a long list" (docs/LOG.md).

    >>> compare(([], ["tea", "milk"]), ([], ["milk", "tea", "salt"], []), False)
    "asked 'tea' did 'tea' same; asked 'milk' did 'milk' same; did 'salt' extra."
    """
    clauses = [(said, True) for said in read] + [
        clause for clause in [*_clauses(asked, done, boxes), *places]
        if clause[1] or kind_of(clause[0]) not in moot]
    if not success:
        first_wrong = next((k for k, (_, well) in enumerate(clauses) if not well), len(clauses))
        clauses = clauses[: first_wrong + 1]
    return "; ".join(said for said, _ in clauses) + "."


def _clauses(asked: Asked, done: Done, boxes: Sequence[Box]) -> list[Clause]:
    """Text boxes (where texts were asked for), then texts, then names. Where one side has no texts, those of
    the other side are compared with names.

    >>> _clauses((["tea"], []), ([], ["tea"], []), [("3", "'anna'"), ("4", "''")])
    [("[3] is 'anna'", True), ('[4] empty', False), ("asked 'tea' did 'tea' same", True)]
    """
    (asked_texts, asked_names), (done_texts, chosen, pressed) = asked, done
    clauses = []
    # All boxes: a small model that had to name the empty one at once missed it (docs/LOG.md).
    if asked_texts or done_texts:
        clauses = [(f"[{bid}] empty", False) if value == "''" else (f"[{bid}] is {value}", True)
                   for bid, value in boxes]
    if asked_texts and done_texts:
        clauses += _text_clauses(asked_texts, done_texts)
        return clauses + _name_clauses(asked_names, [], chosen, pressed)
    typed = [text for text in done_texts if text]
    return clauses + _name_clauses(asked_texts + asked_names, typed, chosen, pressed)


def _text_clauses(asked: list[str], done: list[str]) -> list[Clause]:
    """Texts belong to places, so their order counts. One text may belong in several places, so the last
    that was asked for is compared with all further texts.

    >>> _text_clauses(["tea"], ["tea", "tee"])
    [("asked 'tea' did 'tea' same", True), ("asked 'tea' did 'tee' different", False)]
    """
    clauses = []
    for k in range(max(len(asked), len(done))):
        text = asked[min(k, len(asked) - 1)]
        typed = done[k] if k < len(done) else None
        clauses.append(_side_by_side(text, typed, text == typed))
    return clauses


def _name_clauses(asked: list[str], typed: list[str], chosen: list[str], pressed: list[str]) -> list[Clause]:
    """Each name that was asked for, then what nobody asked for. The order of presses counts, the order of
    choices does not. Beside a name that was not chosen stands what was chosen instead: that a name is missing
    from a list is hard to see.

    >>> _name_clauses(["One", "Two"], [], [], ["Two", "One"])
    [("asked 'One' did 'Two' different", False), ("asked 'Two' did 'One' different", False)]
    >>> _name_clauses(["tea", "milk"], [], ["salt", "tea"], ["Help"])[1:]
    [("asked 'milk' did 'salt' different", False), ("did 'Help' extra", False)]
    """
    done = typed + chosen + pressed
    extra = [name for k, name in enumerate(done) if done[:k].count(name) >= asked.count(name)]
    # The order is looked at only where each name was pressed as often as it was asked for.
    in_order = [name for name in pressed if name in asked]
    comparable = sorted(in_order) == sorted(name for name in asked if name in pressed)
    clauses = []
    for k, name in enumerate(asked):
        other: str | None = in_order.pop(0) if comparable and name in pressed else name
        same = name == other and done.count(name) > asked[:k].count(name)
        if name == other and not same:
            other = next((candidate for candidate in extra if candidate in chosen), None)
            if other is not None:
                extra.remove(other)
        clauses.append(_side_by_side(name, other, same))
    return clauses + [(f"did '{name}' extra", False) for name in extra]


def _place_clauses(goal: str, steps: Sequence[Step]) -> list[Clause]:
    r"""Whether the last press stands by the text that the goal names, where it names one.

    >>> page = "StaticText 'Ada'\n[4] image ''\nStaticText 'Bob'\n[5] image ''"
    >>> _place_clauses("Delete the mail by Ada.", [Step("", page, "", Action("click", "5"), ())])
    [("asked by 'Ada' did by 'Bob' different", False)]
    """
    asked, pressed = _places_asked(goal, steps[-1].page), presses(steps)
    if len(asked) != 1:
        return []
    by = _stands(pressed[-1][0].page, pressed[-1][0].action.bid)[1] if pressed else ""
    if not by:
        return [(f"asked by '{asked[0]}' none", False)]
    same = by == asked[0]
    return [(f"asked by '{asked[0]}' did by '{by}' {'same' if same else 'different'}", same)]


def _side_by_side(asked: str, done: str | None, same: bool) -> Clause:
    said = "none" if done is None else f"did '{done}' {'same' if same else 'different'}"
    return f"asked '{asked}' {said}", same


# ---- judging: other goals for the same trajectory ----------------------------------------------------------

Swap = tuple[str, str]  # (what the goal says, what it could say instead)


def _pressed_last(trajectory: Trajectory) -> str:
    """What is pressed last (Submit). The goal may name it, but it is not what the goal asks for."""
    return data.label(trajectory.steps[-1].page, trajectory.steps[-1].action.bid)


def other_goal(rng: random.Random, trajectory: Trajectory) -> str | None:
    """The goal with one thing replaced that it asks for; None where there is none, or the draw is the same.

    >>> page = "[1] radio 'tea'\\n[2] radio 'milk'\\n[3] button 'Send'"
    >>> steps = [Step("", page, "", Action("click", "1"), ()), Step("", page, "", Action("click", "3"), ())]
    >>> recorded = Trajectory("t", 0, "Select tea and press Send.", steps, page, 1, True, False, "", ())
    >>> other_goal(random.Random(0), recorded)
    'Select milk and press Send.'
    """
    goal = trajectory.goal
    swaps = (_letter_swaps(rng, goal) + _number_swaps(rng, goal) + _name_swaps(rng, trajectory)
             + _place_swaps(rng, trajectory))
    if not swaps:
        return None
    old, new = rng.choice(swaps)
    return re.sub(_whole(old), lambda _: new, goal) if old != new else None


def _letter_swaps(rng: random.Random, goal: str) -> list[Swap]:
    """Every quoted text with one letter changed. What quite another text looks like, failures show.

    >>> _letter_swaps(random.Random(1), 'Type "tea".')
    [('"tea"', '"Kea"')]
    """
    swaps = []
    for text in re.findall(r'"([^"]+)"', goal):
        k, letter = rng.randrange(len(text)), rng.choice(string.ascii_letters + string.digits)
        swaps.append((f'"{text}"', f'"{text[:k] + letter + text[k + 1 :]}"'))
    return swaps


def _numbers(goal: str) -> list[str]:
    """The numbers and times of a goal outside of quotes."""
    return re.findall(NUMBER, re.sub(r'"[^"]*"', "", goal))


def _number_swaps(rng: random.Random, goal: str) -> list[Swap]:
    """Every number and time outside of quotes, with one thing about it exchanged: a digit of a long number;
    hours or minutes or the half of the day; a short number whole.

    >>> rng = random.Random(3)
    >>> [_number_swaps(rng, goal) for goal in ("At 3:35 PM.", "At 3:35 PM.", "Take -7.", "Take 238928.")]
    [[('3:35 PM', '10:35 PM')], [('3:35 PM', '3:35 AM')], [('-7', '-6')], [('238928', '238929')]]
    """
    swaps = []
    for number in _numbers(goal):
        parts = list(re.finditer(r"\d+|[AP](?=M)", number))
        if not parts:
            continue
        part = rng.choice(parts)
        if part[0] in "AP":
            other = "P" if part[0] == "A" else "A"
        elif len(part[0]) > 2:
            k = rng.randrange(len(part[0]))
            other = part[0][:k] + rng.choice(string.digits) + part[0][k + 1 :]
        else:
            minutes = number[: part.start()].endswith(":")
            other = f"{rng.randrange(60):02d}" if minutes else str(rng.randint(1, 12))
        swaps.append((number, number[: part.start()] + other + number[part.end() :]))
    return swaps


def _name_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """Every element of the first page that the goal names, and another of the same kind on that page."""
    goal, last, swaps = trajectory.goal, _pressed_last(trajectory), []
    nodes = [node for node in a11y.parse(trajectory.steps[0].page) if node.bid and node.name]
    named = [node.name for node in nodes if node.name in goal]
    for k, node in enumerate(nodes):
        part = any(node.name != name and node.name in name for name in named)  # the "tea" of "green tea"
        if part or node.name == last or not re.search(_whole(node.name), goal):
            continue
        # In a table a label may only become another label: every second cell.
        alike = [other.name for j, other in enumerate(nodes) if other.role == node.role
                 and other.name != node.name and (node.role != "cell" or (j - k) % 2 == 0)]
        if alike:
            swaps.append((node.name, rng.choice(alike)))
    return swaps


def _place_swaps(rng: random.Random, trajectory: Trajectory) -> list[Swap]:
    """The text by which something stands that the goal asks for, and another such text of the last page."""
    page = trajectory.steps[-1].page
    texts = [text.strip(":") for text in _texts_beside(page)]
    return [(text.strip(":"), rng.choice(texts)) for text in _places_asked(trajectory.goal, page)]


def hindsight_goal(trajectory: Trajectory) -> str | None:
    """A goal that this failure did reach: its own, with what was not done exchanged for what was done
    instead. None where one goal cannot be made of the other (nothing was submitted, a box was left empty), or
    where the agent stopped with something else than what that goal asks for.

    NNetNav labels its demonstrations so (arXiv 2410.02907). Here only the judge learns from it: the other
    successes are a handful, and it called most of what is unlike those a failure (docs/LOG.md). Code says
    that the goal is reached, by `compare`'s clauses; no environment did. One exchange a turn of the loop:

        'Enter the user "anna" and the password "x7Q".'    texts ['bob', 'y'] were typed: 2 clauses are wrong
        'Enter the user "bob" and the password "x7Q".'     1 is wrong
        'Enter the user "bob" and the password "y".'       none is wrong
    """
    page = trajectory.steps[-1].page
    done, boxes = done_items(trajectory.steps, trajectory.final_page), text_boxes(page)

    def count_wrong(goal: str) -> int:
        return sum(not well for _, well in _clauses(asked_items(goal, page), done, boxes))

    goal, wrong = trajectory.goal, count_wrong(trajectory.goal)
    while wrong:
        swaps = _hindsight_swaps(goal, trajectory, done)
        changed = {re.sub(_whole(old), lambda _, new=new: new, goal, count=1) for old, new in swaps}
        better = [(left, new) for new in changed if (left := count_wrong(new)) < wrong]
        if not better:
            return None
        wrong, goal = min(better)
    last = trajectory.steps[-1].action
    if last.name == "stop" and last.text not in asked_items(goal, page)[0]:
        return None  # `stop [Submit]` presses nothing, though a goal names Submit
    return goal if goal != trajectory.goal else None


def _hindsight_swaps(goal: str, trajectory: Trajectory, done: Done) -> list[Swap]:
    """What hindsight_goal may exchange.

    A quoted text for a text that was typed, a number for a number. A name for another thing that was chosen or pressed, or for
    itself and all of those: "tea" becomes "milk", or "tea, milk". In a table, a label for a label whose value
    was given.
    """
    page, last = trajectory.steps[-1].page, _pressed_last(trajectory)
    texts, chosen, pressed = done
    typed = [step.action.text for step in trajectory.steps if step.action.name == "type" and not step.error]
    swaps = [(f'"{old}"', f'"{new}"') for old in re.findall(r'"([^"]+)"', goal) for new in typed]
    swaps += [(old, new) for old in _numbers(goal) for new in typed if re.fullmatch(NUMBER, new)]

    names = asked_items(goal, page)[1]
    others = [name for name in chosen + pressed if name not in names and name != last]
    swaps += [(old, new) for old in names if old != last for new in (*others, ", ".join([old, *others]))]

    cells = [node.name for node in a11y.parse(page) if node.role == "cell" and node.name]
    value = dict(zip(cells[::2], cells[1::2]))  # label -> what stands beside it
    return swaps + [(old, new) for old in value if old in goal for new in value if value[new] in texts]
