"""What node/plan.py prints: memory, storage, hours, what differs from `paper`, and what was assumed.

Every function returns lines for a terminal of 110 columns. A plan is a node.plan.Plan.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import recipe
from node.hours import ANSWER, LIKELY, PAGE, TRIES, Stage, total
from node.sizes import CARDS


def whole(head: str, plans: dict) -> list[str]:
    """GPUs, host and disk of trainings that come one after the other."""
    lines, disk = [head, ""], {}
    for plan in plans.values():
        lines += [*memory(plan), ""]
        disk |= plan.disk
    for who, plan in plans.items():
        lines += storage(f"Host memory of the node, {who}, GB", plan.host)
    return [*lines, *storage("Disk, GB", disk), ""]


def memory(plan) -> list[str]:
    of, size = plan.memory, plan.memory.card.memory

    def line(who: str, dreaming: float | str, update: float | str, why: str = "") -> str:
        text = f"  {who:36}"
        for cell in (dreaming, update) if of.dreaming else (update,):
            text += f"{cell:>10.1f}" if isinstance(cell, float) and cell else f"{cell or '-':>10}"
        return f"{text}   {why}".rstrip()

    lines = [of.title, "", line("GB of each GPU", of.before, "update")]
    lines += [line(row.who, row.dreaming, row.update, row.why) for row in of.rows]
    lines += [line("total", of.dreaming, of.update),
              line(f"free of {size:.1f}", size - of.dreaming, size - of.update),
              line(f"free at a sequence of {of.context:,}", " ", size - of.longest,
                   "the longest of --context, alone in a microbatch"), ""]
    if of.free >= 0:
        return lines + ["It fits."]
    if size < max(of.dreaming, of.update):
        lines.append("IT DOES NOT FIT.")
    else:
        lines.append("IT DOES NOT ALWAYS FIT: a full microbatch does, but a sequence over "
                     f"{of.fits:,} tokens runs out of memory.")
    lines.append(f"  {'Change, cheapest first; each counted alone':44}{'then free':>10}   at the price of")
    lines += [f"  {change.what:44}{change.free:10.1f}   {change.cost}" for change in plan.changes]
    if not any(change.free >= 0 for change in plan.changes):
        larger = ", ".join(name for name, card in CARDS.items() if card.memory >= size - of.free)
        lines += ["  None is enough alone: put several together, or take more ranks or another card:",
                  f"  {larger or 'none here is large enough'}."]
    return lines


def storage(title: str, parts: dict[str, float]) -> list[str]:
    lines = [f"    {what:46}{size:8,.1f}" for what, size in parts.items()]
    return [f"  {title:48}{sum(parts.values()):8,.0f}", *lines]


def table(title: str, stages: Sequence[Stage], unit: str) -> list[str]:
    scale = {"s": 1, "min": 60, "h": 3600}[unit]
    lines = [f"  {title:28}{'M tokens':>9}{unit:>8}{'from':>9}{'to':>7}"]
    for stage in (*stages, total(stages)):
        numbers = f"{stage.tokens / 1e6:9,.2f}{stage.seconds / scale:8,.1f}"
        for value, width in ((stage.low / scale, 9), (stage.high / scale, 7)):
            numbers += f"{value:{width},.{1 if value < 1000 else 0}f}"
        lines.append(f"    {stage.name:26}{numbers}   {stage.why}".rstrip())
    return lines


def differences(learning: recipe.WorldModelSFT, cloning: recipe.PolicySFT,
                dreaming: recipe.Train) -> list[str]:
    """What a recipe has otherwise than `paper`: a line a flag."""
    def flat(config, prefix: str = "--") -> dict[str, object]:
        found = {}
        for each in fields(config):
            value, name = getattr(config, each.name), prefix + each.name.replace("_", "-")
            found |= flat(value, name + ".") if is_dataclass(value) else {name: value}
        return found

    lines = [f"  {'Where it is not `paper`':42}{'paper':>34}   here"]
    papers = recipe.WorldModelSFT(), recipe.PolicySFT(), recipe.Train()
    programs = "sft.py world_model", "sft.py policy", "train.py"
    for program, here, paper in zip(programs, (learning, cloning, dreaming), papers):
        there = flat(paper)
        lines += [f"    {program}"] + [f"      {name:38}{there[name]!s:>34}   {value}"
                                       for name, value in flat(here).items() if value != there[name]]
    return lines


SINKS = ["gpt-oss is fine-tuned with --attention sinks (node/sinks.py). Eager attention holds (T, T) scores:",
         "54 GB at 2k tokens, 57 at 4k, and at 16k no card is enough."]
ASSUMPTIONS = [
    "The first figure of time is the one that we expect; have money for the last. From and to: all that",
    "nobody has measured, or that measurements disagree on, at its fast end at once, and at its slow end.",
    f"Pages are log-normal, {PAGE:,} tokens in the mean (NNetNav's are 33 kB). The",
    f"agent writes {ANSWER} tokens a turn. A delta is as long as in recorded transitions of real",
    f"applications, {LIKELY.navigation:.0%} of them to another page. All ranks wait for the dream that ends",
    "last. More tasks a batch, a step of overlap or CUDA's MPS would shorten it most (docs/LOG.md, 22).",
    "Published agents spare the agent's fine-tuning. No recipe of the node learns to judge. Figures have",
    "their sources in node/hours.py, node/sizes.py and node/plan.py; none was measured on this card by us."]
RECORDED_ASSUMPTIONS = [
    *ASSUMPTIONS[:2],
    "Pages and deltas are as long as those of twelve MiniWoB++ tasks, counted with another tokenizer than",
    "the model's; the slow end has them twice as long. Steps and resets of pages are of two cores. vLLM's",
    "steps are never shorter than a small model's were elsewhere. Not in it: downloads (5 GB). Figures have",
    "their sources in node/hours.py, node/sizes.py and node/plan.py; none was measured on this card by us."]

WEBRL_ASSUMPTIONS = [
    "The first figure of time is the one that we expect. From and to: all that nobody has measured at its",
    "fast end at once, and at its slow end. Assumptions are above all the turns of a try, the seconds of a",
    "real step, and the teacher's answer (node/hours.py). A rank has as many browsers as worlds/webarena.py",
    "lets it have. Ranks are taken to act equally long. Not in it: the critic's fit (minutes a phase on a",
    f"core), the machines of sites and teacher, and how the {TRIES:,} labelled tries were made."]
