"""The configs of training, each with the figures of the paper's recipe; and how a command line chooses one.

    PolicySFT        supervised fine-tuning of the policy, which is also the judge      sft.py policy
    WorldModelSFT    fine-tuning of the world model                                     sft.py world_model
    Train            the dreaming                                                       train.py

The defaults are `paper`: eight H100. `GPU...` is the same on one GPU, `LAPTOP...` on two CPU cores.
"""

import dis
import hashlib
import json
import math
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import torch
import tyro

import data
import distributed
import dream
import finetune
import lm
import policy
import remote
import update

# ---- vLLM --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineConfig:
    """The agent's engine on each rank. Trainer and world model are on the same GPU (NOTES 9.10)."""

    kv_cache_gb: float = 7.0
    """Memory for keys and values, in 1e9 bytes. Llama-3.1-8B takes 131 kB a token, so 7 are 53k tokens a
    rank."""
    memory_fraction: float = 0.02
    """Share of each GPU's memory without which vLLM refuses to start, and to start again. It sizes nothing
    (NOTES 7.9)."""
    max_num_seqs: int = 64
    """Answers that are written at once. CUDA graphs are captured up to twice this number, and 512 at most
    (NOTES 7.10)."""
    eager: bool = False
    """Run without compilation and CUDA graphs: slower, but ready in seconds (for tests)."""


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """A vLLM server, over GPUs that the trainer and the agent's engines use as well (NOTES 9.10)."""

    tensor_parallel: int = 8
    """GPUs that share the model."""
    kv_cache_gb: float = 2.5
    """Memory for keys and values on each GPU, in 1e9 bytes. gpt-oss-120b takes 37 kB a token, over all
    GPUs."""
    dtype: str = "auto"
    """Type of the weights; `auto` is what the folder says."""
    start_minutes: float = 30.0
    """Minutes that a server may take to start: 65 GB from a slow disk, compilation and graphs. After three
    hours of waiting the other ranks give up (distributed.init)."""
    restarts: int = 3
    """How often in a run a server that died or hung is started again. After that the run stops."""

# ---- fine-tuning -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicySFT:
    """Supervised fine-tuning of the policy."""

    base: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Folder of the model to fine-tune."""
    trajectories: str = "nnetnav-live/train.jsonl"
    """File of recorded trajectories."""
    out: str = "runs/paper/sft"
    """Folder of the fine-tuned model."""
    demonstrations: int = 0
    """Successes of each task to clone; 0 takes all."""
    context: int = 32768
    """Longest prompt with its completion, in tokens."""
    system_prompt: str = ""
    """System message to fine-tune with. The folder's tokenizer keeps it, so that the model is always asked as
    it was trained. Without one it is the data's own, or policy.SYSTEM, which explains every action."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in host memory between uses."""
    sft: finetune.FineTune = field(
        default_factory=lambda: finetune.FineTune(epochs=1, lr=1e-5, tokens=16384, microbatches=16))
    """How it is fine-tuned."""


@dataclass(frozen=True)
class WorldModelSFT:
    """Supervised fine-tuning of the world model."""

    base: str = "openai/gpt-oss-120b"
    """Folder of the model to fine-tune."""
    transitions: str = "nnetnav-live/train.jsonl"
    """File of recorded trajectories (.jsonl.gz of worlds/explore.py, or NNetNav's .jsonl)."""
    out: str = "runs/paper/world_model"
    """Folder of the fine-tuned model."""
    per_task: int = 0
    """Trajectories of each task to learn from; 0 takes all."""
    played: str = ""
    """A file of the policy's own episodes (worlds/explore.py --policy); all are learned as well. What it
    tries and the browser refuses, an explorer hardly tries."""
    context: int = 32768
    """Longest prompt with its target, in tokens. A transition that does not fit is dropped and counted."""
    system_prompt: str = ""
    """As of PolicySFT; without one it is world_model.SYSTEM."""
    reasons: str = ""
    """File of reasons that a large model wrote (python -m node.annotate); without it code writes the
    sentence."""
    lora_rank: int = 8
    """Rank of LoRA's adapters on q, k, v, o, merged at the end (authors' script: 8); 0 trains all weights."""
    lora_alpha: int = 16
    """Scale of the adapters: lora_alpha / lora_rank (authors' script: 16)."""
    sft: finetune.FineTune = field(
        default_factory=lambda: finetune.FineTune(epochs=1, lr=2e-4, tokens=8192, microbatches=8))
    """How it is fine-tuned."""


@dataclass(frozen=True)
class RewardModelSFT(PolicySFT):
    """Supervised fine-tuning of a reward model on recorded outcomes (judge.examples)."""

    trajectories: str = "runs/paper/episodes.jsonl.gz"
    """File of episodes that the policy played (worlds/explore.py --policy): they come first."""
    explored: str = ""
    """A file of the explorer's, of which `per_task` trajectories of each task are learned as well."""
    out: str = "runs/paper/reward_model"
    per_task: int = 20
    """Of `explored`; 0 takes all."""


# ---- dreaming ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Train(update.Config):
    """The dreaming."""

    policy: str = "stanfordnlp/llama8b-nnetnav-live"
    """Folder of the SFT agent: where training starts, and, without `judge_model`, the frozen judge."""
    world_model: str = "runs/paper/world_model"
    """Folder of the world model; or http://host:port/v1#NAME, a model that a server talks for
    (chat/completions; without #NAME the first that it lists)."""
    judge_model: str = ""
    """Folder of the frozen judge (--dreaming.judge policy), where that is not the SFT agent: a reward model,
    or a base that still answers questions."""
    out: str = "runs/paper/dream"
    """Folder of the agent that has learned. OUT.run/ beside it holds metrics.jsonl, dreams.jsonl,
    report.html, checkpoint/, config.json and curve.png."""
    trajectories: str = "nnetnav-live/train.jsonl"
    """File of recorded trajectories: the experts and the starts."""
    world: str = "dream"
    """Where the agent learns: in dreams (`dream`), on real pages by their own reward, without world model and
    judge (`real`), or in `both`. Real pages are reset by task and seed: MiniWoB++'s, or those of
    --benchmark."""
    on: Annotated[data.Options, tyro.conf.arg(name="")] = field(default_factory=data.Options)
    """Other people's pages in place of MiniWoB++'s, to learn on and to look at."""
    real_fraction: float = 0.5
    """With `both`, the chance that a group is done on real pages."""
    demonstrations: int = 0
    """Successes of each task that the SFT agent was cloned from, as sft.py was told: they are the experts. 0
    takes all."""
    first_pages: bool = False
    """Dream from the first page of every recorded trajectory; an expert is then a whole demonstration of at
    most `dreaming.horizon` steps. Otherwise from windows of the experts (paper)."""
    not_dreamed: tuple[str, ...] = ()
    """Tasks of `trajectories` that nothing is dreamed of: those that the judge is blind to (audit.py
    --judge)."""
    seed: int = 0
    """Seed of every random choice of this run: windows, starts, dreams, order. With another number the same
    agent learns from the same demonstrations with other dice."""
    updates: int = 1000
    """How many batches the agent learns from."""
    epochs: float = 0.0
    """Passes over the tasks that dreams start from, instead of `updates` (paper: 10 over a set that it does
    not name, NOTES 1.5); 0 counts `updates`. Tasks are drawn at random: a pass is as many draws as there are
    tasks."""
    context: int = 24576
    """Longest prompt with its answer of the agent, in tokens (paper: 32k + 16k). A dream whose page is longer
    is dropped. A sequence longer than `tokens` gets a microbatch of its own: some GB of 85 are free beside it
    (docs/gpu.md)."""
    world_model_context: int = 40960
    """The same of the world model: a page that the agent can read, and an answer that writes out a whole
    page. It can be longer than the agent's, since nothing is learned at this length; its server's KV cache is
    sized for it. (Servers of --world-model-urls and --judge-urls have contexts of their own.)"""
    judge_context: int = 49152
    """The same of the frozen judge, which reads two such pages. Another judge (--dreaming.judge) is the agent
    or the world model, and has its context."""
    trained_layers: int = 0
    """How many of the last layers learn (lm.train_last); 0: all weights."""
    evaluate_every: int = 20
    """Updates between looks at the real web on dev seeds; 0 never looks."""
    evaluate_seeds: str = "1000000:4"
    """START:COUNT: the seeds, of the dev range, that are looked at and never learned from."""
    evaluate_horizon: int = 10
    """Most steps of a trajectory in these looks."""
    checkpoint_every: int = 5
    """Updates from one checkpoint to the next."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept: the newest."""
    sampler: str = "vllm"
    """Who samples: `vllm` (an engine on each rank, and servers for world model and judge) or `transformers`
    (all in this process)."""
    world_model_urls: tuple[str, ...] = ()
    """URLs of vLLM servers of the world model (http://host:port/v1), asked in turn. Without any, train.py
    starts one over all GPUs."""
    judge_urls: tuple[str, ...] = ()
    """The same for the frozen judge."""
    policy_engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of vLLM in each rank, which samples for the agent."""
    world_model_server: ServerConfig = field(default_factory=ServerConfig)
    """The server that train.py starts for the world model."""
    judge_server: ServerConfig = field(default_factory=lambda: ServerConfig(kv_cache_gb=2.0))
    """The same for the frozen judge."""
    drop_limit: float = 0.5
    """Stop where a larger share of the dreams of the first three updates was dropped (dream.py), or a larger
    share of their verdicts could not be read. 1 never stops."""
    compute: str = "bfloat16"
    """Type of matrix products: bfloat16, float32, or auto, the faster one here (lm.matrix_type). Weights and
    optimizer are float32."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in host memory between uses (paper: "FSDP offloading")."""
    dreaming: dream.Config = field(default_factory=dream.Config)
    """How the agent dreams."""

    def __post_init__(self):
        super().__post_init__()
        if self.sampler not in ("vllm", "transformers"):
            raise ValueError(f"sampler is vllm or transformers, not {self.sampler!r}")
        if self.world not in ("dream", "real", "both"):
            raise ValueError(f"world is dream, real or both, not {self.world!r}")
        if not 0 <= self.real_fraction <= 1:
            raise ValueError("real_fraction is a share: give it a value from 0 to 1")
        if self.compute not in ("bfloat16", "float32", "auto"):
            raise ValueError(f"compute is bfloat16, float32 or auto, not {self.compute!r}")
        try:
            data.seeds_to_look_at(self.evaluate_seeds)
        except ValueError as error:
            raise ValueError(f"--evaluate-seeds: {error}") from error
        if self.sampler == "transformers" and (self.world_model_urls or self.judge_urls):
            raise ValueError("--world-model-urls and --judge-urls are for --sampler vllm: without it, give "
                             "--world-model http://host:port/v1#NAME")
        if remote.is_url(self.world_model) and self.dreaming.judge == "world_model":
            raise ValueError("a world model behind a URL gives no log-probs, and cannot judge: give another "
                             "--dreaming.judge")
        data.check_counts(1, checkpoint_every=self.checkpoint_every, keep_checkpoints=self.keep_checkpoints)
        data.check_counts(1, **{f"dreaming.{name}": getattr(self.dreaming, name)
                                for name in ("tasks", "horizon")})
        if self.dreaming.temperature <= 0:
            raise ValueError(f"--dreaming.temperature {self.dreaming.temperature:g}: rows of a group must "
                             "differ; give it more than 0")
        if self.epochs < 0:
            raise ValueError(f"epochs {self.epochs:g}: give passes over the tasks, or 0 to count --updates")

    @property
    def answers_elsewhere(self) -> tuple[str, ...]:
        """Where the world model stands, if this run does not start it."""
        return (self.world_model,) if remote.is_url(self.world_model) else self.world_model_urls

    @property
    def real_share(self) -> float:
        """Share of the groups done on real pages. Below 1 it takes a world model and a judge, above 0 a
        browser."""
        return {"dream": 0.0, "real": 1.0, "both": self.real_fraction}[self.world]


T = TypeVar("T", bound=Train)

# ---- smaller: the same code, other names and sizes ---------------------------------------------------------

# `laptop`: two CPU cores, three quarters of an hour. SmolLM2-135M-Instruct comes inside a package (lm.py),
# and plays MiniWoB++ pages of some 150 tokens. What the explorer recorded of them is in the repository.
SMALLEST, RECORDED = "runs/smollm2", "recordings/small.jsonl.gz"
POLICY_PROMPT = "You operate a web browser. Say which element comes next, then act."
WORLD_MODEL_PROMPT = "You are the web. Say what the action touches, what changes, and whether it is over."
REWARD_MODEL_PROMPT = "Was the objective reached?"
LAPTOP_POLICY = PolicySFT(
    base=SMALLEST, trajectories=RECORDED, out="runs/laptop/sft", demonstrations=20, context=1024,
    system_prompt=POLICY_PROMPT, sft=finetune.FineTune(lr=2e-4, tokens=512))
LAPTOP_WORLD_MODEL = WorldModelSFT(
    base=SMALLEST, transitions=RECORDED, out="runs/laptop/world_model", per_task=15,
    played="runs/laptop/episodes.jsonl.gz", context=1024, lora_rank=0, system_prompt=WORLD_MODEL_PROMPT,
    sft=finetune.FineTune(lr=3e-4, tokens=512))
# From the policy, which can find on a page what a goal names: from SMALLEST its loss stayed at chance.
LAPTOP_REWARD_MODEL = RewardModelSFT(
    base="runs/laptop/sft", trajectories="runs/laptop/episodes.jsonl.gz", explored=RECORDED,
    per_task=10, out="runs/laptop/reward_model", context=1024, system_prompt=REWARD_MODEL_PROMPT,
    sft=finetune.FineTune(epochs=2, lr=1e-4, tokens=2048))
LAPTOP = Train(
    policy="runs/laptop/sft", world_model="runs/laptop/world_model", judge_model="runs/laptop/reward_model",
    out="runs/laptop/dream", trajectories=RECORDED, first_pages=True, updates=10,
    # A reward model that is right in nine verdicts of ten on the others is near chance here (AUC .66 to .72,
    # NOTES 11.8): which of three boxes, all without a name, is the 2nd?
    not_dreamed=("focus-text-2",),
    # 135 M parameters and not 8 B: fifty times the paper's rate. A turn has some 20 tokens where the paper's
    # has hundreds, and s_i is a mean over them. Its noise, and what one step moves it by, are that much
    # larger: the clip has to be as well (NOTES 4.10).
    lr=5e-5, minibatches=2, eps_low=0.03, eps_high=0.04,
    tokens=8192, context=1024, world_model_context=1024, judge_context=1024, evaluate_every=5,
    evaluate_horizon=6, sampler="transformers", compute="auto",
    dreaming=dream.Config(tasks=8, group=8, horizon=5, expert_fraction=0.0, temperature=1.0,
                          max_new_tokens=48, world_model_tokens=128, world_model_temperature=0.5,
                          judge_tokens=0),
)

# `gpu`: one GPU, an evening, all tasks of worlds/miniwob.py. Everything that is not a size is the paper's,
# but for the judge. A card of 24 GB takes flags besides (docs/gpu.md).
GPU_POLICY = PolicySFT(
    base="Qwen/Qwen3-0.6B", trajectories="recordings/pages.jsonl.gz", out="runs/gpu/sft", context=4096,
    system_prompt=POLICY_PROMPT, sft=finetune.FineTune(lr=1e-5, tokens=8192, microbatches=2))
GPU_WORLD_MODEL = WorldModelSFT(
    base="Qwen/Qwen3-1.7B", transitions="recordings/pages.jsonl.gz", played="runs/gpu/episodes.jsonl.gz",
    out="runs/gpu/world_model", context=4608, system_prompt=WORLD_MODEL_PROMPT,
    sft=finetune.FineTune(lr=2e-4, tokens=8192, microbatches=2))
GPU_REWARD_MODEL = RewardModelSFT(
    base="Qwen/Qwen3-0.6B", trajectories="runs/gpu/episodes.jsonl.gz", explored="recordings/pages.jsonl.gz",
    out="runs/gpu/reward_model", context=8192, system_prompt=REWARD_MODEL_PROMPT,
    sft=finetune.FineTune(lr=1e-5, tokens=8192, microbatches=2))
GPU = Train(
    policy="runs/gpu/sft", world_model="runs/gpu/world_model", judge_model="runs/gpu/reward_model",
    out="runs/gpu/dream", trajectories="recordings/pages.jsonl.gz", updates=150,
    tokens=8192, context=4096, world_model_context=4608, judge_context=8192, evaluate_every=50,
    policy_engine=EngineConfig(kv_cache_gb=2.0),
    world_model_server=ServerConfig(tensor_parallel=1, kv_cache_gb=2.0),
    judge_server=ServerConfig(tensor_parallel=1, kv_cache_gb=1.5),
    # The world model reads every page that the agent reads: 4096 - 512 = 4608 - 1024.
    dreaming=dream.Config(max_new_tokens=512, world_model_tokens=1024, judge_tokens=0),
)

# What a resumed run may change. These change no update, but for rounding, or only how far the run goes. The
# contexts also decide which pages fit: a run that was out of memory needs a shorter one.
MAY_CHANGE = ("updates", "epochs", "evaluate_every", "checkpoint_every", "keep_checkpoints",
              "out", "tokens", "offload", "context", "world_model_context", "judge_context", "drop_limit",
              "sampler_gap_limit", "evaluate_seeds", "evaluate_horizon", "world_model_urls", "judge_urls",
              "policy_engine", "world_model_server", "judge_server")


def identity(config: Train) -> dict:
    """What a checkpoint keeps of its run: the settings, and 12 digits of the models and recordings that they
    name, where these are on this disk. By now others may stand there, by the same name. In the digits are
    each file's size and last MiB: all of an 8B model would take a minute."""
    settings = asdict(config)
    for name in ("policy", "world_model", "judge_model", "trajectories"):
        path, digest = Path(settings[name]), hashlib.sha256()
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
        for file in files:
            with file.open("rb") as content:
                content.seek(max(0, file.stat().st_size - 2**20))
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read())
        settings |= {f"what stands at {name}": digest.hexdigest()[:12]} if settings[name] and files else {}
    return settings


# ---- what a run starts from, and when it stops -------------------------------------------------------------

FEW_VERDICTS = 8  # fewer say nothing about the judge: an agent that hardly ever ends is hardly ever judged


# What to raise or change for each cause of dropped dreams (measure.of_batch's `drops`).
WAYS_OUT = {"policy: too long": "--context", "world model: too long": "--world-model-context",
            "world model: cut off": "--dreaming.world-model-tokens",
            "world model: unreadable": "another --world-model",
            "world model: not recorded": "no flag: the agent went back to before its start",
            "judge: cut off": "--dreaming.judge-tokens",
            "judge: unreadable": "another --dreaming.judge",
            "browser: failed": "fewer programs beside it"}


def check_drops(logged: Sequence[dict], config: Train) -> None:
    """Raise ValueError after the dreams of the third update when too many dreams of the three were dropped,
    or too many of their verdicts could not be read. `logged`: the metrics of all updates so far, this one's
    last."""
    if len(logged) != 3:
        return
    drops: Counter = Counter()
    for metrics in logged:
        drops.update(metrics.get("drops", {}))  # a log from before there were drops has none
    dreams, real, judged, malformed = (
        sum(metrics.get(name, 0) for metrics in logged)
        for name in ("dreams", "real_trajectories", "judged", "judge_malformed"))
    done, few = dreams + real, judged < FEW_VERDICTS
    lost = drops.total() > config.drop_limit * done
    unread = malformed > config.drop_limit * judged and not few
    # Experts' rows are among the drops and not among the done, so a limit of 1 is asked for by itself.
    if config.drop_limit < 1 and (lost or unread):
        judges = {"policy": "--judge-context", "current": "--context", "world_model": "--world-model-context"}
        ways = WAYS_OUT | {"judge: too long": judges[config.dreaming.judge]}
        causes = ", ".join(f"{count} {cause} ({ways.get(cause, 'see what you handed in')})"
                           for cause, count in drops.most_common())
        raise ValueError(
            f"{drops.total()} of {done} {'trajectories' if real else 'dreams'} of the first three updates "
            f"were dropped, and {malformed} of {judged} verdicts could not be read (limit "
            f"{config.drop_limit:g}). By cause, and what to raise or change (with another --out, where a "
            f"checkpoint was written): {causes}. Or give --drop-limit 1 to go on with what is left")


def with_type(config: T) -> T:
    """`config` with the type of matrix products that `auto` stands for on this machine. So the run keeps it,
    and does not go on in another one elsewhere without a word."""
    return replace(config, compute=str(lm.matrix_type(config.compute)).removeprefix("torch."))


def count_updates(config: Train, tasks: int) -> int:
    """config.updates, or as many as config.epochs passes over so many tasks take.

    >>> count_updates(Train(updates=7), 5017), count_updates(Train(epochs=10), 5017)
    (7, 12543)
    """
    return math.ceil(config.epochs * tasks / config.dreaming.tasks) or config.updates


def starts(config: Train, knows: Callable[[str], bool] = lambda task: True) -> list[dream.Drawn]:
    """Where dreams and real trajectories may begin, each with its expert or None: the windows of the experts,
    or with config.first_pages the first page of every recording. Tasks of which all recordings succeeded, or
    none, are then left out: their groups would have equal rewards, and teach nothing. Raises ValueError when
    nothing is left, for a recording that must not be learned from, and for a task that the real pages do not
    know: `knows(task)`."""
    recorded = [t for t in data.read_trajectories(config.trajectories) if t.task not in config.not_dreamed]
    check_recorded(recorded, config, knows)
    shown = finetune.successes(recorded, config.demonstrations)
    if config.first_pages:
        ends = {(t.task, t.reward == 1) for t in recorded}
        recorded = [t for t in recorded if {(t.task, True), (t.task, False)} <= ends]
        whole = {id(t): dream.Expert(first_page(t), tuple(t.steps), t.final_page) for t in shown
                 if len(t.steps) <= config.dreaming.horizon}
        found = [(first_page(t), whole.get(id(t))) for t in recorded if t.steps and t.steps[0].index == 0]
    else:
        found = [(expert.start, expert) for expert in experts(shown, config.dreaming.horizon, config.seed)]
    if not found:
        raise ValueError(f"{config.trajectories} holds no "
                         f"{'task with both ends' if config.first_pages else 'success'}: there is nowhere to "
                         "begin; give other --trajectories")
    return found


def experts(demonstrations: Sequence[data.Trajectory], horizon: int, seed: int) -> list[dream.Expert]:
    """The windows of the demonstrations (data.expert_windows), at most two of each. A window is left out
    where the browser refused every step: it has nothing to teach (dream.expert_row)."""
    rng = random.Random(seed)
    return [dream.Expert(start, tuple(steps), t.final_page)
            for t in demonstrations for start, steps in data.expert_windows(t, horizon, rng=rng)
            if not all(step.error for step in steps)]


def first_page(t: data.Trajectory) -> data.Start:
    return data.Start(t.task, t.seed, (), t.goal, t.steps[0].url, t.steps[0].page, (), t.system)


def check_recorded(recorded: Sequence[data.Trajectory], config: Train,
                   knows: Callable[[str], bool] = lambda task: True) -> None:
    """Raises ValueError for a task of a benchmark that is held out; and, where groups are done on real pages,
    for a task that these do not know (a page is reset by its task and seed alone)."""
    for t in recorded:
        if config.on.benchmark not in ("", "miniwob") and data.side(t.task) != data.TRAINING:
            raise ValueError(f"{t.source}: {t.task!r} is held out (data.side): what is evaluated must "
                             "not be learned from; give other --trajectories (worlds/explore.py records the "
                             "training side)")
        if config.world != "dream" and not knows(t.task):
            raise ValueError(
                f"{t.source}: --world {config.world} begins each trajectory on a real page, and "
                f"{config.on.benchmark or 'worlds/miniwob.py'} cannot reset {t.task!r}. Give --trajectories "
                "of its tasks (worlds/explore.py records them), the --benchmark that they are of, or --world "
                "dream")


def fitting(model: lm.LM, found: Sequence[dream.Drawn], config: Train) -> list[dream.Drawn]:
    """The starts of starts() that fit model.context. Rank 0 says how many were dropped.

    All steps of an expert are learned from, but for those that the browser refused. A step over the context
    would be a microbatch that no GPU holds, and that again after each resume. A start needs room for its
    prompt and for the longest answer.

    A prompt is tokenised only when its page, goal and past have more than 2 bytes a token of that room. Pages
    have some 3 bytes a token, so what is not tokenised should fit; to tokenise every page of NNetNav would
    take minutes. Raises ValueError when nothing is left.
    """
    room = model.context - config.dreaming.max_new_tokens

    def short(start: data.Start, page: str, previous: Sequence[str]) -> bool:  # in bytes, of all that varies
        return len("".join((page, start.goal, *previous)).encode(errors="replace")) <= 2 * room

    def starts_here(start: data.Start) -> bool:
        return short(start, start.page, start.previous) or len(
            policy.turn_prompt(model, start.goal, start.page, start.previous, start.system)) <= room

    def step_fits(start: data.Start, step: data.Step) -> bool:
        return short(start, step.page, step.previous) or sum(
            map(len, policy.step_pair(model, start.goal, step, start.system))) <= model.context

    kept = [(start, expert) for start, expert in found if starts_here(start)
            and (expert is None or all(step.error or step_fits(start, step) for step in expert.steps))]
    if len(kept) < len(found) and distributed.rank() == 0:
        print(f"{len(found) - len(kept)} of {len(found)} starts dropped: a step over --context "
              f"{model.context} tokens")
    if not kept:
        raise ValueError(f"no start of {config.trajectories} fits --context {model.context} tokens; give a "
                         "larger one")
    return kept

# ---- commands ----------------------------------------------------------------------------------------------


def chosen(configs: dict):
    """The config that the command line names (`laptop`, `gpu`; else `paper`) with its flags put over it. An
    unknown flag ends the program."""
    words = sys.argv[1:]
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["paper", *words]
    try:
        return tyro.extras.overridable_config_cli(configs, args=words)
    except ValueError as error:  # a config refused a value
        fail(Path(sys.argv[0]).name, error)


def needs_gpu(folder: str, large: Sequence[str], laptop: str) -> None:
    """End the program where a model of `large` is asked for and there is no GPU. `laptop`: what would run
    here."""
    if folder in large and not torch.cuda.is_available():
        sys.exit(f"{folder} needs a GPU, and torch {torch.__version__} finds none; the laptop's recipe is: "
                 f"{laptop}")


def foreseen(error: Exception) -> bool:
    """Whether one line says all of an error that ends a command. Not of a ValueError that no `raise` of this
    repository made: it is a library's, or a bug ("not enough values to unpack"), and its line does not say
    where."""
    at = error.__traceback__
    if not isinstance(error, ValueError) or at is None:
        return True
    while at.tb_next:
        at = at.tb_next
    code = at.tb_frame.f_code  # of the innermost frame
    file = Path(code.co_filename).resolve()
    ours = file.is_relative_to(Path(__file__).resolve().parent) and "site-packages" not in file.parts  # .venv
    return ours and dis.opname[code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def fail(program: str, error: Exception, before: str = "") -> NoReturn:
    """End the program with an error that the user can mend, in one line. `before`: lines before it."""
    rank = f" (rank {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(before, end="", file=sys.stderr)
    sys.exit(f"{program}{rank}: {error}")


def command(work: Callable[[], dict | None], alone: bool = False) -> None:
    """The body of a command: join the other ranks, do the work, print its report on rank 0. An error that the
    user can mend is a line, and no traceback (`foreseen`). `alone`: see distributed.init."""
    try:
        distributed.init(alone)
        report = work()
        distributed.finish()
    except (ValueError, OSError, remote.EngineError) as error:
        fail(Path(sys.argv[0]).name, error, "" if foreseen(error) else traceback.format_exc())
    except torch.OutOfMemoryError as error:
        fail(Path(sys.argv[0]).name, ValueError(
            f"{str(error).split('. ')[0]}. Give lower --tokens (of sft.py --sft.tokens, with another --out) "
            "or --context, or --offload; docs/gpu.md says what fits which card"))
    if report and os.environ.get("RANK", "0") == "0":
        print(json.dumps(report, indent=1))
