"""A GSPO update of ours beside TRL's GRPOTrainer: the same numbers first, then how fast, in one run.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements.txt trl==1.16.0
    .venv-trl/bin/pip install --no-deps -r requirements-no-deps.txt
    .venv-trl/bin/python -m bench.bench_trl [--model FOLDER] [--repeat 3]   # one thread; after `python lm.py`

An update is what both make of one batch of sampled sequences: old log-probs, then four steps of AdamW. TRL
is fed with the same minibatches and runs at its best: no recomputation of layers, and its head on the
completions' rows alone. `parity` compares, in float32, loss, gradient and clip fraction of each step. Rates
are the median of interleaved repetitions; compare those of one run only (the last column). Where nothing is
clipped (`unclipped`) all sequences are learned from, as TRL always does.
"""

import copy
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import replace

import torch
import trl.trainer.utils
import tyro
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import gspo
import lm
import train
from config import TRAIN
from policy import Rollout, Turn

# The paper's clip leaves out about half of these sequences. A microbatch is as large as TRL's.
CONFIG = replace(TRAIN["laptop"], minibatches=4, eps_low=3e-4, eps_high=4e-4, tokens=2304)
CONFIGS = {"clipped": CONFIG, "unclipped": replace(CONFIG, eps_low=0.9, eps_high=9.0)}
STEPS, TEMPERATURE = CONFIG.minibatches, CONFIG.temperature
CASES = {"32 short": (32, 80, 120), "8 x 500": (8, 460, 460)}  # sequences, shortest, longest prompt


def batch_of(case: str) -> tuple[list[Rollout], torch.Tensor]:
    """Sequences of 20 to 40 tokens behind their prompts, 40 behind long prompts; advantages (K,)."""
    rng, (count, low, high) = random.Random(0), CASES[case]
    draw = lambda n: [rng.randrange(300, 5000) for _ in range(n)]
    pairs = [(draw(rng.randint(low, high)), draw(rng.randint(20, 40) if low < high else 40))
             for _ in range(count)]
    kept = [Rollout(None, [], [Turn(*pair, [])]) for pair in pairs]
    return kept, torch.tensor([rng.choice([-1.0, 1.0]) for _ in pairs])


class Theirs:
    """TRL's trainer around a copy of our model."""

    def __init__(self, model: lm.LM, ours=CONFIG):
        self.net = copy.deepcopy(model.net)
        self.net.set_attn_implementation("sdpa")  # transformers' default
        self.net.train()  # it keeps its metrics by mode
        config = GRPOConfig(
            f"{tempfile.gettempdir()}/bench_trl", importance_sampling_level="sequence", loss_type="grpo",
            beta=0.0, epsilon=ours.eps_low, epsilon_high=ours.eps_high, steps_per_generation=STEPS,
            gradient_accumulation_steps=1, per_device_train_batch_size=8, num_generations=8,
            max_completion_length=40, temperature=TEMPERATURE, bf16=model.compute == torch.bfloat16,
            use_cpu=model.device.type == "cpu", gradient_checkpointing=False, report_to="none")
        self.trainer = GRPOTrainer(
            model=self.net, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 64), processing_class=model.tokenizer)
        self.trainer.current_gradient_accumulation_steps = 1

    def update(self, optimizer, kept: list[Rollout], advantages: torch.Tensor) -> list[tuple]:
        """As its training loop does it, with our minibatches. Returns (loss, clip fraction) of each step."""
        trl.trainer.utils._use_triton = lambda _: True  # its head runs on the completions' rows alone
        whole, seen = {"advantages": advantages.to(self.net.device)}, []
        prompts, completions = zip(*(rollout.turns[0][:2] for rollout in kept))
        for name, side, rows in (("prompt", "left", prompts), ("completion", "right", completions)):
            for what, parts in (("ids", rows), ("mask", [[1] * len(row) for row in rows])):
                made = trl.trainer.utils.pad([torch.tensor(part) for part in parts], 0, side)
                whole[f"{name}_{what}"] = made.to(self.net.device)
        ids, mask = (torch.cat([whole[f"prompt_{what}"], whole[f"completion_{what}"]], 1)
                     for what in ("ids", "mask"))
        with torch.no_grad():
            whole["old_per_token_logps"], *_ = self.trainer._get_per_token_logps_and_entropies(
                self.net, ids, mask, whole["completion_ids"].shape[1], 8)
        order = list(range(len(kept)))
        random.Random(0).shuffle(order)
        for k in range(STEPS):
            part = {name: value[order[k::STEPS]] for name, value in whole.items()}
            loss = self.trainer._compute_loss(self.net, part)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), CONFIG.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((loss.item(), self.trainer._metrics["train"]["clip_ratio/region_mean"][-1]))
        return seen


def parity(model: lm.LM) -> None:
    """Prints the differences of each step; AssertionError where they are more than rounding."""
    model.compute = torch.float32
    (kept, advantages), theirs, seen, ours, its = batch_of("32 short"), Theirs(model), [], [], []

    def say(*args):
        loss, metrics = gspo.gspo_loss(*args)
        seen.append((loss.item(), metrics["clip_frac"]))
        return gspo.gspo_coefficients(*args)

    def sgd(net, gradients: list):  # Adam makes a step of a rounding error
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda *_: gradients.append(
            torch.cat([p.grad.flatten() for p in net.parameters()])))
        return optimizer

    train.update(model, sgd(model.net, ours), kept, advantages, CONFIG, random.Random(0), say)
    given = theirs.update(sgd(theirs.net, its), kept, advantages)
    for k, ((loss, clipped), (its_loss, its_clipped), g, h) in enumerate(zip(seen, given, ours, its)):
        apart = float((g - h).norm() / h.norm())
        print(f"parity, step {k}: loss {loss:+.6f} and {its_loss:+.6f}   gradient {apart:.1e} apart   "
              f"clipped {clipped:.4f} and {its_clipped:.4f}", flush=True)
        assert abs(loss - its_loss) < 1e-5 and apart < 1e-3 and abs(clipped - its_clipped) < 1e-6


def rates(model: lm.LM, case: str, clip: str, repeat: int) -> None:
    """One update, ours and theirs, each from the same weights: tokens a second of processor time."""
    config, found = CONFIGS[clip], {"ours": [], "TRL": []}
    (kept, advantages), theirs = batch_of(case), Theirs(model, config)
    weights = copy.deepcopy(model.net.state_dict())
    tokens = sum(len(turn.prompt_ids) + len(turn.completion_ids) for one in kept for turn in one.turns)
    for k in range(repeat + 1):  # the first is a warm-up
        for name, net in (("ours", model.net), ("TRL", theirs.net)):
            net.load_state_dict(weights)
            optimizer, began = torch.optim.AdamW(net.parameters(), config.lr, fused=True), time.process_time()
            if name == "ours":
                train.update(model, optimizer, kept, advantages, config, random.Random(0))
            else:
                theirs.update(optimizer, kept, advantages)
            found[name] += [tokens / (time.process_time() - began)] * (k > 0)
    ours, its = map(statistics.median, found.values())
    print(f"{case}, {clip}, {model.compute}: ours {ours:.0f}, TRL {its:.0f} tokens/s  {ours / its:.2f}",
          flush=True)


def main(model: str = "runs/smollm2", repeat: int = 3):
    torch.set_num_threads(1)
    ours = lm.load(model)
    parity(copy.deepcopy(ours))
    ours.net.train()
    for case, clip in itertools.product(CASES, CONFIGS):
        rates(copy.deepcopy(ours), case, clip, repeat)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
