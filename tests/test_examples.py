"""Claims about examples/: each uses what was handed in, and learns as train.py does. A random model clicks in
the shop as often as it is told to: what SmolLM2 learns there is seen by running them."""

from dataclasses import replace

import pytest
import torch
from conftest import check_judge, check_protocol, check_world_model, tiny_lm

import data
import finetune
import gspo
import lm
import policy
import recipe
import train
from data import Action
from examples import loop, own_env, own_loss


@pytest.fixture(scope="module")
def prepared(tokenizer, tmp_path_factory):
    """The settings of the loop behind recording and cloning, for a random model that learned to click."""
    folder = tmp_path_factory.mktemp("shop")
    model, pairs = tiny_lm(tokenizer), []
    for seed in range(40):  # More or Order at first, then Order
        shop, more = own_env.Shop(), Action("click", "2")
        [obs] = shop.reset([data.start("order", seed)])
        [[then], *_] = shop.step([more])
        rows = (obs, (), "2"), (obs, (), "4"), (then, (data.describe(more, obs.page),), "4")
        pairs += [(policy.turn_prompt(model, seen.goal, seen.page, past),
                   model.template.completion_ids(f"```click [{bid}]```")) for seen, past, bid in rows]
    finetune.fit(model, pairs, finetune.FineTune(epochs=8, lr=3e-3, tokens=800))
    lm.save(model, folder / "base")
    config = own_env.prepare(str(folder / "out"), updates=2, base=str(folder / "base"))
    # What it would learn of thoughts is longer than max_new_tokens, in bytes: the base acts.
    return replace(config, policy=str(folder / "base"), trained_layers=0, lr=1e-3,
                   evaluate_seeds="1000000:4", compute="float32")


def test_shop_world_model_and_clerk_keep_what_all_of_their_kind_promise():
    """Guards: an example that teaches a broken environment, world model or judge."""
    check_protocol(own_env.Shop(), [data.start("order", seed) for seed in (3, 4, 5)], "click [2]")
    pages = [own_env.page_of("lamp", 1), own_env.page_of("book", 0)]
    check_world_model(own_env.Imagined(), pages, [Action("click", "2"), Action("click", "4")])
    ordered = ("click [4] where [4] is Order",)
    case = lambda count: ("Order 1 of lamp.", ordered, "", own_env.page_of("lamp", count))
    check_judge(own_env.Clerk(), case(1), case(2))


@pytest.mark.parametrize("right", [True, False])
def test_the_clerk_pays_a_dream_as_the_shop_pays_an_episode(right):
    """Guards against dreams that teach something else than what the page rewards."""
    for seed in range(30):
        shop, past = own_env.Shop(), ()
        [obs] = shop.reset([data.start("order", seed)])
        wanted, count = int(obs.goal.split()[1]), int(obs.page.split("value='")[1][0])
        clicks = ("2" if wanted > count else "3") * abs(wanted - count) + "2" * (not right) + "4"
        for bid in clicks:
            before, past = obs.page, (*past, data.describe(Action("click", bid), obs.page))
            [obs], [reward], [terminated], _ = shop.step([Action("click", bid)])
        [verdict] = own_env.Clerk().verdicts([(obs.goal, past, before, obs.page)])
        assert terminated and reward == float(verdict.success) == float(right)
    stopped = (*past[:-1], data.describe(Action("stop", text="3"), before))
    assert not own_env.Clerk().verdicts([(obs.goal, stopped, before, obs.page)])[0].success


def test_the_loop_learns_in_an_environment_and_by_a_loss_that_are_handed_in(prepared):
    """Guards against a loop that takes another environment, judge or loss, and does not use it."""
    used = []

    def watched(*given):
        used.append(own_loss.spo_coefficients(*given))
        return used[-1]

    rows = own_env.learn(prepared, watched)
    assert [row["update"] for row in rows] == [0, 1, 2] and "real_success" in rows[0]
    for name in ("dreams", "judged", "real_steps", "kept"):
        assert sum(row.get(name, 0) for row in rows) > 0, name
    assert len(used) == prepared.minibatches * sum(row["kept"] > 0 for row in rows if "kept" in row)


def test_an_update_of_the_loop_on_one_screen_is_train_pys(prepared, tmp_path):
    """Guards against a loop to learn from that is another one; and against Eq. 10 in pieces that does not add
    up to the loss: the example has Eq. 5 in one graph. Adam's first step is a sign, so what rounding moves is
    not nothing: the changes are compared as vectors."""
    config = replace(prepared, out=str(tmp_path / "both"), updates=1, evaluate_every=0, world="dream")
    train.train(config, load=own_env.load_models)
    model, models = own_env.load_models(config, tmp_path)
    before = torch.cat([p.detach().flatten().clone() for p in model.model.parameters()])
    loop.learn(model, models, recipe.fitting(model, recipe.starts(config), config), config)
    lm.save(model, tmp_path / "alone")
    after, alone = (torch.cat([p.flatten() for p in lm.load(folder).model.parameters()])
                    for folder in (config.out, tmp_path / "alone"))
    assert (after - before).norm() > 0.1 and (after - alone).norm() < 0.02 * (after - before).norm()


def test_the_own_losss_coefficients_are_its_gradient(monkeypatch):
    """Guards against a wrong derivative, and against a check that would not see one."""
    assert max(own_loss.largest_error(seed) for seed in range(20)) < 1e-12
    monkeypatch.setattr(own_loss, "spo_coefficients", gspo.gspo_coefficients)
    assert own_loss.largest_error() > 1e-3
