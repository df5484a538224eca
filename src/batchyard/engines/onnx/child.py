"""Floor 3. The child process of the engine `onnx`: tokenises, packs, computes.

The main thread reads jobs and tokenises; one thread for each core draws the next pack whenever it is
free and computes it on itself. So tokenising overlaps with computing, and texts of different jobs share
packs. Run with its options as JSON. Ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchyard.batching.packing import draw_pack
from batchyard.engines.child import say_error, say_ready
from batchyard.engines.onnx.encoder import Encoder
from batchyard.engines.onnx.frames import (
    Count,
    Counts,
    Drop,
    Job,
    Refusal,
    Vectors,
    frame,
    read_to_child,
    write_all,
)
from batchyard.engines.onnx.graph import GROUPS
from batchyard.errors import ModelError

#: Texts among which the next pack is chosen: length-sorted, the oldest always included.
_WINDOW = 1024


@dataclass(slots=True, eq=False)
class _Task:
    """A job while its texts are computed."""

    id: int
    vectors: npt.NDArray[np.float32]
    remaining: int
    tokens: list[int]
    cut: list[int]
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Text:
    ids: npt.NDArray[np.int64]
    task: _Task
    place: int


@dataclass(slots=True)
class _Pool:
    """Texts that wait, in order of arrival."""

    texts: list[_Text] = field(default_factory=list)
    ready: threading.Condition = field(default_factory=threading.Condition)

    def add(self, texts: list[_Text]) -> None:
        with self.ready:
            self.texts += texts
            self.ready.notify_all()

    def draw(self, max_tokens: int) -> list[_Text]:
        """The next pack; waits for one."""
        with self.ready:
            while True:
                self.texts = [text for text in self.texts if not text.task.dropped]
                if self.texts:
                    break
                self.ready.wait()
            window = self.texts[:_WINDOW]
            chosen = draw_pack([len(text.ids) for text in window], max_tokens=max_tokens, max_lengths=GROUPS)
            taken = set(chosen)
            self.texts = [text for place, text in enumerate(window) if place not in taken] + self.texts[
                _WINDOW:
            ]
            return [window[place] for place in chosen]


class _Tokenizer:
    """The model's tokenizer, without padding; cutting is done here so that it can be told."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - a missing package is told in words

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise ModelError(f"The tokenizer in {folder} is missing or damaged: {error}.") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._max_tokens = max_tokens

    def ids(self, inputs: list[str | list[int]]) -> list[list[int]]:
        """Token ids of each input, special tokens included; given ids are taken as they are."""
        texts = [one for one in inputs if isinstance(one, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts) if texts else ())
        return [next(encoded).ids if isinstance(one, str) else one for one in inputs]

    def cut(self, ids: list[int]) -> list[int]:
        """*ids* as long as the model takes, with its last special token kept."""
        return ids if len(ids) <= self._max_tokens else [*ids[: self._max_tokens - 1], ids[-1]]


class _Server:
    def __init__(self, encoder: Encoder, tokenizer: _Tokenizer, max_tokens: int) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._pool = _Pool()
        self._tasks: dict[int, _Task] = {}
        self._writing = threading.Lock()

    def serve(self, workers: int) -> None:
        """Read jobs until the parent is gone."""
        for number in range(workers):
            threading.Thread(target=self._compute, name=f"batchyard-onnx-{number}", daemon=True).start()
        while (message := read_to_child(0)) is not None:
            match message:
                case Job():
                    self._take(message)
                case Drop(id=job):
                    task = self._tasks.get(job)
                    if task is not None:
                        task.dropped = True
                case Count():
                    counts = [len(ids) for ids in self._tokenizer.ids(message.inputs)]
                    self._say(Counts(message.id, counts))
        os._exit(0)

    def _take(self, job: Job) -> None:
        shape = self._encoder.shape
        found = self._tokenizer.ids(job.inputs)
        for place, ids in enumerate(found):
            if not ids or min(ids) < 0 or max(ids) >= shape.vocabulary:
                self._say(Refusal(job.id, f"Input {place} holds token ids that the model does not know."))
                return
        cut = [place for place, ids in enumerate(found) if len(ids) > shape.max_tokens]
        short = [self._tokenizer.cut(ids) for ids in found]
        vectors = np.empty((len(short), shape.hidden), dtype=np.float32)
        task = _Task(job.id, vectors, len(short), [len(ids) for ids in short], cut)
        self._tasks[job.id] = task
        self._pool.add([_Text(np.array(ids, dtype=np.int64), task, place) for place, ids in enumerate(short)])

    def _compute(self) -> None:
        while True:
            pack = self._pool.draw(self._max_tokens)
            vectors = self._encoder.run([text.ids for text in pack])
            done = []
            with self._writing:
                for text, vector in zip(pack, vectors, strict=True):
                    text.task.vectors[text.place] = vector
                    text.task.remaining -= 1
                    if not text.task.remaining:
                        done.append(text.task)
            for task in done:
                del self._tasks[task.id]
                self._say(Vectors(task.id, task.vectors.tobytes(), task.tokens, task.cut))

    def _say(self, message: Vectors | Counts | Refusal) -> None:
        data = frame(message)
        with self._writing:
            write_all(1, data)


def main() -> None:
    """Load the model, check that company does not change its vectors, then serve."""
    options = json.loads(sys.argv[1])
    folder = Path(options["folder"])
    try:
        encoder = Encoder(folder, options["precision"], Path(options["cache"]))
        tokenizer = _Tokenizer(folder, encoder.shape.max_tokens)
    except ModelError as error:
        say_error(str(error))
        return
    invariant = encoder.is_batch_invariant()
    shape = encoder.shape
    say_ready(
        invariant=invariant,
        hidden=shape.hidden,
        max_tokens=shape.max_tokens,
        dimensions=list(shape.dimensions),
    )
    _Server(encoder, tokenizer, options["max_tokens"]).serve(options["workers"])


if __name__ == "__main__":
    main()
