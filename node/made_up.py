"""Made-up models, tokenizers and recordings: the real names, shapes and sizes, without a download.

    with made_up.place("runs/rehearsal", made_up.gigabytes("configs/gpt-oss-120b") + 1) as folder:
        made_up.model_folder(folder / "world", "configs/gpt-oss-120b")
        made_up.rows_file(folder / "train.jsonl", rows=4000)

What is made costs what the real thing costs: to read from disk, to hold, to multiply, to tokenise. It says
nothing that anybody would want to read. Under torchrun rank 0 writes, the others wait, and its error is
everybody's.
"""

import gzip
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

import distributed
import lm
from node import made_pages
from node.made_pages import PAGE
from node.sizes import EXPERTS, GB


def _on_rank_0(what: Path, make: Callable[[], object]) -> object:
    """make() on rank 0, and what it returns on every rank. All ranks raise the ValueError of rank 0."""
    made, failed = None, ""
    if distributed.rank() == 0:
        try:
            made = make()
        except ValueError as error:
            failed = str(error)
        except (OSError, SafetensorError) as error:  # a full disk
            failed = f"{what} cannot be written ({error})"
    failed, made = distributed.gather((failed, made))[0]
    if failed:
        raise ValueError(failed)
    return made


# ---- models ------------------------------------------------------------------------------------------------

SHARD = 10**9  # bytes of a file, where no tensor is larger: what of a model is in memory at once
BLOCK = 2**24 + 43  # random numbers that are written again and again; odd, so that no two rows are the same


def tensors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The tensors of a model's files, by name, on the meta device. Experts are packed where the config says
    MXFP4 (NOTES 8.3). A tied head is in no file."""
    packed = getattr(config, "quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        found = dict(model.named_parameters())
        for name in [name for name in found if packed and name.endswith(EXPERTS)]:
            experts, inner, outer = found.pop(name).shape
            if inner % 32:
                raise ValueError(f"{name}: MXFP4 packs 32 numbers at a time; {inner} is no multiple of 32")
            found[name + "_blocks"] = torch.empty(experts, outer, inner // 32, 16, dtype=torch.uint8)
            found[name + "_scales"] = torch.empty(experts, outer, inner // 32, dtype=torch.uint8)
    return found


def gigabytes(config_folder: str | Path) -> float:
    """GB on disk of model_folder's folder; its tokenizer is less than 10 MB of it."""
    found = tensors(AutoConfig.from_pretrained(config_folder))
    return sum(tensor.nbytes for tensor in found.values()) / GB + 0.01


def model_folder(where: str | Path, config_folder: str | Path, seed: int = 0) -> Path:
    """A model with random weights and a made tokenizer, from the config.json in `config_folder`. Returns
    `where`.

    Names, dtypes and shapes are as published. Matrices are normal with deviation .02, norms 1, MXFP4 numbers
    random bits times 2^-7: answers are finite, and nearly uniform over the vocabulary. All ranks call it.
    Raises ValueError when `where` exists, or its disk is full.
    """
    where, config = Path(where), AutoConfig.from_pretrained(config_folder)
    _on_rank_0(where, lambda: _write_model(where, config_folder, config, seed))
    return where


def _write_model(where: Path, config_folder: str | Path, config: PreTrainedConfig, seed: int) -> None:
    found = tensors(config)
    if where.exists():
        raise ValueError(f"{where} exists already; a made-up model needs a folder of its own")
    where.mkdir(parents=True)
    made = tokenizer(config.model_type, config.vocab_size)
    made.save_pretrained(where)
    told = json.loads((Path(config_folder) / "config.json").read_text())
    ends, generation = _ends(made)
    # Without a version transformers takes any large vocabulary for one of Mistral's, and warns of it.
    told |= {"dtype": "bfloat16", "transformers_version": transformers.__version__, **ends}
    (where / "config.json").write_text(json.dumps(told, indent=1))
    (where / "generation_config.json").write_text(json.dumps(generation, indent=1))
    split = split_torch_state_dict_into_shards(found, max_shard_size=SHARD)
    generator = torch.Generator().manual_seed(seed)
    blocks = {torch.bfloat16: torch.randn(BLOCK, generator=generator).mul_(0.02).bfloat16(),
              torch.uint8: torch.randint(0, 256, (BLOCK,), generator=generator, dtype=torch.uint8)}
    for file, names in tqdm(split.filename_to_tensors.items(), desc=f"making {where.name}", unit="file",
                            dynamic_ncols=True):
        _write_shard(where / file, {name: _filled(name, found[name], blocks, seed) for name in names})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (where / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _filled(name: str, like: torch.Tensor, blocks: dict, seed: int) -> torch.Tensor:
    """The numbers of a tensor: of its block, from a place that is its own."""
    if name.endswith(("norm.weight", "_scales")):
        return torch.full(like.shape, 1 if name.endswith("norm.weight") else 127 - 7,  # 2^-7: E8M0
                          dtype=like.dtype)
    block, count, parts = blocks[like.dtype], like.numel(), []
    start = lm.mix(seed, name) % BLOCK
    while count:
        parts.append(block[start : start + count])
        count, start = count - len(parts[-1]), 0
    return torch.cat(parts).reshape(like.shape)  # a copy: safetensors takes no memory twice


def _write_shard(file: Path, found: dict[str, torch.Tensor]) -> None:
    save_file(found, file, {"format": "pt"})
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
        if hasattr(os, "posix_fadvise"):  # a download is read from the disk, and not out of memory (Linux)
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- tokenizers --------------------------------------------------------------------------------------------

MERGES = 3_500  # so that a made page has 3.7 bytes a token (NOTES 2.7)
# What GPT-4 and Llama-3 cut text at, before any merge.
PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"),
                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
# Special tokens, in the order of their ids. The named ones; a model of the real size has all.
LLAMA = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>
<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> <|eom_id|>
<|eot_id|> <|python_tag|>""".split()
LLAMA_ALL = LLAMA + [f"<|reserved_special_token_{k}|>" for k in range(3, 248)]  # 128000 .. 128255
HARMONY = """<|startoftext|> <|endoftext|> <|reserved_200000|> <|reserved_200001|> <|return|> <|constrain|>
<|reserved_200004|> <|channel|> <|start|> <|end|> <|message|> <|reserved_200009|> <|reserved_200010|>
<|reserved_200011|> <|call|>""".split()
HARMONY_ALL = HARMONY + [f"<|reserved_{k}|>" for k in range(200_013, 200_018)] + ["<|endofprompt|>"]
# As published, those from <tool_call> on are not special: they are read and written as text (NOTES 6.12).
QWEN = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
<|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
TEXT = QWEN[QWEN.index("<tool_call>") :]
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
# As Qwen3's for chats of system, user and assistant: an assistant's last turn begins with a block of
# thought, and the place of the next answer with an empty one where thinking is off.
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}")
# For each type of model: tokens before the special ones, those of a tiny and those of a real model, which of
# them do what, and the chat template.
KINDS = {
    "llama": (128_000, LLAMA, LLAMA_ALL, {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
              LLAMA_TEMPLATE),
    "gpt_oss": (199_998, HARMONY, HARMONY_ALL, {"eos_token": "<|return|>", "bos_token": "<|startoftext|>",
                                                "pad_token": "<|endoftext|>"}, HARMONY_TEMPLATE),
    "qwen3": (151_643, QWEN, QWEN, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, QWEN_TEMPLATE)}


def tokenizer(model_type: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of Llama-3.1, Qwen3 or gpt-oss at its end, in a model of the
    real size with the real ids. It has `vocabulary` tokens; gpt-oss's has 200,019 of 201,088 and Qwen3's
    151,669 of 151,936, as published.

    Merges are learned from made pages. The rest of the vocabulary is made-up words that no text reaches: they
    read like words when a model with random weights writes them. Raises ValueError for too few tokens.
    """
    words, few, specials, names, template = KINDS.get(model_type, KINDS["llama"])
    if vocabulary < words + len(specials):  # a tiny model
        words, specials = vocabulary - len(few), few
    if words < 256:
        raise ValueError(f"a vocabulary of {vocabulary} has no room for 256 bytes and {len(specials)} "
                         "special tokens")
    learned, merges = _learn(min(words, 256 + MERGES))
    numbered, syllables = dict(learned), made_pages.syllables(made_pages.LATIN)
    unused = ("\u0120" + "".join(parts) for parts in product(syllables, repeat=3))  # \u0120: a space
    while len(numbered) < words:
        numbered.setdefault(next(unused), len(numbered))
    inner = Tokenizer(models.BPE(numbered, merges))
    inner.pre_tokenizer = SPLIT
    inner.decoder = decoders.ByteLevel()
    for token in specials:
        inner.add_tokens([AddedToken(token, special=token not in TEXT, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False,
                                   model_max_length=131_072, **names)
    fast.chat_template = template
    assert len(fast) == words + len(specials) <= vocabulary
    return fast


@cache
def _learn(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of that size, and its merges, from a hundred made pages."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = SPLIT
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    inner.train_from_iterator((made_pages.Site(random.Random(k)).page() for k in range(100)), trainer)
    learned = json.loads(inner.to_str())["model"]
    return learned["vocab"], [tuple(merge) for merge in learned["merges"]]


def _ends(made: PreTrainedTokenizerFast) -> tuple[dict, dict]:
    """What config.json tells of the special tokens, and the whole generation_config.json, as published. In a
    model of the real size the ids are the real ones."""
    ids = made.convert_tokens_to_ids
    if "<|im_end|>" in made.get_added_vocab():
        bos, eos = ids("<|endoftext|>"), ids("<|im_end|>")
        return ({"bos_token_id": bos, "eos_token_id": eos},
                {"bos_token_id": bos, "eos_token_id": [eos, bos], "pad_token_id": bos, "do_sample": True,
                 "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    if "<|return|>" in made.get_added_vocab():
        ends = {"eos_token_id": ids("<|return|>"), "pad_token_id": ids("<|endoftext|>")}
        every = ids(["<|return|>", "<|endoftext|>", "<|call|>"])
        return ends, {"bos_token_id": ids("<|startoftext|>"), "do_sample": True, **ends,
                      "eos_token_id": every}
    ends = {"bos_token_id": ids("<|begin_of_text|>"),
            "eos_token_id": ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])}
    return ends, {**ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9}


# ---- recordings --------------------------------------------------------------------------------------------


def rows_file(file: str | Path, rows: int, seed: int = 0, page_bytes: int = PAGE) -> int:
    """A file in NNetNav's schema of at least so many rows, and whole tasks. Returns the number of rows.

    Pages have `page_bytes` in the mean, log-normal, and most actions change a part of them (NOTES 2.7). A
    row holds its page twice. All ranks call it. A file .gz is packed. Raises ValueError when the disk is
    full.
    """
    return _on_rank_0(file, lambda: _write_rows(Path(file), rows, seed, page_bytes))


def _write_rows(file: Path, rows: int, seed: int, page_bytes: int) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary, count, task = file.with_name(file.name + ".tmp"), 0, ""
    with ((gzip.open if file.suffix == ".gz" else open)(temporary, "wt", encoding="utf-8") as stream,
          tqdm(total=rows, desc=f"making {file.name}", unit="row", dynamic_ncols=True) as bar):
        for row in made_pages.rows(seed, page_bytes):
            if row["task_name"] != task and count >= rows:
                break
            task, count = row["task_name"], count + 1
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            bar.update(1)
    temporary.rename(file)
    return count


# ---- a place that is removed -------------------------------------------------------------------------------

@contextmanager
def place(where: str | Path, need: float, flag: str = "--where") -> Iterator[Path]:
    """A new folder in `where` for made-up files of `need` GB, removed with all that is in it when the block
    ends. SIGTERM and a lost connection end it by SystemExit, as Ctrl-C does by KeyboardInterrupt. Its path is
    printed, for who has to remove it after a kill -9.

    All ranks enter and leave it, on one machine or over a shared disk. Raises ValueError on all of them,
    naming `flag`, when nothing can be written there, or its disk has too little room.
    """
    where, made = Path(where), None
    caught = [number for number in (signal.SIGTERM, signal.SIGHUP)
              if distributed.rank() == 0 and signal.getsignal(number) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        made = Path(_on_rank_0(where, lambda: _take(where, need, flag)))
        yield made
        distributed.barrier()  # it is in use until all ranks are here
    finally:
        if made:  # whichever rank leaves first: after an error rank 0 may be stuck in a collective
            shutil.rmtree(made, ignore_errors=True)
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
    distributed.barrier()  # it is gone


def _take(where: Path, need: float, flag: str) -> str:
    parent = next(path for path in (where, *where.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free / GB
    if need > 0.99 * free:
        raise ValueError(f"{where} needs {need:.1f} GB, and on its disk {free:.1f} GB are free; give another "
                         f"place with {flag}")
    where.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix="made-", dir=where)
    print(f"What is made up lies in {made}, and is removed at the end (after a kill -9: rm -r {made}).",
          flush=True)
    return made
