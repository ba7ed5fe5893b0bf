"""Short, long and very long stories from a small grammar: a hero, a wish, some troubles, help, and an end."""

from random import Random

from demo.facts import ANIMALS, COLOUR_NAMES, FOODS, NAMES, THINGS
from demo.turns import Turn, a, pick

TRAITS = ["small", "brave", "clever", "kind", "shy", "curious", "old", "young", "quiet", "merry", "sleepy", "friendly"]
PLACES = [
    "a dark forest", "a green valley", "a small village", "a quiet farm", "a sunny meadow", "a house by the sea",
    "an old mill", "a high mountain", "a garden full of flowers", "a cave near the river",
]  # fmt: skip
TARGETS = ["the lake", "the big hill", "the old bridge", "the market", "the river", "the forest", "the lighthouse",
           "the castle", "the mill", "the beach"]  # fmt: skip
WEATHERS = ["The sun was shining.", "It was a windy day.", "It was a cold morning.", "The sky was grey.",
            "Snow lay on the ground.", "Birds were singing in the trees."]  # fmt: skip
LESSONS = [
    "it is good to have friends", "it is good to share", "small steps lead far", "even the small can be brave",
    "it helps to ask for help", "it is better to be kind than to be strong", "patience helps more than anger",
]  # fmt: skip


class Cast:
    """Who and what one story is about."""

    def __init__(self, rng: Random, animal: str, thing: str) -> None:
        self.rng, self.animal, self.thing = rng, animal, thing
        self.name, *self.helpers = rng.sample(NAMES, 7)
        self.trait, self.shade, self.place = rng.choice(TRAITS), rng.choice(COLOUR_NAMES), rng.choice(PLACES)
        self.friends = rng.sample([other for other in ANIMALS if other != animal], 6)

    def opening(self) -> str:
        return pick(
            self.rng,
            f"Once upon a time there was {a(self.trait)} {self.animal} called {self.name}. "
            f"{self.name} lived in {self.place}.",
            f"Long ago, in {self.place}, lived {a(self.trait)} {self.animal}. Its name was {self.name}.",
            f"{self.name} was {a(self.trait)} {self.animal} who lived in {self.place}.",
        )

    def wish(self) -> str:
        return pick(
            self.rng,
            f"More than anything, {self.name} wanted to find {a(self.shade)} {self.thing}.",
            f"One day {self.name} lost {a(self.shade)} {self.thing} and was very sad.",
            f"One morning {self.name} heard about {a(self.shade)} {self.thing} and wanted to see it.",
        )

    def journey(self, target: str) -> str:
        return pick(
            self.rng,
            f"So {self.name} walked to {target}. {self.rng.choice(WEATHERS)}",
            f"{self.name} set out for {target}. {self.rng.choice(WEATHERS)}",
            f"{self.rng.choice(WEATHERS)} {self.name} went all the way to {target}.",
        )

    def meeting(self, number: int) -> str:
        friend, helper = self.friends[number], self.helpers[number]
        food = self.rng.choice(FOODS)
        return pick(
            self.rng,
            f'There {self.name} met {a(friend)} called {helper}. "Have you seen my {self.thing}?" asked {self.name}. '
            f'"No," said {helper}, "but I will help you." They shared some {food} and went on together.',
            f'On the way {a(friend)} was sitting under a tree. "I am {helper}," said the {friend}. "I am so hungry." '
            f"{self.name} gave {helper} some {food}, and they became friends.",
            f"{a(friend).capitalize()} called {helper} had fallen into a hole. "
            f"{self.name} took a long branch and pulled {helper} out. "
            f'"Thank you!" said {helper}. "Let me come with you."',
            f'"Stop!" cried {a(friend)}. It was {helper}, who guarded the path. '
            f'"First tell me what you are looking for." '
            f'"For {a(self.shade)} {self.thing}," said {self.name}. {helper} smiled and let {self.name} pass.',
        )

    def trouble(self) -> str:
        return pick(
            self.rng,
            f"Then it began to rain, and the path was gone. {self.name} was afraid, but did not give up.",
            f"The river was deep and fast. {self.name} built a small boat out of wood and crossed it.",
            f"When night came it was very dark. {self.name} waited for the moon and then went on.",
            f"A loud noise came out of the bushes. {self.name} hid behind a stone, but it was only the wind.",
        )

    def ending(self) -> str:
        lesson = self.rng.choice(LESSONS)
        helper = self.helpers[0]
        return pick(
            self.rng,
            f"At last {self.name} found the {self.shade} {self.thing} behind a big stone. {self.name} was very happy "
            f"and learned that {lesson}.",
            f"In the end the {self.shade} {self.thing} was at home, under the bed. {self.name} and {helper} laughed "
            f"for a long time. That day {self.name} learned that {lesson}.",
            f"There, in the grass, lay the {self.shade} {self.thing}. {self.name} took it home and showed it to "
            f"everyone. From that day on {self.name} knew that {lesson}.",
        )


def tell(rng: Random, animal: str, thing: str, num_parts: int, chapters: bool = False) -> str:
    """A story with so many parts between its beginning and its end: 0 is a few sentences, 6 in chapters a long tale."""
    cast = Cast(rng, animal, thing)
    targets = rng.sample(TARGETS, max(num_parts, 1))
    parts = [f"{cast.opening()} {cast.wish()}"]
    for number in range(num_parts):
        events = [cast.journey(targets[number]), cast.meeting(number)]
        if num_parts > 1 and rng.random() < 0.6:
            events.append(cast.trouble())
        parts.append(" ".join(events))
    if num_parts == 0:
        parts.append(cast.journey(targets[0]))
    parts.append(cast.ending())
    if chapters:
        return "\n\n".join(f"Chapter {number}\n{part}" for number, part in enumerate(parts, 1)) + "\n\nThe end."
    return ("\n\n" if num_parts > 1 else " ").join(parts)


def story_turn(rng: Random) -> Turn:
    animal, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    size = rng.choices(("short", "", "long", "very long"), (4, 4, 2, 1))[0]
    num_parts = {"short": 0, "": 1, "long": rng.randint(2, 3), "very long": rng.randint(4, 6)}[size]
    sized = f"a {size} story" if size else "a story"
    text = tell(rng, animal, thing, num_parts, chapters=size == "very long")
    form = rng.random()
    if form < 0.15:
        question = pick(rng, f"Tell me {sized}.", f"Write {sized}.", f"Can you tell me {sized}?", f"Tell {sized}")
        return Turn("story", question, text, always=True)
    if form < 0.55:
        question = pick(rng, f"Tell me {sized} about {a(animal)}.", f"Write {sized} about {a(animal)}.",
                        f"Can you tell me {sized} about {a(animal)}?", f"Tell {sized} about {a(animal)}.",
                        f"Please tell me {sized} about {a(animal)}.",
                        f"I want to hear {sized} about {a(animal)}.")  # fmt: skip
        return Turn("story", question, text, always=True)
    question = pick(rng, f"Tell me {sized} about {a(animal)} and {a(thing)}.",
                    f"Write {sized} about {a(animal)} and {a(thing)}.",
                    f"Tell {sized} about {a(animal)} and {a(thing)}.",
                    f"Write {sized} with {a(animal)} and {a(thing)}.")  # fmt: skip
    return Turn("story", question, text, key=f"story {animal} {thing}")
