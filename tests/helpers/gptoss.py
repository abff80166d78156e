"""A folder shaped as OpenAI's gpt-oss, small: MXFP4 blocks, sinks, biases, two files with an index."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as bpe
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedTokenizerFast
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
            "<|end|>", "<|message|>", "<|call|>", "<|reserved_200013|>"]
# One token a byte, and harmony's special tokens; the last is in no list of special tokens, as most of them.
bytewise = Tokenizer(bpe.BPE({x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = decoders.ByteLevel()
bytewise.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|return|>", pad_token=SPECIALS[1])


def write_folder(folder):
    """A GPT-OSS folder of two layers, with experts in MXFP4."""
    torch.manual_seed(0)
    config = GptOssConfig(num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=2,
                          vocab_size=len(TOKENIZER) + 1,  # 267 rows: two ranks do not divide it
                          hidden_size=64, intermediate_size=64, head_dim=32, num_attention_heads=2,
                          num_key_value_heads=1, sliding_window=8, pad_token_id=TOKENIZER.pad_token_id,
                          eos_token_id=TOKENIZER.eos_token_id)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: (1.0 if "embed" in name or "sinks" in name else 0.2) * torch.randn_like(value)
             + ("norm" in name) for name, value in net.state_dict().items()}
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        count, columns, rows = state.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:3], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    parts = {name: f"model-0000{1 + ('layers.0.' not in name)}-of-00002.safetensors" for name in state}
    for part in set(parts.values()):
        held = {name: value for name, value in state.items() if parts[name] == part}
        save_file(held, folder / part, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    (folder / "original").mkdir()
    save_file({"another.layout": torch.zeros(3)}, folder / "original/model.safetensors")
    return folder


def tensors(folder) -> dict[str, torch.Tensor]:
    """All that the files of a folder hold."""
    return {name: value for file in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(file).items()}


def unpack(folder, out) -> None:
    """Write `folder` with its experts in bf16, as transformers lays them out."""
    state = tensors(folder)
    for name in [name for name in state if name.endswith("_blocks")]:
        at = name.removesuffix("_blocks")
        state[at] = convert_moe_packed_tensors(state.pop(name), state.pop(f"{at}_scales")).contiguous()
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*", "original"))
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    save_file(state, out / "model.safetensors", {"format": "pt"})
