"""Three fine-tunings: policy from demonstrations, world model from transitions, reward model from outcomes.

    python sft.py policy laptop                          # writes runs/laptop/sft
    python sft.py world_model laptop                     # writes runs/laptop/world_model
    python sft.py reward_model laptop                    # from episodes that the policy played (Makefile)
    torchrun --nproc_per_node 8 sft.py world_model       # gpt-oss-120b with LoRA on NNetNav's transitions
    torchrun --nproc_per_node 8 sft.py policy            # Llama-3.1-8B on NNetNav; published agents need none

Killed at any moment, the same command goes on from its last checkpoint.
"""

import sys
from collections import Counter
from collections.abc import Sequence

import data
import distributed
import finetune
import gpt_oss
import judge
import lm
import policy
import recipe
import world_model
from node import prepare

CONFIGS = {
    "policy": {"laptop": ("SmolLM2-135M, MiniWoB++ pages, two CPU cores", recipe.LAPTOP_POLICY),
               "gpu": ("Qwen3-0.6B, one GPU", recipe.GPU_POLICY),
               "paper": ("Llama-3.1-8B on NNetNav", recipe.PolicySFT())},
    "world_model": {"laptop": ("SmolLM2-135M, MiniWoB++ pages, two CPU cores", recipe.LAPTOP_WORLD_MODEL),
                    "gpu": ("Qwen3-1.7B with LoRA, one GPU", recipe.GPU_WORLD_MODEL),
                    "paper": ("gpt-oss-120b on NNetNav", recipe.WorldModelSFT())},
    "reward_model": {"laptop": ("SmolLM2-135M, the policy's own episodes", recipe.LAPTOP_REWARD_MODEL),
                     "gpu": ("Qwen3-0.6B, one GPU", recipe.GPU_REWARD_MODEL),
                     "paper": ("Llama-3.1-8B", recipe.RewardModelSFT())},
}

# ---- policy and reward model -------------------------------------------------------------------------------


def learn_policy(config: recipe.PolicySFT) -> dict:
    """Clone demonstrations and write config.out; returns what was learned from. All ranks call it."""
    if not config.demonstrations and not config.trajectories.endswith(".gz"):
        prepared = prepare.demonstrations(config)  # before the model is loaded: it takes memory and all cores
        return finetune.learn(load(config), prepared, config.sft, "policy", config.out, prepared.counts)
    shown = finetune.successes(data.read_trajectories(config.trajectories), config.demonstrations)
    model, counts = load(config), Counter(demonstrations=len(shown))
    pairs = policy.examples(model, shown, counts)
    return finetune.learn(model, pairs, config.sft, "policy", config.out, counts)


def learn_reward_model(config: recipe.RewardModelSFT) -> dict:
    """Learn recorded outcomes and write config.out; returns what was learned from. All ranks call it."""
    episodes = data.read_trajectories(config.trajectories)
    explored = data.read_trajectories(config.explored) if config.explored else []
    tasks = {t.task for t in episodes}
    explored = finetune.first([t for t in explored if t.task in tasks], config.per_task)
    model, counts = load(config), Counter[str]()
    groups = judge.examples(model, episodes + explored, counts)
    return finetune.learn(model, groups, config.sft, "reward model", config.out, counts)


def load(config: recipe.PolicySFT | recipe.WorldModelSFT) -> lm.LM:
    """The base model, all of whose weights can be trained, asked with config.system_prompt."""
    offload = isinstance(config, recipe.PolicySFT) and config.offload
    made_by = "python lm.py" if config.base == recipe.SMALLEST else ""
    model = lm.load(config.base, config.context, made_by=made_by, sharded=distributed.grouped(),
                    offload=offload)
    if config.system_prompt:
        model.tokenizer.init_kwargs["system_prompt"] = config.system_prompt
    return model


# ---- the world model ---------------------------------------------------------------------------------------


def learn_world_model(config: recipe.WorldModelSFT) -> dict:
    """Fine-tune on transitions and write config.out; returns what was learned from. All ranks call it."""
    if not config.per_task and not config.played and not config.transitions.endswith(".gz"):
        prepared = prepare.transitions(config)
        finetune.check_some(prepared, "world model", prepared.counts)  # before 120B parameters are read
        return fit_world_model(config, load_world_model(config), prepared, prepared.counts)
    trajectories = finetune.first(data.read_trajectories(config.transitions), config.per_task)
    if config.played:
        trajectories += data.read_trajectories(config.played)
    model, counts = load_world_model(config), Counter(trajectories=len(trajectories))
    pairs = world_model.examples(model, trajectories, counts, prepare.annotated(config.reasons))
    return fit_world_model(config, model, pairs, counts)


def fit_world_model(config: recipe.WorldModelSFT, model: lm.LM, pairs: Sequence[lm.Pair],
                    counts: Counter) -> dict:
    finetune.check_some(pairs, "world model", counts)
    write = None
    if config.lora_rank:  # the adapter is merged into the base's own files
        write = lambda: gpt_oss.save(model.model, config.base, config.out, config.lora_rank,
                                     config.lora_alpha)
    return finetune.learn(model, pairs, config.sft, "world model", config.out, counts, write)  # Eq. 4


def load_world_model(config: recipe.WorldModelSFT) -> lm.LM:
    """The base model: all weights trained, or frozen with adapters beside its attention."""
    if not config.lora_rank:
        model = load(config)
        model.template = gpt_oss.template(model.tokenizer)  # as node/prepare.py writes its examples
        return model
    model = gpt_oss.load(config.base, config.context, config.lora_rank, config.lora_alpha)
    if config.system_prompt:
        model.tokenizer.init_kwargs["system_prompt"] = config.system_prompt
    return model


# ---- the command -------------------------------------------------------------------------------------------


def main():
    work = {"policy": learn_policy, "world_model": learn_world_model, "reward_model": learn_reward_model}
    what = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in work else None
    if what is None:
        sys.exit(f"sft.py: fine-tune what? python sft.py {{{', '.join(work)}}} laptop; --help behind each")
    config = recipe.chosen(CONFIGS[what])
    large = CONFIGS[what]["paper"][1].base, CONFIGS[what]["gpu"][1].base
    recipe.needs_gpu(config.base, large, f"python sft.py {what} laptop")
    alone = what == "world_model" and config.lora_rank > 0
    recipe.command(lambda: work[what](config), alone)


if __name__ == "__main__":
    main()
