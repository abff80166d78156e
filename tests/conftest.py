"""What several test files share: a random language model, a sampler that writes what it is told, an
environment whose pages count, a server over HTTP. All is float32 on one thread, so that equal means equal."""
import asyncio
import contextlib
import functools
import gzip
import json
import os
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import servers
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import data
import judge
import lm
import policy
import sft
import world_model
from config import SFT, Train
from data import Action, Obs, Start, Step, Trajectory, parse_action

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = ["sites"]  # applications with verifiers: read by test_envs.py, no tests themselves
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
# The same examples on every machine.
settings.register_profile("tests", deadline=None, max_examples=50, derandomize=True,
                          suppress_health_check=list(HealthCheck))
settings.load_profile("tests")


# ---- models ------------------------------------------------------------------------------------------------

TURN = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
# Without the system message, which would be most of what these small models read.
TEMPLATE = ("{% for message in messages %}{% if message['role'] != 'system' %}"
            "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and what a few recorded pages and prompts have often. A digit is a token. It loses nothing."""
    with gzip.open(ROOT / "recordings/small.jsonl.gz", "rt") as rows:
        texts = [page for row in islice(rows, 60) for page in json.loads(row)["pages"]]
    prompts = (policy.messages(GOAL, "", "", ()), world_model.messages("", "", "", Action("stop")),
               judge.messages(GOAL, (), "", ""))
    texts += 50 * [counting_page(0), GOAL, act("click [1]"), "So.\nno change\nover: yes", "COMPLETED: YES",
                   "COMPLETED: NO", "**YES", "**NO", *(messages[1]["content"] for messages in prompts)]
    inner, as_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_bytes])
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=600, special_tokens=TURN, initial_alphabet=sorted(as_bytes.alphabet()),
        show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=TURN[0], eos_token=TURN[3], additional_special_tokens=TURN[1:3],
        clean_up_tokenization_spaces=False, model_max_length=4096, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


def tiny_lm(tokenizer) -> lm.LM:
    """An untrained Llama, four query heads to two keys. Its weights are large, so that its output depends on
    all of its input."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=160, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.15, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="trie")  # as lm.load makes it
    return lm.LM(net.eval(), tokenizer, 512, torch.float32)


_KEPT = tempfile.TemporaryDirectory()  # until this process ends


@functools.cache
def base_folder() -> Path:
    """The folder of a random model, for what reads one by its name."""
    lm.save(tiny_lm(build_tokenizer()), folder := Path(_KEPT.name) / "base")
    return folder


@pytest.fixture
def model(tokenizer):
    """Fresh for each test: tests train it."""
    return tiny_lm(tokenizer)


class Scripted:
    """A policy.Sampler that writes what `write(prompt text)` returns (None: an answer that is cut off), and
    finds exactly that text likely. `seeds`: those of what was sampled (greedy is not)."""

    def __init__(self, tokenizer, write):
        self.tokenizer, self.template, self.context = tokenizer, lm.Template(tokenizer), 4096
        self.write, self.prompts, self.seeds = write, [], []

    async def generate(self, prompt, max_new_tokens, temperature, seed):
        assert len(prompt) + max_new_tokens <= self.context, "the caller has to look"
        self.prompts.append(self.tokenizer.decode(prompt))
        self.seeds += [seed] if temperature else []
        text = self.write(self.prompts[-1])
        await asyncio.sleep(0)
        ids = self.template.completion_ids(act("click [1]") if text is None else text)
        if text is None:
            ids.pop()  # the end of turn
        return lm.as_sample(self.tokenizer, ids, [-1.0] * len(ids))

    async def margin(self, prompt, yes, no):
        """2.9 for the next token of what the script writes."""
        asked, mark, prefix = self.tokenizer.decode(prompt).rpartition("<|assistant|>")
        text = self.write(asked + mark)
        assert text.startswith(prefix), "asked after a text that was never written"
        likely = self.template.completion_ids(text)[len(self.tokenizer.encode(prefix))]
        return 2.9 * ((yes == likely) - (no == likely))


@pytest.fixture
def scripted(tokenizer):
    return functools.partial(Scripted, tokenizer)


def run(coroutine):
    """The result of one coroutine."""
    return lm.together([coroutine])[0]


def act(text: str) -> str:
    """What an agent writes to do `text`."""
    return f"Let's think step-by-step. So. In summary, the next action I will perform is ```{text}```"


@pytest.fixture
def serving():
    """helpers.servers.model(answer, pause), until the end of the test."""
    with contextlib.ExitStack() as there:
        yield lambda *what, **how: there.enter_context(servers.model(*what, **how))


# ---- a web that counts -------------------------------------------------------------------------------------

GOAL = "Press More, then Done."
PRESSED_MORE = "click [1] where [1] is More"  # in words


def counting_page(n: int) -> str:
    return (f"RootWebArea 'Count {n}', focused, url='http://count/{n}'\n"
            "\t[1] button 'More', clickable\n\t[2] button 'Done', clickable")


def start(n: int = 0, task: str = "count", seed: int = 0, previous: tuple = (), goal: str = GOAL) -> Start:
    return Start(task, seed, (), goal, counting_page(n), tuple(previous))


class CountingEnv:
    """policy.Env over pages that count clicks on [1]. [2] ends with reward 1, and so does page `end`. Page
    `cut` fails, as where a browser's page hung."""

    def __init__(self, end: int = 10**9, cut: int = 10**9):
        self.end, self.cut, self.taken = end, cut, []

    async def reset(self, start):
        self.start, self.n, self.over = start, int(data.root_url(start.page)[13:] or 0), False
        return self._see()

    async def step(self, action):
        assert not self.over, "a step after the end"
        self.taken.append(str(action))
        if action.bid and action.bid not in ("1", "2"):
            return self._see(f"{action}: there is no [{action.bid}] on the page"), 0.0, False, False
        self.n += action.bid == "1"
        if self.n == self.cut:
            raise policy.Invalid(f"browser: failed: {action}: the page hung for 10 s")
        self.over = action.name == "stop" or action.bid == "2" or self.n == self.end
        return self._see(), float(self.over and action.name != "stop"), self.over, False

    def _see(self, error=""):
        return Obs(self.start.goal or GOAL, counting_page(self.n), error)


class CountingPages:
    """What train.py asks of environments (envs.Envs). `envs` are all that were opened."""

    def __init__(self, **how):
        self.how, self.envs = how, []

    @contextlib.asynccontextmanager
    async def __call__(self):
        self.envs.append(CountingEnv(**self.how))
        yield self.envs[-1]

    def dev_starts(self, seeds, learned):
        return [start(n % 3, seed=n) for n in data.seeds_to_look_at(seeds)]


def recorded(texts, seed: int = 0, task: str = "count", reward: int = 1, goal: str = GOAL) -> Trajectory:
    """A trajectory of the counting web, from its actions as text. It ends by itself when the last of them is
    on [2] or is stop."""
    n, steps, previous = 0, [], ()
    for text in texts:
        action, page = parse_action(text), counting_page(n)
        steps.append(Step(page, "So.", action, previous))
        previous += (data.describe(action, page),)
        n += action.bid == "1"
    ended = texts[-1].startswith("stop") or texts[-1] == "click [2]"
    return Trajectory(task, seed, goal, steps, counting_page(n), reward, ended, not ended, f"here:{seed}",
                      tuple(texts))


def record(file, trajectories) -> None:
    """Writes trajectories as envs/explore.py."""
    rows = [{"task": t.task, "seed": t.seed, "goal": t.goal, "reward": t.reward, "terminated": t.terminated,
             "truncated": t.truncated, "pages": [step.page for step in t.steps] + [t.final_page],
             "actions": t.real_actions, "errors": [""] * len(t.steps)} for t in trajectories]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def small(folder: Path, taught: Path, preset: Train | None = None, **changes) -> Train:
    """A run of seconds in the counting web, of a preset, or of four updates; writes what it begins from."""
    folder.mkdir(exist_ok=True)
    if not (file := folder / "recorded.jsonl").exists():
        record(file, [recorded(["click [1]", "click [2]"]), recorded(["click [2]"], 1, reward=0)])
    base = preset or Train(
        updates=4, groups=3, group_size=4, expert_fraction=0.25, minibatches=2, eps_low=0.03, eps_high=0.04,
        evaluate_every=2, evaluate_seeds="1000000:2", evaluate_horizon=3, checkpoint_every=2,
        sampler="transformers")
    return replace(base, **dict(
        policy=str(taught), world_model=str(taught), judge=str(taught) if preset else "",
        out=f"{folder}/agent", recorded=str(file), horizon=3, lr=2e-4, tokens=600, temperature=1.0,
        max_new_tokens=16, world_model_tokens=48, judge_tokens=16, context=256, world_model_context=256,
        judge_context=256, compute="float32") | changes)


def lines(config: Train, name: str = "metrics") -> list[dict]:
    """Of metrics.jsonl or dreams.jsonl, without what a clock measured."""
    rows = map(json.loads, Path(f"{config.out}.run/{name}.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def written(config: Train) -> bytes:
    """The weights that a run left."""
    return Path(config.out, "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def taught(tokenizer, tmp_path_factory):
    """A folder with a model that lives in the counting web, as policy, world model and judge at once. It
    presses More or Done (even chances), and knows that Done on page 1 is success."""
    chats = []
    for n in range(3):
        page, url, past = counting_page(n), f"http://count/{n}", (PRESSED_MORE,) * n
        counted = f"name /0 'Count {n + 1}'\nset /0 url='http://count/{n + 1}'\nover: no"
        for button, change in (("click [1]", counted), ("click [2]", "no change\nover: yes")):
            asked = world_model.messages(page, url, "".join(past[-1:]), parse_action(button))
            chats.append((policy.messages(GOAL, url, page, past), f"```{button}```"))
            chats.append((asked, f"so.\n{change}"))
        ending = judge.messages(GOAL, (*past, "click [2] where [2] is Done"), page, page)
        chats.append((ending, f"so.\nCOMPLETED: {'YES' if n == 1 else 'NO'}"))
    model, folder = tiny_lm(tokenizer), tmp_path_factory.mktemp("taught") / "model"
    words = model.template
    sft.fit(model, [[(words.prompt_ids(chat), words.completion_ids(text))] for chat, text in chats],
            SFT(epochs=60, lr=3e-3, tokens=800, microbatches=1))
    lm.save(model, folder)
    return folder


# ---- what is promised --------------------------------------------------------------------------------------

def check_env(env, start, harmless: str) -> None:
    """What every environment promises to policy.rollout (policy.Env), real or dreamed. `harmless` is an
    action (text) that ends nothing. Guards: an error that stays, an exception at what an agent does wrong."""
    async def promises():
        first = await env.reset(start)
        assert type(first) is Obs and first.goal and first.page and not first.error

        async def step(action, ends=False):
            obs, reward, *ended = await env.step(action)
            assert type(obs) is Obs and obs.goal == first.goal
            assert type(reward) is float and reward in (0.0, 1.0) and ended == [ends, False]
            return obs

        before = await step(parse_action(harmless))
        obs = await step(Action("click", "999"))
        assert obs.error == "click [999]: there is no [999] on the page" and obs.page == before.page
        assert (await step(parse_action(harmless))).error == "", "an error is about the last action only"
        await step(Action("stop", text="x"), ends=True)
        assert await env.reset(start) == first, "a second reset is as the first"
        await step(parse_action(harmless))

    run(promises())
