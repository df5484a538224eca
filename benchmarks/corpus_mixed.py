"""Texts of mixed length: 5 to 512 tokens, median about 38, mean about 62, heavy-tailed.

Made, not collected: sentences from a small grammar over five subjects, the same ones on every machine.
Each text keeps to one subject, so that nearest neighbours mean something. Lengths follow a log-normal
law, as questions, paragraphs and pages do together.

    python benchmarks/corpus_mixed.py 5000 > texts.jsonl
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass

MEDIAN_TOKENS = 38.0
SIGMA = 1.0
SHORTEST, LONGEST = 5, 512
#: Word pieces to a word of this vocabulary, by measurement with the MiniLM tokenizer.
TOKENS_PER_WORD = 1.26


@dataclass(frozen=True, slots=True)
class Subject:
    actors: str
    acts: str
    things: str
    qualities: str
    places: str


SUBJECTS = {
    "sea": Subject(
        "captain sailor pilot fisherman lighthouse-keeper harbour-master boatswain diver shipwright smuggler navigator",
        "steered repaired lost anchored towed loaded painted sighted abandoned followed measured moored",
        "schooner net compass sail lantern chart rudder cargo buoy hull tide mast oar ballast current reef",
        "leaking weathered narrow salt-stained slow patched heavy seaworthy drifting battered",
        "off the cape|beyond the sandbank|in the estuary|under the cliffs|at the old quay|through the strait",
    ),
    "kitchen": Subject(
        "baker cook grandmother apprentice waiter brewer butcher guest gardener innkeeper neighbour",
        "kneaded salted burned tasted peeled simmered served chopped forgot sweetened ground roasted",
        "bread soup onion kettle dough pepper broth pie knife oven honey barley stew apple mustard cellar",
        "crusty bitter fragrant lukewarm thick golden unripe smoked overcooked plain",
        "by the window|in the back kitchen|over a low fire|before the feast|on the long table|at the market",
    ),
    "observatory": Subject(
        "astronomer student lens-grinder professor assistant visitor mathematician clockmaker comet-hunter librarian",
        "recorded calculated polished observed doubted confirmed sketched predicted missed compared published corrected",
        "comet telescope orbit mirror eclipse catalogue spectrum star pendulum planet error table nebula shadow meridian",
        "faint precise periodic distant unexpected bright invisible variable tilted double",
        "near the horizon|before sunrise|in the northern dome|during the winter|beside the great clock|on a moonless night",
    ),
    "office": Subject(
        "customer accountant clerk engineer manager auditor supplier courier tenant lawyer receptionist technician",
        "cancelled refunded signed delayed shipped questioned approved returned invoiced renewed escalated archived",
        "invoice contract parcel account password subscription deadline printer complaint delivery receipt budget meeting schedule",
        "overdue duplicate incomplete urgent expired disputed annual unsigned digital wrong",
        "before the end of the month|without notice|at the front desk|after the second reminder|by registered post|in the last quarter",
    ),
    "farm": Subject(
        "farmer shepherd miller beekeeper blacksmith veterinarian ploughman neighbour carter orchardist milkmaid",
        "sowed fenced sheared watered harvested mended drained counted sold fed drove sheltered",
        "field flock plough hedge barn wheat well orchard calf hive gate pasture mill cart seed furrow",
        "muddy stubborn fertile early drought-stricken low-lying healthy rented wild frosty",
        "below the mill|across the valley|after the thaw|along the drystone wall|on the upper meadow|before the rain came",
    ),
}
ADVERBS = "slowly carefully twice again quietly at_last in_haste never usually with_pride reluctantly at_once"
LINKS = "because although while until so_that whenever even_though since"
OPENERS = "However, Later, In_truth, By_then, As_the_letters_show, For_that_reason, Nobody_denies_that Some_say_that"
QUESTIONS = (
    "Why had the {actor} {act} the {thing}?",
    "Where is the {quality} {thing} that the {actor} {act}?",
)


def _words(text: str) -> list[str]:
    return [one.replace("_", " ") for one in text.split()]


class Corpus:
    """Makes texts; the same *seed* gives the same texts."""

    def __init__(self, seed: int = 20_240_601) -> None:
        self._random = random.Random(seed)

    def text(self) -> str:
        wanted = math.exp(self._random.gauss(math.log(MEDIAN_TOKENS), SIGMA))
        words_wanted = max(2.0, (min(LONGEST, max(SHORTEST, wanted)) - 2.0) / TOKENS_PER_WORD)
        subject = SUBJECTS[self._random.choice(list(SUBJECTS))]
        words: list[str] = []
        while len(words) < words_wanted:
            words += self._sentence(subject, first=not words).split()
        words = words[: max(2, round(words_wanted))]
        return " ".join(words).rstrip(",.?") + "."

    def _clause(self, subject: Subject) -> str:
        pick = self._random.choice
        thing = pick(_words(subject.things))
        if self._random.random() < 0.6:
            thing = f"{pick(_words(subject.qualities))} {thing}"
        clause = f"the {pick(_words(subject.actors))} {pick(_words(subject.acts))} the {thing}"
        if self._random.random() < 0.4:
            clause += f" {pick(_words(ADVERBS))}"
        if self._random.random() < 0.5:
            clause += f" {pick(subject.places.split('|'))}"
        if self._random.random() < 0.15:
            clause += f" in {self._random.randint(1700, 1999)}"
        return clause

    def _sentence(self, subject: Subject, *, first: bool) -> str:
        pick = self._random.choice
        if first and self._random.random() < 0.3:
            return pick(QUESTIONS).format(
                actor=pick(_words(subject.actors)),
                act=pick(_words(subject.acts)),
                thing=pick(_words(subject.things)),
                quality=pick(_words(subject.qualities)),
            )
        sentence = self._clause(subject)
        if self._random.random() < 0.5:
            sentence += f" {pick(_words(LINKS))} {self._clause(subject)}"
        if not first and self._random.random() < 0.4:
            return f"{pick(_words(OPENERS))} {sentence}."
        return sentence[0].upper() + sentence[1:] + "."


def texts(count: int = 5_000) -> list[str]:
    """The first *count* texts of the corpus."""
    corpus = Corpus()
    return [corpus.text() for _ in range(count)]


if __name__ == "__main__":
    for one in texts(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000):
        print(json.dumps(one))
