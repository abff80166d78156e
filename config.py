"""Every setting, with its help and its source, and three presets: `laptop`, `gpu` and `paper`.

    python sft.py policy laptop               SFT, three presets of three models
    python train.py laptop --updates 20       Train
    torchrun --nproc_per_node 8 train.py      without a word it is `paper`: eight H100

`gpu` is the same code on one GPU, `laptop` on two CPU cores. Besides sizes, these differ from the paper: in
both a reward model judges, and it and the world model learn from the agent's real episodes too; in `laptop`
also starts, temperature, rate, clip and minibatches (NOTES 4.2, 11.6).
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro


class UserError(ValueError):
    """A mistake that the user can mend. Its message is one line: the file or the setting, the value, and the
    way out. A command prints it without a traceback; every other error keeps its own."""


@dataclass(frozen=True)
class Engine:
    """vLLM, in a rank or as a server, on GPUs that the trainer uses as well (NOTES 9.10)."""
    kv_cache_gb: float = 7.0  # For keys and values on each GPU, in 1e9 bytes (Llama-3.1-8B: 131 kB a token)
    tensor_parallel: int = 1  # GPUs that share a server's model
    eager: bool = False  # Run without compilation and CUDA graphs: slower, but ready in seconds (for tests)


@dataclass(frozen=True)
class Benchmark:
    """Whose pages: MiniWoB++'s, or those of another benchmark, and what that needs."""
    benchmark: str = "miniwob"  # or infinity, webarena, webarena_lite, webvoyager or openended
    sites: str = ""  # infinity: the folder of its applications
    # webvoyager: its JSONL ({"web_name", "id", "ques", "web"}); openended: {"id", "goal", "url"} a line.
    task_file: str = ""
    hosts: tuple[str, ...] = ()  # Live pages may reach these beside those of their tasks (*.example.org)
    grader_url: str = ""  # webvoyager, openended: a chat server (.../v1#NAME) that judges what was answered
    step_seconds: float = 0.0  # A longer step fails the try, and not the agent (0: 30; live 60, WebArena 120)


# ---- fine-tuning: sft.py -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning on (prompt, completion) pairs of recorded trajectories."""
    base: str = "meta-llama/Llama-3.1-8B-Instruct"  # Folder of the model to fine-tune
    recorded: str = "nnetnav-live/train.jsonl"  # Trajectories of NNetNav, or .jsonl.gz of envs/explore.py
    per_task: int = 0  # The first of each task of `recorded` (policy: of its successes); 0 takes all
    # The policy's own episodes (envs/explore.py), all of which world model and reward model learn as well:
    # what it tries and the browser refuses, an explorer hardly tries.
    played: str = ""
    rationales: str = ""  # World model: what a large model wrote (annotate.py); without it code writes them
    out: str = "runs/paper/sft"  # Folder of the fine-tuned model
    context: int = 32768  # Longest prompt with its completion, in tokens; the rest is dropped and counted
    # System message to fine-tune with. The folder's tokenizer keeps it, so that the model is always asked as
    # it was trained. Without one it is the data's own, or the one in policy.py, world_model.py, judge.py.
    system_prompt: str = ""
    lora_rank: int = 0  # Of adapters on q, k, v, o, merged at the end (authors' script: 8); 0: all weights
    lora_alpha: int = 16  # Scale of the adapters: lora_alpha / lora_rank (authors' script: 16)
    offload: bool = False  # Keep weights, gradients and optimizer states in host memory between uses
    epochs: float = 1.0  # Passes over the examples (paper: 1)
    lr: float = 1e-5  # Peak: warm-up over 3 % of the steps, then a cosine to a tenth (the authors' script)
    tokens: int = 16384  # Most tokens of a microbatch, padding counted
    microbatches: int = 8  # Microbatches a step, over all ranks (the authors' script: 8)
    clip_norm: float = 1.0  # Largest norm of a step's gradient, before it is weighed by the step's tokens
    checkpoint_every: int = 200  # Steps from one checkpoint to the next
    seed: int = 0  # Seed of the order of the examples

    def __post_init__(self):
        if min(self.epochs, self.tokens, self.microbatches, self.checkpoint_every) <= 0:
            raise UserError("--epochs, --tokens, --microbatches, --checkpoint-every: give more than 0")


# ---- dreaming: train.py ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Train:
    """Dreaming, and learning from it by GSPO."""
    # Folder of the SFT policy: where training starts, and, without `judge`, the frozen judge.
    policy: str = "stanfordnlp/llama8b-nnetnav-live"
    world_model: str = "runs/paper/world_model"  # Folder of the world model
    judge: str = ""  # Folder of the frozen judge: a reward model, or a base that still answers questions
    out: str = "runs/paper/dream"  # Folder of the trained policy; OUT.run/ beside it has logs and checkpoints
    recorded: str = "nnetnav-live/train.jsonl"  # File of recorded trajectories: the experts and the starts

    updates: int = 1000  # How many batches are learned from
    groups: int = 4  # Groups a batch (paper: 4), each of another task while there are tasks
    group_size: int = 8  # Rollouts a group, dreams or the expert's (paper: 8)
    horizon: int = 5  # Steps a dream (paper: 5)
    expert_fraction: float = 0.5  # Chance of an expert in a rollout's place (paper: 0.5, best near 0.4)
    real_fraction: float = 0.0  # Chance that a group is done on real pages; 1: no world model, no judge
    # Start from the first page of every recorded trajectory; an expert is then a whole demonstration of at
    # most `horizon` steps. Otherwise from windows of the successes (paper).
    first_pages: bool = False
    not_dreamed: tuple[str, ...] = ()  # Tasks to leave out: those that the judge is blind to (audit.py judge)
    on: Annotated[Benchmark, tyro.conf.arg(name="")] = Benchmark()  # Whose pages
    seed: int = 0  # Seed of every random choice of this run: windows, starts, dreams, order

    minibatches: int = 4  # GSPO steps a batch (GSPO paper: 4)
    lr: float = 1e-6  # Learning rate, constant (paper: 1e-6)
    eps_low: float = 3e-4  # The clip begins where a ratio falls below 1 minus this (GSPO paper, section 5.1)
    eps_high: float = 4e-4  # The clip begins where a ratio rises above 1 plus this (GSPO paper, section 5.1)
    clip_norm: float = 1.0  # Largest norm of the gradient
    tokens: int = 16384  # Most of a microbatch, padding counted: memory; rounding changes alone (NOTES 4.4)

    temperature: float = 0.7  # Sampling temperature of the agent (paper: 0.7)
    max_new_tokens: int = 4096  # Longest answer of the agent (paper: 16k; NNetNav's have some hundreds)
    context: int = 24576  # Longest prompt with its answer of the agent, in tokens (paper: 32k + 16k)
    world_model_temperature: float = 0.7  # Of the world model (authors' script: 0.7, with a top_p of .9)
    world_model_tokens: int = 16384  # Longest prediction, in tokens (paper: 16k; script: 8,192, NOTES 2.7)
    world_model_context: int = 40960  # A page that the agent can read, and an answer that writes one out
    judge_tokens: int = 1024  # Longest verdict with its reasons; 0: it answers at once (reward models)
    judge_context: int = 49152  # The judge reads two such pages

    evaluate_every: int = 20  # Updates between evaluations on real pages of dev seeds; 0: none
    evaluate_seeds: str = "1000000:4"  # START:COUNT, of the dev range, which are never learned from
    evaluate_horizon: int = 10  # Most steps of an episode in them
    checkpoint_every: int = 5  # Updates from one checkpoint to the next
    discard_limit: float = 0.5  # Stop where more of the first update's dreams were discarded; 1: never
    sampler: Literal["vllm", "transformers"] = "vllm"  # vllm: engines, servers. transformers: in this process
    # vLLM servers of the world model (http://host:port/v1), asked in turn. Without any train.py starts one.
    world_model_urls: tuple[str, ...] = ()
    judge_urls: tuple[str, ...] = ()  # The same for the judge
    policy_engine: Engine = Engine()  # vLLM in each rank
    world_model_server: Engine = Engine(2.5, tensor_parallel=8)  # The server that train.py starts
    judge_server: Engine = Engine(2.0, tensor_parallel=8)  # The same for the judge
    compute: Literal["bfloat16", "float32", "auto"] = "bfloat16"  # Of matrix products; auto: the faster here
    offload: bool = False  # Weights, gradients, Adam in host memory between uses (paper: "FSDP offloading")

    def __post_init__(self):
        if min(self.minibatches, self.group_size) < 2:
            raise UserError("--minibatches, --group-size: give 2, or ratios are all 1, or advantages all 0")
        if not all(0 <= share <= 1 for share in (self.expert_fraction, self.real_fraction)):
            raise UserError("--expert-fraction and --real-fraction are shares: give values from 0 to 1")
        if min(self.groups, self.horizon, self.temperature, self.checkpoint_every) <= 0:
            raise UserError("--groups, --horizon, --temperature, --checkpoint-every: give more than 0")
        if self.sampler == "transformers" and (self.world_model_urls or self.judge_urls):
            raise UserError("--world-model-urls and --judge-urls are for --sampler vllm")


# ---- presets -----------------------------------------------------------------------------------------------

# `laptop`: two CPU cores, an hour. SmolLM2-135M-Instruct, which comes inside a package (lm.py), plays
# MiniWoB++ pages of some 150 tokens. What the explorer recorded of them is in the repository.
SMALLEST, SMALL, PAGES = "runs/smollm2", "recordings/small.jsonl.gz", "recordings/pages.jsonl.gz"
POLICY = "You operate a web browser. Say which element comes next, then act."
WORLD_MODEL = "You are the web. Say what the action touches, what changes, and whether it is over."
REWARD_MODEL = "Was the objective reached?"

POLICY_SFT = {
    "paper": SFT(microbatches=16),
    "gpu": SFT("Qwen/Qwen3-0.6B", PAGES, out="runs/gpu/sft", context=4096, system_prompt=POLICY, tokens=8192,
               microbatches=2),
    "laptop": SFT(SMALLEST, SMALL, per_task=20, out="runs/laptop/sft", context=1024, system_prompt=POLICY,
                  lr=2e-4, tokens=512, microbatches=1)}
WORLD_MODEL_SFT = {
    "paper": SFT("openai/gpt-oss-120b", out="runs/paper/world_model", lora_rank=8, lr=2e-4, tokens=8192),
    "gpu": SFT("Qwen/Qwen3-1.7B", PAGES, played="runs/gpu/episodes.jsonl.gz", out="runs/gpu/world_model",
               context=4608, system_prompt=WORLD_MODEL, lora_rank=8, lr=2e-4, tokens=8192, microbatches=2),
    "laptop": SFT(SMALLEST, SMALL, per_task=15, played="runs/laptop/episodes.jsonl.gz",
                  out="runs/laptop/world_model", context=1024, system_prompt=WORLD_MODEL, lr=3e-4, tokens=512,
                  microbatches=1)}
# From the policy, which can find on a page what a goal names: from SMALLEST its loss stayed at chance.
REWARD_MODEL_SFT = {
    "paper": SFT(recorded="", played="runs/paper/episodes.jsonl.gz", out="runs/paper/reward_model",
                 microbatches=16),
    "gpu": SFT("runs/gpu/sft", PAGES, per_task=20, played="runs/gpu/episodes.jsonl.gz",
               out="runs/gpu/reward_model", context=8192, system_prompt=REWARD_MODEL, tokens=8192,
               microbatches=2),
    "laptop": SFT("runs/laptop/sft", SMALL, per_task=10, played="runs/laptop/episodes.jsonl.gz",
                  out="runs/laptop/reward_model", context=1024, system_prompt=REWARD_MODEL, epochs=2, lr=1e-4,
                  tokens=2048, microbatches=1)}
TRAIN = {
    "paper": Train(),
    "gpu": Train("runs/gpu/sft", "runs/gpu/world_model", "runs/gpu/reward_model", "runs/gpu/dream", PAGES,
                 updates=150, tokens=8192, max_new_tokens=512, world_model_tokens=1024, judge_tokens=0,
                 context=4096, world_model_context=4608, judge_context=8192, evaluate_every=50,
                 policy_engine=Engine(2.0), world_model_server=Engine(2.0), judge_server=Engine(1.5)),
    # The reward model is near chance on focus-text-2 (NOTES 11.8). 135 M parameters and not 8 B: fifty times
    # the paper's rate. A turn has some 20 tokens where the paper's has hundreds, and s_i is a mean over them:
    # its noise, and what one step moves it by, are that much larger, and so is the clip.
    "laptop": Train("runs/laptop/sft", "runs/laptop/world_model", "runs/laptop/reward_model",
                    "runs/laptop/dream", SMALL, updates=10, groups=8, first_pages=True,
                    not_dreamed=("focus-text-2",), minibatches=2, lr=5e-5, eps_low=0.03, eps_high=0.04,
                    tokens=4096, temperature=1.0, max_new_tokens=48, context=1024,
                    world_model_temperature=0.5, world_model_tokens=128, world_model_context=1024,
                    judge_tokens=0, judge_context=1024, evaluate_every=5, evaluate_horizon=6,
                    sampler="transformers", compute="auto")}


def chosen(presets: dict[str, Any]) -> Any:
    """The preset that the command line names (else `paper`) with its flags. An unknown flag is an error."""
    words = sys.argv[1:] or ["paper"]
    if words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["paper", *words]
    given = {name: ("", preset) for name, preset in presets.items()}
    return tyro.extras.overridable_config_cli(given, args=words)
