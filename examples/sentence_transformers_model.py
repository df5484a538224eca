"""Callers embed one text each; the model sees batches by length budget. Needs: sentence_transformers.

python examples/sentence_transformers_model.py [FOLDER OR NAME OF A MODEL]
"""

import asyncio
import sys

from sentence_transformers import SentenceTransformer

from batchyard import Batcher


async def main(name: str) -> None:
    """Two hundred texts of uneven length, asked for one by one."""
    model = SentenceTransformer(name)

    def embed(texts: list[str]) -> list[list[float]]:
        return list(model.encode(texts, normalize_embeddings=True).tolist())

    def tokens(text: str) -> int:
        return len(model.tokenizer(text, truncation=True)["input_ids"])

    # The model pads each batch to its longest text: so a batch costs its longest times its size.
    async with Batcher(embed, cost=tokens, max_cost=1024, padded=True) as batcher:
        texts = [f"This is text {n}. " * (1 + n % 17) for n in range(200)]
        vectors = await asyncio.gather(*map(batcher, texts))
        stats = batcher.stats
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers in {stats.dispatches} calls of the model")
    print(f"padding: {stats.padding_share:.0%} of what was computed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sentence-transformers/all-MiniLM-L6-v2"))
