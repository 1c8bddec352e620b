"""Generated prose: plain sentences from a small grammar, as a haystack that needs no network and no file.

RULER's essay haystack consists of Paul Graham's essays, which kvbench may not redistribute. This text replaces them:
varied words in sentences of 6 to 20 words, without digits and without the needle's wording. It is easier to predict
than an essay and therefore has its own name in `prompt_id`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

PEOPLE = """the teacher|the old farmer|a young doctor|my neighbour|the captain|her brother|the painter|a quiet student|
the engineer|our guide|the baker|a tired traveller|the librarian|his daughter|the gardener|a famous writer|the judge|
two sailors|the children|several visitors|the mayor|a clever merchant|the musician|their uncle|the clerk|many readers|
the people of the town|a group of friends|the carpenter|nobody|everyone|the new owner""".replace("\n", "").split("|")
THINGS = """the garden|an old letter|the wooden bridge|a small boat|the broken clock|a long story|the morning paper|
the first chapter|a basket of apples|the kitchen door|the city map|a simple idea|the winter coat|a heavy stone|
the yellow house|a strange question|the village school|the best road|a box of books|the empty room|the river bank|
a cup of tea|the town market|an open window|the evening train|a piece of bread|the company|the program|a good reason|
the tall tower|a quiet street|the northern coast|the last page|a warm fire|the plan|a useful tool|the harbour|
a field of wheat|the stone wall|the answer""".replace("\n", "").split("|")
VERBS = """found|painted|remembered|described|carried|watched|repaired|studied|sold|visited|built|forgot|opened|liked|
moved|borrowed|noticed|measured|crossed|cleaned|understood|drew|lost|bought|explained|followed|changed|kept""".replace(
    "\n", ""
).split("|")
ADVERBS = """slowly|carefully|often|never|quickly|almost always|once again|with great care|without a word|
as usual|by accident|in silence|for many years|for a while|before long|at first""".replace("\n", "").split("|")
PLACES = """near the lake|in the city|behind the church|on the hill|at home|along the river|under the bridge|
in the south|beside the road|across the valley|at the station|in the forest|on the island|by the sea""".replace(
    "\n", ""
).split("|")
TIMES = """in the morning|last summer|after the storm|before dinner|during the long winter|every evening|on Sunday|
when the rain stopped|as soon as the sun rose|while the others slept|in those days|at the end of the year""".replace(
    "\n", ""
).split("|")
QUALITIES = """beautiful|useful|harder than it seems|cheaper than before|quite ordinary|worth the trouble|too late|
almost ready|difficult to explain|very old|better than nothing|a matter of taste|surprisingly light""".replace(
    "\n", ""
).split("|")
PATTERNS = (
    "{person} {verb} {thing} {time}",
    "{time}, {person} {verb} {thing} {place}",
    "{person} {adverb} {verb} {thing}",
    "{person} {verb} {thing} and {verb} {thing} {place}",
    "{thing} {place} was {quality}",
    "it was {quality}, but {person} {adverb} {verb} {thing}",
    "if {thing} is {quality}, then {thing} is {quality} too",
    "{person} said that {thing} was {quality}",
    "{place}, {person} {verb} {thing} because {thing} was {quality}",
    "most of the time {person} {adverb} {verb} {thing}, and {person} {verb} {thing}",
    "there is nothing {quality} about {thing}",
    "what {person} {verb} {time} was {thing}",
    "{person} asked whether {person} {verb} {thing} {place}",
    "some say that {thing} was {quality} {time}, and others {adverb} {verb} {thing}",
)
LISTS = {
    "person": PEOPLE,
    "thing": THINGS,
    "verb": VERBS,
    "adverb": ADVERBS,
    "place": PLACES,
    "time": TIMES,
    "quality": QUALITIES,
}


def sentences(rng: random.Random) -> Iterator[str]:
    """An endless stream of sentences with full stops, determined by the state of `rng`."""
    while True:
        words: list[str] = []
        for part in rng.choice(PATTERNS).split(" "):
            name = part.strip("{},")
            if part.startswith("{"):
                words.append(rng.choice(LISTS[name]) + ("," if part.endswith(",") else ""))
            else:
                words.append(part)
        text = " ".join(words)
        yield text[0].upper() + text[1:] + "."
