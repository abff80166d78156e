"""What several test files share: a random language model, a model with a known distribution, an agent that
writes what it is told, a web whose pages count, and a server over HTTP. Everything is float32 on
one thread, so that equal means equal."""
import contextlib
import gzip
import json
import os
import tempfile

import finetune

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import servers
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import data
import judge
import lm
import policy
import world_model
from data import Action, Obs, Start, Step, Trajectory, parse_action

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = ["sites"]  # applications with verifiers: read by test_infinity.py, no tests themselves
torch.set_num_threads(1)
# The same examples on every machine.
settings.register_profile("models", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("models")  # a module that loads another does so before its own tests


# ---- models ------------------------------------------------------------------------------------------------

TURN = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
# Without the system message, which would be most of what these small models read.
TEMPLATE = ("{% for message in messages %}{% if message['role'] != 'system' %}"
            "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")

VERDICTS = ("COMPLETED: YES", "COMPLETED: NO", "**YES", "**NO")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and what a few recorded pages and prompts have often: lossless on every text. A digit is a
    token."""
    with gzip.open(ROOT / "recordings/small.jsonl.gz", "rt") as rows:
        pages = [page for row in islice(rows, 60) for page in json.loads(row)["pages"]]
    asked = [(counting_page(0), GOAL, act("click [1]"), "So.\nno change\nover: yes", *VERDICTS)] * 50
    asked += [[messages[1]["content"] for messages in (
        policy.messages(GOAL, "", "", ()), world_model.messages("", "", "", Action("stop")),
        judge.messages(GOAL, (), "", ""))]] * 50
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator([*pages, *(text for texts in asked for text in texts)], trainers.BpeTrainer(
        vocab_size=600, special_tokens=TURN, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=TURN[0], eos_token=TURN[3], additional_special_tokens=TURN[1:3],
        clean_up_tokenization_spaces=False, model_max_length=4096)
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


def tiny_lm(tokenizer, context: int = 512, seed: int = 0) -> lm.LM:
    """An untrained Llama of two layers with heads of 32. Its weights are large, so that its output depends on
    all of its input."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, intermediate_size=160, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.15, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="trie")  # as lm.load makes it
    return lm.LM(net.eval(), tokenizer, context, torch.float32)


_KEPT = tempfile.TemporaryDirectory()  # until this process ends


def base_folder() -> Path:
    """The folder of a random model, for what reads one by its name."""
    folder = Path(_KEPT.name) / "base"
    if not folder.exists():
        lm.save(tiny_lm(build_tokenizer()), folder)
    return folder


@pytest.fixture
def model(tokenizer):
    """Fresh for each test: tests train it."""
    return tiny_lm(tokenizer)


class Bigram:
    """A causal language model of which everything is known: P(next | last) = softmax(table[last]). Token 0 is
    padding, token 1 ends a turn."""

    def __init__(self, table):
        self.table = torch.tensor(table, dtype=torch.float32)  # (V, V)
        self.device, self.config = torch.device("cpu"), SimpleNamespace()
        self.lm_head = SimpleNamespace(weight=self.table.T)

    def model(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=torch.eye(len(self.table))[input_ids])  # (B, T, V)


def bigram(table, context: int = 64) -> lm.LM:
    digits = SimpleNamespace(pad_token_id=0, eos_token_id=1, decode=lambda ids: " ".join(map(str, ids)))
    return lm.LM(Bigram(table), digits, context, torch.float32)


class Scripted:
    """Stands in for every language model. lm.sample writes what `write(prompt text)` returns (None: an answer
    that is cut off), and LM.margins finds exactly that text likely.

    `prompts` are the texts that were asked, in order. `calls` (their sizes) and `models` belong to the calls
    of lm.sample that ask anything. `seeds` are those of the rows that draw (greedy rows do not), over all
    calls.
    """

    def __init__(self, monkeypatch, tokenizer, write, context: int = 4096):
        self.lm, self.write = lm.LM(None, tokenizer, context, torch.float32), write
        self.prompts, self.calls, self.seeds, self.models = [], [], [], []
        monkeypatch.setattr(lm.LM, "margins", self.margins)
        monkeypatch.setattr(lm, "sample", self.sample)

    def sample(self, model, prompts, max_new_tokens, temperature, seed):
        seeds = lm.row_seeds(seed, len(prompts))
        if not prompts:
            return []
        self.calls.append(len(prompts))
        self.seeds += seeds if temperature else []
        self.models.append(model)
        samples = []
        for ids in prompts:
            assert len(ids) + max_new_tokens <= model.context, "lm.sample would have raised"
            self.prompts.append(model.tokenizer.decode(ids))
            text = self.write(self.prompts[-1])
            if text is None:
                text, cut = "and so on and", True
                written = model.template.completion_ids(text)[:-1]
            else:
                written, cut = model.template.completion_ids(text), False
            samples.append(lm.Sample(written, [-1.0] * len(written), text, cut))
        return samples

    def margins(self, prompts, yes, no):
        """The next token of what the script writes has log-probability -0.1, any other -3."""
        found = []
        for ids, a, b in zip(prompts, yes, no):
            prompt, mark, begun = self.lm.tokenizer.decode(ids).rpartition("<|assistant|>")
            text = self.write(prompt + mark)
            assert text.startswith(begun), "asked after a text that was never written"
            written = self.lm.template.completion_ids(text)
            likely = written[len(self.lm.tokenizer(begun, add_special_tokens=False).input_ids)]
            found.append((-0.1 if a == likely else -3.0) - (-0.1 if b == likely else -3.0))
        return found


@pytest.fixture
def scripted(monkeypatch, tokenizer):
    return lambda write, **more: Scripted(monkeypatch, tokenizer, write, **more)


def act(text: str) -> str:
    """What an agent writes to do `text`."""
    return f"Let's think step-by-step. So. In summary, the next action I will perform is ```{text}```"


# ---- servers -----------------------------------------------------------------------------------------------

@pytest.fixture
def serving():
    """helpers.servers.model(answer, pause), until the end of the test."""
    with contextlib.ExitStack() as there:
        yield lambda *what, **more: there.enter_context(servers.model(*what, **more))


# ---- a web that counts -------------------------------------------------------------------------------------

GOAL = "Press More, then Done."


def counting_page(n: int) -> str:
    return (f"RootWebArea 'Count {n}', focused, url='http://count/{n}'\n"
            "\t[1] button 'More', clickable\n\t[2] button 'Done', clickable")


def start(n: int = 0, task: str = "count", seed: int = 0, previous: tuple = (), goal: str = GOAL) -> Start:
    return Start(task, seed, (), goal, f"http://count/{n}", counting_page(n), tuple(previous))


class CountingWorld:
    """policy.World over pages that count clicks on [1]. [2] ends with reward 1, and so does page
    `end`. At page `cut` the world truncates and (wrongly) pays 1, as where a browser's page hung. `taken`
    records the actions of every step as text, `sizes` the pages of every reset, `begun` how many trajectories
    began between the others' actions."""

    def __init__(self, end: int = 10**9, cut: int = 10**9):
        self.end, self.cut, self.taken, self.resets, self.sizes, self.begun = end, cut, [], 0, [], 0

    def reset(self, starts):
        self.starts, self.resets, self.failures = list(starts), self.resets + 1, [""] * len(starts)
        self.sizes.append(len(starts))
        self.n = [int(s.url.rpartition("/")[2] or 0) for s in starts]  # a real start has no page yet
        self.over = [False] * len(starts)
        return [self._see(k) for k in range(len(starts))]

    def step(self, actions):
        assert len(actions) == len(self.n), f"{len(actions)} actions for {len(self.n)} pages"
        assert not any(isinstance(action, Action) and over for action, over in zip(actions, self.over)), (
            "a step after the end")
        self.taken.append([action and (str(action) if isinstance(action, Action) else action.task)
                           for action in actions])
        rows = [self._begin(k, action) if isinstance(action, Start) else self._act(k, action)
                for k, action in enumerate(actions)]
        return tuple(map(list, zip(*rows))) if rows else ([], [], [], [])

    def _begin(self, k, start):
        self.starts[k], self.failures[k], self.over[k] = start, "", False
        self.n[k] = int(start.url.rpartition("/")[2] or 0)
        self.begun += 1
        return self._see(k), 0.0, False, False

    def _act(self, k, action):
        """(what is seen, reward, terminated, truncated) of page k."""
        if action is None:
            return self._see(k), 0.0, False, False
        if action.bid and action.bid not in ("1", "2"):
            return self._see(k, f"{action}: there is no [{action.bid}] on the page"), 0.0, False, False
        self.n[k] += action.bid == "1"
        ended = action.name == "stop" or action.bid == "2" or self.n[k] == self.end
        cut = self.n[k] == self.cut
        self.over[k] = ended or cut
        self.failures[k] = f"{action}: the page hung for 10 s" if cut else ""
        return self._see(k), float(cut or ended and action.name != "stop"), ended, cut

    def _see(self, k, error=""):
        return Obs(self.starts[k].goal or GOAL, f"http://count/{self.n[k]}", counting_page(self.n[k]), error)


def recorded(texts, seed: int = 0, task: str = "count", reward: int = 1, goal: str = GOAL) -> Trajectory:
    """A trajectory of the counting web, from its actions as text. It ends by itself when the last of them is
    on [2] or is stop."""
    n, steps, previous = 0, [], ()
    for text in texts:
        action, page = parse_action(text), counting_page(n)
        steps.append(Step(data.root_url(page), page, "So.", action, previous))
        previous += (data.describe(action, page),)
        n += action.bid == "1"
    ended = texts[-1].startswith("stop") or texts[-1] == "click [2]"
    return Trajectory(task, seed, goal, steps, counting_page(n), reward, ended, not ended, f"here:{seed}",
                      tuple(texts))


def record(file, trajectories) -> None:
    """Writes trajectories as worlds/explore.py; whole, as two ranks may write and read the same file."""
    rows = [{"task": t.task, "seed": t.seed, "goal": t.goal,
             "pages": [step.page for step in t.steps] + [t.final_page], "actions": list(t.real_actions),
             "errors": [""] * len(t.steps), "reward": t.reward, "terminated": t.terminated,
             "truncated": t.truncated} for t in trajectories]
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.rename(file)


@pytest.fixture(scope="session")
def taught(tokenizer, tmp_path_factory):
    """A folder with a model that lives in the counting web, as policy, world model and judge at once.

    It presses More or Done (even chances), and knows that Done on page 1 is success. finetune.fit teaches it
    in a few seconds.
    """
    model, pairs = tiny_lm(tokenizer), []

    def teach(messages, text):
        pairs.append((model.template.prompt_ids(messages), model.template.completion_ids(text)))

    for n in range(3):
        page, url = counting_page(n), f"http://count/{n}"
        past = ("click [1] where [1] is More",) * n
        for button in ("click [1]", "click [2]"):
            teach(policy.messages(GOAL, url, page, past), f"```{button}```")
            change = f"name /0 'Count {n + 1}'\nset /0 url='http://count/{n + 1}'\nover: no"
            if button == "click [2]":
                change = "no change\nover: yes"
            last = past[-1] if past else ""
            teach(world_model.messages(page, url, last, parse_action(button)), f"so.\n{change}")
        case = judge.messages(GOAL, (*past, "click [2] where [2] is Done"), page, page)
        teach(case, f"so.\nCOMPLETED: {'YES' if n == 1 else 'NO'}")
    finetune.fit(model, pairs, finetune.FineTune(epochs=60, lr=3e-3, tokens=800))
    folder = tmp_path_factory.mktemp("taught") / "model"
    lm.save(model, folder)
    return folder


# ---- what is promised --------------------------------------------------------------------------------------

def check_protocol(world, starts, harmless: str) -> None:
    """What every world promises to policy.rollout (policy.World), browser or dream. `harmless` is an action
    (text) that ends nothing.

    Guards: a world that returns tuples of other lengths, pays an idling page, ends twice, goes on after the
    end, raises at what an agent does wrong, or says nothing of failures.
    """
    assert len(starts) == 3
    first = seen = world.reset(starts)
    assert [type(obs) for obs in first] == [Obs] * 3
    assert all(obs.goal and obs.page and not obs.error for obs in first)
    assert all(obs.url == data.root_url(obs.page) for obs in first)
    assert list(world.failures) == [""] * 3, "nothing has failed yet"
    go, stop = parse_action(harmless), Action("stop", text="x")

    def step(*actions):
        nonlocal seen
        before, (seen, rewards, terminated, truncated) = seen, world.step(list(actions))
        assert len(seen) == len(rewards) == len(terminated) == len(truncated) == 3
        assert all(type(reward) is float and reward in (0.0, 1.0) for reward in rewards)
        assert all(type(flag) is bool for flag in terminated + truncated)
        assert not any(ended and cut for ended, cut in zip(terminated, truncated)), "both ended and cut off"
        assert list(world.failures) == [""] * 3, "an agent's doing is no failure"
        for k, action in enumerate(actions):
            assert seen[k].goal == before[k].goal and seen[k].url == data.root_url(seen[k].page)
            if action is None:
                assert seen[k].page == before[k].page, "an idling page moved"
                assert rewards[k] == 0.0, "an idling page was paid"
                assert not terminated[k] and not truncated[k], "an idling page ended"
        return seen, rewards, terminated, truncated

    assert step(None, None, None)[0] == first
    assert step(go, None, go)[2:] == ([False] * 3, [False] * 3)
    for name in ("hover", "click"):  # nobody is there
        after, _, terminated, truncated = step(None, Action(name, "999"), None)
        assert after[1] == replace(first[1], error=f"{name} [999]: there is no [999] on the page")
        assert not terminated[1] and not truncated[1]
    assert step(None, None, None)[0][1].error == "", "an error is about the last action only"
    assert step(stop, None, None)[2:] == ([True, False, False], [False] * 3)
    with pytest.raises(AssertionError, match="after the end"):
        world.step([go, None, None])
    with pytest.raises(AssertionError, match="2 actions for 3 pages"):
        world.step([None, None])
    step(None, go, stop)  # the others go on
    seen = world.reset(starts)
    assert [obs.page for obs in seen] == [obs.page for obs in first], "a second reset is as the first"
    assert step(go, None, go)[2:] == ([False] * 3, [False] * 3), "the trajectories before are over"
    assert world.reset([]) == [] and list(world.failures) == [] and world.step([]) == ([], [], [], [])


def check_sampler(model) -> None:
    """What every sampler promises (policy.Sampler).

    Guards: answers in another order than the prompts', draws that depend on who is beside them, log-probs
    that are not the tokens', an end of turn that is lost or counted as a cut.
    """
    template = model.template
    a, b = (template.prompt_ids(policy.messages(GOAL, f"http://count/{n}", counting_page(n), ()))
            for n in (0, 2))
    end = template.completion_ids("x")[-1]
    assert len(max(a, b)) + 8 <= model.context and model.concurrency >= 1
    for temperature in (0.0, 1.0):
        samples = model.generate([a, a, b], 8, temperature, [5, 5, 6])
        assert len(samples) == 3
        for sample in samples:
            assert 0 < len(sample.ids) == len(sample.logps) <= 8 and max(sample.logps) <= 0
            assert sample.truncated == (end not in sample.ids) and sample.ids.count(end) <= 1
            assert len(sample.ids) == 8 or sample.ids[-1] == end
            assert template.read(sample) == sample.text
        assert samples[0] == samples[1], "one prompt and one seed"
        (alone,) = model.generate([b], 8, temperature, [6])
        assert alone.ids == samples[2].ids and alone.logps == pytest.approx(samples[2].logps, abs=1e-4)
        (other,) = model.generate([a], 8, temperature, [7])
        assert other.ids == samples[0].ids or temperature, "greedy, and drawn all the same"
    yes, no = (template.completion_ids(word)[0] for word in ("YES", "NO"))
    there, back, other = model.margins([a, a, b], [yes, no, yes], [no, yes, no])
    assert there == pytest.approx(-back, abs=1e-5) and there != pytest.approx(other, abs=1e-4)
    assert model.generate([], 8, 1.0, []) == [] == model.margins([], [], [])


def check_world_model(model, pages, actions) -> None:
    """What dream.Dream asks of a world model: a Prediction of each action, in order, and no exception. The
    first action is possible on the first page, and none names [999].

    Guards: answers of another row, an action on nothing that changes the page, answers without a reason why
    there is none.
    """
    pages, actions = [*pages, pages[0]], [*actions, Action("click", "999")]
    answers = model.predict(pages, actions, [""] * len(pages), range(len(pages)))
    assert [type(answer) for answer in answers] == [world_model.Prediction] * len(pages)
    for page, answer in zip(pages, answers):
        assert answer.page == page or not (answer.error or answer.unknown), "no answer, and another page"
        assert type(answer.over) is bool and not (answer.over and (answer.error or answer.unknown))
        assert not answer.unknown or answer.unknown.partition(": ")[2], "not 'what: more'"
    assert not answers[0].error and not answers[0].unknown and answers[-1] == world_model.Prediction(
        pages[0], error="click [999]: there is no [999] on the page")
    again = model.predict(pages, actions, [""] * len(pages), range(len(pages)))
    assert again == answers, "something is drawn without its seed"
    assert model.predict([], [], [], []) == []


def check_judge(model, good: judge.Case, bad: judge.Case) -> None:
    """What dream.Dream asks of a judge: a Verdict on each case, in order, and no exception.

    Guards: verdicts of another row, and verdicts that are drawn.
    """
    verdicts = model.verdicts([good, good, bad])
    assert [type(verdict) for verdict in verdicts] == [judge.Verdict] * 3
    assert [verdict.success for verdict in verdicts] == [True, True, False] and verdicts[0] == verdicts[1]
    assert not any(verdict.unknown for verdict in verdicts)
    assert model.verdicts([bad])[0].success is False and model.verdicts([]) == []
