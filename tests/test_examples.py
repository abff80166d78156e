"""Claims about examples/: each hands in what it says, and learns as train.py does."""
from dataclasses import replace

import torch
from conftest import ROOT, check_env, lines, run, tiny_lm

import data
import dream
import gspo
import lm
import policy
import sft
import train
from data import Action
from examples import loop, own_env, own_loss


def test_the_shop_and_a_dream_of_it_keep_the_protocol_and_answer_alike():
    """Guards: an example that teaches a broken environment, or dreams that pay for what the page does not."""
    shop, dreamed = own_env.ShopEnv(), dream.DreamEnv(own_env.Imagined(), own_env.Clerk(), 0)
    for start in [data.Start("order", seed) for seed in range(40)]:
        check_env(shop, start, "click [2]")
        first = run(shop.reset(start))
        run(dreamed.reset(replace(start, goal=first.goal, page=first.page)))
        for bid in "2" * (start.seed % 3) + "93" * (start.seed % 2) + "4":
            assert run(shop.step(Action("click", bid))) == run(dreamed.step(Action("click", bid)))


def test_the_loop_is_train_pys_and_the_readmes_and_what_is_handed_in_is_used(tokenizer, tmp_path):
    """Guards: a loop to learn from that is another one; Eq. 10 in pieces that does not add up to the loss."""
    model, base, used, past = tiny_lm(tokenizer), f"{tmp_path}/base", [], ("click [2] where [2] is More",)
    pairs = [(policy.turn_prompt(model, f"Order {n} of {item}.", own_env.page_of(item, n + k), past[:m]),
              model.template.completion_ids(f"```click [{bid}]```")) for bid in "24" for n in (1, 2, 3)
             for k in (-1, 0, 1) for item in ("lamp", "book") for m in (0, 1)]
    sft.fit(model, [[pair] for pair in pairs], sft.SFT(epochs=10, lr=3e-3, tokens=800, microbatches=1))
    lm.save(model, base)
    config = replace(own_env.prepare(f"{tmp_path}/shop", 2, base), policy=base, lr=1e-3, compute="float32")
    own_env.learn(config, lambda *given: used.append(given) or own_loss.grpo_coefficients(*given))
    rows = lines(config)
    assert "real_success" in rows[0] and len(used) == 2 * sum("clip_frac" in row for row in rows)
    assert min(sum(row.get(name, 0) for row in rows) for name in ("dreams", "real_steps", "learned")) > 0
    config = replace(config, out=str(tmp_path / "both"), updates=1, evaluate_every=0, real_fraction=0.0)
    train.train(config, world_model=own_env.Imagined(), judge=own_env.Clerk())
    model = lm.load(base, config.context, torch.float32)
    models = dream.Models(lm.Batched(model), own_env.Imagined(), own_env.Clerk())
    loop.learn(model, models, dream.starts(config), config)
    lm.save(model, tmp_path / "alone")
    before, after, alone = (torch.cat([p.flatten() for p in lm.load(folder).net.parameters()]).detach()
                            for folder in (base, config.out, tmp_path / "alone"))
    # Adam's first step is a sign: rounding moves some weights. So the changes are compared as vectors.
    assert (after - before).norm() > 0.1 and (after - alone).norm() < 0.02 * (after - before).norm()
    code = lambda text: [line.split("  #")[0].strip() for line in text.splitlines() if line[:1] == " "]
    readme = code((ROOT / "README.md").read_text().split("## The loop")[1].split("\n## ")[0])
    source = iter(code(open(loop.__file__).read()))
    assert len(readme) == 14 and all(line in source for line in readme), "line by line, in this order"


def test_the_own_losss_coefficients_are_its_gradient(monkeypatch):
    """Guards: a wrong derivative, and a check that would not see one."""
    assert max(own_loss.largest_error(seed) for seed in range(20)) < 1e-12
    monkeypatch.setattr(own_loss, "grpo_coefficients", gspo.gspo_coefficients)
    assert own_loss.largest_error() > 1e-3
