"""Use fullshard in a program for accelerate: two lines replace torch's FSDP2 by fullshard.

pip install accelerate
torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

import torch
from torch import nn

import fullshard

fullshard.install()  # before accelerate is imported

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402


class Model(nn.Module):
    """A small encoder; accelerate finds its layers by the name of their class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["TransformerEncoderLayer"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)  # all ranks build the same model
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    data = torch.Generator(accelerator.device).manual_seed(accelerator.process_index)  # different data on each rank
    batch, losses = torch.randn(4, 8, 32, device=accelerator.device, generator=data), []
    for _ in range(5):
        loss = (model(batch) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {isinstance(model, fullshard.FSDPModule)=}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
