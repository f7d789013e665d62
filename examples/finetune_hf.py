"""Fine-tune a model of transformers: load and save its checkpoint shard by shard, so that no rank ever holds the whole model.

    pip install transformers
    torchrun --nproc-per-node 2 examples/finetune_hf.py                          # a tiny Llama with random weights
    torchrun --nproc-per-node 2 examples/finetune_hf.py --lora 8                 # train only low-rank adapters
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model path/to/Llama-3.1-8B --text mine.txt --bf16

The model is built on meta and sharded layer by layer; each rank reads its own rows of the files, trains, averages the
weights, and writes its own rows of a directory that `from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import fullshard

BYTES = 256


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained low-rank update (Hu et al., arXiv 2106.09685)."""

    rank: int
    lora_a: nn.Parameter  # (rank, in)
    lora_b: nn.Parameter  # (out, rank)

    @classmethod
    def around(cls, linear: nn.Linear, rank: int) -> None:
        """Convert a Linear into a LoRALinear, in place."""
        linear.__class__ = cls
        linear.rank = rank
        linear.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        linear.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def first_values(self) -> None:
        nn.init.normal_(self.lora_a, std=1 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merge(self) -> None:
        """Add the low-rank update to the weight. Each rank updates its own rows, since it has the same rows of lora_b."""
        self.weight.to_local().add_(self.lora_b.to_local() @ self.lora_a.full_tensor())


def add_lora(model: nn.Module, rank: int) -> None:
    warnings.filterwarnings("ignore", message=".* mixes parameters that are trainable")  # intended here
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            LoRALinear.around(module, rank)


def tiny(folder: Path) -> Path:
    """Save a tiny Llama with random weights, whose tokens are bytes, and return its folder."""
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return folder


def tokens(text: Path, source: Path) -> Tensor:
    if (source / "tokenizer_config.json").exists():
        return torch.tensor(AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"])
    return torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()


def batch_of(ids: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """Return this rank's rows of a batch that depends only on the step, (rows, length)."""
    starts = torch.randint(len(ids) - options.length, (options.rows,), generator=torch.Generator().manual_seed(step))
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.stack([ids[start : start + options.length] for start in mine.tolist()])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory of transformers (default: a tiny one is made)")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]) / "argparse.py", help="to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="receives the checkpoint")
    parser.add_argument("--lora", type=int, default=0, help="rank of low-rank adapters; 0 trains everything")
    parser.add_argument("--ema", type=float, default=0.9, help="decay of the averages that are saved")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rows", type=int, default=8, help="of a batch, over all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    return parser.parse_args()


def main() -> None:
    options = parse()
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rank = dist.get_rank()
    source = options.model or tiny(options.out / "tiny")

    def build() -> Any:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
        if options.lora:
            add_lora(model, options.lora)
        return model

    with torch.device("meta"):  # shapes without memory
        model = build()
    loading, saving = (fullshard.weights.transformers_rules(model, saving=saves) for saves in (False, True))
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16) if options.bf16 else fullshard.MixedPrecisionPolicy()
    fullshard.shard_model(model, mesh=mesh, mp_policy=policy)
    loaded = fullshard.load_weights(model, source, key_map=loading, missing=["lora_[ab]$"], buffers=build)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.first_values()
    print(f"rank {rank}: read {loaded.bytes_read:,} bytes in {loaded.seconds:.2f} s", flush=True)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    ema = fullshard.EMA(model, options.ema, warmup=10)
    ids, losses = tokens(options.text, source), []
    for step in range(options.steps):
        batch = batch_of(ids, step, options).to(device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        dist.all_reduce(shown := loss.detach() / dist.get_world_size())
        losses.append(shown.item())

    other_files = {path.name: path for path in source.iterdir() if path.suffix in (".json", ".txt", ".model", ".jinja")}
    other_files.pop("model.safetensors.index.json", None)
    with ema.swapped():  # inside the block the averages are the weights
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, LoRALinear):
                    module.merge()
        kept = fullshard.weights.Drop(r"[.]lora_[ab]$", optional=True)  # optional: full fine-tuning has no adapters
        saved = fullshard.save_weights(model, options.out / "saved", key_map=[kept, *saving], extra=other_files)
        model.eval()
        probe = batch_of(ids, 0, options).to(device)
        for module in model.modules():
            if isinstance(module, LoRALinear):
                nn.init.zeros_(module.lora_b)  # merged into the weight above
        with torch.no_grad():
            logits = model(input_ids=probe, use_cache=False).logits
    print(f"rank {rank}: wrote {saved.bytes_written:,} bytes in {saved.seconds:.2f} s", flush=True)

    if rank == 0:
        again, told = AutoModelForCausalLM.from_pretrained(options.out / "saved", dtype=torch.float32, output_loading_info=True)
        difference = (again.to(device).eval()(input_ids=probe, use_cache=False).logits - logits).abs().max().item()
        print(
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}; from_pretrained: {len(told['missing_keys'])} missing keys, "
            f"{len(told['unexpected_keys'])} unexpected, logits within {difference:.1e}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
