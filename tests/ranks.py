"""What tests run on two ranks and, for comparison, on one.

    python tests/ranks.py FOLDER 0 2:JOB,JOB 1:JOB & python tests/ranks.py FOLDER 1 2:JOB,JOB 1:JOB

Two processes, with hashes of their own as all processes have. In each stage (so many ranks, and what they do)
a fork of each is its rank; where the stage has one rank, of the first alone. Each job computes something from
the same numbers on any number of ranks. Rank 0 writes what it returns to FOLDER/<world size>-<job>.pt. A
stage that ends in ! ends by kill -9 for all its ranks, as soon as the checkpoint of its last job stands.
"""

import dataclasses
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from conftest import CountingWorld, act, start
from helpers import dreams as scripts
from helpers import phases, runs
from helpers.scores import each_step

import distributed
import dream
import lm
import measure
import recipe
import sft
import train
import update
from finetune import FineTune, fit
from node.dreams import Dream
from worlds import benchmarks

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
WORLD = 1  # how many ranks this stage has
PAUSE = 0.5  # seconds: longer than another rank takes to come to the next line
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, 0.3, -0.5])


def agent(**more) -> lm.LM:
    """float32 everywhere, so that only the order of sums differs."""
    return lm.load(FOLDER / "model", 512, torch.float32, sharded=True, **more)


def state(model: lm.LM) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in distributed.full_tensors(model.model, torch.float32)}


# ---- counts, data, barriers --------------------------------------------------------------------------------

def counts() -> dict:
    """Data that every rank has, or gets."""
    rank, mine = distributed.rank(), distributed.shard_rows("abcde")
    return {"gathered": distributed.gather(rank), "shares": distributed.gather(mine),
            "collected": distributed.collect([row.upper() for row in mine])}


def late() -> dict:
    """Rank 0 takes its time whenever it writes. Does every rank find what it wrote?"""
    first, found, model = distributed.rank() == 0, {}, agent()
    file, folder = FOLDER / f"late-{WORLD}", FOLDER / f"late-model-{WORLD}"
    if first:
        time.sleep(PAUSE)
        file.write_text("")
    distributed.barrier()
    found["file"] = file.exists()

    lm.shutil = SimpleNamespace(rmtree=lambda *_, **__: time.sleep(PAUSE))  # only rank 0 removes folders
    lm.save(model, folder)
    found["model"] = (folder / "config.json").exists()
    lm.shutil = shutil
    return {name: distributed.gather(value) for name, value in found.items()}


# ---- dreams ------------------------------------------------------------------------------------------------

class Written(lm.LM):
    """A model of this process that writes what helpers/dreams.py's scripts say."""

    def generate(self, prompts, *_):
        write = scripts.script(agent=lambda prompt: act(f"click [{1 + (scripts.turn(prompt) > 2)}]"))
        texts = [write(self.tokenizer.decode(ids)) for ids in prompts]
        return [lm.Sample(ids, [-1.0] * len(ids), text, False)
                for text in texts for ids in [self.template.completion_ids(text)]]

    def margins(self, prompts, *_):
        return [1.0 if "'Count 3'" in self.tokenizer.decode(ids) else -1.0 for ids in prompts]


class Served(Written):
    """The same behind a server: each answer takes its time, another on each rank."""

    concurrency = 64

    def generate(self, prompts, *given):
        time.sleep(random.Random(f"{prompts} {distributed.rank()}").random() / 20)
        return super().generate(prompts, *given)


def dreams() -> dict:
    """A batch of dreams that do not wait for each other."""
    tokenizer = lm.load_tokenizer(FOLDER / "model")
    here, there = (kind(None, tokenizer, 4096) for kind in (Written, Served))
    drawn = [(start(n), None) for n in (0, 1, 2)]
    config = dream.Config(group=3, horizon=4, max_new_tokens=60, world_model_tokens=200, judge_tokens=60)
    models = dataclasses.replace(scripts.who(here, there, there), world=Dream)
    batch = dream.batch(models, drawn, config, (1, 2))
    rows = [(t.start.url, t.reward, t.final_page, t.pairs, t.dropped) for t in batch.trajectories]
    return {"rows": distributed.gather(rows), "drops": measure.of_batch(batch)["drops"]}


# ---- gradients ---------------------------------------------------------------------------------------------

def learned(model: lm.LM, optimizer, rows: int, advantages: torch.Tensor, config: recipe.Train) -> dict:
    """An update on so many trajectories."""
    return update.update(model, optimizer, runs.some(rows), advantages, config,
                         config.dreaming.temperature, random.Random(3))


def gradients(**more) -> dict:
    """A batch of ragged trajectories in three minibatches: the gradients applied, and the weights after."""
    model, seen = agent(**more), []
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.01)
    step = optimizer.step

    def watched():
        named = model.model.named_parameters()
        seen.append({name: distributed.gathered(parameter.grad).cpu().clone() for name, parameter in named})
        step()

    optimizer.step = watched
    model.model.train()
    config = runs.config(tokens=60)
    metrics = learned(model, optimizer, 7, ADVANTAGES, config)
    return {"gradients": seen, "state": state(model), "metrics": metrics}


def updated(advantages: torch.Tensor, tokens: int = 60, **sgd) -> dict:
    """An update on as many trajectories as there are advantages: the weights before and after."""
    model, config = agent(), runs.config(tokens=tokens)
    before, optimizer = state(model), torch.optim.SGD(model.model.parameters(), **({"lr": 0.01} | sgd))
    metrics = learned(model, optimizer, len(advantages), advantages, config)
    return {"before": before, "state": state(model), "metrics": metrics}


def nothing_left() -> dict:
    """The second of three minibatches has no advantages: no rank makes a backward pass. Momentum moves the
    weights all the same, and the third minibatch has to see them moved."""
    order, advantages = list(range(7)), ADVANTAGES.clone()
    random.Random(3).shuffle(order)
    advantages[order[1::3]] = 0.0
    return updated(advantages, lr=0.03, momentum=0.9)


def head() -> dict:
    """Log-probs of a sharded model in bf16, and by a float64 head on what its last norm gave."""
    model, norm = lm.load(FOLDER / "model", 512, torch.bfloat16, sharded=True), []
    model.model.model.norm.register_forward_hook(lambda _module, _args, hidden: norm.append(hidden.detach()))
    pairs = [([5, 6, 7], [8, 9, 10]), ([11] * 4, [12, 13])]
    with torch.no_grad():
        logp, _ = lm.token_logps(model, pairs, 0.7)
    named = dict(distributed.full_tensors(model.model, torch.bfloat16))
    weight = named.get("lm_head.weight", named["model.embed_tokens.weight"])
    at, targets = [2, 3, 4, 9, 10], [8, 9, 10, 12, 13]
    logits = norm[-1][0, at].double() @ weight.double().T / 0.7
    return {"logp": logp, "by hand": logits.log_softmax(-1)[range(5), targets].float(),
            "type": str(norm[-1].dtype)}


def looks() -> dict:
    """A look at five pages, the third of which is solved in one step; how many pages all ranks opened."""
    agent, web = Written(None, lm.load_tokenizer(FOLDER / "model"), 4096), CountingWorld(end=3)
    found = measure.look(web, agent, [start(n, seed=n) for n in range(5)], "dev seeds", 1, 60)
    return found | {"pages": sum(map(sum, distributed.gather(web.sizes)))}


def finetune() -> dict:
    """Three microbatches a step, so that a rank of two repeats a microbatch with weight zero."""
    model, rng, pairs, losses = agent(), random.Random(1), [], []
    for _ in range(23):
        lengths = rng.randrange(3, 30), rng.randrange(1, 10)
        pairs.append(tuple([rng.randrange(4, 600) for _ in range(length)] for length in lengths))
    config = FineTune(epochs=2, lr=1e-3, tokens=64, microbatches=3)
    assign, work, taken = distributed.assign, [], []

    def watched(costs, ranks):
        shares = assign(costs, ranks)
        work.append(sum(costs))
        taken.extend(ranks * max(costs[index] for index, _ in together) for together in zip(*shares))
        return shares

    distributed.assign = watched
    with each_step(lambda step, loss: losses.append(loss)):
        report = fit(model, pairs, config)
    distributed.assign = assign
    waits = 1 - sum(work) / sum(taken)
    return {"state": state(model), "losses": losses, "idle": report["idle"], "waits": waits}


def not_finite() -> dict:
    """A nan in the last rank's part of the gradient: what each rank is told, and whether a step was made."""
    model = agent()
    logp, _ = lm.token_logps(model, [([5, 6, 7], [8, 9])])
    logp.sum().backward()
    if distributed.rank() == WORLD - 1:
        gradient = model.model.model.norm.weight.grad
        getattr(gradient, "_local_tensor", gradient).fill_(float("nan"))
    try:
        told = str(distributed.clip_grad_norm(model.model, 1.0))
    except ValueError as error:
        told = str(error)
    return {"told": distributed.gather(told)}


# ---- checkpoints and folders -------------------------------------------------------------------------------

def adam(model: lm.LM, steps: int, optimizer) -> list[float]:
    losses = []
    for n in range(steps):
        logp, _ = lm.token_logps(model, [([5, 6, 7 + n], [8, 9]), ([11] * 4, [12, 13 + n, 14])])
        loss = -logp.sum() / WORLD  # summed over the ranks, which all hold the same batch here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * WORLD)
    return losses


def save() -> dict:
    """Three steps, a checkpoint, three more."""
    model = agent()
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3, fused=True)
    adam(model, 3, optimizer)
    distributed.save_checkpoint(FOLDER / f"checkpoint-{WORLD}", 3, model.model, optimizer, {"who": "save"})
    return {"saved": state(model), "losses": adam(model, 3, optimizer), "state": state(model)}


def early() -> dict:
    """Three steps, and three with a checkpoint before the first."""
    weights = {}
    for how in ("straight", "saved"):
        model, folder = agent(), FOLDER / f"early-{WORLD}"
        optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
        if how == "saved":
            distributed.save_checkpoint(folder, 1, model.model, optimizer, {})
            assert not distributed.load_checkpoint(folder, model.model, optimizer, {})
        adam(model, 3, optimizer)
        weights[how] = state(model)
    return weights


def resume(world: int) -> dict:
    model = agent()
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3, fused=True)
    folder = FOLDER / f"checkpoint-{world}"
    step = distributed.load_checkpoint(folder, model.model, optimizer, {"who": "save"})
    loaded = state(model)
    return {"step": step, "loaded": loaded, "losses": adam(model, 3, optimizer), "state": state(model)}


# ---- the commands ------------------------------------------------------------------------------------------

def dreamer(base: str, tokens: int) -> dict:
    """sft.py on the counting web's transitions as its command runs it, in bf16. Three microbatches a step, so
    that a rank of two idles."""
    config = recipe.WorldModelSFT(
        base=str(FOLDER / base), transitions=str(FOLDER / "counting.jsonl"), context=2048,
        out=str(FOLDER / f"{base}-{WORLD}"), lora_rank=8, lora_alpha=16,
        sft=FineTune(epochs=2, lr=1e-2, tokens=tokens, microbatches=3))
    return sft.learn_world_model(config)


def nnetnav(name: str = "nnetnav", **more) -> dict:
    """sft.py on NNetNav's rows as its command runs it, in float32; what it was taught, as text; how it was
    loaded."""
    kept, how, taught = [], [], []
    load = lm.load

    def float32(*args, **options):
        kept.append(load(*args, compute=torch.float32, **options))
        how.append(options["offload"])
        return kept[0]

    def watched(model, pairs, *args, **more):
        taught.extend([[model.tokenizer.decode(part) for part in pair] for pair in pairs])
        return fit(model, pairs, *args, **more)

    config = recipe.PolicySFT(
        base=str(FOLDER / "chat"), trajectories=str(FOLDER / "nnetnav_small.jsonl"), context=1024,
        out=str(FOLDER / f"{name}-{WORLD}"), sft=FineTune(epochs=8, lr=1e-3, tokens=300, microbatches=3),
        **more)
    lm.load, sft.finetune.fit = float32, watched
    try:
        report = sft.learn_policy(config)
    finally:
        lm.load, sft.finetune.fit = load, fit
    how += [kept[0].sharded, kept[0].model.is_gradient_checkpointing]
    return {"report": report, "taught": taught, "how": how, "state": state(kept[0])}


def plain() -> dict:
    """The same without a process group: the laptop's path."""
    grouped, distributed.grouped = distributed.grouped, lambda: False
    try:
        return nnetnav("plain")
    finally:
        distributed.grouped = grouped


def run(name: str, world: str = "dream") -> None:
    """train.py as it is."""
    config = runs.tiny_run(FOLDER / name, FOLDER / "model")
    browser, benchmarks.Browser = benchmarks.Browser, runs.Paying
    train.train(dataclasses.replace(config, evaluate_every=0, checkpoint_every=2, compute="float32",
                                    world=world))
    benchmarks.Browser = browser


def webrl(world: str) -> dict:
    """Two phases of rivals/webrl.py."""
    from rivals import webrl as rival

    folder = FOLDER / f"webrl-{world}-{WORLD}"
    if distributed.rank() == 0:
        folder.mkdir()
    distributed.barrier()
    config = phases.phases_run(folder, FOLDER / "model", FOLDER / "orm", updates=2, world=world)
    save, browser, after = lm.save, benchmarks.Browser, {}
    benchmarks.Browser = runs.Web
    lm.save = lambda model, out: (after.update(state(model)), save(model, out))  # before it is rounded
    rival.train_phases(config)
    lm.save, benchmarks.Browser = save, browser
    return {"state": after, "rows": phases.lines(config)}


JOBS = {  # one function, several ways
    "offload": lambda: gradients(offload=True),
    # Fewer microbatches than ranks, in every minibatch; and all gradients zero: nobody waits for anybody.
    "one_microbatch": lambda: updated(ADVANTAGES[:3], tokens=100_000),
    "no_advantage": lambda: updated(torch.zeros(5), lr=0.1),
    "resume_1": lambda: resume(1),
    "resume_2": lambda: resume(2),
    "gptoss": lambda: dreamer("gptoss", 2500),
    "llama": lambda: dreamer("llama", 150),
    "offloaded": lambda: nnetnav("offloaded", offload=True),
    "straight": lambda: run("straight"),
    "killed": lambda: run("killed"),
    "alone": lambda: run("alone"),
    "real": lambda: run(f"real-{WORLD}", "real"),
    "both": lambda: run(f"both-{WORLD}", "both"),
    "webrl_dream": lambda: webrl("dream"),
    "webrl_real": lambda: webrl("real"),
}


# ---- the ranks ---------------------------------------------------------------------------------------------

def address(rank: int, number: int) -> str:
    """The port at which the ranks of this stage meet: rank 0 finds one, and all others wait for it."""
    file = FOLDER / f"port-{number}"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(str(probe.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.05)
    return file.read_text()


def work(rank: int, ranks: int, jobs: list[str], port: str) -> None:
    """What a rank does in a stage. It dies with its parent, as it would with torchrun."""
    global WORLD
    WORLD = ranks
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    (FOLDER / f"pid-{rank}").write_text(str(os.getpid()))
    distributed.init(alone=True, timeout_minutes=2)
    for job in jobs:
        result = (JOBS.get(job) or globals()[job])()
        if rank == 0 and result is not None:
            torch.save(result, FOLDER / f"{WORLD}-{job}.pt")
    distributed.finish()


def stage(rank: int, number: int, ranks: int, jobs: list[str], kill: bool) -> None:
    port, checkpoint = address(rank, number), FOLDER / jobs[-1] / "agent.run/checkpoint/step-2"
    if not (child := os.fork()):
        torch.set_num_threads(1)  # before several threads ask for the fork's pool at once (helpers/killed.py)
        work(rank, ranks, jobs, port)
        sys.exit()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.05)
        if kill and rank == 0 and checkpoint.exists():  # both at once, or one would tell of the other's end
            for other in range(ranks):
                os.kill(int((FOLDER / f"pid-{other}").read_text()), signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
    if os.waitstatus_to_exitcode(ended[1]) != (-signal.SIGKILL if kill else 0):
        sys.exit(f"rank {rank} of {ranks} ended with {ended[1]}, in {jobs}")


if __name__ == "__main__":
    for number, told in enumerate(sys.argv[3:]):
        ranks, jobs = int(told[0]), told[2:].rstrip("!").split(",")
        if int(sys.argv[2]) < ranks:
            stage(int(sys.argv[2]), number, ranks, jobs, told.endswith("!"))
