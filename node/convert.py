"""A published folder made loadable: pytorch_model*.bin to safetensors, of which each rank can read its own
rows, and an index of the files, which transformers asks for (NOTES 6.8).

    python -m node.convert stanfordnlp/llama8b-nnetnav-live

A folder that has both is left as it is.
Host memory holds one file at most. Killed, the same command goes on behind the last finished file.
"""

import contextlib
import json
import shutil
from pathlib import Path

import torch
import tyro
from safetensors.torch import save_file
from tqdm import tqdm

import recipe
from distributed import FolderError, ShardFiles


def convert(folder: tyro.conf.Positional[str]) -> dict:
    """Write model*.safetensors beside the pytorch_model*.bin of `folder`, unless it has safetensors already,
    and an index. Returns {files, tensors}: what was converted, and what the index lists. Raises FolderError
    for a missing or damaged file, and a full disk."""
    here = Path(folder)
    index = here / "pytorch_model.bin.index.json"
    listed = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
    files = sorted({here / name for name in listed} or here.glob("pytorch_model*.bin"))
    with contextlib.suppress(FolderError):  # all its safetensors are there: published, or converted before
        files = [] if ShardFiles(folder).entries else files
    if missing := [file for file in files if not file.exists()]:
        raise FolderError(f"{missing[0]} is missing; download it again")
    out = {file: here / f"{file.stem.replace('pytorch_', '', 1)}.safetensors" for file in files}
    todo = [file for file in files if not out[file].exists()]
    need, free = sum(file.stat().st_size for file in todo), shutil.disk_usage(here).free
    if need > 0.99 * free:
        raise FolderError(f"{folder} needs {need / 1e9:.1f} GB on its disk, and {free / 1e9:.1f} are free")
    for file in tqdm(todo, desc="converting", unit="file", dynamic_ncols=True, disable=not todo):
        temporary = out[file].with_suffix(".tmp")
        try:
            weights = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            save_file(untied(weights), temporary, {"format": "pt"})
        except Exception as error:  # zip, pickle, torch and safetensors raise anything
            cause = " ".join(str(error).split())[:200]
            raise FolderError(f"{file} cannot be converted ({cause}); is it cut off?") from error
        temporary.rename(out[file])
    weight_map = {name: entry.file.name for name, entry in ShardFiles(folder).entries.items()}
    (here / "index.tmp").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    (here / "index.tmp").rename(here / "model.safetensors.index.json")
    return {"files": len(files), "tensors": len(weight_map)}


def untied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, and of two names for the same memory one: a model asks for its embedding's."""
    kept = {}
    for name, tensor in sorted(weights.items(), key=lambda item: item[0].startswith("lm_head")):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # computed from the config; old files hold it, and no model asks for it
        same = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        kept.setdefault(same, (name, tensor.clone(memory_format=torch.contiguous_format)))
    return dict(kept.values())


if __name__ == "__main__":
    recipe.command(lambda: tyro.cli(convert, prog="python -m node.convert"))
