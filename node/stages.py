"""What node/rehearse.py runs: each stage of a recipe, by the functions of the run itself.

Random weights never end an answer and never write an action. So the lengths are scripted: engine and servers
really write so many tokens, and an action, a delta or a verdict takes the place of what they wrote.

A stage takes a Run, keeps in it what later stages need, and returns what to report besides seconds and
memory. All ranks run it.
"""

import gc
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import data
import distributed
import dream
import finetune
import gspo
import lm
import measure
import policy
import recipe
import sft
import train
import update
import world_model
from judge import Judge
from node import gptoss, kernels, made_up, plan, prepare
from node.hours import LIKELY, Pages, pages_of
from node.sizes import GB

ROWS = 80  # recorded steps that are made up: for three steps of fine-tuning, and for a batch of dreams


@dataclass
class Run:
    """What the stages share. `have` holds what they have made, by name; the same names on every rank."""

    recipe: plan.Recipe
    """All of its folders are below `made`."""
    models: dict[Path, Path]
    """{folder of a model that is made up: folder of its config.json}."""
    made: Path
    logs: Path
    """Folder of the servers' logs."""
    page_bytes: int
    """Mean size of a recorded page."""
    have: dict = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Names of stages."""

    def forget(self, *names: str) -> None:
        """Free what the stages made under these names, and all of the GPU's memory that is free."""
        for name in names:
            self.have.pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()


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
        self.tokenizer, self.context, self.template = model.tokenizer, model.context, model.template
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


def agent_script(model, horizon: int, pages: Pages = Pages()):
    """Presses a key at every turn but the last, which stops: so each dream is judged."""
    def said(prompt, _):
        turn = model.tokenizer.decode(prompt[-2000:]).count(GO_ON)  # the past stands at a prompt's end
        action = data.Action("stop", text="done") if turn >= horizon - 1 else data.parse_action(GO_ON)
        return data.completion("It goes on.", action), None

    return Scripted(model, lambda rng: rng.lognormvariate(math.log(pages.answer) - 0.125, 0.5), said)


def world_script(model, pages: Pages = Pages()):
    """Renames the page's first line, so that no page begins like the one before (vLLM would answer from its
    prefix cache). As long as the plan's: now and then a page is written out."""
    def said(_, seed):
        delta = DELTA.format(seed)
        return (world_model.target("It is pressed.", delta, False),
                world_model.completion_ids(model, "It is pressed.", delta, False))

    def length(rng) -> float:
        shares = pages.between if rng.random() < LIKELY.navigation else pages.inside
        return (pages.reason or LIKELY.reason) + pages.page * rng.choice(shares)

    return Scripted(model, length, said)


def judge_script(model, pages: Pages = Pages()):
    said = "It was asked, and done.\nCOMPLETED: YES"
    return Scripted(model, lambda rng: pages.verdict, lambda *_: (said, None))


# ---- the stages: each returns what to report besides seconds and memory ------------------------------------


def make_folders(run: Run) -> dict:
    """Both models and a file of rows: what a download would bring."""
    for folder, config in run.models.items():
        made_up.model_folder(folder, config)
    made_up.rows_file(run.recipe.dreaming.trajectories, rows=ROWS, page_bytes=run.page_bytes)
    run.have["folders"] = True
    return {"gigabytes": size(run.made)}


def size(folder: Path) -> float:
    """GB of all files below."""
    return round(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GB, 3)


def prepare_pairs(run: Run) -> dict:
    """Examples of the recorded steps, as sft.py makes them."""
    run.have["pairs"] = pairs = prepare.transitions(run.recipe.learning)
    return {"tokens": int(pairs.lengths.sum()), "longest": int(pairs.lengths.max())}


def load_learner(run: Run) -> dict:
    """Each rank reads and dequantises its own experts."""
    run.have["learner"] = sft.load_world_model(run.recipe.learning)
    return {}


def fine_tune(run: Run) -> dict:
    """Three steps on real lengths. The first warms up: the rate is of the others."""
    learner, tuning = run.have["learner"], run.recipe.learning.sft
    pairs = list(run.have["pairs"])
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    enough = lambda n, steps: len(lm.microbatches(lengths[:n], tuning.tokens)) >= steps * tuning.microbatches
    one, three = (next((n for n in range(1, len(pairs)) if enough(n, steps)), len(pairs)) for steps in (1, 3))
    finetune.fit(learner, pairs[:one], tuning, "world model, the first step")
    began = time.monotonic()
    report = finetune.fit(learner, pairs[one:three], tuning, "world model, two more")
    return {"tokens": report["tokens"], "rate_seconds": round(time.monotonic() - began, 3),
            "steps": 1 + report["steps"], "loss": report["loss"], "idle": report["idle"],
            "microbatch": max(*lengths[:three], tuning.tokens)}


def fine_tune_longest(run: Run) -> dict:
    """A sequence of the whole context on each rank; half of it is written, as when a page follows a page."""
    learner, config = run.have["learner"], run.recipe.learning
    ids = [token for prompt, completion in run.have["pairs"] for token in prompt + completion]
    ids = (ids * (config.context // len(ids) + 1))[: config.context]
    ranks = distributed.world_size()
    pairs = [(ids[: len(ids) // 2], ids[len(ids) // 2 :])] * ranks
    report = finetune.fit(learner, pairs, replace(config.sft, microbatches=ranks), "world model, longest")
    return {"tokens": report["tokens"], "microbatch": config.context}


def merge(run: Run) -> dict:
    """The adapter into the folder that dreams are made with."""
    learner, config = run.have["learner"], run.recipe.learning
    sequences = [(run.have["pairs"][k][0] + run.have["pairs"][k][1])[-2048:] for k in range(4)]
    report = gptoss.merge_all_ranks(learner.model, config, sequences)
    return {"gigabytes": size(Path(config.out)), "kl": report["kl of the merge"]}


def start(run: Run) -> dict:
    """The trainer's model, then servers and engines, as train.py starts them. The world model's trainer makes
    room before; `left_gb` of it have stayed."""
    run.forget("learner")
    left, config = allocated(), run.recipe.dreaming
    if not Path(config.world_model).exists():  # without a merge the base will do
        config = replace(config, world_model=run.recipe.learning.base)
    model, run.have["samplers"] = train.load_models(config, run.logs)  # the second: dream.Models
    keep_trainer(run, model)
    return {"left_gb": left}


def start_alone(run: Run) -> dict:
    """The trainer's model, where there is no vLLM, or its start has failed."""
    run.forget("learner")
    left, config = allocated(), run.recipe.dreaming
    compute = lm.matrix_type(config.compute)
    keep_trainer(run, lm.load_sharded(config.policy, "", config.context, compute, config.offload))
    return {"left_gb": left}


def allocated() -> float:
    return round(torch.cuda.memory_allocated() / GB, 3) if torch.cuda.is_available() else 0.0


def keep_trainer(run: Run, model: lm.LM) -> None:
    """With an optimizer as train.train makes it, and the starts that fit."""
    config = run.recipe.dreaming
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0,
                                  fused=True)
    run.have["trainer"] = model, optimizer
    run.have["starts"] = recipe.fitting(model, *recipe.starts(config), config)


def sync(run: Run) -> dict:
    """Every weight, negated at the head so that an engine with the old ones would be found out; then how far
    sampled and scored log-probabilities are apart."""
    (model, _), agent, config = run.have["trainer"], run.have["samplers"].agent, run.recipe.dreaming
    negate_head(model)
    began = time.monotonic()
    agent.sync(distributed.full_tensors(model.model, model.compute))
    seconds = time.monotonic() - began
    prompts = [policy.turn_prompt(model, e.start.goal, e.start.page, e.start.previous, e.start.system)
               for e in run.have["starts"][0][: 2 * distributed.world_size()]]
    mine = distributed.shard_rows(prompts)
    samples = lm.sample(agent, mine, min(64, config.dreaming.max_new_tokens), config.dreaming.temperature, 0)
    turns = [(k, (prompt, sample.ids), sample.logps)
             for share in distributed.gather(list(zip(mine, samples)))
             for k, (prompt, sample) in enumerate(share)]
    minibatch = update.Minibatch(turns, config.tokens)
    gap = update.sampler_gap([minibatch], [minibatch.score(model, config.dreaming.temperature)])
    negate_head(model)
    agent.sync(distributed.full_tensors(model.model, model.compute))
    if not gap <= config.sampler_gap_limit:
        raise ValueError(f"what was sampled and what is scored differ by {gap:.3f} a token after a sync "
                         f"(limit {config.sampler_gap_limit}): the engine has other weights than the trainer")
    return {"sampler_gap": gap, "sync_seconds": seconds}


@torch.no_grad()
def negate_head(model: lm.LM) -> None:
    model.model.reshard()  # after a forward the head lies whole (NOTES 9.2)
    local(model.model.lm_head.weight).neg_()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def dreams(run: Run) -> dict:
    """A batch of dreams, with its experts."""
    parts, config = run.have["samplers"], run.recipe.dreaming
    pages, world = pages_of(config.trajectories), parts.world_model
    acting = agent_script(parts.agent, config.dreaming.horizon, pages)
    judging, answering = judge_script(parts.judge.lm, pages), world_script(world.lm, pages)
    scripted = replace(
        parts, agent=acting,
        judge=Judge(judging, parts.judge.max_new_tokens, parts.judge.threshold, parts.judge.unsure),
        world_model=world_model.WorldModel(answering, world.max_new_tokens, world.temperature))
    drawn = dream.draw(random.Random(config.seed), *run.have["starts"], config.dreaming)
    batch = dream.batch(scripted, drawn, config.dreaming, (config.seed, 0))
    run.have["batch"] = batch
    of_ranks = distributed.gather([dict(script.counts) for script in (acting, answering, judging)])
    counted = {who: dict(sum((Counter(parts[k]) for parts in of_ranks), Counter()))
               for k, who in enumerate(("agent", "world model", "judge"))}
    told, metrics = ("dreams", "experts", "kept", "steps", "judged", "drops"), measure.of_batch(batch)
    return {"tokens": sum(sum(counts.values()) for counts in counted.values()), "counted": counted,
            **{name: metrics[name] for name in told}}


def update_batch(run: Run) -> dict:
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
    return learned(run, kept, torch.tensor(([1.0, -1.0] * count)[:count]))


def learned(run: Run, kept: Sequence[policy.TokenTrajectory], advantages: torch.Tensor) -> dict:
    model, optimizer = run.have["trainer"]
    config, lengths = run.recipe.dreaming, [len(p) + len(c) for t in kept for p, c in t.pairs]
    model.model.train()
    metrics = update.update(model, optimizer, kept, advantages, config, config.dreaming.temperature,
                            random.Random(0))
    model.model.eval()
    told = {name: metrics[name] for name in ("sampler_gap", "clip_frac", "grad_norm", "idle")}
    return {"tokens": sum(lengths), "microbatch": max(*lengths, config.tokens), **told}


def kill_server(run: Run) -> dict:
    """The world model's server dies, all ranks ask it, and it comes back beside a full trainer."""
    remote = run.have["samplers"].world_model.lm
    server = getattr(remote, "server", None)
    if not any(distributed.gather(server is not None)):
        return {"note": "the servers stand elsewhere"}
    remote.given_up.clear()  # a rank whose dreams failed has given it up (node/dreams.py)
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

    def state() -> list[torch.Tensor]:  # this rank's part
        moments = [moment for of_one in optimizer.state.values() for moment in of_one.values()]
        return [local(tensor) for tensor in (*model.model.parameters(), *moments) if torch.is_tensor(tensor)]

    before = [float(tensor.sum()) for tensor in state()]
    for tensor in state():
        tensor.zero_()
    step = run.have["checkpoints"].load(asdict(run.recipe.dreaming))
    if step != 1 or before != [float(tensor.sum()) for tensor in state()]:
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
    """`needs` and `gives`: names in Run.have. `trains`: whose memory is beside the plan's, learner's or
    trainer's."""

    name: str
    work: Callable[[Run], dict]
    needs: tuple[str, ...] = ("folders",)
    gives: tuple[str, ...] = ()
    trains: str = ""
    quick: bool = True
    """Also with --quick."""
    vllm: bool = False
    """Not with --no-vllm."""


STAGES = [
    # Before anything is written. What fails here is said first, and the other stages show what it does.
    Stage("kernels", lambda run: kernels.try_all(), ()),
    Stage("made-up folders", make_folders, (), ("folders",)),
    Stage("examples prepared", prepare_pairs, gives=("pairs",)),
    Stage("world model: load", load_learner, gives=("learner",)),
    Stage("world model: three steps", fine_tune, ("learner", "pairs"), trains="learner"),
    Stage("world model: longest", fine_tune_longest, ("learner", "pairs"), trains="learner"),
    Stage("world model: merge", merge, ("learner", "pairs"), quick=False),
    Stage("servers and engines", start, gives=("trainer", "starts", "samplers"), vllm=True),
    Stage("trainer alone", start_alone, gives=("trainer", "starts")),  # where there is none yet
    Stage("weights to the engine", sync, ("trainer", "samplers"), vllm=True),
    Stage("a batch of dreams", dreams, ("samplers", "starts"), ("batch",), vllm=True),
    Stage("update", update_batch, ("trainer",), trains="trainer"),
    Stage("update: longest", update_longest, ("trainer",), trains="trainer"),
    Stage("weights, once more", sync, ("trainer", "samplers"), vllm=True),
    Stage("a server killed", kill_server, ("samplers",), vllm=True),
    Stage("checkpoint", checkpoint, ("trainer",), ("checkpoints",)),
    Stage("resume", resume, ("trainer", "checkpoints")),
    Stage("export", export, ("trainer",), quick=False)]
