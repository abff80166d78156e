"""Our update and our sampling beside TRL's GRPOTrainer: the same numbers first, then how fast, in one run.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements.txt trl==1.16.0
    .venv-trl/bin/pip install --no-deps -r requirements-browsergym.txt
    .venv-trl/bin/python -m bench.bench_trl [--model FOLDER] [--device cuda] [--repeat 5]   # one thread

An update is what both make of one batch of sampled sequences: old log-probs, then four GSPO steps of AdamW.
TRL has importance_sampling_level "sequence", loss_type "grpo", beta 0, and is fed with the same minibatches.
`TRL as shipped` recomputes each layer in the backward pass and, without Triton, runs its head on all rows.
`TRL at its best` does neither. Both pad a batch to its longest prompt and its longest completion.

`parity` compares, in float32, loss, gradient and clip fraction of each of the four steps, before anything is
timed; of GRPO's and DAPO's ratio (rivals/ratios.py) gradient and clip fraction, against TRL's loss_type
"grpo" and "bnpo" with one ratio a token. (TRL's "dapo" divides each step by the mean number of tokens of the
batch's steps; TRL has neither REINFORCE without a clip nor GSPO-token.) Rates are the median of interleaved
repetitions; compare those of one run only (the last column).
Where nothing is clipped (`unclipped`) all sequences are learned from, as TRL always does.
"""

import copy
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import torch
import tyro

import gspo
import lm
import update
from policy import TokenTrajectory
from rivals import ratios
from tiny import cpu, lessons

try:
    import trl.trainer.utils
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad
except ImportError as error:
    sys.exit(f"bench_trl.py: TRL is missing ({error}); install it into a venv of its own, as the first lines "
             "of this file say")

# The paper's clip leaves out about half of these sequences. A microbatch is as large as TRL's.
CONFIG = replace(lessons.TRAIN, eps_low=3e-4, eps_high=4e-4, tokens=4608)
UNCLIPPED = replace(CONFIG, eps_low=0.9, eps_high=9.0)
STEPS, NEW = CONFIG.minibatches, 40  # GSPO steps of an update; tokens that are sampled
# Sequences, shortest and longest prompt, the config.
CASES = {"64 short": (64, 80, 120, CONFIG), "64 short, unclipped": (64, 80, 120, UNCLIPPED),
         "16 x 1,100": (16, 1060, 1060, CONFIG), "16 x 1,100, unclipped": (16, 1060, 1060, UNCLIPPED)}


def batch_of(case: str) -> tuple[list[TokenTrajectory], torch.Tensor]:
    """Sequences of 20 to 40 tokens behind their prompts, 40 behind long prompts; advantages (K,)."""
    rng, (count, low, high, _) = random.Random(0), CASES[case]
    draw = lambda n: [rng.randrange(300, 5000) for _ in range(n)]
    pairs = [(draw(rng.randint(low, high)), draw(rng.randint(20, 40) if high < 1000 else 40))
             for _ in range(count)]
    advantages = torch.tensor([rng.choice([-1.0, 1.0]) for _ in pairs])
    return [TokenTrajectory(None, [], [pair], [[]]) for pair in pairs], advantages


class Theirs:
    """TRL's trainer around a copy of our model."""

    def __init__(self, model: lm.LM, compute: str, best: bool, ours=CONFIG, level: str = "sequence",
                 loss: str = "grpo"):
        self.net = copy.deepcopy(model.model)
        self.net.set_attn_implementation("sdpa")  # transformers' default
        self.net.train()  # it keeps its metrics by mode
        self.net.generation_config.top_k, self.best = 0, best
        config = GRPOConfig(
            f"{tempfile.gettempdir()}/bench_trl", importance_sampling_level=level, loss_type=loss, beta=0.0,
            epsilon=ours.eps_low, epsilon_high=ours.eps_high, steps_per_generation=STEPS,
            gradient_accumulation_steps=1, per_device_train_batch_size=16, num_generations=8, top_k=0,
            max_completion_length=NEW, temperature=CONFIG.dreaming.temperature, report_to="none",
            bf16=compute == "bfloat16", use_cpu=model.device.type == "cpu",
            gradient_checkpointing=not best)  # on is its default
        self.trainer = GRPOTrainer(
            model=self.net, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 64), processing_class=model.tokenizer)
        self.trainer.current_gradient_accumulation_steps = 1
        if not best:  # its default; the training loop, which is not run here, would switch it on
            self.net.gradient_checkpointing_enable({"use_reentrant": False})

    def inputs(self, kept: list[TokenTrajectory], advantages: torch.Tensor) -> dict[str, torch.Tensor]:
        """What its _generate_and_score_completions hands on: prompts padded left, completions right."""
        def padded(rows, side):
            return [pad([torch.tensor(part) for part in parts], 0, side).to(self.net.device)
                    for parts in (rows, [[1] * len(row) for row in rows])]

        prompts, completions = zip(*(trajectory.pairs[0] for trajectory in kept))
        (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, "left"), padded(completions, "right")
        return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids,
                "completion_mask": mask, "advantages": advantages.to(self.net.device)}

    def update(self, optimizer, kept: list[TokenTrajectory], advantages: torch.Tensor) -> list[dict]:
        """As its training loop does it, and with our minibatches. Returns loss and clip fraction of each
        step."""
        usual = trl.trainer.utils._use_triton
        if self.best:  # its own way to run the head on the completions' rows; on a GPU with Triton the usual
            trl.trainer.utils._use_triton = lambda _: True
        whole, seen = self.inputs(kept, advantages), []
        with torch.no_grad():
            ids = torch.cat([whole["prompt_ids"], whole["completion_ids"]], 1)
            mask = torch.cat([whole["prompt_mask"], whole["completion_mask"]], 1)
            width = whole["completion_ids"].shape[1]
            whole["old_per_token_logps"], *_ = self.trainer._get_per_token_logps_and_entropies(
                self.net, ids, mask, width, 16)
        order = list(range(len(kept)))
        random.Random(0).shuffle(order)
        for k in range(STEPS):
            part = {name: value[order[k::STEPS]] for name, value in whole.items()}
            loss = self.trainer._compute_loss(self.net, part)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), CONFIG.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            clipped = self.trainer._metrics["train"]["clip_ratio/region_mean"][-1]
            seen.append({"loss": loss.item(), "clipped": clipped})
        trl.trainer.utils._use_triton = usual
        return seen


# Our rule, their level and loss_type, and how much rounding may do. One ratio a token: a token that stands at
# the clip's edge, to float32, may be clipped by one and not by the other.
RATIOS = {"GSPO": (gspo.gspo_coefficients, "sequence", "grpo", 1e-3, 1e-6),
          "GRPO": (ratios.grpo_coefficients, "token", "grpo", 0.05, 0.01),
          "DAPO": (ratios.dapo_coefficients, "token", "bnpo", 0.05, 0.01)}


def parity(model: lm.LM, name: str) -> None:
    """Prints the differences of each step; AssertionError where they are more than rounding."""
    model.compute, weights = torch.float32, copy.deepcopy(model.model.state_dict())
    rule, level, loss_type, most, most_clipped = RATIOS[name]
    (kept, advantages), seen = batch_of("64 short"), []
    theirs = Theirs(model, "float32", True, level=level, loss=loss_type)

    def with_loss(*args):
        coefficients, metrics = rule(*args)
        seen.append({"loss": gspo.gspo_loss(*args)[0].item(), "clipped": metrics["clip_frac"]})
        return coefficients, metrics

    optimizers, gradients = [], ([], [])
    for net, kept_here in zip((model.model, theirs.net), gradients):
        optimizers.append(torch.optim.SGD(net.parameters(), lr=1e-3))  # Adam makes a step of a rounding error
        optimizers[-1].register_step_pre_hook(lambda *_, net=net, here=kept_here: here.append(
            torch.cat([p.grad.flatten() for p in net.parameters()])))
    update.update(model, optimizers[0], kept, advantages, CONFIG, CONFIG.dreaming.temperature,
                  random.Random(0), with_loss)
    told = theirs.update(optimizers[1], kept, advantages)
    for k, (a, b, g, h) in enumerate(zip(seen, told, *gradients)):
        apart = float((g - h).norm() / h.norm())
        losses = f"loss {a['loss']:+.6f} and {b['loss']:+.6f}   " if name == "GSPO" else ""
        print(f"parity, {name}, step {k}: {losses}gradient {apart:.1e} apart   "
              f"clipped {a['clipped']:.4f} and {b['clipped']:.4f}", flush=True)
        assert not losses or abs(a["loss"] - b["loss"]) < 1e-5
        assert apart < most and abs(a["clipped"] - b["clipped"]) < most_clipped
    model.model.load_state_dict(weights)


def rates(title: str, model: lm.LM, count, works: dict, repeat: int) -> None:
    """Prints a row for each of `works`: the median of count(result) / seconds, beside that of the first.
    Seconds of the processor; on a GPU, of the clock."""
    clock, found = time.process_time, {name: [] for name in works}
    if model.device.type != "cpu":
        clock = lambda: (torch.cuda.synchronize(), time.perf_counter())[1]
    for k in range(repeat + 1):  # the first is a warm-up
        for name, work in works.items():
            began, result = clock(), work()
            found[name] += [count(result) / (clock() - began)] * (k > 0)
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, rate in medians.items():
        print(f"{title:38s} {name:22s} {rate:8.0f} tokens/s   ours / this {medians['ours'] / rate:.2f}",
              flush=True)


def updates(model: lm.LM, compute: str, case: str, repeat: int) -> None:
    """One update, ours and theirs, each from the same weights."""
    (kept, advantages), config = batch_of(case), CASES[case][-1]
    tokens = sum(len(prompt) + len(completion) for t in kept for prompt, completion in t.pairs)
    model.compute, weights = getattr(torch, compute), copy.deepcopy(model.model.state_dict())

    def fresh(net):
        net.load_state_dict(weights)
        return torch.optim.AdamW(net.parameters(), config.lr, (0.9, 0.98), weight_decay=0.0, fused=True)

    works = {"ours": lambda: update.update(model, fresh(model.model), kept, advantages, config,
                                          config.dreaming.temperature, random.Random(0))}
    for name, best in (("TRL as shipped", False), ("TRL at its best", True)):
        theirs = Theirs(model, compute, best, config)
        works[name] = lambda theirs=theirs: theirs.update(fresh(theirs.net), kept, advantages)
    rates(f"update, {case}, {compute}", model, lambda _: tokens, works, repeat)
    model.model.load_state_dict(weights)


def sampling(model: lm.LM, compute: str, repeat: int) -> None:
    """64 rows of 40 tokens. Counted are the tokens up to a row's end of turn."""
    rng, end = random.Random(1), model.tokenizer.eos_token_id
    prompts = [[rng.randrange(300, 5000) for _ in range(rng.randrange(60, 150))] for _ in range(64)]
    model.compute = getattr(torch, compute)
    theirs, width = Theirs(model, compute, True), max(map(len, prompts))
    net, settings = theirs.net, theirs.trainer.generation_config
    rows = theirs.inputs([TokenTrajectory(None, [], [(p, [0])], [[]]) for p in prompts], torch.zeros(64))
    ids, mask = rows["prompt_ids"], rows["prompt_mask"]

    def generate():
        with torch.no_grad(), model.autocast():
            rows = net.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return [row[: (row + [end]).index(end) + 1] for row in rows[:, width:].tolist()]

    works = {"ours": lambda: [s.ids for s in lm.sample(model, prompts, NEW, CONFIG.dreaming.temperature, 0)],
             "transformers' generate": generate,
             "TRL's generation": lambda: theirs.trainer._generate_single_turn(prompts, None, {}, 8)[0]}
    rates(f"sampling, 64 rows, {compute}", model, lambda rows: sum(map(len, rows)), works, repeat)


def main(model: str = "tiny/base", device: str = "", repeat: int = 5):
    torch.set_num_threads(1)
    ours = cpu.load(model)
    if device and ours.device.type != device:
        sys.exit(f"bench_trl.py: torch finds no {device} here, only {ours.device.type}")
    for name in RATIOS:
        parity(ours, name)
    for compute in ("bfloat16", "float32"):
        ours.model.train()
        for case in CASES:
            updates(ours, compute, case, repeat)
        ours.model.eval()
        sampling(ours, compute, repeat)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
