"""A language model: load, score tokens, sample, fine-tune. Policy, judge and world model use the same calls.

    B sequences, T positions, N completion tokens of a batch laid end to end, V vocabulary, W model width

A sequence is (prompt_ids, completion_ids): two lists of token ids. Only completion tokens are scored and
learned, the end-of-turn token included. A text that came out of sample() is never tokenised again: what was
sampled is what is scored.

Fine-tuning minimises -(1/N) sum log p(token | all before it) over the N target tokens of a step. Where the
pairs are the world model's, this is Eq. 4 of arXiv 2601.22149.

Sampling is by temperature alone. top_k and top_p would make the sampled distribution differ from the scored
one, and the importance ratio of GSPO would start away from 1 (NOTES 5.9).

Batches hold sequences of like length, padded on the right. Under a causal mask no token looks to its right,
so right padding needs no attention mask. On the CPU this is faster than a packed row with a block-diagonal
mask (bench/bench_lm.py; NOTES 10.5). A sharded model gets the same batches packed: one row without padding,
in which its attention takes one sequence at a time (attention.py).

vLLM's engine and servers (node/engine.py) sample, too, with the same `generate` and `margins`. Their settings
stand at the end of this file: a config holds them without importing the engine.
"""

import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase

import attention  # transformers knows its functions by name: "packed", "blocks"
import distributed
import reader

Pair = tuple[list[int], list[int]]  # (prompt_ids, completion_ids)


@dataclass
class LM:
    """A model with what it takes to use it."""

    model: PreTrainedModel
    """Weights are float32: an update at lr 1e-6 is lost in bf16."""
    tokenizer: PreTrainedTokenizerBase
    context: int
    """The longest sequence that the model may see, in tokens, prompt and completion together."""
    compute: torch.dtype = field(default_factory=lambda: matrix_type())
    """The type of matrix products."""
    sharded: bool = False
    """Over the ranks: it scores and learns packed batches, on all ranks together, and cannot sample."""

    # How many threads may ask at once: the main thread alone. Clients of servers (node/engine.py) take more,
    # and then dreams do not wait for each other (dream.py).
    concurrency = 1

    def __post_init__(self):
        if self.sharded:  # methods of the model, so that FSDP gathers embedding, last norm and head for them
            self.model.token_logps = types.MethodType(_token_logps, self.model)
            self.model.last_hidden = types.MethodType(_last_hidden, self.model)
            register_fsdp_forward_method(self.model, "token_logps")
            register_fsdp_forward_method(self.model, "last_hidden")

    @property
    def device(self) -> torch.device:
        return distributed.device() if self.sharded else self.model.device

    def autocast(self):
        """Sampling, scoring and training all run under it: their log-probabilities differ by rounding only.
        FSDP casts by itself."""
        enabled = self.compute != torch.float32 and not self.sharded
        return torch.autocast(self.device.type, self.compute, enabled=enabled)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int],
                 tokens: int = 16384) -> list["Sample"]:
        """See sample(). Prompts are batched by length, at most `tokens` tokens at a time."""
        assert not self.sharded, "a sharded model cannot sample: give the run an engine, or a replica"
        samples: list[Sample | None] = [None] * len(prompts)
        for batch in microbatches([len(p) + max_new_tokens for p in prompts], tokens):
            rows, their_seeds = [prompts[i] for i in batch], [seeds[i] for i in batch]
            written = _sample_batch(self, rows, max_new_tokens, temperature, their_seeds)
            for index, completion in zip(batch, written):
                samples[index] = completion
        return samples

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt: which of the two it prefers."""
        return [float(logp[a] - logp[b]) for logp, a, b in zip(next_logps(self, prompts), yes, no)]

    @torch.no_grad()
    def margin(self, sample: "Sample", place: int, yes: int, no: int) -> float:
        """The same of ids[place] of a greedy sample of ours, which is not read again."""
        logits = _head_logits(self.model.lm_head, sample.hidden[place])  # (V,)
        return float(logits[yes] - logits[no])

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, tensor) of all weights: for a replica that samples for a sharded model."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                parameters.pop(name).copy_(value)
        assert not parameters, f"no new weights for {sorted(parameters)[:3]} ..."


def matrix_type(compute: str = "auto") -> torch.dtype:
    """The type of matrix products: `bfloat16`, `float32`, or `auto`, the faster of them on this machine.

    A GPU has instructions for bfloat16, and so have some CPUs. The others emulate it: an AMD EPYC with AVX2
    multiplies 60 GFLOP/s a thread in float32 and 1.6 in bfloat16 (LOG.md, 2026-11-23).
    """
    if compute != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[compute]
    # Private, and in every torch from 2.11 to 2.13. torch.ops.mkldnn's question is also true of AVX-512.
    cpu_has_it = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if torch.cuda.is_available() or cpu_has_it else torch.float32


# ---- folders -----------------------------------------------------------------------------------------------


def load(folder: str | Path, made_by: str = "", context: int = 0, compute: torch.dtype | None = None) -> LM:
    """A Hugging Face folder, in float32 on the GPU if there is one, matrix products in `compute`: None is
    matrix_type(), the faster one here.

    Context 0 takes the model's own limit. Raises distributed.FolderError when there is no model; `made_by` is
    the command that it then names.
    """
    folder = check_folder(folder, made_by)
    files = distributed.ShardFiles(folder)
    if {entry.file.name for entry in files.entries.values()} != {"model.safetensors"} and not files.index:
        raise distributed.FolderError(f"{folder} has no index of its files, and transformers asks for one; "
                                      f"write it: python -m node.convert {folder}")
    # On the CPU, blocks: other models may have sinks, windows or soft caps, which they do not know.
    on_cpu = "blocks" if AutoConfig.from_pretrained(folder).model_type == "llama" else "eager"
    kind = "sdpa" if torch.cuda.is_available() else on_cpu
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind)
    _check_weights(files, model)
    model = model.to(distributed.device()).eval()
    context = context or model.config.max_position_embeddings
    return LM(model, load_tokenizer(folder), context, compute or matrix_type())


def load_sharded(folder: str | Path, made_by: str = "", context: int = 0,
                 compute: torch.dtype | None = None, offload: bool = False) -> LM:
    """load, with the weights spread over the ranks (distributed.shard). Each rank reads its own rows only."""
    folder, compute = check_folder(folder, made_by), compute or matrix_type()
    files, config = distributed.ShardFiles(folder), AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")
    _check_weights(files, model)
    distributed.shard(model, distributed.mesh(), compute, offload)
    home = torch.device("cpu") if offload else distributed.device()
    distributed.fill(model, files.read, home)
    context = context or config.max_position_embeddings
    return LM(model.eval(), load_tokenizer(folder), context, compute, sharded=True)


def _check_weights(files: distributed.ShardFiles, model: PreTrainedModel) -> None:
    """The folder holds every weight of `model`, and nothing else but a tied head: some folders store it."""
    files.check({name for name, _ in model.named_parameters()}, set(model.state_dict()))


def made_by(base: str) -> str:
    """The command that makes a base model: the laptop's. Any other comes from the hub ("")."""
    return "python tiny/base.py" if base.startswith("tiny/") else ""


def check_folder(folder: str | Path, made_by: str = "") -> Path:
    """The folder of a model, as a Path. Raises distributed.FolderError when there is none; the message names
    `made_by`, the command that makes it, or where the hub has it."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        # Some publish the same weights once more in original/ and metal/: gpt-oss-120b 196 GB, and not 65.
        less = '--exclude "original/*" --exclude "metal/*"'
        hub = f"a model of the hub: hf download {folder} {less} --local-dir {folder}"
        way_out = f"make it with: {made_by}" if made_by else hub
        raise distributed.FolderError(f"{folder} holds no model (no config.json); {way_out}")
    return folder


NO_OFFLOAD = ("--offload is for a sharded model: of several ranks, or on a GPU. Here is a single process "
              "without a GPU, or with --sampler transformers; leave it out")


def load_to_train(folder: str | Path, made_by: str = "", context: int = 0, offload: bool = False) -> LM:
    """load_sharded where there is a process group (on a GPU there always is one: distributed.init), else
    load. `offload` without a group is a mistake of the user's: ValueError."""
    if distributed.grouped():
        return load_sharded(folder, made_by, context, offload=offload)
    if offload:
        raise ValueError(NO_OFFLOAD)
    return load(folder, made_by, context)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:  # Llama has none; padding is never attended to, so any token serves
        tokenizer.pad_token = tokenizer.eos_token
    # A tokenizer.json may hold a truncation or a padding. Its first use turns them off, which must not happen
    # while another thread uses it ("Already borrowed").
    tokenizer("a")
    return tokenizer


def save(lm: LM, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a Hugging Face folder, in bf16 as the paper's models are. A save that is killed leaves the old
    folder. All ranks call it; rank 0 writes."""
    folder, state = Path(folder), {}
    for name, value in distributed.full_tensors(lm.model, dtype):  # a tied weight appears once
        if distributed.rank() == 0:
            state[name] = value.cpu()
    if distributed.rank() == 0:
        temporary = folder.with_name(folder.name + ".tmp")
        lm.model.save_pretrained(temporary, state_dict=state)
        lm.tokenizer.save_pretrained(temporary)
        replace_folder(temporary, folder)
    distributed.barrier()


def replace_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in the place of an old one. Killed between its two renamings, it leaves the old
    one whole, as folder.old."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)  # of a process that was killed right below
        folder.rename(old)
    temporary.rename(folder)
    if old.exists():
        shutil.rmtree(old)


# ---- text to tokens ----------------------------------------------------------------------------------------


def disarm(tokenizer: PreTrainedTokenizerBase | None, text: str) -> str:
    """`text` without special tokens: a page that says "<|end|>" must not end the user's turn. Without a
    tokenizer, without anything that looks like one: "<|end|>", "<s>", "</s>"."""
    if tokenizer is None:
        return re.sub(r"<(?=[|\uff5c/a-zA-Z])", "< ", text)  # \uff5c: DeepSeek's wide bar
    # Not all_special_tokens: it leaves out Llama 3's <|start_header_id|>, which would begin a turn.
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, token[0] + " " + token[1:])
    return text


# Llama-3.2's template writes today's date otherwise, and a run that goes on tomorrow has other prompts. This
# date is the one that Llama's templates fall back to.
DATE = "26 Jul 2024"


def prompt_ids(lm: LM, messages: list[dict]) -> list[int]:
    """Token ids of a chat, up to where the assistant begins, in the tokenizer's template; disarmed. For an
    agent without a tokenizer (node/engine.py, Chat) the messages themselves."""
    safe = [{**message, "content": disarm(lm.tokenizer, message["content"])} for message in messages]
    if lm.tokenizer is None:
        return safe
    text = lm.tokenizer.apply_chat_template(
        safe, add_generation_prompt=True, tokenize=False, date_string=DATE)
    return lm.tokenizer(text, add_special_tokens=False).input_ids


def completion_ids(lm: LM, text: str) -> list[int]:
    """Token ids of an assistant's text, disarmed, and the end of turn: it is learned, too (NOTES 5.8)."""
    ids = lm.tokenizer(disarm(lm.tokenizer, text), add_special_tokens=False).input_ids
    return ids + [lm.tokenizer.eos_token_id]


# ---- batches -----------------------------------------------------------------------------------------------


def microbatches(lengths: Sequence[int], tokens: int, rng: random.Random | None = None) -> list[list[int]]:
    """Batches of sequences of like length, as lists of indices. Every index is in exactly one batch.

    A batch has at most `tokens` tokens, padding counted; a longer sequence stands alone. With `rng` the
    batches come in random order (training), without it by length.

    >>> microbatches([3, 9, 4, 4], tokens=12)
    [[0, 2, 3], [1]]
    """
    batches: list[list[int]] = []
    order = list(range(len(lengths)))
    if rng is not None:
        rng.shuffle(order)  # or sequences of one length would have the same neighbours in every epoch
    for index in sorted(order, key=lambda i: lengths[i]):  # ascending: the last to join is the longest
        if batches and lengths[index] * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    if rng is not None:
        rng.shuffle(batches)
    return batches


def pad(pairs: Sequence[Pair], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and loss mask, both (B, T); the mask is 1 on completions, 0 on prompts and padding.

    >>> ids, mask = pad([([5, 6], [7]), ([5], [8, 9, 2])], 0, torch.device("cpu"))
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7, 0], [5, 8, 9, 2]], [[0, 0, 1, 0], [0, 1, 1, 1]])
    """
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids = torch.full((len(pairs), longest), pad_id)  # (B, T)
    mask = torch.zeros(len(pairs), longest, dtype=torch.long)  # (B, T)
    for row, (prompt, completion) in enumerate(pairs):
        ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        mask[row, len(prompt) : len(prompt) + len(completion)] = 1
    return ids.to(device), mask.to(device)


def pack(pairs: Sequence[Pair], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """All sequences in one row: ids and loss mask (1, T), and what tells the model where each begins.

    >>> ids, mask, where = pack([([5, 6], [7]), ([5], [8, 9, 2])], torch.device("cpu"))
    >>> ids.tolist(), mask.tolist(), where["position_ids"].tolist(), where["cu_seq_lens_q"].tolist()
    ([[5, 6, 7, 5, 8, 9, 2]], [[0, 0, 1, 0, 1, 1, 1]], [[0, 1, 2, 0, 1, 2, 3]], [0, 3, 7])
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    tokens, bits = [], []
    for prompt, completion in pairs:
        tokens += prompt + completion
        bits += [0] * len(prompt) + [1] * len(completion)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]  # (1, T)
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32).to(device)  # (B + 1,)
    where = {"position_ids": positions.to(device), "cu_seq_lens_q": starts, "cu_seq_lens_k": starts,
             "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return torch.tensor([tokens], device=device), torch.tensor([bits], device=device), where


# ---- scoring -----------------------------------------------------------------------------------------------

# Rows of the head at a time: 16k rows of 128k logits in float32 are 8.4 GB, several times over (NOTES 10.1).
HEAD_TOKENS = 2048


def _token_logps(model, ids, mask, temperature, where) -> tuple[torch.Tensor, torch.Tensor]:
    """See token_logps. ids and mask (B, T); `where`: what else the model needs to know about them."""
    at = mask[:, 1:].bool()  # (B, T - 1); position t predicts token t + 1
    hidden = model.model(input_ids=ids, use_cache=False, **where).last_hidden_state  # (B, T, W)
    hidden, targets, row = hidden[:, :-1][at], ids[:, 1:][at], at.nonzero()[:, 0]  # (N, W), (N,), (N,)
    if len(targets) <= HEAD_TOKENS:
        return _head_logps(model.lm_head, hidden, targets, temperature), row
    pieces = []
    for h, t in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS)):
        pieces.append(checkpoint(_head_logps, model.lm_head, h, t, temperature, use_reentrant=False))
    return torch.cat(pieces), row


def _head_logits(head, hidden) -> torch.Tensor:
    """Float32 logits (N, V) of hidden (N, W), whatever the rest is computed in: rounded to bf16 they would
    move log s_i by half of GSPO's clip (NOTES 10.2). Scoring and sampling both take them from here."""
    bias = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float(), None if bias is None else bias.float())


def _head_logps(head, hidden, targets, temperature: float) -> torch.Tensor:
    logits = _head_logits(head, hidden) / temperature  # (N, W) -> (N, V)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def token_logps(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N,) of the completion tokens at `temperature`, and the row of `pairs` (N,) of each.

    One forward. The head runs on completion positions only: prompts are most of the tokens, and V is large.
    """
    assert all(prompt for prompt, _ in pairs), "without a prompt nothing predicts a completion's first token"
    if lm.sharded:
        ids, mask, where = pack(pairs, lm.device)
        logp, _ = lm.model.token_logps(ids, mask, temperature, where)
        lengths = torch.tensor([len(completion) for _, completion in pairs], device=lm.device)
        return logp, torch.arange(len(pairs), device=lm.device).repeat_interleave(lengths)
    with lm.autocast():
        return _token_logps(lm.model, *pad(pairs, lm.tokenizer.pad_token_id, lm.device), temperature, {})


def _last_hidden(model, ids, mask, where) -> torch.Tensor:
    """See last_hidden. ids and mask (B, T) or packed (1, T), mask 1 on the last token of each sequence."""
    hidden = model.model(input_ids=ids, use_cache=False, **where).last_hidden_state  # (B, T, W)
    return hidden[mask.bool()]  # (B, W)


@torch.no_grad()
def last_hidden(lm: LM, prompts: Sequence[list[int]]) -> torch.Tensor:
    """What the head reads behind each prompt: (B, W) float32. One forward; of a sharded model on all ranks
    together."""
    pairs = [(prompt[:-1], prompt[-1:]) for prompt in prompts]
    if lm.sharded:
        return lm.model.last_hidden(*pack(pairs, lm.device)).float()
    with lm.autocast():
        return _last_hidden(lm.model, *pad(pairs, lm.tokenizer.pad_token_id, lm.device), {}).float()


@torch.no_grad()
def score(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0, tokens: int = 8192) -> list[torch.Tensor]:
    """token_logps of any number of sequences: a tensor (len(completion),) for each, in the order given."""
    scores: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for batch in microbatches([len(p) + len(c) for p, c in pairs], tokens):
        logp, row = token_logps(lm, [pairs[i] for i in batch], temperature)  # (N,), (N,)
        for k, index in enumerate(batch):
            scores[index] = logp[row == k]
    return scores


@torch.no_grad()
def next_logps(lm: LM, prompts: Sequence[list[int]], tokens: int = 8192) -> list[torch.Tensor]:
    """The log-probabilities (V,) of the token that follows each prompt, in the order given."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    for batch in microbatches([len(p) for p in prompts], tokens):
        ids, mask = pad([([], prompts[i]) for i in batch], lm.tokenizer.pad_token_id, lm.device)
        with lm.autocast():
            hidden = lm.model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, W)
            last = hidden[torch.arange(len(batch)), mask.sum(1) - 1]  # (B, W)
            logits = _head_logits(lm.model.lm_head, last)  # (B, V)
        for index, logp in zip(batch, torch.log_softmax(logits, -1)):
            found[index] = logp
    return found


# ---- sampling ----------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A completion: its ids (with the end-of-turn token, if that was written), their log-probabilities under
    the distribution they were drawn from, its text (without it), and whether max_new_tokens cut it off."""

    ids: list[int]
    logps: list[float]
    text: str
    truncated: bool
    hidden: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    """What the head read before each token, (W,) each: of an LM's greedy samples. The judge's verdict is read
    off them (judge.verdicts)."""


def mix(*parts) -> int:
    """A seed made of seeds (run, update, row, ...): equal parts give equal seeds on every machine and rank.

    >>> mix(0, 12, 3) == mix(0, 12, 3), mix(0, 12, 3) == mix(0, 1, 23)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for every row: the seeds given, or seeds made of one number."""
    seeds = [mix(seed, row) for row in range(rows)] if isinstance(seed, int) else list(seed)
    assert len(seeds) == rows, f"{len(seeds)} seeds for {rows} rows"
    return seeds


def sample(model, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float,
           seed: int | Sequence[int]) -> list[Sample]:
    """A completion for each prompt, in order, by an LM or by vLLM (node/engine.py). Temperature 0 is greedy;
    the log-probabilities are then those of temperature 1.

    Each row has its own seed: the same (weights, prompt, seed) gives the same sample, whatever else is in the
    batch (rounding apart). Raises ValueError for a prompt that leaves no room for max_new_tokens: what a page
    that is too long means is for callers to decide.
    """
    if too_long := [len(p) for p in prompts if len(p) + max_new_tokens > model.context]:
        asked = f"a prompt of {max(too_long)} tokens and {max_new_tokens} new ones"
        raise ValueError(f"{asked} do not fit the context of {model.context}")
    if not prompts:
        return []
    samples = model.generate(list(prompts), max_new_tokens, temperature, row_seeds(seed, len(prompts)))
    with _counting:
        _sampled["tokens"] += sum(len(sample.ids) for sample in samples)
    return samples


_sampled: Counter = Counter()
_counting = threading.Lock()  # dreams may ask from several threads


def tokens_sampled() -> int:
    """How many tokens this process has sampled so far, by whatever model: what a method costs, beside its
    steps on real pages."""
    return _sampled["tokens"]


def _draw(logp: torch.Tensor, temperature: float, generators: list[torch.Generator | None]) -> torch.Tensor:
    """A token (B,) of each row of logp (B, V); the likeliest at temperature 0. A row without a generator has
    ended: it draws nothing, and its token is not kept."""
    if not temperature:
        return logp.argmax(-1)
    # exponential_ would make the same numbers of the same generator; on the CPU it takes three times as long.
    noise = torch.zeros(logp.shape, dtype=torch.float64, device=logp.device)  # (B, V)
    for row, generator in enumerate(generators):
        if generator is not None:
            noise[row].uniform_(generator=generator)
    noise = (-torch.log1p(-noise)).float()  # exponential
    # Gumbel-max: argmax(logp + gumbel) is a draw from softmax(logp). A single number a row, against the
    # cumulated chances, is a quarter faster, but then rounding moves every boundary behind it: the neighbours
    # in a batch would change many more draws.
    return (logp - noise.log()).argmax(-1)


@torch.no_grad()
def _sample_batch(lm: LM, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                  seeds: list[int]) -> list[Sample]:
    """See sample(). Rows that have ended leave the batch, a quarter of it at a time: a long answer would keep
    them all. (transformers' generate draws from the global generator, and returns V logits a token.)"""
    eos = lm.tokenizer.eos_token_id
    generators = [torch.Generator(device=lm.device).manual_seed(seed) for seed in seeds]
    ids: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # row k of the batch writes ids[rows[k]]
    alive = [True] * len(rows)
    with lm.autocast():  # around all tokens: autocast forgets its casts of the weights when it is left
        read = reader.of(lm.model, prompts, lm.tokenizer.pad_token_id)
        for step in range(max_new_tokens):
            if step > 0:
                read.read(token)
            logp = torch.log_softmax(_head_logits(lm.model.lm_head, read.last) / (temperature or 1.0), -1)
            drawing = [generators[row] if on else None for row, on in zip(rows, alive)]
            token = _draw(logp, temperature, drawing)  # (B,)
            token_logp = logp.gather(1, token[:, None]).squeeze(1)  # (B,)
            drawn = zip(rows, alive, token.tolist(), token_logp.tolist(), read.last)
            for row, _, its_token, its_logp, its_hidden in (one for one in drawn if one[1]):
                ids[row].append(its_token)
                logps[row].append(its_logp)
                if not temperature:
                    hidden[row].append(its_hidden)
            alive = [ids[row][-1] != eos for row in rows]
            if not any(alive):
                break
            if sum(alive) <= 0.75 * len(rows):
                left = [k for k, on in enumerate(alive) if on]
                read.keep(left)
                token, rows, alive = token[left], [rows[k] for k in left], [True] * len(left)
    return [_as_sample(lm, *row) for row in zip(ids, logps, hidden)]


def _as_sample(lm: LM, ids: list[int], logps: list[float], hidden: list[torch.Tensor]) -> Sample:
    ended = bool(ids) and ids[-1] == lm.tokenizer.eos_token_id
    return Sample(ids, logps, lm.tokenizer.decode(ids[:-1] if ended else ids), not ended, hidden)


# ---- fine-tuning -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FineTune:
    """Supervised fine-tuning on (prompt, target)."""

    epochs: float = 1.0
    """Passes over the examples (paper: 1)."""
    lr: float = 2e-4
    """Peak, after a warm-up of 3 %; then a cosine."""
    floor: float = 0.1
    """Share of the peak that the cosine ends at (the authors' script: 10 %)."""
    tokens: int = 4096
    """Tokens a microbatch, padding counted."""
    microbatches: int = 1
    """Microbatches a step, over all ranks (the authors' script: 8)."""
    checkpoint_every: int = 200
    """Steps."""
    weight_decay: float = 0.0
    """AdamW's."""
    clip_norm: float = 1.0
    """Largest norm of a step's gradient, before it is weighed by the step's tokens."""
    embeddings: float = 1.0
    """Share of the rate at which the token embeddings learn, and a head that is tied to them."""
    seed: int = 0
    """Of the order of the examples."""


def cosine(step: int, steps: int, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Factor on the learning rate at `step` of `steps`: linear warm-up, then cosine down to `floor`."""
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _lengths(pairs: Sequence[Pair]) -> list[int]:
    """The tokens of each pair, prompt and completion together: as `pairs` says, or counted."""
    lengths = pairs.lengths if hasattr(pairs, "lengths") else (len(p) + len(c) for p, c in pairs)
    return [int(length) for length in lengths]  # not numpy's: a checkpoint knows the pairs by their repr


def schedule(lengths: Sequence[int], config: FineTune) -> list[list[list[int]]]:
    """The steps of a fine-tuning: steps[n][m] are the sequences of microbatch m of step n.

    The microbatches of a step cost alike, for the ranks that share it wait for the most expensive one: of
    microbatches in random order it costs twice the mean (NOTES 10.9). The steps come in random order.

    >>> schedule([4, 9, 8, 3, 10, 9], FineTune(tokens=10, microbatches=2))  # they cost 7, 10, 9, 9, 8
    [[[3, 0]], [[4], [1]], [[5], [2]]]
    """
    rng, schedule = random.Random(config.seed), []
    for epoch in range(math.ceil(config.epochs)):
        batches = microbatches(lengths, config.tokens, rng)
        batches = batches[: math.ceil(len(batches) * min(1.0, config.epochs - epoch))]
        order = sorted(range(len(batches)), key=lambda m: -sum(lengths[i] for i in batches[m]))
        steps = [order[k : k + config.microbatches] for k in range(0, len(order), config.microbatches)]
        schedule += [[batches[m] for m in step] for step in sorted(steps)]  # m is random, and so their order
    return schedule


def check_microbatches(name: str, config: FineTune) -> None:
    """Raises ValueError when a step has fewer microbatches than there are ranks."""
    ranks = distributed.world_size()
    if config.microbatches < ranks:
        raise ValueError(f"{name}: microbatches {config.microbatches}: {ranks - config.microbatches} ranks "
                         f"would idle in every step; give --sft.microbatches {ranks} or more")


# (logp (N,) of a microbatch's target tokens, the row (N,) of each, the index in `pairs` of each row) -> the
# sum (0-d) over these tokens of what is minimised.
Loss = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]


def likelihood(logp: torch.Tensor, row: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """-log p, the Loss of ordinary fine-tuning."""
    return -logp.sum()


def finetune(lm: LM, pairs: Sequence[Pair], config: FineTune, name: str = "fine-tuning",
             each: Callable[[int, float], None] | None = None, checkpoint: str | Path = "",
             loss: Loss = likelihood) -> dict:
    """Minimise the mean of `loss` over a step's target tokens, in place. Returns {steps, tokens, loss, idle};
    see distributed.idle.

    Where a step has several microbatches its gradient is weighed by its tokens: they are alike in length, and
    the targets of short pages would weigh twice as much (NOTES 10.9).

    `each` is called with (step, loss) after every step. `checkpoint` is a folder to resume from. All ranks
    give the same pairs, and share the microbatches of a step. Where `pairs` has `lengths` (of prompt and
    completion together, in tokens) it may lie on disk: a pair is read in the steps that learn it, and let go.
    Raises ValueError when there are no pairs, and when a step has fewer microbatches than there are ranks.
    Callers drop and count the sequences that are longer than lm.context.
    """
    if not len(pairs):
        raise ValueError(f"{name}: there is nothing to learn from (no example was left)")
    check_microbatches(name, config)
    lengths = _lengths(pairs)
    assert len(lengths) == len(pairs) and max(lengths) <= lm.context, "an example does not fit the context"
    steps = schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]  # in tokens
    mean, idle = sum(map(sum, costs)) / len(steps), distributed.idle(costs, distributed.world_size())
    optimizer = _adamw(lm.model, config.weight_decay)
    checkpoints = distributed.Checkpoints(checkpoint, lm.model, optimizer, keep=1) if checkpoint else None
    run = {"finetune": asdict(config), "pairs": mix(lengths, pairs[0], pairs[len(pairs) - 1])}
    first, smooth = checkpoints.load(run) if checkpoints else 0, None
    lm.model.train()
    with tqdm(total=len(steps), initial=first, desc=name + f" ({idle:.0%} idle)" * (idle > 0), unit="step",
              mininterval=1, dynamic_ncols=True, disable=distributed.rank() != 0) as bar:
        for n, step in enumerate(steps[first:], first):
            for group, share in zip(optimizer.param_groups, (1.0, config.embeddings)):
                group["lr"] = config.lr * share * cosine(n, len(steps), floor=config.floor)
            weight = sum(costs[n]) / mean if config.microbatches > 1 else 1.0
            total = _backward(lm, [[pairs[i] for i in batch] for batch in step], costs[n], weight,
                              lambda index, logp, row: loss(logp, row, step[index]))
            distributed.clip_grad_norm(lm.model, config.clip_norm * weight)  # or clipping undoes the weight
            optimizer.step()
            optimizer.zero_grad()
            smooth = total if smooth is None else 0.95 * smooth + 0.05 * total
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            bar.update(1)
            if each:
                each(n, total)
            if checkpoints and (n + 1) % config.checkpoint_every == 0 and n + 1 < len(steps):
                checkpoints.save(n + 1, run)
    if checkpoints:
        checkpoints.settle(wait=True)
    lm.model.eval()
    return {"steps": len(steps), "tokens": sum(map(sum, costs)), "loss": smooth, "idle": round(idle, 3)}


def _adamw(model: PreTrainedModel, weight_decay: float) -> torch.optim.AdamW:
    """Of two groups: all weights that learn but the token embeddings; then these."""
    words = model.get_input_embeddings().weight
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in learned if (p is words) == wanted]} for wanted in (False, True)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)


def _backward(lm: LM, step: Sequence[Sequence[Pair]], costs: Sequence[int], weight: float,
              loss_of: Callable[..., torch.Tensor]) -> float:
    """The gradient of `weight` times a step's loss, over the ranks' shares of its microbatches, which cost so
    much. `loss_of(microbatch, logp (N,), row (N,))`. Returns that loss, without `weight`."""
    # Of all ranks and microbatches, or the tokens of a short microbatch would weigh more.
    target_tokens = sum(len(completion) for batch in step for _, completion in batch)
    shares, mine = distributed.deal(costs, distributed.world_size()), 0.0
    for index, own in shares[distributed.rank()]:
        logp, row = token_logps(lm, step[index])  # (N,), (N,)
        loss = own * loss_of(index, logp, row) / target_tokens  # Eq. 4 where the pairs are the world model's
        (weight * loss).backward()
        mine += loss.item()
    return sum(distributed.gather(mine))


# ---- settings ----------------------------------------------------------------------------------------------


class EngineError(RuntimeError):
    """vLLM is missing, cannot start, or does not answer. The message names what failed and the way out."""


@dataclass(frozen=True)
class EngineConfig:
    """The policy's engine on each rank. Trainer and world model are on the same GPU (NOTES 9.10)."""

    kv_cache_gb: float = 7.0
    """Keys and values, in 1e9 bytes: 131 kB a token for Llama-3.1-8B, so 7 are 53k tokens a rank."""
    memory_fraction: float = 0.02
    """vLLM refuses to start when less of the GPU's memory is free. It sizes nothing (NOTES 7.9)."""
    max_num_seqs: int = 64
    """Dreams that are written at once on a rank; CUDA graphs are captured up to it."""
    eager: bool = False
    """No compilation and no CUDA graphs: slower, and ready in seconds (tests)."""


@dataclass(frozen=True)
class ServerConfig:
    """A vLLM server, over GPUs that the trainer and the policy's engines use as well (NOTES 9.10)."""

    tensor_parallel: int = 8
    """GPUs that share the model."""
    kv_cache_gb: float = 2.5
    """Keys and values on each GPU, in 1e9 bytes: 37 kB a token for gpt-oss-120b, over the GPUs."""
    memory_fraction: float = 0.02
    """vLLM refuses to start, and so to restart, when less of each GPU's memory is free. It sizes nothing
    (NOTES 7.9)."""
    max_num_seqs: int = 64
    """Answers that are written at once. CUDA graphs are captured up to it, by default for 1,024
    (NOTES 7.10)."""
    dtype: str = "auto"
    """`auto`: as the folder says."""
    eager: bool = False
    """No compilation and no CUDA graphs (tests)."""
    start_minutes: float = 30.0
    """65 GB from a slow disk, compilation and graphs."""
    restarts: int = 3
    """Of a server that died or hung, in a run; then the run stops."""


# ---- commands ----------------------------------------------------------------------------------------------


def chosen(configs: dict):
    """The config that the command line names (`tiny`, `single`; else `paper`) with its flags put over it. An
    unknown flag ends the program."""
    import tyro

    words = sys.argv[1:]
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["paper", *words]
    try:
        return tyro.extras.overridable_config_cli(configs, args=words)
    except ValueError as error:  # a config refused a value
        fail(Path(sys.argv[0]).name, error)


def needs_gpu(folder: str, large: Sequence[str], laptop: str) -> None:
    """End the program where a model of `large` is asked for and there is no GPU. `laptop`: what would run
    here."""
    if folder in large and not torch.cuda.is_available():
        why = distributed.unusable_gpu()
        why = f"torch cannot use the one that is here ({why})" if why else "there is none here"
        sys.exit(f"{folder} needs a GPU, and {why}; the laptop's recipe is: {laptop}")


ALIKE = 5.0  # seconds that the others have to fail, too, where all ranks fail alike


def fail(program: str, error: Exception) -> NoReturn:
    """End the program with an error that the user can mend, in a line: one line where several ranks fail of
    it. A rank that fails alone says its number."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(f"{program}: {error}")
    distributed.say_once(program, str(error), ALIKE)
    sys.exit(1)


def command(work: Callable[[], dict | None], alone: bool = False,
            preflight: Callable[[], bool] | None = None) -> None:
    """The body of a command: join the other ranks, look whether all is there (`preflight` says whether to go
    on), do the work, print its report on rank 0. An error that the user can mend is a line, and no traceback.
    `alone`: see distributed.init."""
    try:
        distributed.init(alone)
        report = work() if preflight is None or preflight() else None
    except (ValueError, OSError, EngineError) as error:
        fail(Path(sys.argv[0]).name, error)
    if report and distributed.rank() == 0:
        print(json.dumps(report, indent=1))


def write_report(folder: str | Path, report: dict) -> None:
    """Write what a fine-tuning learned from beside its model, which stands: its checkpoints can go."""
    if distributed.rank() == 0:
        shutil.rmtree(f"{folder}.sft", ignore_errors=True)
        (Path(folder) / "training.json").write_text(json.dumps(report, indent=1))
