"""How far dreams are from reality. Each command prints a table; but for rank, --out FILE has it as JSON.

    python audit.py pages --recorded FILE           the world model on recorded transitions
    python audit.py judge --checkpoint AGENT        the judge on an agent's own episodes on real pages
    python audit.py dreams --checkpoint AGENT       an agent's dreams, their actions for real, its own tries
    python audit.py rank A.json B.json C.json ...   do dreams rank agents (of `dreams --out`) as reality does?

- exact: the share of next pages that are the real ones but for their ids (Word2World, arXiv 2512.18832).
  F1 of the changed elements, over all steps together: copying the page earns nothing. Ours.
  Teacher-forced: on the recorded page. Open loop: on the page of the answer before it.
- W2R: success of a dream's actions, done for real from the same start; CR = W2R / the agent's own real
  success: 1 where what is done in dreams is as good as what is done for real (arXiv 2512.18832).
- precision and recall of the judge's YES against the page's reward, and AUC of its margin.
- Spearman's rho of success in dreams and on real pages, over agents.
Nothing learns here, so recordings of any seed are read (data.read_trajectories(audit=True)).
"""

import contextlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import a11y
import data
import distributed
import envs
import evaluate
import lm
from config import UserError
from data import Action, Trajectory
from dream import DreamEnv, Models
from judge import Judge, ending
from policy import Env, Invalid, Rollout, rollout
from world_model import Prediction, WorldModel, by_code


@dataclass(frozen=True)
class Audit(evaluate.Agent):
    """What is audited: an agent, and the models that it dreams with."""
    world_model: str = "runs/laptop/world_model"  # Folder of the world model
    judge: str = "runs/laptop/reward_model"  # Folder of the judge
    recorded: str = "recordings/small.jsonl.gz"  # Recorded trajectories (`pages`)
    world_model_tokens: int = 0  # Longest prediction, in tokens
    world_model_context: int = 0  # Longest prompt with its prediction
    judge_context: int = 0  # Longest prompt with its verdict
    judge_tokens: int = 0  # Longest verdict, in tokens; 0: a reward model, which answers at once


def loaded(config: Audit, what: str) -> Any:
    """What an audit needs of dream.Models."""
    agent, world, judge = None, None, None
    if what != "pages":
        agent = evaluate.sampler_of(config)
        judge = Judge(evaluate.frozen(config.judge, config.judge_context), config.judge_tokens)
    if what != "judge":
        world = WorldModel(evaluate.frozen(config.world_model, config.world_model_context),
                           config.world_model_tokens, 0.0)
    return Models(agent, world, judge)  # type: ignore[arg-type]


def by_task(rows: Sequence[dict]) -> list[tuple[str, list[dict]]]:
    """[("all", all rows), (task, its rows), ...]"""
    tasks = sorted({row["task"] for row in rows})
    return [("all", [*rows]), *((task, [row for row in rows if row["task"] == task]) for task in tasks)]


mean = lambda rows, key: sum(row[key] for row in rows) / max(1, len(rows))

# ---- the world model on recorded pages, the judge on an agent's --------------------------------------------

def changes(before: str, after: str) -> Counter:
    """The elements of which `after` has more (+) or fewer (-) than `before`: lines without tabs and ids.

    >>> changes("[1] textbox ''\\n[2] link 'a'", "[7] link 'a'\\n[8] textbox '' value='x'")
    Counter({"+textbox '' value='x'": 1, "-textbox ''": 1})
    """
    was, now = (Counter(re.findall(r"^\t*(?:\[\w+\] )?(.*)", page, re.MULTILINE)) for page in (before, after))
    return Counter([f"+{x}" for x in (now - was).elements()] + [f"-{x}" for x in (was - now).elements()])


def to_real(action: Action, dreamed: str, real: str) -> Action | None:
    """`action` with the id that its element has on the real page; None when it has no counterpart there."""
    ids, there = a11y.alignment(dreamed, real), data.bids(dreamed)
    found = {"": ""} | {ours: theirs for theirs, ours in ids.items() if ours in there}
    return replace(action, bid=found[action.bid]) if action.bid in found else None


async def predicted(model: Any, t: Trajectory, open_loop: bool) -> list[dict]:
    """What the world model answers to every recorded action that code does not answer."""
    rows, page, following = [], "", -1  # following: the step whose page was imagined
    for n, (step, action, after, over) in enumerate(data.transitions(t)):
        page = page if open_loop and step.index == following else step.page
        tried, answer, following = to_real(action, step.page, page), None, step.index + 1
        if by_code(step.page, action):
            page = after if action.name == "go_back" and not step.error else page  # what was left
            continue
        with contextlib.suppress(Invalid):  # what acts on nothing that was imagined changes nothing
            last = step.previous[-1] if step.previous else ""
            answer = await model.predict(page, tried, last, n) if tried else Prediction(page)
        then = answer.page if answer else page
        said, did = changes(page, then), changes(step.page, after)
        rows.append({"task": t.task, "unreadable": not answer, "hits": (said & did).total(),
                     "changes": said.total() + did.total(), "end": (answer and answer.over) == over,
                     "exact": answer is not None and a11y.align(then, after) == then})
        page = then
    return rows


def of_pages(config: Audit, models: Any) -> dict:
    """The world model on config.recorded."""
    recorded, found = data.read_trajectories(config.recorded, audit=True), {}
    for name, open_loop in (("teacher-forced", False), ("open loop", True)):
        parts = lm.together(predicted(models.world_model, t, open_loop) for t in recorded)
        for task, of in by_task([row for part in parts for row in part]):
            found[f"{name}: {task}"] = {
                "n": len(of), **{key: mean(of, key) for key in ("exact", "end", "unreadable")},
                "F1": 2 * mean(of, "hits") / (mean(of, "changes") or 1)}
    return found


def auc(low: Sequence[float], high: Sequence[float]) -> float | None:
    """The chance that one of `high` is above one of `low`, ties counted half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in high for b in low)
    return wins / (len(low) * len(high)) if low and high else None


def of_verdicts(rows: Sequence[dict]) -> dict:
    """Of {"task", "margin": None where there is no verdict, "reward": what it is held against}."""
    found = {}
    for task, of in by_task([row for row in rows if row["margin"] is not None]):
        no, yes = ([row["margin"] for row in of if row["reward"] == reward] for reward in (0, 1))
        right, said = (sum(margin > 0 for margin in margins) for margins in (yes, yes + no))
        found[f"judge: {task}"] = {
            "n": len(of), "successes": len(yes), "AUC": auc(no, yes),
            "precision": right / said if said else None, "recall": right / len(yes) if yes else None}
    return found | {"no verdict": {"n": sum(row["margin"] is None for row in rows)}}


def of_judge(config: Audit, models: Any) -> dict:
    """The judge on the agent's own episodes that ended."""
    with envs.Envs(config.on, config.pages) as pages:
        first = pages.starts(config.tasks, config.seeds)
        played = envs.play(pages, models.agent, first, config.horizon, config.max_new_tokens,
                           config.temperature)

    async def judged(done: Rollout) -> dict:
        row = {"task": done.start.task, "reward": done.reward, "margin": None}
        with contextlib.suppress(Invalid):
            row["margin"] = (await models.judge.verdict(done.start.goal, *ending(done))).margin
        return row

    return of_verdicts(lm.together(judged(done) for done in played if done.terminated and done.steps))


# ---- dreams beside reality ---------------------------------------------------------------------------------

async def replayed(env: Env, dreamed: Rollout) -> float:
    """The reward of a dream's actions, done for real. One on what is there in the dream alone ends it."""
    obs = await env.reset(dreamed.start)
    for step in dreamed.steps:
        if action := to_real(step.action, step.page, obs.page):
            obs, reward, terminated, truncated = await env.step(action)
            if terminated or truncated:
                return reward
        elif not step.error:
            return 0.0
    return 0.0


def of_dreams(config: Audit, models: Any) -> dict:
    """The agent's dreams from first pages, beside what their actions and the agent earn on the real ones."""
    async def beside(k: int, start: data.Start) -> dict:
        how = config.horizon, config.max_new_tokens, config.temperature, lm.mix(k)
        async with pages() as env:
            try:
                obs = await env.reset(start)
                seen = replace(start, goal=obs.goal, page=obs.page)
                imagined = DreamEnv(models.world_model, models.judge, lm.mix(k))
                dreamed = await rollout(imagined, models.agent, seen, *how)
                w2r = await replayed(env, dreamed)
                real = await rollout(env, models.agent, start, *how)
            except Invalid as why:
                return {"why": str(why)}
        return {"why": dreamed.discarded or real.discarded, "task": start.task, "dream": dreamed.reward,
                "reward": w2r, "real": real.reward, "margin": imagined.verdict and imagined.verdict.margin}

    with envs.Envs(config.on, config.pages) as pages:
        first = pages.starts(config.tasks, config.seeds)
        rows = lm.together(beside(k, start) for k, start in enumerate(first))
    valid, found = [row for row in rows if not row["why"]], {}
    for task, of in by_task(valid):
        w2r, real = mean(of, "reward"), mean(of, "real")
        found[f"dreams: {task}"] = {"n": len(of), "dream": mean(of, "dream"), "W2R": w2r, "real": real,
                                    "CR": w2r / real if real else None}
    causes = Counter(":".join(row["why"].split(":")[:2]) for row in rows if row["why"])
    return found | of_verdicts(valid) | {f"left out: {cause}": {"n": n} for cause, n in causes.items()}


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks; equal values share the mean of theirs. None where a side has no order."""
    ranks = [[sum(y < x for y in side) + side.count(x) / 2 for x in side] for side in (list(a), list(b))]
    return statistics.correlation(*ranks) if all(len(set(side)) > 1 for side in ranks) else None


def of_agents(files: Sequence[str]) -> dict:
    try:
        cells = [json.loads(Path(file).read_text())["dreams: all"] for file in files]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{' '.join(files)}: not all are of `audit.py dreams --out` ({error!r})") from error
    rho = spearman([cell["dream"] for cell in cells], [cell["real"] for cell in cells])
    return dict(zip(files, cells)) | {"Spearman of dream and real": {"n": len(cells), "rho": rho}}


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
    def work() -> None:
        what, *words = sys.argv[1:] or [""]
        if measure := {"pages": of_pages, "judge": of_judge, "dreams": of_dreams}.get(what):
            config = evaluate.with_lengths(tyro.cli(Audit, args=words, description=__doc__))
            found = measure(config, loaded(config, what))
            print(table(found))
            if config.out:
                Path(config.out).write_text(json.dumps(found, indent=1))
        elif what == "rank" and words:
            print(table(of_agents(words)))
        else:
            raise UserError("what to audit? python audit.py pages, judge, dreams or rank")

    distributed.command(work)


if __name__ == "__main__":
    main()
