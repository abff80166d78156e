"""A language model: load, score tokens, sample, fine-tune. The same four calls serve the policy, the judge and the world model.

    B sequences, T positions (right-padded), N completion tokens of a batch laid end to end, V vocabulary.

A sequence is (prompt_ids, completion_ids): two lists of token ids. Only completion tokens are scored and learned, the
end-of-turn token included; a text that came out of sample() is never tokenised again, so what was sampled is what is scored.

Sampling is by temperature alone. top_k and top_p would make the sampled distribution differ from the scored one, and the
importance ratio of GSPO would start away from 1 (facts.md, section 8, trap 9).

Batches are planned by length and right-padded. Under a causal mask nothing looks to its right, so right padding needs no attention
mask; on the CPU that beats one packed row with a block-diagonal mask (bench/bench_lm.py). On a GPU the same plan is packed (varlen).
"""

import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

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

    @property
    def device(self) -> torch.device:
        return self.model.device

    def autocast(self):
        """Sampling, scoring and training all run under it, so that their log-probabilities differ by rounding only."""
        return torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32)


def load(folder: str | Path, made_by: str = "", context: int = 0) -> LM:
    """A Hugging Face folder, in float32 on the GPU if there is one. `made_by` is the command named when the folder is not there.

    context 0 takes the model's own limit. Raises ModelFolderError.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ModelFolderError(f"{folder} holds no model (no config.json)" + (f"; make it with: {made_by}" if made_by else ""))
    cuda = torch.cuda.is_available()
    # The CPU's fused attention has a slow backward at the lengths of the laptop recipe: eager is 15 % faster there.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa" if cuda else "eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:  # Llama has none; padding is never attended to, so any token serves
        tokenizer.pad_token = tokenizer.eos_token
    return LM(model.to("cuda" if cuda else "cpu").eval(), tokenizer, context or model.config.max_position_embeddings)


def save(lm: LM, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """A plain Hugging Face folder, in bf16 as the paper's models are. Written beside and renamed: a killed process leaves the old one."""
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    state = {name: parameter.detach().to(dtype) for name, parameter in lm.model.named_parameters()}  # tied ones appear once
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


def token_logps(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N,) of the completion tokens at `temperature`, and the index into `pairs` (N,) of each; one forward.

    The head runs on the completion positions only: prompts are most of the tokens, and V is large.
    """
    ids, mask = pad(pairs, lm.tokenizer.pad_token_id, lm.device)
    assert all(prompt for prompt, _ in pairs), "a completion needs a prompt: its first token is predicted from the prompt's last"
    at = mask[:, 1:].bool()  # position t predicts token t + 1
    with lm.autocast():
        hidden = lm.model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
        logits = lm.model.lm_head(hidden[:, :-1][at])  # (N, V)
    logits = logits.float() / temperature  # the softmax of bf16 logits would be off by more than GSPO's clip
    logp = torch.log_softmax(logits, -1).gather(1, ids[:, 1:][at][:, None]).squeeze(1)
    return logp, at.nonzero()[:, 0]


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


@torch.no_grad()
def sample(lm: LM, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seed: int, tokens: int = 16384) -> list[Sample]:
    """One completion for each prompt, in order; temperature 0 is greedy (log-probabilities are then those of temperature 1).

    The same (weights, prompts, seed) gives the same samples. Prompts are batched by length, at most `tokens` tokens at a time.
    Raises ValueError for a prompt that leaves no room for max_new_tokens: callers decide what a page too long means.
    """
    if too_long := [len(p) for p in prompts if len(p) + max_new_tokens > lm.context]:
        raise ValueError(f"a prompt of {max(too_long)} tokens and {max_new_tokens} new ones do not fit the context of {lm.context}")
    samples: list[Sample | None] = [None] * len(prompts)
    generator = torch.Generator(device=lm.device).manual_seed(seed)
    for batch in plan([len(p) + max_new_tokens for p in prompts], tokens):
        for index, one in zip(batch, _sample_batch(lm, [prompts[i] for i in batch], max_new_tokens, temperature, generator)):
            samples[index] = one
    return samples


def _sample_batch(lm: LM, prompts: list[list[int]], max_new_tokens: int, temperature: float, generator: torch.Generator) -> list[Sample]:
    """Left-padded, with a key-value cache. (transformers' generate draws from the global generator and hands back V logits a token to
    get one log-probability; this loop is what is left without its options.)"""
    eos, longest = lm.tokenizer.eos_token_id, max(map(len, prompts))
    ids = torch.tensor([[lm.tokenizer.pad_token_id] * (longest - len(p)) + p for p in prompts], device=lm.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=lm.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    alive = torch.ones(len(prompts), dtype=torch.bool, device=lm.device)
    cache = None
    for _ in range(max_new_tokens):
        with lm.autocast():
            out = lm.model.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            logits = lm.model.lm_head(out.last_hidden_state[:, -1])
        cache = out.past_key_values
        logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)  # (B, V)
        if temperature:
            # Gumbel-max: argmax(logp + gumbel) is a draw from softmax(logp)
            noise = torch.empty_like(logp).exponential_(generator=generator)
            token = (logp - noise.log()).argmax(-1)
        else:
            token = logp.argmax(-1)
        chosen = logp.gather(1, token[:, None]).squeeze(1).tolist()
        for row, (is_alive, one) in enumerate(zip(alive.tolist(), token.tolist())):
            if is_alive:
                written[row].append(one)
                logps[row].append(chosen[row])
        alive &= token != eos
        if not alive.any():
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
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
    """Peak; cosine to a floor of 10 %, warm-up 3 % (the authors' script)."""
    tokens: int = 4096
    """Tokens a step, padding counted."""
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    seed: int = 0


def cosine(step: int, steps: int, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Factor on the learning rate at `step` of `steps`: linear warm-up, then cosine down to `floor`."""
    warm = max(1, round(steps * warmup))
    if step < warm:
        return (step + 1) / warm
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def finetune(lm: LM, pairs: Sequence[Pair], config: FineTune, name: str = "fine-tuning", each: Callable[[int, float], None] | None = None) -> dict:
    """Minimise the mean of -log p over the target tokens of a batch. Changes lm.model in place; returns {steps, tokens, loss}.

    `each` is called with (step, loss) after every step. Sequences over lm.context are the caller's error: drop and count them before.
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
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True)
    lm.model.train()
    total, smooth = 0, None
    with tqdm(schedule, desc=name, unit="step", mininterval=1, dynamic_ncols=True) as bar:
        for step, batch in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * cosine(step, len(schedule))
            logp, _ = token_logps(lm, [pairs[i] for i in batch])
            loss = -logp.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.model.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            total += sum(lengths[i] for i in batch)
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            if each:
                each(step, loss.item())
    lm.model.eval()
    return {"steps": len(schedule), "tokens": total, "loss": smooth}
