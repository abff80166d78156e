"""Claims about node/engine.py's Engine, with the real vLLM: it is lm.LM's sampler, and follows the trainer's
weights."""
import copy
import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
from helpers import real_vllm
from helpers.real_vllm import gap

import distributed
import lm
import recipe
from node import engine

pytestmark = real_vllm.MARKS
folder, model, prompts = real_vllm.folder, real_vllm.model, real_vllm.prompts  # fixtures


def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def actor(folder):
    before = states()
    actor = engine.Engine(folder, 512, torch.float32, recipe.EngineConfig(kv_cache_gb=0.06, eager=True))
    actor.moved_random_states = states() != before
    yield actor
    actor.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_the_scored_ones(actor, model, prompts, temperature):
    """Guards: log-probs before the temperature, of a truncated distribution, or of the next token's
    position."""
    samples = lm.sample(actor, prompts, 40, temperature, seed=1)
    assert sum(len(sample.ids) for sample in samples) > 100
    assert gap(model, prompts, samples, temperature) < 1e-4


def test_greedy_answers_are_the_trainers_with_the_log_probs_of_temperature_1(actor, model, prompts):
    """Guards: log-probs of 0 for certain tokens; a text with the end of turn, or cut one token short; a turn
    that ends at another token (generation_config.json lists the quote); the answers in the order in which
    they ended."""
    ours, theirs = (lm.sample(sampler, prompts, 12, 0.0, seed=0) for sampler in (model, actor))
    assert [(a.ids, a.text, a.truncated) for a in ours] == [(a.ids, a.text, a.truncated) for a in theirs]
    assert {a.truncated for a in ours} == {True, False} and gap(model, prompts, theirs, 1.0) < 1e-4


def test_a_seed_gives_one_sample_in_any_company(actor, prompts):
    """Guards: a dream that changes with what else is in the batch, and copies inside a group."""
    alone = [lm.sample(actor, [prompts[0]], 20, 2.0, [seed])[0].ids for seed in (1, 2, 2**32 - 1)]
    company = [prompts[k] for k in (3, 0, 0, 5, 0)]
    together = lm.sample(actor, company, 20, 2.0, [1, 2, 1, 2, 2**32 - 1])
    assert [together[2].ids, together[1].ids, together[4].ids] == alone
    assert len({tuple(ids) for ids in alone}) == 3


def test_more_prompts_than_one_step_takes_are_answered_as_they_are_alone(actor, prompts):
    """Guards: an engine that dies of a seeded prompt that it read in two pieces (vLLM on a CPU), and rows
    that are mixed up."""
    asked, seeds = prompts * 8, list(range(len(prompts)))
    assert sum(map(len, asked)) > 2 * 4096
    together, alone = lm.sample(actor, asked, 4, 1.0, seeds * 8), lm.sample(actor, prompts, 4, 1.0, seeds)
    assert [sample.ids for sample in together] == [sample.ids for sample in alone] * 8


def test_an_unfinished_answer_is_truncated_and_a_finished_one_has_its_end_of_turn(actor, model, prompts):
    """Guards: an end of turn that is lost when it is the last token allowed."""
    whole = lm.sample(actor, prompts[:1], 40, 0.0, seed=0)[0]
    length = len(whole.ids)
    assert not whole.truncated and whole.ids[-1] == model.tokenizer.eos_token_id
    assert model.tokenizer.eos_token not in whole.text
    exact, short = (lm.sample(actor, prompts[:1], n, 0.0, seed=0)[0] for n in (length, length - 1))
    assert exact == whole and short.truncated and short.ids == whole.ids[:-1] and short.text == whole.text


def test_margins_are_differences_of_the_models_log_probs(actor, model, prompts):
    """Guards: a margin between likelier tokens than the two asked for, or with its sign turned."""
    yes, no = list(range(10, 10 + len(prompts))), list(range(400, 400 + len(prompts)))
    assert actor.margins(prompts, yes, no) == pytest.approx(model.margins(prompts, yes, no), abs=1e-4)


def test_the_trainers_random_states_and_environment_stay(actor, model, prompts):
    """Guards: ranks that draw alike after vLLM has seeded them, a resumed run that differs, a single process
    that takes itself for a rank."""
    before = states()
    lm.sample(actor, prompts, 8, 1.0, seed=3)
    actor.sync(distributed.full_tensors(model.model, torch.float32))
    assert states() == before and not actor.moved_random_states and "RANK" not in os.environ


def test_after_a_sync_answers_follow_the_new_weights_also_where_the_prompt_was_cached(actor, model, prompts):
    """Guards: a sampler that stays at the first weights, and keys and values of the old weights for a prompt
    that comes again."""
    asked = [prompt for prompt in prompts if len(prompt) > 128] * 2
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    lm.sample(actor, asked, 8, 1.0, seed=0)  # now they are cached
    actor.sync(distributed.full_tensors(changed.model, torch.float32))
    samples = lm.sample(actor, asked, 8, 1.0, seed=0)
    assert gap(model, asked, samples, 1.0) > 0.1, "the change was too small to tell"
    assert gap(changed, asked, samples, 1.0) < 1e-4
    actor.sync(distributed.full_tensors(model.model, torch.float32))
    assert gap(model, asked, lm.sample(actor, asked, 8, 1.0, seed=0), 1.0) < 1e-4


def test_a_sync_that_leaves_a_weight_out_is_an_error(actor, model):
    """Guards: a layer that keeps its old weights, of which vLLM only writes a line in a log."""
    named = list(distributed.full_tensors(model.model, torch.float32))
    with pytest.raises(ValueError, match="model.layers.2.mlp.down_proj.weight"):
        actor.sync(pair for pair in named if pair[0] != "model.layers.2.mlp.down_proj.weight")
    actor.sync(named)


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_two_ranks_sync_from_their_shards_and_leave_without_a_traceback(head):
    """Guards: an engine that waits for the other rank, half a tensor for a whole one, a tied head that stays
    the old embedding, and vLLM's finalizer on a group that is gone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
               "--master_port", str(engine.free_port()), "tests/two_ranks.py", head]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")).count("both ends met") == 2, done.stdout
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
