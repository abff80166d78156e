"""Claims about rivals/lookahead.py, in the counting web: Done on page 1 is success, and the models are
conftest's `Scripted`."""

import dataclasses
import math

import pytest
from conftest import CountingWorld, act, recorded, start
from helpers.dreams import kind, script
from helpers.runs import Web

import policy
from rivals import lookahead
from world_model import WorldModel

CONFIG = lookahead.Config(judge_tokens=40, candidates=3, reasons=2, ahead=1)


def said(reward_on_page: int, order):
    """What all models write: an agent that writes `order` in turn, a world model that counts and a judge that
    says YES to Done on page `reward_on_page`."""
    turns = iter(order)

    def judged(prompt):
        done = "where [2] is Done" in prompt and f"Count {reward_on_page}" in prompt
        return f"so.\nCOMPLETED: {'YES' if done else 'NO'}"

    return script(judge=judged, agent=lambda prompt: act(next(turns)))


def turn_of(agent, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return lookahead.LookAhead(WorldModel(agent.lm, 60, 0.5), agent.lm, config)


def rolled(agent, turn, at, horizon=1, temperature=0.0):
    return policy.rollout(CountingWorld(), agent.lm, [start(at)], horizon, 60, temperature, 3, turn)[0]


def play(scripted, order, at=0, good=1, horizon=1, **changes):
    agent = scripted(said(good, order))
    turn = turn_of(agent, **changes)
    played = rolled(agent, turn, at, horizon)
    return [str(step.action) for step in played.steps], turn.counts, agent


@pytest.mark.parametrize("at, order, ahead, done, changed", [
    (1, "121", 1, "2", 1), (0, "121", 1, "1", 0),  # Done on page 0 is no success; a tie: the greedy action
    (0, "211", 1, "2", 0), (0, "2112", 2, "1", 1),  # More is right on page 0: Done follows, which H = 2 sees
    (1, "2ss", 2, "2", 0)])  # both dreams are over after their first action
def test_the_action_is_done_whose_dream_the_judge_likes_best(scripted, at, order, ahead, done, changed):
    """Guards: an argmin, scores of another candidate, an agent whose greedy action is always done, a horizon
    that is counted without the candidate, dreams in which the agent does not act, or must when all are over.
    """
    found, counts, _ = play(scripted, ["stop [x]" if n == "s" else f"click [{n}]" for n in order], at,
                            ahead=ahead)
    assert found == [f"click [{done}]"] and counts == {"turns": 1, "dreamed": 1, "changed": changed}


def test_equal_candidates_are_not_dreamed_and_a_text_that_is_no_action_is_none(scripted):
    """Guards against the price of dreams that change nothing, and a candidate that nobody can do."""
    done, counts, agent = play(scripted, ["click [1]"] * 3)
    assert done == ["click [1]"] and counts["dreamed"] == 0
    assert "world" not in map(kind, agent.prompts)
    done, counts, _ = play(scripted, ["(nothing", "click [2]", "click [2]"])
    assert done == ["click [2]"] and counts["dreamed"] == 0


def test_a_score_is_the_mean_of_p_yes_over_the_sampled_reasons(scripted):
    """Guards: greedy reasons that are the same n times, a sum, log-odds in the place of a chance. conftest's
    margin is log .9 less log .05, about: -.1 + 3 = 2.9 for what is written."""
    agent = scripted(said(1, ["click [1]", "click [2]", "click [2]"]))
    turn = turn_of(agent)
    scores, whole = [], turn.scores
    turn.scores = lambda *given: scores.extend(whole(*given)) or scores
    rolled(agent, turn, 1)
    yes = 1 / (1 + math.exp(-2.9))
    assert scores == pytest.approx([1 - yes, yes])
    judged = [prompt for prompt in agent.prompts if kind(prompt) == "judge"]
    assert len(judged) == 2 * CONFIG.reasons
    # Drawn at a temperature: two candidates, two pages, and each reason. The greedy action is not.
    assert len(set(agent.seeds)) == len(agent.seeds) == 2 + 2 + len(judged)


def test_a_reward_model_without_reasons_is_asked_once(scripted):
    """Guards against n equal answers, and against reasons of no token."""
    agent = scripted(said(1, ["click [1]", "click [2]", "click [2]"]))
    turn = turn_of(agent)
    turn.config = dataclasses.replace(CONFIG, judge_tokens=0)
    asked, scores = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookahead.judge.Judge, "verdicts", lambda self, cases: asked.append(cases) or [
            lookahead.judge.Verdict(True, 0.0, "")] * len(cases))
        scores = turn.scores([policy.TokenTrajectory(start(), [step], final_page=step.page)
                              for step in recorded(["click [1]", "click [2]"]).steps], [1, 2])
    assert [len(cases) for cases in asked] == [2] and scores == [0.5, 0.5]


def test_what_a_row_dreams_does_not_depend_on_the_rows_beside_it(scripted):
    """Guards: a try that changes with --pages, and a second attempt at it that is another one. Each row has
    two candidates: both are dreamed for two steps, and judged."""
    def seeds_of(*seeds):
        rows = len(seeds)
        order = iter(["click [1]"] * rows + ["click [2]"] * (2 * rows) + ["click [1]"] * (2 * rows))
        agent = scripted(script(judge=lambda _: "so.\nCOMPLETED: NO", agent=lambda _: act(next(order))))
        policy.rollout(CountingWorld(), agent.lm, [start(0)] * rows, 1, 60, 0.7, seeds,
                       turn_of(agent, ahead=2))
        return agent.seeds

    alone, beside = seeds_of(51), seeds_of(50, 51)
    assert len(alone) == len(set(alone)) and len(beside) == 2 * len(alone)
    assert set(alone) < set(beside)


def test_a_dream_that_nobody_could_imagine_scores_nothing(scripted):
    """Guards against an unreadable page that is judged as it was before."""
    write = said(1, ["click [1]", "click [2]", "click [1]"])
    agent = scripted(lambda prompt: "?" if kind(prompt) == "world" and "\nACTION: click [2]" in prompt
                     else write(prompt))
    played = rolled(agent, turn_of(agent), 1)
    assert [str(step.action) for step in played.steps] == ["click [1]"]


def test_with_one_candidate_it_is_the_agent_of_evaluate(scripted):
    """Guards against other prompts, seeds or records than policy.act's."""
    plain = scripted(said(1, ["click [1]", "click [2]"]))
    (wanted,) = policy.rollout(CountingWorld(), plain.lm, [start()], 5, 60, 0.7, 3)
    agent = scripted(said(1, ["click [1]", "click [2]"]))
    turn = turn_of(agent, candidates=1)
    found = rolled(agent, turn, 0, 5, 0.7)
    assert found == wanted and agent.seeds == plain.seeds


@pytest.mark.parametrize("wrong", [{"ahead": 0}, {"reasons": 0}, {"table": ("x",)},
                                   {"agent_url": "http://x/v1", "agent_model": "m"}, {"sampler": "vllm"}])
def test_settings_that_cannot_be_are_refused(wrong):
    """Guards against a flag of evaluate.py that would be ignored."""
    with pytest.raises(ValueError, match="give|leave out"):
        dataclasses.replace(CONFIG, **wrong)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(lookahead, "Browser", Web)
    monkeypatch.setattr(lookahead.evaluate, "tasks_of", lambda tasks: ("count",))


def test_an_agent_behind_a_url_looks_ahead_too(taught, counting, serving):
    """Guards against candidates that need token ids or log-probs. The server's greedy answer is More, any
    other is Done, so each turn has two candidates, and each is dreamed with the folders' models."""
    server = serving(lambda body: act(f"click [{1 if not body['temperature'] else 2}]"))
    result = lookahead.run(dataclasses.replace(
        CONFIG, agent_url=server.url, agent_model="m", horizon=1, world_model=str(taught),
        judge_checkpoint=str(taught), seeds="1000000:2", context=256, max_new_tokens=16,
        world_model_tokens=48, judge_tokens=16))
    assert result["n"] == result["turns"] == result["dreamed"] == 2
    asked = sorted(body["temperature"] for body in server.asked)
    assert asked == [0.0] * 2 + [1.0] * 4, "three candidates a turn, one of them greedy"
