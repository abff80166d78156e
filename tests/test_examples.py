"""Claims about examples/: each runs, learns, and uses what was handed in."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import check_judge, check_protocol
from tiny import cpu

import data
import gspo
import lm
import recipe
import train
from data import Action
from examples import loop, own_loss, own_world

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The settings of the loop, behind the recording and both fine-tunings of the example. Four updates, not
    six: it learns less (.42 and not .48 in the end), and enough to be seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # tiny/base
        yield own_world.prepare(own_world.Config(str(tmp_path_factory.mktemp("shop")), updates=4))


@pytest.fixture(scope="module")
def learned(prepared):
    """The lines of metrics.jsonl of the example."""
    return own_world.learn(prepared)

# ---- a world of one's own ----------------------------------------------------------------------------------

def test_the_shop_and_the_clerk_keep_what_every_world_and_judge_promise():
    """Guards: an example that teaches a broken world or judge; real groups that begin elsewhere than their
    experts did."""
    shop, middle = own_world.Shop(), data.start("order", 4)
    check_protocol(shop, [data.start("order", seed) for seed in (3, 4, 5)], "click [2]")
    case = lambda count: ("Order 1 book.", ("click [4] where [4] is Order",), "",
                          f"spinbutton 'book' value='{count}'")
    check_judge(own_world.Clerk(), case(1), case(2))
    shop.reset([middle])
    [after], *_ = shop.step([Action("click", "2")])
    [begun] = shop.reset([replace(middle, prefix=("click [2]",))])
    assert begun.page == after.page != shop.reset([middle])[0].page


@pytest.mark.parametrize("wanted", [True, False])
def test_the_clerk_pays_a_dream_as_the_shop_pays_a_visit(wanted):
    """Guards against dreams that teach something else than what the page rewards."""
    shop, paid, said = own_world.Shop(), [], []
    for seed in range(30):
        [obs] = shop.reset([data.start("order", seed)])
        more = 1 if wanted else seed % 2 * 2  # one is asked for; none or two are not
        past, page = (), obs.page
        for bid in ["2"] * more + ["4"]:
            before, past = page, (*past, data.describe(Action("click", bid), page))
            [after], [reward], [terminated], _ = shop.step([Action("click", bid)])
            page = after.page
        [verdict] = own_world.Clerk().verdicts([(obs.goal, past, before, page)])
        paid, said = paid + [reward], said + [float(verdict.success)]
        assert terminated
    assert paid == said == [float(wanted)] * 30
    stopped = (*past[:-1], data.describe(Action("stop", text="3"), before))
    assert not own_world.Clerk().verdicts([(obs.goal, stopped, before, page)])[0].success


def test_the_agent_learns_in_a_world_that_is_handed_in_and_in_dreams_of_it(prepared, learned):
    """Guards against a loop that cannot be given another world or judge, or that learns nothing there."""
    before, after = own_world.success(prepared.policy), own_world.success(prepared.out)
    assert after > before + 0.1, (before, after)  # seen: .19 and .42
    for name in ("dreams", "judged", "real_steps"):
        assert sum(row.get(name, 0) for row in learned) > 0, name
    assert any(row.get("dream_success") for row in learned), "the clerk paid no dream"
    assert any(row.get("real_train_success") for row in learned), "the shop paid no visit"


def test_the_key_to_metrics_names_what_a_run_writes_and_nothing_else(learned):
    """Guards against a figure that nobody can look up, and against one that is no longer written. The key is
    the table in train.py's docstring: names, two spaces, what they are."""
    table = train.__doc__.partition("metrics.jsonl")[2]
    cells = re.findall(r"^    (\w+(?:, \w+)*)  ", table, re.MULTILINE)
    told = {name for cell in cells for name in cell.split(", ")}
    assert told == {name for row in learned for name in row} | {"real_failed"}  # the shop never fails

# ---- the loop on one screen --------------------------------------------------------------------------------

def test_the_loop_of_the_readme_is_the_example():
    """Guards against a loop on the first page that calls what nobody has."""
    text = (ROOT / "README.md").read_text().partition("## The loop")[2].partition("\n## ")[0]
    shown = ["".join(line.partition("#")[0].split()) for line in text.splitlines() if line.startswith("    ")]
    source = "".join((ROOT / "examples/loop.py").read_text().split())
    places = [source.index(line) for line in shown]  # raises where the example has no such line
    assert len(shown) == 14 and places == sorted(places)


def test_an_update_of_the_example_is_train_pys(prepared, tmp_path):
    """Guards against a loop to learn from that is another one; and against Eq. 10 in pieces that does not add
    up to the loss: the example has Eq. 5 in one graph. Adam's first step is a sign, so what rounding moves is
    not nothing: the changes are compared as vectors."""
    settings = replace(prepared, out=str(tmp_path / "both"), updates=1, evaluate_every=0, world="dream")
    train.train(settings, load=own_world.load_models)
    model, models = own_world.load_models(settings, tmp_path)
    before = torch.cat([p.detach().flatten().clone() for p in model.model.parameters()])
    loop.learn(model, models, *recipe.fitting(model, *recipe.starts(settings), settings), settings)
    lm.save(model, tmp_path / "alone")
    after, alone = (torch.cat([p.flatten() for p in cpu.load(folder, context=512, compute=torch.float32
                                                             ).model.parameters()])
                    for folder in (settings.out, tmp_path / "alone"))
    assert (after - before).norm() > 0.1 and (after - alone).norm() < 0.02 * (after - before).norm()

# ---- a loss of one's own -----------------------------------------------------------------------------------

def test_the_own_losss_coefficients_are_its_gradient(monkeypatch):
    """Guards against a wrong derivative, and against a check that would not see one."""
    assert max(own_loss.largest_error(seed) for seed in range(20)) < 1e-12
    monkeypatch.setattr(own_loss, "spo_coefficients", gspo.gspo_coefficients)
    assert own_loss.largest_error() > 1e-3


@pytest.mark.parametrize("advantage, best", [(0.7, 1.04), (-0.7, 0.97)])
def test_the_own_loss_pulls_a_trajectory_back_to_its_width(advantage, best):
    """Guards against eps_low and eps_high exchanged, and against a clip in the place of the square."""
    def pull(ratio):
        logp = torch.tensor([ratio, ratio]).double().log()
        own, given = torch.zeros(2, dtype=torch.long), torch.tensor([advantage]).double()
        return float(own_loss.spo_coefficients(logp, torch.zeros(2).double(), own, given, 0.03, 0.04)[0][0])

    assert pull(best) == pytest.approx(0, abs=1e-6)
    assert pull(best - 0.01) > 0 > pull(best + 0.01)


def test_the_loop_learns_with_a_loss_that_is_handed_in(prepared, learned, tmp_path):
    """Guards against a loop that takes the loss and does not use it."""
    settings, used = replace(prepared, out=str(tmp_path / "spo"), updates=1, evaluate_every=0), []

    def watched(*given):
        used.append(own_loss.spo_coefficients(*given))
        return used[-1]

    ours = own_world.learn(settings, watched)[0]
    assert len(used) == settings.minibatches and all(found.isfinite().all() for found, _ in used)
    theirs = learned[0]
    assert ours["groups"] == theirs["groups"] and ours["kept"] == theirs["kept"] > 0  # the same batch
    assert ours["abs_log_ratio"] != theirs["abs_log_ratio"]
