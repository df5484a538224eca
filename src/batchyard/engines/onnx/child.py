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
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class _Text:
    ids: npt.NDArray[np.int64]
    task: _Task
    place: int


class _Pool:
    """Texts that wait, in order of arrival.

    Args:
        max_tokens: real tokens of a pack.
        max_items: texts of a pack; None for no limit.
    """

    def __init__(self, max_tokens: int, max_items: int | None) -> None:
        self._max_tokens = max_tokens
        self._max_items = max_items
        self._texts: list[_Text] = []
        self._arrived = threading.Condition()

    def add(self, texts: list[_Text]) -> None:
        with self._arrived:
            self._texts += texts
            self._arrived.notify_all()

    def drop(self, task: _Task) -> None:
        """Forget the texts of *task* that nobody has begun."""
        with self._arrived:
            self._texts = [text for text in self._texts if text.task is not task]

    def draw(self) -> list[_Text]:
        """The next pack; waits for one."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._texts)
            window = self._texts[:_WINDOW]
            chosen = draw_pack(
                [len(text.ids) for text in window],
                max_tokens=self._max_tokens,
                max_items=self._max_items,
                max_lengths=GROUPS,
            )
            taken = set(chosen)
            self._texts[:_WINDOW] = [text for place, text in enumerate(window) if place not in taken]
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
        self.max_tokens = max_tokens

    def ids(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of each input, special tokens included; given ids are taken as they are."""
        texts = [one for one in inputs if isinstance(one, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts) if texts else ())
        return [next(encoded).ids if isinstance(one, str) else one for one in inputs]

    def cut(self, ids: list[int]) -> list[int]:
        """*ids* as long as the model takes, with its last special token kept."""
        return ids if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], ids[-1]]


class _Server:
    def __init__(self, encoder: Encoder, tokenizer: _Tokenizer, pool: _Pool, output: int) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._pool = pool
        self._output = output
        #: By job; a task that was dropped is in here no more.
        self._tasks: dict[int, _Task] = {}
        #: Guards `_tasks`, what is left of each, and the output.
        self._lock = threading.Lock()

    def serve(self, workers: int) -> None:
        """Read jobs until the parent is gone."""
        for number in range(workers):
            threading.Thread(target=self._compute, name=f"batchyard-onnx-{number}", daemon=True).start()
        while (message := read_to_child(0)) is not None:
            match message:
                case Job():
                    self._take(message)
                case Drop(id=job):
                    with self._lock:
                        task = self._tasks.pop(job, None)
                    if task is not None:
                        self._pool.drop(task)
                case Count():
                    counts = [len(ids) for ids in self._tokenizer.ids(message.texts)]
                    with self._lock:
                        write_all(self._output, frame(Counts(message.id, counts)))

    def _take(self, job: Job) -> None:
        shape = self._encoder.shape
        found = self._tokenizer.ids(job.inputs)
        cut = [place for place, ids in enumerate(found) if len(ids) > self._tokenizer.max_tokens]
        texts = [np.array(self._tokenizer.cut(ids), dtype=np.int64) for ids in found]
        vectors = np.empty((len(texts), shape.hidden), dtype=np.float32)
        task = _Task(job.id, vectors, len(texts), [len(ids) for ids in texts], cut)
        with self._lock:
            self._tasks[job.id] = task
        self._pool.add([_Text(ids, task, place) for place, ids in enumerate(texts)])

    def _compute(self) -> None:
        try:
            while True:
                pack = self._pool.draw()
                vectors = self._encoder.run([text.ids for text in pack])
                for text, vector in zip(pack, vectors, strict=True):
                    text.task.vectors[text.place] = vector
                with self._lock:
                    self._finish(pack)
        except Exception:  # noqa: BLE001 - whatever it was: a thread that ended alone would leave its texts waiting
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the parent starts another one

    def _finish(self, pack: list[_Text]) -> None:
        """Say the vectors of the tasks that *pack* ended."""
        for text in pack:
            task = text.task
            task.remaining -= 1
            if not task.remaining and self._tasks.pop(task.id, None) is not None:
                vectors = Vectors(task.id, task.vectors.tobytes(), task.tokens, task.cut)
                write_all(self._output, frame(vectors))


def main() -> None:
    """Load the model, check that company does not change its vectors, then serve."""
    options = json.loads(sys.argv[1])
    folder = Path(options["folder"])
    try:
        encoder = Encoder(folder, options["precision"], Path(options["cache"]))
        wanted = options["max_input_tokens"]
        max_tokens = encoder.shape.max_tokens if wanted is None else min(wanted, encoder.shape.positions)
        tokenizer = _Tokenizer(folder, max_tokens)
    except ModelError as error:
        say_error(str(error))
        return
    invariant = encoder.is_batch_invariant()
    shape = encoder.shape
    say_ready(
        invariant=invariant,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        max_tokens=max_tokens,
        dimensions=list(shape.dimensions),
    )
    # From here on frames go out on a handle of their own, and what a library prints goes to the log.
    output = os.dup(1)
    os.dup2(2, 1)
    # Where company would change a vector, each text is computed alone.
    pool = _Pool(options["pack_tokens"], None if invariant else 1)
    _Server(encoder, tokenizer, pool, output).serve(options["workers"])
    os._exit(0)


if __name__ == "__main__":
    main()
