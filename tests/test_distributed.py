"""Claims about distributed.py: two real ranks (gloo) do what one process without a group does (ranks.py)."""
import shutil

import pytest
import ranks
import torch
from conftest import lines
from helpers.processes import full_disk, torchrun
from hypothesis import given, strategies
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import distributed
import lm
from config import Train, UserError

EXACT, WEIGHTS, NAMES = {"rtol": 0, "atol": 0}, "model.safetensors", ("straight", "killed", "alone")


@pytest.fixture(scope="module")
def done(taught, tmp_path_factory):
    """A folder; what one process made of each job; what ranks 0 and 1 did. torchrun restarts them once."""
    folder = shutil.copytree(taught, tmp_path_factory.mktemp("ranks") / "model").parent
    jobs = ["update,ragged", "update,lone", "fit,of-1", "tokenise,policy", "tokenise,world_model"]
    alone = {job: ranks.run(folder, job) for job in [*jobs, "loop,alone"]}
    jobs += ["loop,straight", "update,offload", "fit,of-2"]
    torchrun(ranks.__file__, folder, "loop,killed", *jobs, restarts=1)
    return folder, alone, *({job: torch.load(folder / f"{job}.{rank}") for job in jobs} for rank in (0, 1))


@pytest.mark.parametrize("how", ["ragged", "lone", "offload"])
def test_an_update_of_two_ranks_is_that_of_one(done, how):
    """Guards NOTES 5.6, 5.10, 5.11, 9.2: a mean over ranks, a denominator or a norm of one; a repeated
    microbatch that counts; a hang where a rank has no work; embedding and head as before the last step."""
    _, alone, first, second = done
    (a, state), (b, found) = alone["update," + how.replace("offload", "ragged")], first[f"update,{how}"]
    assert_close(found, state, rtol=1e-4, atol=2e-6)
    assert b == pytest.approx(a, rel=1e-4) and a["grad_norm"] > 3, "it has to clip"
    assert b == second[f"update,{how}"][0]


def test_fine_tuning_on_two_ranks_is_that_on_one_and_goes_on_from_a_checkpoint_of_the_other(done):
    """Guards: trajectories tokenised twice or never; a mean over ranks of means over tokens, a repeated
    microbatch that is learned; weights without the optimizer's moments, or read only on as many ranks."""
    folder, alone, both, other = done
    for job in ("tokenise,policy", "tokenise,world_model"):
        assert both[job] == other[job] == alone[job] and len(alone[job][0]) > 1
    (a, passes, state), (b, half, _) = alone["fit,of-1"], both["fit,of-2"]
    assert b == pytest.approx(a, rel=1e-4) and (passes, half) == (6 * 3, 6 * 2)
    on_two, on_one = both["fit,of-1"], ranks.fit(folder, "of-2")
    assert (on_two[1], on_one[1]) == (2 * 2, 2 * 3), "it goes on from step 4"
    for found in (both["fit,of-2"], on_two, on_one):
        assert_close(found[2], state, rtol=1e-3, atol=1e-5)


def test_the_loop_on_two_ranks_is_that_on_one_and_killed_is_not_killed(done):
    """Guards: dreams that depend on the rank that dreams them; an evaluation of one rank's share; a resume
    that dreams otherwise. torchrun gives its restart the old store, in which the dead ranks stand."""
    folder, alone, first, second = done
    logged = [lines(Train(out=f"{folder}/{name}")) for name in NAMES]
    assert logged[0] == logged[1] and [row["update"] for row in logged[0]] == list(range(5))
    near = lambda value: pytest.approx(value, rel=0.02, abs=1e-4) if type(value) is float else value
    assert [{key: near(value) for key, value in row.items()} for row in logged[2]] == logged[0]
    assert 0 < logged[0][0]["real_success"] < 1 and sum(row["learned"] > 0 for row in logged[0][:4]) > 2
    straight, killed, _ = (lm.load(folder / name).net.state_dict() for name in NAMES)
    assert_close(dict(killed), dict(straight), **EXACT)
    assert first["loop,straight"] + second["loop,straight"] == alone["loop,alone"]


@given(strategies.lists(strategies.integers(1, 1000), max_size=40), strategies.integers(1, 9))
def test_every_microbatch_is_dealt_once_in_rounds_that_no_other_order_makes_shorter(costs, count):
    """Guards NOTES 5.10: ranks with other numbers of forwards, a microbatch learned twice or never; a rank
    that waits while another has the long sequence."""
    shares = distributed.assign(costs, count)
    assert len(shares) == count and {len(share) for share in shares} == {-(-len(costs) // count)}
    dealt = sorted((index, weight) for share in shares for index, weight in share if weight)
    assert dealt == [(index, 1.0) for index in range(len(costs))]
    takes = sum(max(costs[index] for index, _ in together) for together in zip(*shares))
    assert takes == sum(sorted(costs, reverse=True)[::count]), "the most expensive together: no sum is less"


# ---- folders -----------------------------------------------------------------------------------------------

def small(kind: str = "llama", **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
             "intermediate_size": 8, "pad_token_id": 0, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | changes))


def filled(folder):
    """The model of a folder, by load_weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    distributed.load_weights(model, folder, torch.device("cpu"))
    return model


@pytest.mark.parametrize("kind, changes", [
    ("olmo3", {"sliding_window": 4}), ("gemma3_text", {"head_dim": 4}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "tie_word_embeddings": True})])
def test_weights_and_buffers_are_those_of_transformers_own_loading(tmp_path, kind, changes):
    """Guards: OLMo-3's `sliding_attention_inv_freq` and Gemma-3's `embed_scale`, garbage after the meta
    device; a tied head that is two tensors; bf16 that stays bf16."""
    small(kind, **changes).to(torch.bfloat16).save_pretrained(tmp_path)
    ours, theirs = filled(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for listed in ("named_parameters", "named_buffers"):
        assert_close(dict(getattr(ours, listed)()), dict(getattr(theirs, listed)()), **EXACT)


@pytest.mark.parametrize("says, harm", [
    ("not fully covered", lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-1])),
    ("lm_head.weight", lambda at: (at / WEIGHTS).unlink()),
    ("a.b has no place", lambda at: save_file({"a.b": torch.ones(2)}, at / "b.safetensors")),
    ("is in two files", lambda at: shutil.copy(at / WEIGHTS, at / "old.safetensors"))])
def test_a_folder_that_does_not_hold_its_model_whole_and_once_is_a_line(tmp_path, says, harm):
    """Guards: half a download that is read as a model; dcp, which takes either of two files that hold a
    weight, and ignores a weight that is not the model's."""
    small().save_pretrained(tmp_path)
    harm(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path}.*{says}[^\n]*$"):
        filled(tmp_path)


def test_a_checkpoint_is_of_what_is_trained_and_what_cannot_be_used_is_a_line(tmp_path):
    """Guards: a checkpoint before the first step, whose moments Adam counts; LoRA's with a head that is tied
    to a frozen embedding; half a checkpoint taken for one; a full disk that costs the old one."""
    model, weights = small(tie_word_embeddings=True), {}
    model.model.embed_tokens.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    save = lambda n: distributed.save_checkpoint(tmp_path, n, model, optimizer, {"lr": 1})
    load = lambda: distributed.load_checkpoint(tmp_path, model, optimizer, {"lr": 1})
    save(0)
    assert not load() and not optimizer.state
    for n in (1, 2, 10):
        model(torch.arange(9)[None]).logits.square().mean().backward()
        optimizer.step()
        weights[n] = [p.detach().clone() for p in trained]
        save(n)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]
    names = distributed.dcp.FileSystemReader(tmp_path / "step-10").read_metadata().state_dict_metadata
    assert len(names) > 20 and not [name for name in names if "embed" in name or "head" in name]
    with full_disk(4096), pytest.raises(UserError, match=r"^[^\n]*step-11 cannot be written [^\n]*; make"):
        save(11)
    for n in (10, 2):
        assert load() == n
        assert_close([p.detach() for p in trained], weights[n], **EXACT)
        (tmp_path / f"step-{n}/__0_0.distcp").write_bytes(b"")
        with pytest.raises(UserError, match=rf"^[^\n]*step-{n} cannot be read [^\n]*; delete it[^\n]*$"):
            load()
        (tmp_path / f"step-{n}/.metadata").unlink()  # written last: a save that was killed
