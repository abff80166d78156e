"""Both fine-tunings: the agent from demonstrations, the world model from transitions.

    python sft.py world_model tiny                       # the laptop; writes runs/tiny/world_model
    python sft.py policy tiny                            # writes runs/tiny/sft, which acts and judges
    torchrun --nproc_per_node 8 sft.py world_model       # gpt-oss-120b with LoRA on NNetNav's transitions
    torchrun --nproc_per_node 8 sft.py policy            # Llama-3.1-8B on NNetNav; published agents need none

Killed at any moment, the same command goes on from its last checkpoint.
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence

import data
import distributed
import finetune
import lm
import policy
import recipe
import world_model
from data import Trajectory
from node import gptoss, prepare
from tiny import cpu, lessons

CONFIGS = {
    "policy": {"tiny": ("the laptop's, on MiniWoB++ demonstrations", lessons.Policy()),
               "single": ("Qwen3-0.6B, one GPU", recipe.SINGLE_POLICY),
               "paper": ("Llama-3.1-8B on NNetNav", recipe.PolicySFT())},
    "world_model": {"tiny": ("the laptop's, on MiniWoB++ transitions", lessons.WorldModel()),
                    "single": ("Qwen3-1.7B with LoRA, one GPU", recipe.SINGLE_WORLD_MODEL),
                    "paper": ("gpt-oss-120b on NNetNav", recipe.WorldModelSFT())},
}


# ---- the agent ---------------------------------------------------------------------------------------------


def learn_policy(config: recipe.PolicySFT) -> dict:
    """Clone demonstrations and write config.out; returns what was learned from. All ranks call it."""
    if isinstance(config, lessons.Policy) or config.demonstrations:  # chosen from the whole file, and few
        return clone(config, data.read_trajectories(config.trajectories))
    pairs = prepare.demonstrations(config)  # before the model is loaded: it takes memory and all cores
    counts = pairs.counts | finetune.drawn(config)
    return finetune.learn(load_policy(config), [(pairs, config.sft)], "policy", config.out, counts)


def clone(config: recipe.PolicySFT, recorded: Sequence[Trajectory]) -> dict:
    """Clone the demonstrations among `recorded`; a laptop's agent learns more beside them
    (tiny/lessons.py)."""
    model, counts = load_policy(config), Counter[str]()
    if isinstance(config, lessons.Policy):
        learned = lessons.policy_lessons(config, model, recorded, counts)
    else:
        shown = finetune.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
        counts["demonstrations"] = len(shown)
        learned = [(policy.examples(model, shown, counts), config.sft)]
    return finetune.learn(model, learned, "policy", config.out, counts | finetune.drawn(config))


def load_policy(config: recipe.PolicySFT) -> lm.LM:
    return cpu.load_to_train(config.base, recipe.base_made_by(config.base), config.context, config.offload)


# ---- the world model ---------------------------------------------------------------------------------------


def learn_world_model(config: recipe.WorldModelSFT) -> dict:
    """Fine-tune on transitions and write config.out; returns what was learned from. All ranks call it."""
    if isinstance(config, lessons.WorldModel):
        return imitate(config, lessons.chosen(config, data.read_trajectories(config.transitions)))
    pairs = prepare.transitions(config)
    finetune.check_some(pairs, "world model", pairs.counts)  # before 120B parameters are read
    return fit_world_model(config, load_world_model(config), pairs, pairs.counts)


def imitate(config: recipe.WorldModelSFT, trajectories: Sequence[Trajectory]) -> dict:
    """Fine-tune on the transitions of `trajectories`."""
    model, counts = load_world_model(config), Counter(trajectories=len(trajectories))
    pairs = world_model.examples(model, trajectories, counts, prepare.annotated(config.reasons))
    finetune.check_some(pairs, "world model", counts)
    random.Random(config.sft.seed).shuffle(pairs)
    return fit_world_model(config, model, pairs, counts)


def fit_world_model(config: recipe.WorldModelSFT, model: lm.LM, pairs: Sequence[lm.Pair],
                    counts: Counter) -> dict:
    merge = None
    if config.lora_rank:  # the adapter is merged into the base's own files
        some = [pairs[k * len(pairs) // 4] for k in range(4)]
        merge = lambda: gptoss.merge_all_ranks(model.model, config, [(p + c)[-2048:] for p, c in some])
    return finetune.learn(model, [(pairs, config.sft)], "world model", config.out,
                          counts | finetune.drawn(config), merge)  # Eq. 4


def load_world_model(config: recipe.WorldModelSFT) -> lm.LM:
    """The base model: all weights trained, or frozen with adapters beside its attention."""
    if not config.lora_rank:
        model = cpu.load_to_train(config.base, recipe.base_made_by(config.base), config.context)
        model.template = gptoss.template(model.tokenizer)  # as node/prepare.py writes its examples
        return model
    grouped, lora = distributed.grouped(), gptoss.Lora(config.lora_rank, config.lora_alpha)
    net = gptoss.load_sharded(config.base, distributed.mesh() if grouped else None, lora, config.attention)
    tokenizer = lm.load_tokenizer(config.base)
    model = lm.LM(net.eval(), tokenizer, config.context, sharded=grouped, template=gptoss.template(tokenizer))
    # Of gpt-oss tests/test_gptoss.py shows it; to gather all 120B for a few tokens would take a minute.
    return model if net.config.model_type == "gpt_oss" else lm.check_logps(model)


# ---- the command -------------------------------------------------------------------------------------------


def main():
    what = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in CONFIGS else None
    if what is None:
        sys.exit("sft.py: fine-tune what? python sft.py policy tiny, or python sft.py world_model tiny; "
                 "--help behind either")
    configs, work = CONFIGS[what], {"policy": learn_policy, "world_model": learn_world_model}
    config = recipe.chosen(configs)
    large = configs["paper"][1].base, configs["single"][1].base
    recipe.needs_gpu(config.base, large, f"python sft.py {what} tiny")
    alone = what == "world_model" and config.lora_rank > 0
    recipe.command(lambda: work[what](config), alone)


if __name__ == "__main__":
    main()
