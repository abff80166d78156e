"""How far dreams are from reality. Each command prints a table; with --out FILE also what it is made of.

    python audit.py pages --recorded FILE           the world model on recorded transitions
    python audit.py judge --checkpoint AGENT        the judge on an agent's own episodes on real pages
    python audit.py dreams --checkpoint AGENT       an agent's dreams, their actions for real, its own tries
    python audit.py rank A.json B.json C.json ...   do dreams rank agents (of `dreams --out`) as reality does?
    python audit.py delta BEFORE.txt AFTER.txt      what changed, as the world model would say it

What is measured, and where it is from
- exact: the share of next pages that are the real ones but for their ids (Word2World's one-step exact
  match, arXiv 2512.18832). F1 of the changed elements, over all steps together: copying the page earns
  nothing. Ours.
  Teacher-forced: on the recorded page. Open loop: on the page of the answer before it.
- W2R: success of a dream's actions, done for real from the same start; CR = W2R / the agent's own real
  success: 1 where what is done in dreams is as good as what is done for real (arXiv 2512.18832).
- precision and recall of the judge's YES against the page's reward, and AUC of its margin: the chance that a
  success has a higher one than a failure, ties counted half.
- Spearman's rho of success in dreams and on real pages, over agents.

Nothing learns here, so recordings of any seed are read (data.read_for_audit).
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

import a11y
import data
import distributed
import dream
import envs
import evaluate
import lm
import world_model
from config import UserError
from data import Action, Trajectory
from judge import Judge, ending
from policy import Env, Invalid, Rollout
from world_model import Prediction, WorldModel


@dataclass(frozen=True)
class Audit(evaluate.Agent):
    """What is audited: an agent, and the models that it dreams with."""

    world_model: str = "runs/laptop/world_model"
    """Folder of the world model."""
    judge: str = "runs/laptop/reward_model"
    """Folder of the judge."""
    recorded: str = "recordings/small.jsonl.gz"
    """Recorded trajectories (`pages`)."""
    tasks: tuple[str, ...] = envs.LAPTOP
    """MiniWoB++ tasks."""
    seeds: str = "1000000:10"
    """START:COUNT of the first pages, each task."""
    horizon: int = 5
    """Most steps."""
    world_model_temperature: float = 0.0
    """Sampling temperature of the world model."""
    world_model_tokens: int = 128
    """Longest prediction, in tokens."""
    judge_tokens: int = 0
    """Longest verdict, in tokens; 0: a reward model."""
    out: str = ""
    """File to write the result to (JSON)."""


# ---- the world model on recorded pages ---------------------------------------------------------------------


def changes(before: str, after: str) -> Counter:
    """The elements of which `after` has more (+) or fewer (-) than `before`. An element is its line without
    tabs and id: one that gets another name or value goes and comes.

    >>> changes("[1] textbox ''\\n[2] link 'a'", "[7] link 'a'\\n[8] textbox '' value='x'")
    Counter({('+', "textbox '' value='x'"): 1, ('-', "textbox ''"): 1})
    """
    was, now = (Counter(re.sub(r"^\t*(\[\w+\] )?", "", line) for line in page.split("\n"))
                for page in (before, after))
    return Counter({(sign, line): n for sign, more in (("+", now - was), ("-", was - now))
                    for line, n in more.items()})


def to_real(action: Action, dreamed: str, real: str) -> Action | None:
    """`action` with the id that its element has on the real page; None when it has no counterpart there."""
    if not action.bid:
        return action
    ids = {ours: theirs for theirs, ours in a11y.alignment(dreamed, real).items()}
    return replace(action, bid=ids[action.bid]) if action.bid in ids else None


async def predicted(model: world_model.AnyWorldModel, t: Trajectory, open_loop: bool) -> list[dict]:
    """What the world model answers to every recorded action that code does not answer."""
    rows, page = [], ""
    for n, (step, action, after, over) in enumerate(data.transitions(t)):
        page = step.page if not open_loop or not n else page
        tried = to_real(action, step.page, page)
        if step.error and world_model.by_code(step.page, action):
            continue
        previous = step.previous[-1] if step.previous else ""
        try:
            answer = Prediction(page) if tried is None else await model.predict(page, tried, previous, n)
            unread = False
        except Invalid:
            answer, unread = Prediction(page), True
        said, did = changes(page, answer.page), changes(step.page, after)
        rows.append({"task": t.task, "exact": not unread and a11y.align(answer.page, after) == answer.page,
                     "end": not unread and answer.over == over, "unreadable": unread,
                     "hits": (said & did).total(), "changes": said.total() + did.total()})
        page = answer.page
    return rows


def of_pages(config: Audit) -> dict:
    model = WorldModel(evaluate.frozen(config.world_model, config.context), config.world_model_tokens,
                       config.world_model_temperature)
    found = {}
    for name, open_loop in (("teacher-forced", False), ("open loop", True)):
        parts = lm.together(predicted(model, t, open_loop) for t in data.read_for_audit(config.recorded))
        rows = [row for part in parts for row in part]
        for task in ("all", *sorted({row["task"] for row in rows})):
            some = [row for row in rows if task in ("all", row["task"])]
            keys = ("exact", "end", "unreadable")
            shares = {key: sum(row[key] for row in some) / len(some) for key in keys}
            found[f"{name}: {task}"] = {
                "n": len(some), **shares,
                "F1": 2 * sum(row["hits"] for row in some) / max(1, sum(row["changes"] for row in some))}
    return found


# ---- the judge ---------------------------------------------------------------------------------------------


def auc(low: Sequence[float], high: Sequence[float]) -> float | None:
    """The chance that one of `high` is above one of `low`, ties counted half.

    >>> auc([0, 1], [1, 2])
    0.875
    """
    wins = sum((a > b) + 0.5 * (a == b) for a in high for b in low)
    return wins / (len(low) * len(high)) if low and high else None


def of_verdicts(rows: Sequence[tuple[str, float, bool]]) -> dict:
    """Of (task, margin, whether it is a success), by task."""
    found = {}
    for task in ("all", *sorted({task for task, *_ in rows})):
        yes, no = ([margin for name, margin, good in rows if task in ("all", name) and good == kind]
                   for kind in (True, False))
        said = sum(margin > 0 for margin in yes + no)
        found[f"judge: {task}"] = {
            "n": len(yes) + len(no), "successes": len(yes), "AUC": auc(no, yes),
            "precision": sum(margin > 0 for margin in yes) / said if said else None,
            "recall": sum(margin > 0 for margin in yes) / len(yes) if yes else None}
    return found


def of_judge(config: Audit) -> dict:
    """The judge on the agent's own episodes that ended."""
    with evaluate.sampler_of(config) as agent, envs.open(evaluate.settings.Benchmark()) as pages:
        played = pages.play(agent, starts(config), 14, config.max_new_tokens, config.temperature)
    ended = [one for one in played if one.terminated and one.steps]
    judge = Judge(evaluate.frozen(config.judge, config.context), config.judge_tokens)
    verdicts = lm.together(judge.verdict(one.start.goal, *ending(one)) for one in ended)
    return of_verdicts([(one.start.task, verdict.margin, one.reward == 1)
                        for one, verdict in zip(ended, verdicts)])


def starts(config: Audit) -> list[data.Start]:
    return [data.start(task, seed) for task in config.tasks for seed in data.parse_seeds(config.seeds)]


# ---- dreams beside reality ---------------------------------------------------------------------------------


async def replayed(env: Env, dreamed: Rollout) -> float:
    """The reward of a dream's actions, done for real. An action whose element is not there ends it."""
    obs = await env.reset(dreamed.start)
    for step in dreamed.steps:
        action = to_real(step.action, step.page, obs.page)
        if action is None:
            return 0.0
        obs, reward, terminated, truncated = await env.step(action)
        if terminated or truncated:
            return reward
    return 0.0


def of_dreams(config: Audit) -> dict:
    world = WorldModel(evaluate.frozen(config.world_model, config.context), config.world_model_tokens,
                       config.world_model_temperature)
    judge = Judge(evaluate.frozen(config.judge, config.context), config.judge_tokens)
    with evaluate.sampler_of(config) as agent, envs.open(evaluate.settings.Benchmark()) as pages:
        models = dream.Models(agent, world, judge)
        how = replace(evaluate.settings.TRAIN["laptop"], horizon=config.horizon,
                      temperature=config.temperature, max_new_tokens=config.max_new_tokens)

        async def one(k: int, start: data.Start) -> tuple:
            async with pages() as env:
                try:
                    obs = await env.reset(start)
                    seen = replace(start, goal=obs.goal, url=obs.url, page=obs.page)
                    dreamed = await dream.imagine(models, seen, how, lm.mix(k))
                    real = await replayed(env, dreamed)
                    own = await dream.rollout(env, agent, start, config.horizon, config.max_new_tokens,
                                              config.temperature, lm.mix(k))
                except Invalid as why:
                    return start, None, 0.0, 0.0, str(why)
                margin = dreamed.verdict.margin if dreamed.verdict else -1.0
                return start, margin, real, own.reward, dreamed.discarded or own.discarded

        rows = lm.together(one(k, start) for k, start in enumerate(starts(config)))
    whole = [(start.task, margin, w2r, own) for start, margin, w2r, own, why in rows if not why]
    found = {}
    for task in ("all", *config.tasks):
        some = [row for row in whole if task in ("all", row[0])]
        judged, w2r, real = (sum(column) / max(1, len(some)) for column in zip(
            *[(margin > 0, w2r, own) for _, margin, w2r, own in some] or [(0, 0, 0)]))
        found[f"dreams: {task}"] = {"n": len(some), "dream": judged, "W2R": w2r, "real": real,
                                    "CR": w2r / real if real else None}
    lost = {"discarded or failed": {"n": len(rows) - len(whole)}}
    return found | of_verdicts([(task, margin, w2r == 1) for task, margin, w2r, _ in whole]) | lost


# ---- agents ranked -----------------------------------------------------------------------------------------


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks; equal values share the mean of theirs. None where a side has no order.

    >>> spearman([1, 2, 3], [0.1, 0.3, 0.2])
    0.5
    """
    ranks = [[sum(y < x for y in side) + (side.count(x) - 1) / 2 for x in side]
             for side in (list(a), list(b))]
    centred = [[x - sum(side) / len(side) for x in side] for side in ranks]
    norms = [sum(x * x for x in side) ** 0.5 for side in centred]
    return sum(x * y for x, y in zip(*centred)) / (norms[0] * norms[1]) if all(norms) else None


def of_agents(files: Sequence[str]) -> dict:
    cells = [json.loads(Path(file).read_text())["dreams: all"] for file in files]
    rho = spearman([cell["dream"] for cell in cells], [cell["real"] for cell in cells])
    return dict(zip(files, cells)) | {"Spearman of dream and real": {"n": len(cells), "rho": rho}}


# ---- the command -------------------------------------------------------------------------------------------


def table(found: dict[str, dict]) -> str:
    """A line a row, a block for each kind of columns."""
    lines, columns = [], None
    in_figures = lambda x: "-" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)
    for name, row in found.items():
        if list(row) != columns:
            columns = list(row)
            lines += ["", " " * 40 + "".join(column.rjust(12) for column in columns)]
        lines.append(name.ljust(40) + "".join(in_figures(value).rjust(12) for value in row.values()))
    return "\n".join(lines[1:])


def main() -> None:
    work = {"pages": of_pages, "judge": of_judge, "dreams": of_dreams}

    def run() -> None:
        what, *words = evaluate.sys.argv[1:] or [""]
        if what == "delta" and len(words) == 2:
            before, after = (Path(file).read_text().rstrip("\n") for file in words)
            return print(a11y.diff(before, a11y.align(before, after)))
        if what == "rank" and words:
            return print(table(of_agents(words)))
        if what not in work:
            raise UserError("what to audit? python audit.py pages, judge, dreams, rank or delta")
        config = evaluate.with_lengths(tyro.cli(Audit, args=words, description=__doc__))
        found = work[what](config)
        if config.out:
            Path(config.out).write_text(json.dumps(found, indent=1))
        print(table(found))

    distributed.command(run)


if __name__ == "__main__":
    main()
