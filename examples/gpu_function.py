"""A compiled function that takes fixed sizes only, on the GPU if there is one. Needs: torch.

python examples/gpu_function.py
"""

import asyncio

import torch

from batchyard import Batcher

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(256, 256, device=device)


def layer(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """One product for the whole batch; the copies to the device and back are paid once."""
    with torch.inference_mode():
        return list(torch.relu(torch.stack(rows).to(device) @ weight).cpu())


async def main() -> None:
    """A hundred rows, asked for one by one."""
    # A captured or compiled graph has a shape of its own for each size: allow few, and fill up to them.
    async with Batcher(layer, allowed_sizes=(1, 8, 32)) as batcher:
        rows = [torch.randn(256) for _ in range(100)]
        answers = await asyncio.gather(*map(batcher, rows))
        stats = batcher.stats
    expected = torch.relu(rows[7].to(device) @ weight).cpu()
    print(f"{len(answers)} rows in {stats.dispatches} calls on {device}, {stats.padding_items} filled up")
    print("row 7 is right:", torch.allclose(answers[7], expected, atol=1e-3))


if __name__ == "__main__":
    asyncio.run(main())
