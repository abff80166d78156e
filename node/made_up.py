"""Made-up models, tokenizers and recordings: the real names, shapes and sizes, without a download.

    with made_up.place("runs/rehearsal", made_up.gigabytes("configs/gpt-oss-120b") + 1) as folder:
        made_up.model_folder(folder / "world", "configs/gpt-oss-120b")
        made_up.rows_file(folder / "train.jsonl", megabytes=300)

What is made costs what the real thing costs: to read from disk, to hold, to multiply, to tokenise. It says
nothing that anybody would want to read. Under torchrun rank 0 writes, the others wait, and its error is
everybody's.
"""

import fcntl
import json
import math
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, product
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

import data
import distributed
import lm

GB = 1e9


def _on_rank_0(what: Path, make: Callable[[], object]) -> object:
    """make() on rank 0, and what it returns on every rank. All ranks raise the ValueError of rank 0."""
    made, failed = None, ""
    if distributed.rank() == 0:
        try:
            made = make()
        except ValueError as error:
            failed = str(error)
        except OSError as error:  # a full disk
            failed = f"{what} cannot be written ({error})"
    failed, made = distributed.gather((failed, made))[0]
    if failed:
        raise ValueError(failed)
    return made


# ---- models ------------------------------------------------------------------------------------------------

SHARD = 5 * 10**9  # bytes of a file, as the hub's
BLOCK = 2**24 + 43  # random numbers that are written again and again; odd, so that no two rows are the same
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SIZES = {"BF16": 2, "U8": 1}


def tensors(config: PreTrainedConfig, kind: str = "published") -> dict[str, tuple[str, tuple[int, ...]]]:
    """{name: (dtype as safetensors writes it, shape)} of a model's files. `kind`: "published" packs experts
    where the config says MXFP4 (NOTES 8.3), "bf16" never does. A tied head is in no file."""
    if kind not in ("published", "bf16"):
        raise ValueError(f"kind {kind!r}: a folder is made as published, or in bf16")
    packed = kind == "published" and getattr(config, "quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = "BF16", tuple(parameter.shape)
        if packed and name.endswith(EXPERTS):
            experts, inner, outer = found.pop(name)[1]
            if inner % 32:
                raise ValueError(f"{name}: MXFP4 packs 32 numbers at a time; {inner} is no multiple of 32")
            found[name + "_blocks"] = "U8", (experts, outer, inner // 32, 16)
            found[name + "_scales"] = "U8", (experts, outer, inner // 32)
    return found


def _bytes(tensor: tuple[str, tuple[int, ...]]) -> int:
    return SIZES[tensor[0]] * math.prod(tensor[1])


def gigabytes(config_folder: str | Path, kind: str = "published") -> float:
    """GB on disk of model_folder's folder; its tokenizer is some 20 MB of it."""
    return sum(map(_bytes, tensors(AutoConfig.from_pretrained(config_folder), kind).values())) / GB + 0.02


def model_folder(where: str | Path, config_folder: str | Path, kind: str = "published",
                 seed: int = 0) -> Path:
    """A model with random weights and a made tokenizer, from the config.json in `config_folder`. Returns
    `where`.

    Names, dtypes, shapes and files of 5 GB are as published. Matrices are normal with deviation .02, norms 1,
    MXFP4 numbers random bits times 2^-7: answers are finite, and nearly uniform over the vocabulary. Memory
    holds 100 MB. All ranks call it. Raises ValueError when `where` exists, or its disk is full.
    """
    where, config = Path(where), AutoConfig.from_pretrained(config_folder)
    _on_rank_0(where, lambda: _write_model(where, config_folder, config, kind, seed))
    return where


def _write_model(where: Path, config_folder: str | Path, config: PreTrainedConfig, kind: str,
                 seed: int) -> None:
    found = tensors(config, kind)
    if where.exists():
        raise ValueError(f"{where} exists already; a made-up model needs a folder of its own")
    where.mkdir(parents=True)
    made = tokenizer(config.model_type, config.vocab_size)
    made.save_pretrained(where)
    told = json.loads((Path(config_folder) / "config.json").read_text())
    if kind == "bf16":
        told.pop("quantization_config", None)
    ends, generation = _ends(made)
    (where / "config.json").write_text(json.dumps(told | {"dtype": "bfloat16", **ends}, indent=1))
    (where / "generation_config.json").write_text(json.dumps(generation, indent=1))
    shards: list[list[str]] = [[]]
    for name in found:
        if shards[-1] and sum(_bytes(found[other]) for other in (*shards[-1], name)) > SHARD:
            shards.append([])
        shards[-1].append(name)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
    fill, total = _Fill(seed), sum(map(_bytes, found.values()))
    with tqdm(total=total, desc=f"making {where.name}", unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        for file, names in zip(files, shards):
            _write_shard(where / file, {name: found[name] for name in names}, fill, bar)
    weight_map = {name: file for file, names in zip(files, shards) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (where / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


class _Fill:
    """What tensors are filled with: blocks of numbers, as bytes."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(BLOCK, generator=generator).mul_(0.02).bfloat16()
        bits = torch.randint(0, 256, (BLOCK,), generator=generator, dtype=torch.uint8)
        as_bytes = lambda tensor: memoryview(tensor.view(torch.uint8).numpy())
        self.seed, self.normal, self.bits = seed, as_bytes(normal), as_bytes(bits)
        self.ones = as_bytes(torch.ones(BLOCK // 16, dtype=torch.bfloat16))
        self.scales = as_bytes(torch.full((BLOCK // 16,), 127 - 7, dtype=torch.uint8))  # 2^-7: E8M0

    def write(self, stream, name: str, count: int) -> None:
        """`count` bytes of the tensor `name`, from a place in the block that is its own."""
        block = self.normal
        if name.endswith("norm.weight"):
            block = self.ones
        elif name.endswith("_scales"):
            block = self.scales
        elif name.endswith("_blocks"):
            block = self.bits
        start = 2 * (lm.mix(self.seed, name) % (len(block) // 2))
        while count:
            part = block[start : start + count]
            stream.write(part)
            count, start = count - len(part), 0


def _write_shard(file: Path, found: dict[str, tuple[str, tuple[int, ...]]], fill: _Fill, bar: tqdm) -> None:
    """One safetensors file, tensor by tensor: save_file would hold all 5 GB of it."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    names = sorted(found, key=lambda name: found[name][0])  # BF16 first: its numbers begin at even bytes
    for name in names:
        start, end = end, end + _bytes(found[name])
        header[name] = {"dtype": found[name][0], "shape": found[name][1], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb", buffering=0) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            fill.write(stream, name, _bytes(found[name]))
            bar.update(_bytes(found[name]))


# ---- tokenizers --------------------------------------------------------------------------------------------

MERGES = 3_500  # so that a made page has 3.7 bytes a token (NOTES 2.7)
# What GPT-4 and Llama-3 cut text at, before any merge.
PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
# Special tokens, in the order of their ids. The named ones; a model of the real size has all.
LLAMA = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>
<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> <|eom_id|>
<|eot_id|> <|python_tag|>""".split()
LLAMA_ALL = LLAMA + [f"<|reserved_special_token_{k}|>" for k in range(3, 248)]  # 128000 .. 128255
HARMONY = """<|startoftext|> <|endoftext|> <|reserved_200000|> <|reserved_200001|> <|return|> <|constrain|>
<|reserved_200004|> <|channel|> <|start|> <|end|> <|message|> <|reserved_200009|> <|reserved_200010|>
<|reserved_200011|> <|call|>""".split()
HARMONY_ALL = HARMONY + [f"<|reserved_{k}|>" for k in range(200_013, 200_018)] + ["<|endofprompt|>"]
REAL = {"gpt_oss": 199_998, "llama": 128_000}  # tokens before the special ones
LLAMA_TEMPLATE = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ date_string if date_string is defined else '26 Jul 2024' }}\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
HARMONY_TEMPLATE = (
    "{% for message in messages %}<|start|>"
    "{{ 'developer' if message['role'] == 'system' else message['role'] }}<|message|>"
    "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}")


def tokenizer(model_type: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of Llama-3.1 or gpt-oss at its end, in a model of the real
    size with the real ids. It has `vocabulary` tokens; gpt-oss's has 200,019 of 201,088, as published.

    Merges are learned from made pages. The rest of the vocabulary is made-up words that no text reaches: they
    read like words when a model with random weights writes them. Raises ValueError for too few tokens."""
    harmony = model_type == "gpt_oss"
    words, specials = REAL["gpt_oss" if harmony else "llama"], HARMONY_ALL if harmony else LLAMA_ALL
    if vocabulary < words + len(specials):  # a tiny model
        specials = HARMONY if harmony else LLAMA
        words = vocabulary - len(specials)
    if words < 256:
        raise ValueError(f"a vocabulary of {vocabulary} has no room for 256 bytes and {len(specials)} "
                         "special tokens")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    learn = trainers.BpeTrainer(vocab_size=min(words, 256 + MERGES), show_progress=False,
                                initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    inner.train_from_iterator((_Site(random.Random(k), PAGE).page() for k in range(100)), learn)
    learned = json.loads(inner.to_str())["model"]
    numbered = dict(learned["vocab"])
    unused = ("\u0120" + "".join(parts) for parts in product(_syllables(LATIN), repeat=3))  # \u0120: a space
    for word in unused:
        if len(numbered) == words:
            break
        numbered.setdefault(word, len(numbered))
    inner.model = models.BPE(numbered, [tuple(merge) for merge in learned["merges"]])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    names = {"eos_token": "<|return|>", "bos_token": "<|startoftext|>", "pad_token": "<|endoftext|>"}
    if not harmony:
        names = {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False,
                                   model_max_length=131_072, **names)
    fast.chat_template = HARMONY_TEMPLATE if harmony else LLAMA_TEMPLATE
    assert len(fast) == words + len(specials) <= vocabulary
    return fast


def _ends(made: PreTrainedTokenizerFast) -> tuple[dict, dict]:
    """What config.json tells of the special tokens, and the whole generation_config.json, as published. In a
    model of the real size the ids are the real ones."""
    ids = made.convert_tokens_to_ids
    if "<|return|>" in made.get_added_vocab():
        ends = {"eos_token_id": ids("<|return|>"), "pad_token_id": ids("<|endoftext|>")}
        every = ids(["<|return|>", "<|endoftext|>", "<|call|>"])
        return ends, {"bos_token_id": ids("<|startoftext|>"), "do_sample": True, **ends, "eos_token_id": every}
    ends = {"bos_token_id": ids("<|begin_of_text|>"),
            "eos_token_id": ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])}
    return ends, {**ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9}


# ---- NNetNav's rows ----------------------------------------------------------------------------------------

LATIN = "b c d f g k l m n p r s t v br st tr".split(), "a e i o u ai ou".split()
SCRIPTS = {  # how many of ten sites, and the beginnings and ends of its syllables
    "latin": (7, LATIN),
    "cyrillic": (1, ([chr(k) for k in range(0x431, 0x443)], [chr(k) for k in range(0x443, 0x44c)])),
    "arabic": (1, ([chr(k) for k in range(0x628, 0x63b)], ["\u0627", "\u0648", "\u064a"])),
    "chinese": (1, ([chr(0x4E00 + 37 * k) for k in range(80)], [chr(0x6000 + 29 * k) for k in range(80)])),
}


def _syllables(script: tuple[list[str], list[str]]) -> list[str]:
    return [a + b for a in script[0] for b in script[1]]


def _lexicon(script: tuple[list[str], list[str]]) -> list[str]:
    """3,000 words, the same in every file."""
    rng, syllables = random.Random(0), _syllables(script)
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3, 3, 4)))) for _ in range(3_000)]
    some = lambda share: rng.random() < share
    return [(word.capitalize() if some(0.15) else word) + ("'s" if some(0.02) else "") for word in words]


WORDS = {name: _lexicon(script) for name, (_, script) in SCRIPTS.items()}
WEIGHTS = list(accumulate(1 / (k + 10) for k in range(3_000)))  # common words are common (Zipf)
PAGE = 33_000  # bytes in the mean (NOTES 2.7)
OF_SITE, OF_PAGE = 0.6, 0.36  # deviations of log size, among sites and among the pages of one: .7 together
NAVIGATES = 0.25  # of the actions lead to another page of the site
SEARCH = " value='', clickable, visible"


@dataclass
class _Block:
    """Some lines of a page, and what can be clicked in them: (id, name)."""

    text: str
    links: list[tuple[int, str]] = field(default_factory=list)
    buttons: list[tuple[int, str]] = field(default_factory=list)


class _Site:
    """A site, and the page of it that is open. Its pages share header, footer and script."""

    def __init__(self, rng: random.Random, page_bytes: int):
        self.rng = rng
        script = rng.choices(list(SCRIPTS), [share for share, _ in SCRIPTS.values()])[0]
        self.words, self.host = WORDS[script], f"https://www.{self.slug()}.example"
        # The mean of a log-normal is over its median by half its variance.
        self.size = page_bytes * math.exp(rng.gauss(-(OF_SITE**2 + OF_PAGE**2) / 2, OF_SITE))
        self.last = rng.randint(8, 40)
        top, self.search = self.id(), self.id()
        box = f"\t[{top}] banner '', visible\n\t\t[{self.search}] searchbox 'Search'{SEARCH}"
        self.header = [_Block(box), *self.blocks(0.08 * self.size)]
        self.behind = self.last
        self.open()

    def id(self) -> int:
        """The next id of the page: in the order of its elements, with gaps."""
        self.last += self.rng.choice((1, 1, 2, 3))
        return self.last

    def phrase(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(self.words, cum_weights=WEIGHTS, k=self.rng.randint(low, high)))

    def slug(self) -> str:
        return "-".join(self.rng.choices(WORDS["latin"], k=2)).lower()

    def blocks(self, size: float) -> list[_Block]:
        """At least one, and so many that they have `size` bytes."""
        made = [self.block()]
        while (size := size - len(made[-1].text.encode())) > 0:
            made.append(self.block())
        return made

    def block(self) -> _Block:
        """A card, a paragraph, a row of a table, or a field of a form."""
        kind, name = self.rng.random(), self.phrase(1, 7)
        if kind < 0.5:
            item, link, button = self.id(), self.id(), self.id()
            url = f"{self.host}/{self.slug()}/{self.rng.randrange(10**6)}"
            return _Block(f"\t\t[{item}] listitem '', visible\n"
                          f"\t\t\t[{link}] link {name!r}, clickable, visible, url='{url}'\n"
                          f"\t\t\t\tStaticText {name!r}\n\t\t\tStaticText {self.phrase(4, 12)!r}\n"
                          f"\t\t\t[{button}] button {name!r}, clickable, visible, expanded=False",
                          [(link, name)], [(button, name)])
        if kind < 0.7:
            text = self.phrase(10, 40)
            return _Block(f"\t\t[{self.id()}] paragraph '', visible\n\t\t\tStaticText {text!r}")
        if kind < 0.85:
            cells = name, f"{self.rng.randrange(10**4) / 100:.2f}", self.phrase(1, 2)
            lines = [f"\n\t\t\t[{self.id()}] gridcell {text!r}, visible" for text in cells]
            return _Block(f"\t\t[{self.id()}] row '', visible{''.join(lines)}")
        box, button = self.id(), self.id()
        return _Block(f"\t\t[{box}] checkbox {name!r}, clickable, visible, checked='false'\n"
                      f"\t\t[{button}] button {name!r}, clickable, visible", [], [(button, name)])

    def open(self) -> None:
        """Another page of the site. Its ids start again behind the header's."""
        self.last, size = self.behind, self.size * math.exp(self.rng.gauss(0, OF_PAGE))
        self.title, self.url = self.phrase(2, 6), f"{self.host}/{self.slug()}"
        self.typed = ""
        self.main = self.blocks(0.84 * size)
        self.footer = self.blocks(0.08 * self.size)

    def change(self) -> None:
        """A part of the page changes: blocks come, none, as many or twice as many go."""
        share = math.exp(self.rng.uniform(math.log(0.004), math.log(0.25)))
        new = self.blocks(share * self.size)
        at = self.rng.randrange(len(self.main))
        gone = len(new) * self.rng.choice((0, 1, 2))
        self.main[at + 1 : at + 1 + gone] = new

    def page(self) -> str:
        root = f"RootWebArea {self.title!r}, focused, url='{self.url}'"
        text = "\n".join([root, *(block.text for block in (*self.header, *self.main, *self.footer))])
        return text.replace(SEARCH, f" value={self.typed!r}{SEARCH[9:]}", 1) if self.typed else text

    def act(self) -> tuple[data.Action, str]:
        """(action, the name of its element), carried out. What there is to click is drawn from all blocks."""
        rng, navigates = self.rng, self.rng.random() < NAVIGATES
        if rng.random() < 0.2:
            query = self.phrase(1, 3)
            action = data.Action("type", str(self.search), query, navigates)
            self.open() if navigates else self.change()
            self.typed = query
            return action, "Search"
        there = [*self.header, *self.main, *self.footer]
        found = [one for block in there for one in (block.links if navigates else block.buttons)]
        if not found:
            return data.Action("scroll", text="down"), ""
        bid, name = rng.choice(found)
        self.open() if navigates else self.change()
        return data.Action("click", str(bid)), name


def _rows(seed: int, page_bytes: int) -> Iterator[dict]:
    """NNetNav's rows (NOTES 6.1), task after task, without end. A task has some 10 of them, as published."""
    task = 0
    while True:
        rng = random.Random(lm.mix(seed, "task", task))
        site, steps, previous = _Site(rng, page_bytes), rng.randint(4, 15), ()
        name, goal = f"made-up-{seed}-{task}", f"Find {site.phrase(3, 9)}"
        for step in range(steps):
            page, url, element = site.page(), site.url, ""
            action = data.Action("stop", text=site.phrase(1, 4))
            if step < steps - 1:
                action, element = site.act()
            answer = data.completion(f"{site.phrase(60, 140)}. {element!r} is next.", action)
            messages = data.policy_messages(goal, url, page, previous)
            text = messages[1]["content"]
            yield {"dataset": "made_up", "id": f"{name}-{step}", "output": answer, "task_name": name,
                   "prompt": text, "n_tokens": len(text) // 4,
                   "messages": [*messages, {"role": "assistant", "content": answer}]}
            shown = f"type [{action.bid}] [{action.text}{' ' if action.enter else ''}]"
            shown = shown if action.name == "type" else str(action)
            previous += (f"{shown} where [{action.bid}] is {element}" if action.bid else shown,)
        task += 1


def rows_file(file: str | Path, megabytes: float = 0, rows: int = 0, seed: int = 0,
              page_bytes: int = PAGE) -> int:
    """A file in NNetNav's schema of at least so many MB or rows, and whole tasks. Returns the number of rows.

    Pages have `page_bytes` in the mean, log-normal, and most actions change a part of them (NOTES 2.7). A
    row holds its page twice. All ranks call it. Raises ValueError when the disk is full.
    """
    assert bool(megabytes) != bool(rows), "give the size in megabytes or in rows"
    return _on_rank_0(file, lambda: _write_rows(Path(file), megabytes * 1e6, rows, seed, page_bytes))


def _write_rows(file: Path, size: float, rows: int, seed: int, page_bytes: int) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary, count, written, task = file.with_name(file.name + ".tmp"), 0, 0, ""
    with (open(temporary, "wb") as stream,
          tqdm(total=size or rows, desc=f"making {file.name}", unit_scale=True, dynamic_ncols=True) as bar):
        for row in _rows(seed, page_bytes):
            if row["task_name"] != task and (written >= size if size else count >= rows):
                break
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            task, count, written = row["task_name"], count + 1, written + len(line)
            stream.write(line)
            bar.update(len(line) if size else 1)
    temporary.rename(file)
    return count


# ---- a place that is removed -------------------------------------------------------------------------------

MARKER = ".made_up"  # whoever finds it in a folder may delete the folder
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, torchrun or a scheduler, a lost connection


@contextmanager
def place(where: str | Path, need: float, flag: str = "--where") -> Iterator[Path]:
    """A new folder `where` for made-up files of `need` GB, removed with all that is in it when the block
    ends: also after an exception and a signal. What a SIGKILL leaves is removed by the next run.

    All ranks enter and leave it. Raises ValueError on all of them, naming `flag`, when the folder exists and
    was not made here, when another run uses it, and when its disk has too little room.
    """
    where, marker = Path(where), []
    before = {number: signal.getsignal(number) for number in ENDINGS} if distributed.rank() == 0 else {}
    for number in before:
        if before[number] == signal.SIG_DFL:  # else the process would end without what stands below
            signal.signal(number, _stop)
    try:
        _on_rank_0(where, lambda: marker.append(_make(where, need, flag)))
        yield where
        distributed.barrier()  # it is in use until all ranks are here
    finally:
        for number in before:  # who is told twice to end still cleans up
            signal.signal(number, signal.SIG_IGN)
        if marker:
            _remove(where)
            marker[0].close()
        for number, handler in before.items():
            signal.signal(number, handler)
    distributed.barrier()  # it is gone


def _stop(number: int, _) -> None:
    raise SystemExit(128 + number)


def _make(where: Path, need: float, flag: str):
    """Make the folder, and its marker, which is returned open and locked: the lock goes with the process."""
    elsewhere = f"give another place with {flag}"
    if where.is_symlink() or where.exists():
        if where.is_symlink() or not (where / MARKER).is_file():
            raise ValueError(f"{where} exists and holds no {MARKER}: it was not made here and is left alone; "
                             f"{elsewhere}")
        with open(where / MARKER) as old:
            try:
                fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{where} is in use by another run; wait for it, or {elsewhere}") from error
            _remove(where)
    parent = next(path for path in where.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free / GB
    if need > 0.99 * free:
        raise ValueError(f"{where} needs {need:.1f} GB, and on its disk {free:.1f} GB are free; {elsewhere}")
    where.mkdir(parents=True)
    marker = open(where / MARKER, "w")
    fcntl.flock(marker, fcntl.LOCK_EX)
    marker.write("Made by node/made_up.py, which removes this folder. You may, too.\n")
    marker.flush()
    return marker


def _remove(where: Path) -> None:
    """The folder with all that is in it, the marker last. Links are removed, not followed."""
    for path in where.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (where / MARKER).unlink()
    where.rmdir()
