"""What is dreamed beside what is.

    a step      predicted beside recorded, on recorded pages and in an open loop            (predicted)
    a dream     beside its actions in a real browser, from the same start                   (replay)
    an agent    its success in dreams, that of their actions done for real, its own tries   (transfer)

Each measure is defined where it is counted, with its source. audit.py is the command. Nothing learns here.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

import a11y
import data
import lm
import measure
import world_model
from data import BULLETS, Action, Start, Step, Trajectory
from judge import AnyJudge, Case, ending
from policy import TokenTrajectory, World

# ---- dreams against reality --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A step that a world model answered, beside what the same action did for real."""

    task: str
    depth: int
    """1: the first step from the start."""
    previous: str
    action: Action
    before: str
    """The page that the world model was shown."""
    answer: world_model.Prediction
    real_before: str
    """The real page at that step: `before` itself where the world model was shown it."""
    real: str
    over: bool
    """It really ended."""
    refused: bool = False
    """The browser refused the action."""

    @functools.cached_property
    def right(self) -> bool:
        """Whether the next page is exactly the real one, but for its ids: the one-step exact match of
        Word2World (arXiv 2512.18832)."""
        page = self.answer.page
        return not self.answer.unknown and a11y.align(page, self.real) == page


# Which predictions can be asked for was decided here before anything was measured. A page counts where every
# name and value of the next page stands on this page or in the action. (A folder that opens shows what nobody
# could know.) An end counts everywhere but where the goal decides it, as the world model does not see the
# goal.
GOAL_ENDS = ("navigate-tree",)


def determined(page: str, action: Action, next_page: str) -> bool:
    """Whether page and action determine the next page, by the rule above.

    >>> determined("[1] textbox ''", Action("type", "1", "tea"), "[1] textbox '' value='tea'")
    True
    >>> determined("[1] listitem 'all'", Action("click", "1"), "[1] listitem 'all'\\n\\t[2] listitem 'more'")
    False
    """
    return _texts(next_page) <= _texts(page) | {action.text, BULLETS}


def _texts(page: str) -> set[str]:
    """Names and values on a page."""
    nodes = a11y.parse(page)
    values = [node.attributes.get("value", "") for node in nodes]
    quoted = {a11y.unquote(value) for value in values if value[:1] in ("'", '"')}
    return {node.name for node in nodes if node.name} | quoted


def words(*texts: str) -> set[str]:
    return set(" ".join(texts).split())


def recorded_words(trajectories: Sequence[Trajectory]) -> dict[str, set[str]]:
    """{task: all words of names and values on its recorded pages, and of its goals}"""
    found: dict[str, set[str]] = defaultdict(set)
    for t in trajectories:
        for page in {*(step.page for step in t.steps), t.final_page}:
            found[t.task] |= words(t.goal, *_texts(page))
    return dict(found)


def changes(before: str, after: str) -> Counter:
    """The elements of which `after` has more (+) or fewer (-) than `before`. An element is its line without
    tabs and id: one that gets another name or value goes and comes. A page that is only put in another order
    has no changes here; `right` sees it.

    >>> changes("[1] textbox ''\\n[2] link 'a'", "[7] link 'a'\\n[8] textbox '' value='x'")
    Counter({('+', "textbox '' value='x'"): 1, ('-', "textbox ''"): 1})
    """
    was, now = (Counter(re.sub(r"^\t*(\[\w+\] )?", "", line) for line in page.split("\n"))
                for page in (before, after))
    return Counter({(sign, line): n for sign, more in (("+", now - was), ("-", was - now))
                    for line, n in more.items()})


def fidelity(rows: Sequence[Predicted], known: Mapping[str, set[str]]) -> dict:
    """How true these predictions are; None where nothing could be counted. An unreadable answer is right in
    nothing. `known`: recorded_words().

    exact           share of next pages that are the real ones (Predicted.right)
    determined      the same of the pages that page and action determine (`determined`); "of": how many
    precision, recall, F1    of the changed elements (`changes`), over all steps together: what was predicted
                    to change beside what did. Copying the page earns nothing. Ours
    no change       of the steps that really changed nothing, the share that were predicted so
    end             share of ends and goings-on that are right, but where the goal decides (GOAL_ENDS)
    unreadable      share of answers that are none: too long, cut off, or no delta
    hallucinated    share of readable answers that bring a name or value of which a word is neither on the
                    page, nor in the action, nor among the recorded words of the task (after GILP's share of
                    hallucinated states, arXiv 2606.27806)
    delta           characters of the deltas over those of the pages that they make
    refused, refused wrongly    of the actions that the browser refused, and of those that it did, the share
                    that the world model refuses, where it is asked
    """
    hits, of = Counter[str](), Counter[str]()

    def count(name: str, hit: int, out_of: int = 1) -> None:
        hits[name] += hit
        of[name] += out_of

    for row in rows:
        answer, read = row.answer, not row.answer.unknown
        if not world_model.impossible(row.before, row.action):  # of that code would say so
            count("refused" if row.refused else "refused wrongly", bool(answer.error))
        said, did = changes(row.before, answer.page), changes(row.real_before, row.real)
        count("exact", row.right)
        if determined(row.real_before, row.action, row.real):
            count("determined", row.right)
        count("precision", (said & did).total(), said.total())
        count("recall", (said & did).total(), did.total())
        count("F1", 2 * (said & did).total(), said.total() + did.total())
        if a11y.align(row.real_before, row.real) == row.real_before:
            count("no change", read and answer.page == row.before)
        if row.task not in GOAL_ENDS:
            count("end", read and answer.over == row.over)
        count("unreadable", not read)
        if read:
            brought = words(*_texts(answer.page) - _texts(row.before) - {row.action.text})
            count("hallucinated", bool(brought - words(row.action.text, BULLETS, *_texts(row.before))
                                       - known.get(row.task, set())))
            count("delta", len(answer.delta), len(answer.page))
    names = ("exact", "determined", "precision", "recall", "F1", "no change", "end", "unreadable",
             "hallucinated", "delta", "refused", "refused wrongly")
    shares = {name: round(hits[name] / of[name], 4) if of[name] else None for name in names}
    return {"n": len(rows)} | shares | {"of": of["determined"]}


def by_task_and_depth(rows: Sequence[Predicted], known: Mapping[str, set[str]]) -> dict[str, dict]:
    return measure.by(rows, lambda some: fidelity(some, known), depth=lambda row: row.depth,
                      task=lambda row: row.task)


def misses(rows: Sequence[Predicted]) -> list[dict]:
    """The first 40 wrong pages of those that could be known."""
    wrong = [row for row in rows if not row.right and determined(row.real_before, row.action, row.real)]
    return [{"task": row.task, "action": str(row.action), "page": row.before, "delta": row.answer.delta,
             "wanted": a11y.diff(row.before, row.real), "malformed": row.answer.unknown}
            for row in wrong[:40]]


NOWHERE = "nowhere0"  # an id that no page has
BATCH = 128  # predictions at a time


def code_answered(step: Step, action: Action) -> bool:
    """Whether the browser refused the action, and code says so in a dream: no world model is asked."""
    return bool(step.error) and world_model.by_code(step.page, action)


def predicted(model: world_model.AnyWorldModel, trajectories: Sequence[Trajectory],
              open_loop: bool) -> list[Predicted]:
    """The answer to every recorded action that code does not answer. Teacher-forced: on the recorded
    page. In an open loop: on the page of the answer before it; an action whose element is not there does
    nothing there. A gap in a recording begins anew, at depth 1."""
    paths: list[tuple[str, list]] = []
    for t in trajectories:
        last = None
        for transition in data.transitions(t):
            if last is None or transition[0].index != last + 1:
                paths.append((t.task, []))
            paths[-1][1].append(transition)
            last = transition[0].index
    own: dict[int, str] = {}
    rows = []
    for depth in tqdm(range(max((len(path) for _, path in paths), default=0)), desc="predicting",
                      dynamic_ncols=True, leave=False):
        here = [(k, task, *path[depth]) for k, (task, path) in enumerate(paths)
                if depth < len(path) and not code_answered(*path[depth][:2])]
        for n in range(0, len(here), BATCH):
            part = here[n : n + BATCH]
            pages = [own.get(k, step.page) if open_loop else step.page for k, _, step, *_ in part]
            actions = [to_real(action, step.page, page) or replace(action, bid=NOWHERE)
                       for page, (_, _, step, action, *_) in zip(pages, part)]
            previous = [step.previous[-1] if step.previous else "" for _, _, step, *_ in part]
            predictions = model.predict(pages, actions, previous, seed=lm.mix(depth, n))
            for page, action, past, prediction, (k, task, step, _, after, over) in zip(
                    pages, actions, previous, predictions, part):
                own[k] = prediction.page
                rows.append(Predicted(task, depth + 1, past, action, page, prediction, step.page, after, over,
                                      bool(step.error)))
    return rows


def calibration(model: world_model.AnyWorldModel, rows: Sequence[Predicted],
                samples: int) -> dict:
    """Whether agreement among `samples` predictions, drawn by this world model, tells which of the answers in
    `rows` are wrong. Agreement is the share of the drawn predictions that are the answer, page and end.

    AUROC: the chance that an answer with a wrong page has less agreement than one with the right page, ties
    counted half (Mann and Whitney 1947); .5 tells nothing. None where no answer is wrong, or none right. What
    it costs: "predictions" and "tokens" a step, beside one prediction.
    """
    began, agree = lm.tokens_sampled(), [0] * len(rows)
    for k in tqdm(range(0, len(rows), BATCH), desc="drawing", dynamic_ncols=True, leave=False):
        part = rows[k : k + BATCH]
        asked = [row.before for row in part], [row.action for row in part], [row.previous for row in part]
        for draw in range(samples):
            for n, (row, drawn) in enumerate(zip(part, model.predict(*asked, lm.mix(k, draw))), k):
                answer = row.answer
                known = not answer.unknown and not drawn.unknown  # what is unknown has the page before
                agree[n] += known and (drawn.page, drawn.over) == (answer.page, answer.over)
    right, wrong = ([n for n, row in zip(agree, rows) if row.right == kind] for kind in (True, False))
    whole = [row.right for n, row in zip(agree, rows) if n == samples]
    return {"AUROC": measure.auroc(wrong, right), "n": len(rows), "wrong": len(wrong),
            "all agree": len(whole), "right where all agree": sum(whole) / len(whole) if whole else None,
            "predictions": samples, "tokens": round((lm.tokens_sampled() - began) / max(1, len(rows)), 1)}


@dataclass
class Replayed:
    """What became of a dream in the real browser."""

    reward: float = 0.0
    unmatched: bool = False
    """An action's element is not on the real page."""
    steps: list[Predicted] = field(default_factory=list)
    """Those that the world model answered, as far as the dream could be followed."""
    pages: list[str] = field(default_factory=list)
    """The real page after each action that was done, with the dream's ids."""
    errors: list[str] = field(default_factory=list)
    """What the real page answered to each of them."""
    over: bool = False
    """The real page ended."""
    failed: str = ""
    """The page failed, twice."""


def replay(web: World, dreamed: Sequence[TokenTrajectory], pages: int = 16) -> list[Replayed]:
    """Do every dream's actions again in the real browser, from the same start, whose prefix runs first.

    At every step, ids of the dream are mapped to real elements by a11y.alignment. An action whose element has
    no counterpart stops that replay. One whose page failed is done once more.
    """
    found, todo = [Replayed() for _ in dreamed], [k for k, t in enumerate(dreamed) if t.steps]
    for _ in range(2):
        for k in range(0, len(todo), pages):
            some = todo[k : k + pages]
            for i, replayed in zip(some, _replay_some(web, [dreamed[i] for i in some]), strict=True):
                found[i] = replayed
        todo = [i for i in todo if found[i].failed]
    return found


def _replay_some(web: World, dreamed: Sequence[TokenTrajectory]) -> list[Replayed]:
    """Dreams replayed side by side."""
    seen = web.reset([trajectory.start for trajectory in dreamed])
    found, live = [Replayed() for _ in dreamed], set(range(len(dreamed)))
    for turn in range(max(len(trajectory.steps) for trajectory in dreamed)):
        actions: list[Action | None] = [None] * len(dreamed)
        for i in sorted(live):
            steps = dreamed[i].steps
            if turn < len(steps):
                actions[i] = to_real(steps[turn].action, steps[turn].page, seen[i].page)
                found[i].unmatched = actions[i] is None
        live = {i for i in live if actions[i] is not None}
        if not live:
            break
        answers, reward, terminated, truncated = web.step(actions)
        for i in sorted(live):
            t, step, obs = dreamed[i], dreamed[i].steps[turn], answers[i]
            assert obs is not None, "to replay, a world has to answer at once"
            if prediction := t.predictions[turn]:  # None: stop or go_back
                past = step.previous[-1] if step.previous else ""
                found[i].steps.append(Predicted(t.start.task, turn + 1, past, step.action, step.page,
                                                prediction, seen[i].page, obs.page, terminated[i],
                                                bool(obs.error)))
            seen[i] = obs
            then = t.steps[turn + 1].page if turn + 1 < len(t.steps) else t.final_page
            found[i].pages.append(a11y.align(then, obs.page))
            found[i].errors.append(obs.error)
            if terminated[i] or truncated[i]:
                found[i].reward, found[i].over = reward[i], terminated[i]
                live.discard(i)
    for replayed, failure in zip(found, web.failures, strict=True):
        replayed.failed = failure
    return found


def to_real(action: Action, dreamed_page: str, real_page: str) -> Action | None:
    """`action` with the id that its element has on the real page; None when it has no counterpart there."""
    if not action.bid:
        return action
    real = {dreamed: there for there, dreamed in a11y.alignment(dreamed_page, real_page).items()}
    return replace(action, bid=real[action.bid]) if action.bid in real else None


def judged(judge: AnyJudge, tried: Sequence[TokenTrajectory]) -> dict:
    """judged_on, on trajectories of an agent on real pages that ended. "failed" counts those whose page
    failed twice."""
    played = [t for t in tried if not t.failed]
    ended = [t for t in played if t.terminated and t.steps]
    cases = [(t.start.task, (t.start.goal, *ending(t)), t.reward == 1) for t in ended]
    return {**judged_on(judge, cases), "not ended": len(played) - len(ended),
            "failed": len(tried) - len(played)}


def judged_on(judge: AnyJudge, cases: Sequence[tuple[str, Case, bool]]) -> dict:
    """The judge's verdicts beside what is known: (task, case, whether it is a success). "unread" counts the
    cases on which it came to no verdict."""
    read = [(*known, verdict) for known, verdict in zip(cases, judge.verdicts([case for _, case, _ in cases]))
            if not verdict.unknown]  # a dream without a verdict is dropped
    wrong = [{"task": task, "goal": goal, "actions": actions, "before": before, "reasons": verdict.text,
              "said": verdict.success}
             for task, (goal, actions, before, _), right, verdict in read if verdict.success != right]
    pairs = [(task, verdict.success, right) for task, _, right, verdict in read]
    return {"judge on real pages": judge_by_task(pairs), "unread": len(cases) - len(read), "wrong": wrong,
            "margins": [[task, verdict.margin, right] for task, _, right, verdict in read]}


def judge_by_task(rows: Sequence[tuple]) -> dict[str, dict]:
    """precision_recall of (task, judged, real), in all and by task."""
    return measure.by(rows, task=lambda row: row[0], count=lambda some: measure.precision_recall(
        [row[1] for row in some], [row[2] for row in some]))


# ---- success in dreams and in reality ----------------------------------------------------------------------


def shown(web: World, starts: Sequence[Start], pages: int = 16) -> list[Start]:
    """The starts with what really stands there: goal, URL and page. One whose page failed is left out."""
    found = []
    for k in range(0, len(starts), pages):
        some = starts[k : k + pages]
        seen = web.reset(some)
        found += [replace(start, goal=obs.goal, url=obs.url, page=obs.page)
                  for start, obs, failure in zip(some, seen, web.failures, strict=True) if not failure]
    return found


def transfer(dreamed: Sequence[TokenTrajectory], replayed: Sequence[Replayed],
             played: Sequence[TokenTrajectory]) -> dict:
    """What success in dreams is worth: the dreams of an agent, their actions done for real, and the agent's
    own tries for real, row by row from the same starts. "tries": [task, seed, dream, W2R, real] of each start
    of which nothing was dropped and no page failed; "success" counts them, in all and by task."""
    whole = [(t, done, own) for t, done, own in zip(dreamed, replayed, played, strict=True)
             if not (t.dropped or done.failed or own.failed)]
    tries = [[t.start.task, t.start.seed, t.reward, done.reward, own.reward] for t, done, own in whole]
    return {"success": measure.by(tries, consistency, task=lambda row: row[0]),
            "judge on dreams": judge_by_task([(row[0], row[2] == 1, row[3] == 1) for row in tries]),
            "dropped": sum(bool(t.dropped) for t in dreamed), "tries": tries,
            "unmatched": sum(done.unmatched for _, done, _ in whole),
            "failed": sum(bool(done.failed or own.failed) for done, own in zip(replayed, played))}


def consistency(tries: Sequence[Sequence]) -> dict:
    """Of transfer()'s tries the share of successes: "dream", as judged; "W2R", the dreams' actions done for
    real; "real", the agent's own tries; and CR = W2R / real, the consistency ratio of arXiv 2512.18832: 1
    where what is done in dreams is as good as what is done for real. Shares have Wilson's intervals, CR one
    by resampling starts (without the draws in which no try succeeded). CR is None where no try did."""
    columns = torch.tensor([row[2:] for row in tries], dtype=torch.float64).reshape(-1, 3).T  # (3, n)
    found: dict = {"n": (n := len(tries))}
    for name, column in zip(("dream", "W2R", "real"), columns):
        found |= {name: float(column.mean()) if n else None,
                  f"{name} 95 %": measure.wilson(float(column.sum()), n)}
    _, w2r, real = columns
    if not real.any():
        return found | {"CR": None, "CR 95 %": None}
    _, w2r_means, real_means = measure.resampled(columns)  # (draws,)
    ratios = (w2r_means / real_means)[real_means > 0]
    return found | {"CR": float(w2r.mean() / real.mean()),
                    "CR 95 %": (float(ratios.quantile(0.025)), float(ratios.quantile(0.975)))}


def lengths_of_success(dreamed: Sequence[TokenTrajectory], tasks: Sequence[str],
                       seeds: Sequence[int]) -> dict[str, str]:
    """{task: a character for each seed}: the number of steps after which its dream was judged a success, 0
    where it was none, - where it was dropped or its first page failed. Of dreams of up to 9 steps.

    A dream of at most L steps is the beginning of a longer one from the same seed. So this holds success at
    every length."""
    found = {(t.start.task, t.start.seed): "-" if t.dropped else str(len(t.steps)) if t.reward == 1 else "0"
             for t in dreamed}
    return {task: "".join(found.get((task, seed), "-") for seed in seeds) for task in tasks}

# ---- as a table --------------------------------------------------------------------------------------------

TABLES = ("teacher-forced", "open loop", "calibration", "success", "steps of dreams", "judge on dreams",
          "judge on real pages", "ranking")


def table(result: dict) -> str:
    """What was measured, as one table: a block for each kind of measure, a line for each row. Below, numbers
    that stand alone."""
    blocks: dict[tuple, list[list[str]]] = {}
    for name in TABLES:
        for row, measures in result.get(name, {}).items():
            said = [f"{name}, {row}", *map(in_figures, measures.values())]
            blocks.setdefault(tuple(measures), [["", *measures]]).append(said)
    lines = []
    for block in blocks.values():
        width = [max(map(len, column)) for column in zip(*block)]
        lines += ["  ".join(text.rjust(size) if k else text.ljust(size)
                            for k, (text, size) in enumerate(zip(line, width))) for line in block] + [""]
    alone = [f"{name} {in_figures(value)}" for name, value in result.items()
             if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return "\n".join([*lines, ", ".join(alone)]).rstrip()


def in_figures(value) -> str:
    """
    >>> in_figures(0.5), in_figures((0.25, 1)), in_figures(7), in_figures(None)
    ('0.500', '[0.250, 1]', '7', '-')
    """
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(in_figures, value))}]"
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
