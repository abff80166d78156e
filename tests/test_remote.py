"""Claims about dreams whose world model and judge are behind servers (remote.Remote): each goes on by itself,
and what is dreamed does not depend on when an answer comes. Real threads and real HTTP; the server answers as
vLLM does, from a script or from a model of two layers."""
import dataclasses
import itertools
import json
import random
import threading

import pytest
import torch
from conftest import act, check_sampler, counting_page
from helpers.dreams import CONFIG, SLOW, Here, count, counted, dreams, script, written
from helpers.processes import wait_for

import lm
import recipe
from node import server
from remote import EngineError, Remote

PATIENT = 60  # seconds until a server that keeps an answer back gives it all the same, and the test fails


def completions(sample, margin=lambda body: 1.0):
    """The answers of vLLM's completions: `sample(body)` gives a lm.Sample, or (status, bytes)."""
    def answer(body):
        if "logprob_token_ids" in body:
            yes, no = body["logprob_token_ids"]
            said = {"logprobs": {"top_logprobs": [{f"token_id:{yes}": margin(body), f"token_id:{no}": 0.0}]}}
        elif isinstance(drawn := sample(body), tuple):
            return drawn
        else:
            said = {"token_ids": drawn.ids, "logprobs": {"token_logprobs": drawn.logps}}
        return 200, json.dumps({"choices": [said]}).encode()
    return answer


def of(model):
    """The answers of a server that draws from `model`, with the seeds that it is sent."""
    lock = threading.Lock()

    def sample(body):
        with lock:
            ids, seeds = [body["prompt"]], [body["seed"]]
            return model.generate(ids, body["max_tokens"], body["temperature"], seeds)[0]

    def margin(body):
        with lock:
            return model.margins([body["prompt"]], *([token] for token in body["logprob_token_ids"]))[0]

    return completions(sample, margin)


@pytest.fixture
def scripts(serving, taught):
    """make(write, **script): an agent of this process and a Remote, whose server asks `write(text)`, or the
    scripts of helpers/dreams.py."""
    tokenizer = lm.load_tokenizer(taught)

    def make(write=None, concurrency: int = 64, **scripts):
        here = Here(None, tokenizer, 4096, torch.float32)
        here.write = scripts.pop("agent", lambda prompt: act("click [1]"))
        write = write or script(**scripts)

        def sample(body):
            said = write(tokenizer.decode(body["prompt"]))
            return said if isinstance(said, tuple) else written(here, said)

        server = serving(completions(sample))
        remote = Remote([server.url], taught, concurrency=concurrency, timeout=2 * PATIENT)
        return here, remote, server
    return make


class Gate:
    """Keeps an answer back until it is opened."""

    def __init__(self):
        self.opened, self.late, self.open = threading.Event(), False, None
        self.open = self.opened.set

    def wait(self):
        self.late = not self.opened.wait(PATIENT)


# ---- who waits for whom ------------------------------------------------------------------------------------

def test_a_dream_makes_all_its_turns_while_the_answer_of_another_is_awaited(scripts):
    """Guards: a turn that waits for the longest answer of all dreams. The slow row's first answer comes only
    after the verdict on the fast row, which ends in its fourth turn."""
    gate = Gate()

    def world(prompt):
        if count(prompt) == SLOW:
            gate.wait()
        return counted(prompt)

    def judged(prompt):
        gate.open()
        return "so.\nCOMPLETED: YES"

    agent = lambda prompt: act("stop [x]" if count(prompt) in (3, SLOW + 2) else "click [1]")
    here, remote, server = scripts(world=world, judge=judged, agent=agent)
    slow, fast = dreams(here, remote, remote, [SLOW, 0])
    assert not gate.late, "the fast dream waited for the slow one"
    assert (len(fast.steps), len(slow.steps)) == (4, 3) and fast.reward == slow.reward == 1
    assert fast.final_page == counting_page(3) and slow.final_page == counting_page(SLOW + 2)


# ---- nothing depends on when an answer comes ---------------------------------------------------------------

@pytest.fixture(scope="module")
def model(taught):
    return dataclasses.replace(lm.load(taught, context=1024), compute=torch.float32)


def outline(trajectories):
    """All of the trajectories but log-probabilities, which rounding moves; and those."""
    exact = [dataclasses.replace(t, logps=[], verdict=t.verdict and dataclasses.replace(t.verdict, margin=0))
             for t in trajectories]
    return exact, [[torch.tensor(turn) for turn in t.logps] for t in trajectories]


def test_servers_keep_what_a_sampler_promises(serving, taught, model):
    """Guards: answers of servers that policy.py and judge.py cannot use as they use a model's of the
    process."""
    check_sampler(Remote([serving(of(model)).url], taught))


@pytest.mark.parametrize("order, judging", [(0, "servers"), (1, "servers"), (2, "this process")])
def test_dreams_are_the_same_whenever_their_answers_come(serving, taught, model, order, judging):
    """Guards: answers of another row, turn or try; draws, drops or verdicts that move with the timing; an end
    judged with another page. The servers draw from the same weights, with the seeds that they are sent, and
    answer after random pauses. The agent, and in one case the judge, belong to the main thread."""
    rng = random.Random(order)
    server = serving(of(model), lambda: rng.random() ** 4 / 5)
    remote = Remote([server.url], taught)
    agent = Here(lm.load(taught).model, model.tokenizer, 1024, torch.float32)
    pages = [0, 1, 0, 2, 0, 98, 0, 1, 0, 0, 1, 0, 0, 2, 98, 0]  # page 98 it was never taught
    config = dataclasses.replace(CONFIG, horizon=3)
    judge = remote if judging == "servers" else agent
    there = dreams(agent, remote, judge, pages, config, temperature=1.0)
    here = dreams(agent, agent, agent, pages, config, temperature=1.0)
    drawn = [(body["temperature"], body["prompt"], body.get("seed")) for body in server.asked]
    drawn, draws = ([draw for draw in all_of_them if draw[0] == 1.0] for all_of_them in (drawn, agent.asked))
    assert sorted(drawn) == sorted(draws) and drawn, "the world model's draws"
    answered = [answer for t in here for answer in t.predictions if answer is not None and not answer.error]
    (there, there_logps), (here, here_logps) = outline(there), outline(here)
    assert there == here
    torch.testing.assert_close(there_logps, here_logps)
    ends = {(t.reward, t.terminated, t.truncated, t.dropped[:11]) for t in here}
    assert len(ends) >= 4 and len({len(t.steps) for t in here}) > 2 and len(draws) > len(answered), (
        "it shows little")


# ---- errors ------------------------------------------------------------------------------------------------

def left() -> list[threading.Thread]:
    """The threads of dreams that do not end."""
    threads = [thread for thread in threading.enumerate() if thread.name == "dream"]
    for thread in threads:
        thread.join(PATIENT / 4)
    return [thread for thread in threads if thread.is_alive()]


def test_the_first_error_ends_the_batch_and_all_its_threads(scripts):
    """Guards: a rank that goes on for half an hour when its run has failed; an error that says "given up" and
    not why. Page 1 is refused; page 2's server is out of order, and page SLOW's answer is under way: it ends,
    and nothing more is asked."""
    gate, tried, slow = Gate(), threading.Event(), threading.Event()

    def write(prompt):
        if count(prompt) == 1:
            assert tried.wait(PATIENT) and slow.wait(PATIENT)
            return 400, b"this request is wrong"
        if count(prompt) == 2:
            tried.set()
            return 503, b"out of order"
        slow.set()
        gate.wait()
        return "nonsense"  # which would be asked for once more

    here, remote, server = scripts(write)
    with pytest.raises(EngineError, match="refuses the request .*this request is wrong"):
        dreams(here, remote, remote, [SLOW, 2, 1])
    asked = len(server.asked)
    gate.open()
    assert left() == [] and not gate.late
    assert len(server.asked) == asked == 3


@pytest.fixture
def started(monkeypatch, tmp_path):
    """started(start, ready): a Server without a process, whose waits are short. `start` is given how often it
    was called before."""
    def make(start=lambda n: None, ready=lambda: True):
        def begin(self):
            start(next(begun))
            self.starts += 1

        begun = itertools.count()
        for name, value in {"WATCH": 1e-3, "HUNG": 3, "PAUSE": 1e-3}.items():
            monkeypatch.setattr(server, name, value)
        monkeypatch.setattr(server, "check_installed", lambda: None)
        monkeypatch.setattr(server.Server, "_start", begin)
        monkeypatch.setattr(server.Server, "_tail", lambda self: "the end of its log")
        monkeypatch.setattr(server.Server, "alive", lambda self: True)
        monkeypatch.setattr(server.Server, "ready", lambda self: ready())
        made.append(server.Server("m", 64, recipe.ServerConfig(), tmp_path / "log"))
        return made[-1]

    made = []
    yield make
    for one in made:
        one.stop()


def test_a_server_whose_process_cannot_be_made_for_a_moment_is_tried_again(started):
    """Guards: OSError in the thread that watches a server: it ends, and all wait for half an hour."""
    tried = []

    def start(n):
        tried.append(n)
        if n == 1:
            raise OSError(12, "Cannot allocate memory")

    one = started(start)
    one.restart(one.starts)
    assert (len(tried), one.starts, one.error) == (3, 2, None)


def test_a_server_that_lives_and_answers_nothing_is_started_again_and_not_for_ever(started):
    """Guards: a hung server that only a request of rank 0's own would find, while rank 0 waits for the others
    in a collective. One answer in three is no hang, and restarts are counted."""
    asked = []
    slow = started(ready=lambda: asked.append(1) or len(asked) % 3 == 0)
    wait_for(lambda: len(asked) > 20, 20)
    assert slow.starts == 1
    hung = started(ready=lambda: False)
    wait_for(lambda: hung.error, 20)
    assert hung.starts == 4 and "ended 4 times, and is not started again" in str(hung.error)


