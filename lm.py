"""A language model: load, score tokens, sample, fine-tune. The same four calls serve the policy, the judge and the world model.

    B sequences, T positions (right-padded), N completion tokens of a batch laid end to end, V vocabulary.

A sequence is (prompt_ids, completion_ids): two lists of token ids. Only completion tokens are scored and learned, the
end-of-turn token included; a text that came out of sample() is never tokenised again, so what was sampled is what is scored.

Sampling is by temperature alone. top_k and top_p would make the sampled distribution differ from the scored one, and the
importance ratio of GSPO would start away from 1 (facts.md, section 8, trap 9).

Batches are planned by length and right-padded. Under a causal mask nothing looks to its right, so right padding needs no attention
mask; on the CPU that beats one packed row with a block-diagonal mask (bench/bench_lm.py). A sharded model packs the same plan into one
row without padding, and its attention takes one sequence at a time (packed_attention).

What samples need not be an LM: engine.py has vLLM's engine and servers, with the same `generate` and `margins`.
"""

import hashlib
import math
import random
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

import distributed

Pair = tuple[list[int], list[int]]  # (prompt_ids, completion_ids)


class ModelFolderError(ValueError):
    """A folder that is no model; the message names the command that makes one."""


@dataclass
class LM:
    """A model, its tokenizer, the longest sequence it may see (tokens, prompt and completion together), and the type it computes in:
    weights are float32 (an update at lr 1e-6 is lost in bf16), matrix products bf16."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    compute: torch.dtype = torch.bfloat16
    sharded: bool = False
    """Its weights are spread over the ranks: it scores and learns packed batches, all ranks together, and cannot sample."""

    def __post_init__(self):
        if self.sharded:  # as a method of the model, so that FSDP gathers embedding, last norm and head for it
            self.model.token_logps = types.MethodType(_token_logps, self.model)
            register_fsdp_forward_method(self.model, "token_logps")

    @property
    def device(self) -> torch.device:
        return distributed.device() if self.sharded else self.model.device

    def autocast(self):
        """Sampling, scoring and training all run under it, so that their log-probabilities differ by rounding only. FSDP casts by itself."""
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32 and not self.sharded)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int], tokens: int = 16384) -> list["Sample"]:
        """See sample(). Prompts are batched by length, at most `tokens` tokens at a time."""
        assert not self.sharded, "a sharded model cannot sample: give the run an engine, or a replica"
        samples: list[Sample | None] = [None] * len(prompts)
        for batch in plan([len(p) + max_new_tokens for p in prompts], tokens):
            for index, one in zip(batch, _sample_batch(self, [prompts[i] for i in batch], max_new_tokens, temperature, [seeds[i] for i in batch])):
                samples[index] = one
        return samples

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt: which of two tokens the model would rather write."""
        return [float(logp[a] - logp[b]) for logp, a, b in zip(next_logps(self, prompts), yes, no)]

    def sync(self, tensors) -> None:
        """Take over (name, tensor) of all weights: a replica that samples for a sharded model."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                parameters.pop(name).copy_(value)
        assert not parameters, f"no new weights for {sorted(parameters)[:3]} ..."


def load(folder: str | Path, made_by: str = "", context: int = 0, compute: torch.dtype = torch.bfloat16) -> LM:
    """A Hugging Face folder, in float32 on the GPU if there is one, matrix products in `compute`.

    `made_by` is the command named when the folder is not there; context 0 takes the model's own limit. Raises ModelFolderError.
    """
    folder = _check_folder(folder, made_by)
    # The CPU's fused attention has a slow backward at the lengths of the laptop recipe: eager is 15 % faster there.
    attention = "sdpa" if torch.cuda.is_available() else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return LM(model.to(distributed.device()).eval(), load_tokenizer(folder), context or model.config.max_position_embeddings, compute)


def load_sharded(folder: str | Path, made_by: str = "", context: int = 0, compute: torch.dtype = torch.bfloat16, offload: bool = False) -> LM:
    """The same folder, float32 weights spread over the ranks (distributed.shard); each rank reads its own rows and no others."""
    folder = _check_folder(folder, made_by)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="packed")
    distributed.shard(model, distributed.mesh(), compute, offload)
    distributed.fill(model, distributed.ShardFiles(folder).read, torch.device("cpu") if offload else distributed.device())
    return LM(model.eval(), load_tokenizer(folder), context or model.config.max_position_embeddings, compute, sharded=True)


def _check_folder(folder: str | Path, made_by: str) -> Path:
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ModelFolderError(f"{folder} holds no model (no config.json)" + (f"; make it with: {made_by}" if made_by else f"; a model of the hub: hf download {folder} --local-dir {folder}"))
    return folder


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:  # Llama has none; padding is never attended to, so any token serves
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save(lm: LM, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """A plain Hugging Face folder, in bf16 as the paper's models are. Written beside and renamed: a killed process leaves the old one.

    All ranks call it; rank 0 writes.
    """
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    state = {}
    for name, value in distributed.full_tensors(lm.model, dtype):  # tied ones appear once
        if distributed.rank() == 0:
            state[name] = value.cpu()
    if distributed.rank() == 0:
        _write(lm, folder, temporary, state)
    distributed.everyone(True)


def _write(lm: LM, folder: Path, temporary: Path, state: dict[str, torch.Tensor]) -> None:
    lm.model.save_pretrained(temporary, state_dict=state)
    lm.tokenizer.save_pretrained(temporary)
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a save that was killed right below
        folder.rename(old)
    temporary.rename(folder)
    if old.exists():
        shutil.rmtree(old)


# ---- text to tokens --------------------------------------------------------------------------------------------------------


def disarm(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` in which no special token can be read: a page that says "<|end|>" must not end the user's turn."""
    # Not all_special_tokens: Llama 3's <|start_header_id|> has no role that it lists, and would begin a turn.
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, token[0] + " " + token[1:])
    return text


def prompt_ids(lm: LM, messages: list[dict]) -> list[int]:
    """Token ids of a chat up to where the assistant begins. Contents are disarmed; the template is the tokenizer's own."""
    safe = [{**message, "content": disarm(lm.tokenizer, message["content"])} for message in messages]
    text = lm.tokenizer.apply_chat_template(safe, add_generation_prompt=True, tokenize=False)
    return lm.tokenizer(text, add_special_tokens=False).input_ids


def completion_ids(lm: LM, text: str) -> list[int]:
    """Token ids of an assistant's text, with the end-of-turn token, which is learned like any other (facts.md, trap 8)."""
    return lm.tokenizer(disarm(lm.tokenizer, text), add_special_tokens=False).input_ids + [lm.tokenizer.eos_token_id]


# ---- batches ---------------------------------------------------------------------------------------------------------------


def plan(lengths: Sequence[int], tokens: int, rng: random.Random | None = None) -> list[list[int]]:
    """Batches of sequences of like length: at most `tokens` tokens each, padding counted; a longer sequence stands alone.

    Every index is in exactly one batch. With `rng` the batches come in random order (training), else by length.

    >>> plan([3, 9, 4, 4], tokens=12)
    [[0, 2, 3], [1]]
    """
    batches: list[list[int]] = []
    order = list(range(len(lengths)))
    if rng is not None:
        rng.shuffle(order)  # ties in length must not keep neighbours together from one epoch to the next
    for index in sorted(order, key=lambda i: lengths[i]):  # ascending: the newest member is the longest, and sets the width
        if batches and lengths[index] * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    if rng is not None:
        rng.shuffle(batches)
    return batches


def pad(pairs: Sequence[Pair], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and loss mask, both (B, T); the mask is 1 on completion tokens, 0 on prompt and padding.

    >>> ids, mask = pad([([5, 6], [7]), ([5], [8, 9, 2])], 0, torch.device("cpu"))
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7, 0], [5, 8, 9, 2]], [[0, 0, 1, 0], [0, 1, 1, 1]])
    """
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids = torch.full((len(pairs), longest), pad_id)
    mask = torch.zeros(len(pairs), longest, dtype=torch.long)
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
    ids = torch.tensor([[token for prompt, completion in pairs for token in prompt + completion]])
    mask = torch.tensor([[bit for prompt, completion in pairs for bit in [0] * len(prompt) + [1] * len(completion)]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32).to(device)
    where = {"position_ids": positions.to(device), "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return ids.to(device), mask.to(device), where


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, cu_seq_lens_q=None, max_length_q=None, **_):
    """Causal attention inside each sequence of a packed row: query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D), None.

    On a GPU by flash-attn where it is installed, else by torch's varlen_attn; on the CPU one sequence after the other.
    """
    assert cu_seq_lens_q is not None and query.shape[0] == 1 and dropout == 0, "packed attention wants lm.pack's one row"
    if query.is_cuda:
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (T, H, D)
        return VARLEN(*rows, cu_seq_lens_q, max_length_q, scaling)[None], None
    pieces = []
    for start, end in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist()):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(pieces, 2).transpose(1, 2), None


def _choose_varlen() -> tuple[str, Callable | None]:
    """(its name, fn(q, k, v (T, H, D), cu, longest, scale)) of what this machine has for packed rows."""
    if not torch.cuda.is_available():
        return "one sequence at a time (CPU)", None
    try:
        from flash_attn import flash_attn_varlen_func as flash

        return "flash-attn", lambda q, k, v, cu, longest, scale: flash(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True)
    except ImportError:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        takes = inspect.signature(varlen_attn).parameters  # is_causal in torch 2.10, a window and grouped heads since 2.12
        causal = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
        grouped = {"enable_gqa": True} if "enable_gqa" in takes else {}

        def varlen(q, k, v, cu, longest, scale):
            if not grouped and k.shape[1] != q.shape[1]:
                k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
            return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, **causal, **grouped)

        return "torch varlen_attn", varlen


PACKED_BY, VARLEN = _choose_varlen()
AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


HEAD_TOKENS = 2048  # rows of the head at a time: 16k rows of 128k logits in float32 would be 8.4 GB, several times over (systems.md, section 6)


def _token_logps(model, ids, mask, temperature, where) -> tuple[torch.Tensor, torch.Tensor]:
    """See token_logps. `where`: what else the model needs to know about ids and mask."""
    at = mask[:, 1:].bool()  # position t predicts token t + 1
    hidden = model.model(input_ids=ids, use_cache=False, **where).last_hidden_state[:, :-1][at]  # (N, D)
    targets = ids[:, 1:][at]  # (N,)
    if len(targets) <= HEAD_TOKENS:
        return _head_logps(model.lm_head, hidden, targets, temperature), at.nonzero()[:, 0]
    pieces = [checkpoint(_head_logps, model.lm_head, h, t, temperature, use_reentrant=False) for h, t in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS))]
    return torch.cat(pieces), at.nonzero()[:, 0]


def _head_logps(head, hidden, targets, temperature: float) -> torch.Tensor:
    logits = head(hidden).float() / temperature  # (N, V); the softmax of bf16 logits would be off by more than GSPO's clip
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def token_logps(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N,) of the completion tokens at `temperature`, and the index into `pairs` (N,) of each; one forward.

    The head runs on the completion positions only: prompts are most of the tokens, and V is large.
    """
    assert all(prompt for prompt, _ in pairs), "a completion needs a prompt: its first token is predicted from the prompt's last"
    if lm.sharded:
        ids, mask, where = pack(pairs, lm.device)
        logp, _ = lm.model.token_logps(ids, mask, temperature, where)
        lengths = torch.tensor([len(completion) for _, completion in pairs], device=lm.device)
        return logp, torch.arange(len(pairs), device=lm.device).repeat_interleave(lengths)
    with lm.autocast():
        return _token_logps(lm.model, *pad(pairs, lm.tokenizer.pad_token_id, lm.device), temperature, {})


@torch.no_grad()
def score(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0, tokens: int = 8192) -> list[torch.Tensor]:
    """token_logps of any number of sequences, in batches: one (len(completion),) tensor each, in the order given."""
    scores: list[torch.Tensor] = [torch.empty(0)] * len(pairs)
    for batch in plan([len(p) + len(c) for p, c in pairs], tokens):
        logp, row = token_logps(lm, [pairs[i] for i in batch], temperature)
        for k, index in enumerate(batch):
            scores[index] = logp[row == k]
    return scores


@torch.no_grad()
def next_logps(lm: LM, prompts: Sequence[list[int]], tokens: int = 8192) -> list[torch.Tensor]:
    """The log-probabilities (V,) of the token that follows each prompt, in the order given."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    for batch in plan([len(p) for p in prompts], tokens):
        ids, mask = pad([([], prompts[i]) for i in batch], lm.tokenizer.pad_token_id, lm.device)
        with lm.autocast():
            hidden = lm.model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
            logits = lm.model.lm_head(hidden[torch.arange(len(batch)), mask.sum(1) - 1])  # (B, V)
        for index, logp in zip(batch, torch.log_softmax(logits.float(), -1)):
            found[index] = logp
    return found


# ---- sampling --------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One completion: its ids (end-of-turn included when it was written), their log-probabilities under the distribution they were
    drawn from, its text without the end-of-turn, and whether max_new_tokens cut it off."""

    ids: list[int]
    logps: list[float]
    text: str
    truncated: bool


def mix(*parts) -> int:
    """A seed made of seeds (run, update, row, turn, ...): equal parts give equal seeds, on every machine and rank.

    >>> mix(0, 12, 3) == mix(0, 12, 3), mix(0, 12, 3) == mix(0, 1, 23)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for every row: those given, or one of each row made of one number."""
    seeds = [mix(seed, row) for row in range(rows)] if isinstance(seed, int) else list(seed)
    assert len(seeds) == rows, f"{len(seeds)} seeds for {rows} rows"
    return seeds


def sample(model, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int | Sequence[int]) -> list[Sample]:
    """One completion for each prompt, in order, by an LM or by vLLM (engine.py); temperature 0 is greedy (log-probabilities are then those
    of temperature 1).

    Each row has its own seed: the same (weights, prompt, seed) gives the same sample, whoever else is in the batch (rounding apart).
    Raises ValueError for a prompt that leaves no room for max_new_tokens: callers decide what a page too long means.
    """
    if too_long := [len(p) for p in prompts if len(p) + max_new_tokens > model.context]:
        raise ValueError(f"a prompt of {max(too_long)} tokens and {max_new_tokens} new ones do not fit the context of {model.context}")
    return model.generate(list(prompts), max_new_tokens, temperature, row_seeds(seed, len(prompts))) if prompts else []


class _Layer(DynamicLayer):
    """One layer's keys and values (B, H, T, D), growing inside memory that is taken once. transformers' own layer concatenates at every token:
    on the CPU that was four fifths of the time of sampling (LOG.md)."""

    space = None  # (keys, values) with room for more; self.keys and self.values are views of what is used

    def update(self, keys, values, *args, **kwargs):
        used, new = self.get_seq_length(), self.get_seq_length() + keys.shape[2]
        if self.space is None or new > self.space[0].shape[2]:
            before = (self.keys, self.values) if used else None
            self.lazy_initialization(keys, values)
            self.space = tuple(part.new_empty(*part.shape[:2], new + 64, part.shape[3]) for part in (keys, values))
            for part, old in zip(self.space, before or ()):
                part[:, :, :used] = old
        for part, fresh in zip(self.space, (keys, values)):
            part[:, :, used:new] = fresh
        self.keys, self.values = (part[:, :, :new] for part in self.space)
        return self.keys, self.values

    def batch_select_indices(self, indices) -> None:
        super().batch_select_indices(indices)
        self.space = None


@torch.no_grad()
def _sample_batch(lm: LM, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int]) -> list[Sample]:
    """Left-padded, with a key-value cache. (transformers' generate draws from the global generator and hands back V logits a token to
    get one log-probability; this loop is what is left without its options.) The dreams of a group begin with the same prompt, and prompts are
    ten times as long as answers here: each different one is read once, and its cache is copied to its rows. Rows that have ended leave the batch,
    a quarter of it at a time: one answer that runs on would keep them all."""
    eos, longest = lm.tokenizer.eos_token_id, max(map(len, prompts))
    different = list(dict.fromkeys(map(tuple, prompts)))
    reader = torch.tensor([different.index(tuple(p)) for p in prompts], device=lm.device)  # (B,)
    ids = torch.tensor([[lm.tokenizer.pad_token_id] * (longest - len(p)) + list(p) for p in different], device=lm.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in different], device=lm.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    rows = torch.arange(len(prompts))  # what is still written, and whether it goes on
    alive = torch.ones(len(prompts), dtype=torch.bool)
    generators = [torch.Generator(device=lm.device).manual_seed(seed) for seed in seeds]
    sliding = any("sliding" in kind for kind in getattr(lm.model.config, "layer_types", None) or ())
    cache = Cache(layer_class_to_replicate=DynamicLayer if sliding else _Layer)
    with lm.autocast():  # around all tokens: autocast forgets its casts of the weights when it is left
        for step in range(max_new_tokens):
            out = lm.model.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            logits = lm.model.lm_head(out.last_hidden_state[:, -1])
            if step == 0:
                cache.batch_select_indices(reader)
                logits, mask, positions = logits[reader], mask[reader], positions[reader]
            logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)  # (B, V)
            if temperature:
                # Gumbel-max: argmax(logp + gumbel) is a draw from softmax(logp)
                noise = torch.empty_like(logp)
                for at, row in enumerate(rows.tolist()):
                    if alive[at]:
                        noise[at].exponential_(generator=generators[row])
                token = (logp - noise.log()).argmax(-1)
            else:
                token = logp.argmax(-1)
            chosen = logp.gather(1, token[:, None]).squeeze(1).tolist()
            for row, goes_on, one, logp_of_one in zip(rows.tolist(), alive.tolist(), token.tolist(), chosen):
                if goes_on:
                    written[row].append(one)
                    logps[row].append(logp_of_one)
            alive &= (token != eos).cpu()
            if not alive.any():
                break
            ids, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            if alive.sum() <= 0.75 * len(rows):
                left = alive.nonzero()[:, 0]
                rows, alive = rows[left], alive[left]
                left = left.to(lm.device)
                ids, positions, mask = ids[left], positions[left], mask[left]
                cache.batch_select_indices(left)
    done = [bool(row) and row[-1] == eos for row in written]
    texts = [lm.tokenizer.decode(row[:-1] if ended else row) for row, ended in zip(written, done)]
    return [Sample(row, logp, text, not ended) for row, logp, text, ended in zip(written, logps, texts, done)]


# ---- fine-tuning -----------------------------------------------------------------------------------------------------------


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
    """A step, over all ranks (the authors' script: 8)."""
    checkpoint_every: int = 200
    """Steps."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    seed: int = 0


def cosine(step: int, steps: int, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Factor on the learning rate at `step` of `steps`: linear warm-up, then cosine down to `floor`."""
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def finetune(lm: LM, pairs: Sequence[Pair], config: FineTune, name: str = "fine-tuning", each: Callable[[int, float], None] | None = None,
             checkpoint: str | Path = "") -> dict:
    """Minimise the mean of -log p over the target tokens of a step. Changes lm.model in place; returns {steps, tokens, loss}.

    `each` is called with (step, loss) after every step; `checkpoint` is a folder to resume from. Sequences over lm.context are the caller's
    error: drop and count them before. On several ranks all are given the same pairs, and the ranks share the microbatches of a step.
    """
    if not pairs:
        raise ValueError(f"{name}: there is nothing to learn from (no example was left)")
    assert all(len(p) + len(c) <= lm.context for p, c in pairs), "an example does not fit the context"
    rng = random.Random(config.seed)
    lengths = [len(p) + len(c) for p, c in pairs]
    schedule: list[list[int]] = []
    for epoch in range(math.ceil(config.epochs)):
        batches = plan(lengths, config.tokens, rng)
        schedule += batches[: math.ceil(len(batches) * min(1.0, config.epochs - epoch))]
    steps = [schedule[k : k + config.microbatches] for k in range(0, len(schedule), config.microbatches)]
    learned = [p for p in lm.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True)
    checkpoints = distributed.Checkpoints(checkpoint, lm.model, optimizer, keep=1) if checkpoint else None
    run = {"finetune": asdict(config), "pairs": mix(lengths, pairs[0], pairs[-1])}
    first = checkpoints.load(run) if checkpoints else 0
    lm.model.train()
    total, smooth = sum(lengths[i] for step in steps[:first] for batch in step for i in batch), None
    with tqdm(total=len(steps), initial=first, desc=name, unit="step", mininterval=1, dynamic_ncols=True, disable=distributed.rank() != 0) as bar:
        for n, step in enumerate(steps[first:], first):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * cosine(n, len(steps), floor=config.floor)
            targets = sum(len(pairs[i][1]) for batch in step for i in batch)  # of all ranks: a short batch's tokens must not weigh more
            hands = distributed.deal([sum(lengths[i] for i in batch) for batch in step], distributed.world_size())
            lost = 0.0
            for index, real in hands[distributed.rank()]:
                logp, _ = token_logps(lm, [pairs[i] for i in step[index]])
                loss = -(real * logp.sum()) / targets
                loss.backward()
                lost += loss.item()
            distributed.clip_grad_norm(lm.model, config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            total += sum(lengths[i] for batch in step for i in batch)
            lost = sum(distributed.gather(lost))
            smooth = lost if smooth is None else 0.95 * smooth + 0.05 * lost
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            bar.update(1)
            if each:
                each(n, lost)
            if checkpoints and (n + 1) % config.checkpoint_every == 0 and n + 1 < len(steps):
                checkpoints.save(n + 1, run)
    if checkpoints:
        checkpoints.settle(wait=True)
    lm.model.eval()
    return {"steps": len(steps), "tokens": total, "loss": smooth}


def chosen(configs: dict):
    """The config that the command line names (`tiny`, `single`, `paper`: the default), with its flags put over it; an unknown flag ends the program."""
    import tyro

    words = sys.argv[1:]
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["paper", *words]
    return tyro.extras.overridable_config_cli(configs, args=words)
