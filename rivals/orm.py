"""WebRL's outcome reward model: did these actions reach the goal, YES or NO (arXiv 2411.02337, sec. 2, "ORM
Training"; NOTES 12.1).

    reward = 1 if log p("YES") - log p("NO") > 0 else 0      of goal, actions, and the last page

    python -m rivals.orm tiny --out runs/tiny/orm            # the laptop: on the recordings of the judge
    torchrun --nproc_per_node 8 -m rivals.orm llama          # Llama-3.1-8B; never run here

It is asked and trained as the judge is (judge.py, tiny/verdicts.py), on the same recordings, but is a model
of its own, and sees no page before the last action.

Where we differ from the paper, and why
- The laptop's starts from the SFT agent, which judges already, and writes its reasons before the verdict: a
  small model that has to answer at once stays at chance (NOTES 11.4).
- A verdict that cannot be read is neither YES nor NO: the try is dropped.
- The prompt is the judge's. The published ORM (THUDM/webrl-orm-llama-3.1-8b) has another one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import data
import finetune
import judge
import recipe
from data import Trajectory
from policy import TokenTrajectory
from tiny import cpu, lessons, rename, verdicts


@dataclass(frozen=True)
class RewardModel(recipe.PolicySFT):
    """The reward model's fine-tuning: judging alone, on recorded outcomes."""

    base: str = "runs/tiny/sft"
    trajectories: str = lessons.RECORDED
    out: str = "runs/tiny/orm"
    demonstrations: int = 2
    context: int = 1024
    renamed: int = 8
    """Copies of each demonstration with its own words exchanged (tiny/rename.py)."""
    judged: int = lessons.Policy.judged
    """Failures of each task. 0 takes all."""
    judge_copies: int = 2
    """Wrong versions of each success, made by changing what its goal asks for."""
    reasons: bool = True
    """It writes what was asked beside what was done before its verdict: a small one needs that (NOTES 11.4).
    A large one answers at once, about recorded goals alone, as in the paper."""
    sft: finetune.FineTune = replace(lessons.SFT, epochs=lessons.Policy().sft.epochs)


def last_page(trajectory: Trajectory | TokenTrajectory) -> tuple[tuple[str, ...], str, str]:
    """What the reward model reads beside the goal: all actions and the last page, no page before it."""
    actions, _, after = judge.ending(trajectory)
    return actions, "", after


class RewardJudge(judge.Judge):
    """The reward model as a judge of dreams: it sees no page before. YES where log p(YES) - log p(NO) is
    above its threshold."""

    def verdicts(self, cases: Sequence[judge.Case]) -> list[judge.Verdict]:
        return super().verdicts([(goal, actions, "", after) for goal, actions, _, after in cases])


def train_reward_model(config: RewardModel) -> dict:
    """Fine-tune it and write config.out; returns what it learned from. `labels`: recorded rewards."""
    finetune.check_drawn({"agent": config.base}, config)
    recorded = data.read_trajectories(config.trajectories)
    shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
    failed = lessons.failures(recorded, config.judged, config.demonstrations_seed)
    copies = rename.renamed(shown, config.renamed, config.seed)
    model = cpu.load_to_train(config.base, recipe.base_made_by(config.base), config.context, config.offload)
    counts = Counter(labels=len(shown) + len(failed))
    if config.reasons:
        pairs = verdicts.judge_examples(model, [*shown, *copies, *failed], config.judge_copies, config.seed,
                                        counts, early=True, ending=last_page)
    else:
        pairs = [(model.template.prompt_ids(judge.messages(t.goal, *last_page(t))),
                  model.template.completion_ids(f"COMPLETED: {'YES' if t.reward else 'NO'}"))
                 for t in [*shown, *failed]]
        short = [pair for pair in pairs if sum(map(len, pair)) <= model.context]
        counts["dropped: too long"], pairs = len(pairs) - len(short), short
    return finetune.learn(model, [(pairs, config.sft)], "policy", config.out,
                          counts | finetune.drawn(config))


LLAMA = RewardModel(
    base="meta-llama/Llama-3.1-8B-Instruct", trajectories="runs/webrl/labelled.jsonl", out="runs/webrl/orm",
    demonstrations=0, context=16384, judged=0, reasons=False,
    sft=finetune.FineTune(epochs=4, lr=5e-6, tokens=16384, microbatches=64))  # rate and epochs: Table 5


def main():
    config = recipe.chosen({"tiny": ("the laptop's", RewardModel()),
                        "llama": ("8 x H100: Llama-3.1-8B on labelled tries", LLAMA)})
    recipe.needs_gpu(config.base, (LLAMA.base,), "python -m rivals.orm tiny")
    recipe.command(lambda: train_reward_model(config))


if __name__ == "__main__":
    main()
