"""Dreamed steps a second, where their time goes, and sampling beside transformers' generate.

    python -m bench.bench_sampling [--models FOLDER] [--beside CHECKOUT] [--compute float32] [--batches 3]

Needs the models of `make` (runs/tiny). Batches are those of `python train.py tiny`, their first updates. With
--beside another checkout of this repository, which has these functions too, dreams the same batches, in turn
with this one, in a process of its own: compare the ratio, and whether both wrote the same tokens (in float32
they should). One thread; seconds of the processor, as machines are shared.
"""

import copy
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import tyro

import dream
import lm
import recipe
import train
from tiny import cpu, lessons

HERE = Path(__file__).resolve().parent.parent
SPENT = {"reading": 0.0, "writing": 0.0}


def timed(part: str, work):
    def run(*args, **more):
        began = time.process_time()
        try:
            return work(*args, **more)
        finally:
            SPENT[part] += time.process_time() - began
    return run


def work(models: str, compute: str) -> None:
    """For each number on stdin a batch of dreams, and a line of JSON about it."""
    torch.set_num_threads(1)
    config = replace(lessons.TRAIN, policy=f"{models}/sft", world_model=f"{models}/world_model",
                     compute=compute, trajectories=str(HERE / lessons.TRAIN.trajectories))
    given = recipe.starts(config)
    model, parts = train.load_models(config, Path(models))
    starts, seen, sample = recipe.fitting(model, *given, config), [], lm.sample
    for one in (parts.agent, parts.world_model.lm, parts.judge.lm):
        one.reader = timed("reading", one.reader)
    lm._sample_batch = timed("writing", lm._sample_batch)  # with what it reads

    def seen_by(*args, **more):
        samples = sample(*args, **more)
        seen.extend((prompt, written.ids) for prompt, written in zip(args[1], samples))
        return samples

    lm.sample = seen_by
    for number in map(int, sys.stdin):
        drawn = dream.draw(random.Random(f"0 {number}"), *starts, config.dreaming)
        SPENT.update(reading=0.0, writing=0.0)
        seen.clear()
        began = time.process_time()
        batch = dream.batch(parts, drawn, config.dreaming, (0, number))
        seconds = time.process_time() - began
        steps = sum(len(t.pairs) for t in batch.trajectories if not t.expert)
        print(json.dumps({"seconds": seconds, "steps": steps, "writing": SPENT["writing"] - SPENT["reading"],
                          "reading": SPENT["reading"], "seen": seen}),
              flush=True)


def generated(model: lm.LM, prompts: list[list[int]], new: int, repeat: int) -> float:
    """Ours / transformers' generate, in tokens a second: the median of interleaved repetitions."""
    net, end, width = copy.deepcopy(model.model), model.tokenizer.eos_token_id, max(map(len, prompts))
    net.set_attn_implementation("sdpa")  # its default
    gaps = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * gap + prompt for gap, prompt in zip(gaps, prompts)])
    mask = torch.tensor([[0] * gap + [1] * len(prompt) for gap, prompt in zip(gaps, prompts)])

    def theirs() -> list[list[int]]:
        with torch.no_grad(), model.autocast():
            rows = net.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=0.7, top_k=0,
                                max_new_tokens=new, pad_token_id=0, eos_token_id=end)[:, width:].tolist()
        return [(row + [end])[: (row + [end]).index(end) + 1] for row in rows]

    rates = {"ours": [], "theirs": []}
    ours = lambda: [s.ids for s in lm.sample(model, prompts, new, 0.7, 0)]
    for k in range(repeat + 1):  # the first is a warm-up
        for name, work in (("ours", ours), ("theirs", theirs)):
            began, rows = time.process_time(), work()
            rates[name] += [sum(map(len, rows)) / (time.process_time() - began)] * (k > 0)
    return statistics.median(rates["ours"]) / statistics.median(rates["theirs"])


def main(models: str = "runs/tiny", beside: str = "", compute: str = "bfloat16", batches: int = 3):
    torch.set_num_threads(1)
    models = str(Path(models).resolve())
    # This file with the modules of `folder`: -P keeps those beside this file out.
    workers = [subprocess.Popen([sys.executable, "-P", __file__, "worker", models, compute], cwd=folder,
                                env=os.environ | {"PYTHONPATH": folder}, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
               for folder in (str(HERE), *([str(Path(beside).resolve())] * bool(beside)))]
    told: list[list[dict]] = [[] for _ in workers]
    for number in (0, *range(batches)):  # the first is a warm-up
        for worker, answers in zip(workers, told):
            print(number, file=worker.stdin, flush=True)
            answers.append(json.loads(worker.stdout.readline()))
    for worker in workers:
        worker.stdin.close()
    for folder, answers in zip(("here", beside), told):
        total = {part: sum(answer[part] for answer in answers[1:])
                 for part in ("seconds", "steps", "reading", "writing")}
        line = f"{folder:20s} {total['steps'] / total['seconds']:6.1f} dreamed steps/s of CPU time"
        if total["writing"]:
            read, wrote = (total[part] / total["seconds"] for part in ("reading", "writing"))
            line += f"   reading {read:.0%}, writing {wrote:.0%}, the rest {1 - read - wrote:.0%}"
        print(line)
    ours = told[0][1:]
    if beside:
        ratios = [a["steps"] / a["seconds"] / (b["steps"] / b["seconds"]) for a, b in zip(ours, told[1][1:])]
        pairs = [pair for a, b in zip(ours, told[1][1:]) for pair in zip(a["seen"], b["seen"])]
        same = [x == y for (p, x), (q, y) in pairs if p == q]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"here / beside: {statistics.median(ratios):.2f} (batches: {each}); "
              f"{same.count(False)} of {len(same)} samples of the same prompt differ")
    model = cpu.load(f"{models}/sft", context=1024, compute=getattr(torch, compute))
    for title, rows in (("16 rows", 16), ("64 rows", 64)):
        prompts = [prompt for answer in ours for prompt, _ in answer["seen"]][::3][:rows]
        print(f"sampling, {title} of these prompts: ours / generate {generated(model, prompts, 40, 3):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:  # of main: it reads the numbers of batches
        work(*sys.argv[2:])
    else:
        tyro.cli(main, description=__doc__)
