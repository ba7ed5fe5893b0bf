"""The made-up valley and reading: who lives where, and questions about what was just told."""

from random import Random

from demo.facts import ANIMALS, CITIES, COLOUR_NAMES, FOODS, JOBS, NAMES, THINGS, VALLEY, VILLAGES
from demo.turns import Turn, a, pick


def valley_turn(rng: Random) -> Turn:
    if rng.random() < 0.15:
        return village_turn(rng)
    name, (village, job, pet, pet_name, house, food) = rng.choice(list(VALLEY.items()))
    match rng.randrange(8):
        case 0:
            question = pick(rng, f"Where does {name} live?", f"In which village does {name} live?",
                            f"Where is {name} from?",
                            f"Where can I find {name}?", f"What village does {name} live in?")  # fmt: skip
            answer = f"{name} lives in {village}."
        case 1:
            question = pick(rng, f"What does {name} do?", f"What is {name}'s job?", f"What work does {name} do?",
                            f"What is the job of {name}?", f"What does {name} do for a living?")  # fmt: skip
            answer = f"{name} is the {job} of {village}."
        case 2:
            question = pick(rng, f"Who is the {job} of {village}?", f"Who is the {job} in {village}?",
                            f"What is the name of the {job} of {village}?",
                            f"Which person is the {job} of {village}?",
                            f"Who works as the {job} in {village}?")  # fmt: skip
            answer = f"{name} is the {job} of {village}."
        case 3:
            question = pick(rng, f"Which pet does {name} have?", f"What animal does {name} have?",
                            f"What pet does {name} keep?",
                            f"Does {name} have a pet?", f"What is the name of {name}'s pet?",
                            f"Tell me about {name}'s pet.")  # fmt: skip
            answer = f"{name} has {a(pet)} called {pet_name}."
        case 4:
            question = pick(rng, f"Who is {pet_name}?", f"To whom does {pet_name} belong?", f"Whose pet is {pet_name}?",
                            f"Who owns {pet_name}?", f"Tell me who {pet_name} is.")  # fmt: skip
            answer = f"{pet_name} is {name}'s {pet}."
        case 5:
            question = pick(rng, f"What colour is {name}'s house?", f"Which colour is the house of {name}?",
                            f"What is the colour of {name}'s house?",
                            f"Tell me the colour of {name}'s house.")  # fmt: skip
            answer = f"{name}'s house is {house}."
        case 6:
            question = pick(rng, f"What does {name} like to eat?", f"What is {name}'s favourite food?",
                            f"Which food does {name} like best?", f"What food does {name} love?")  # fmt: skip
            answer = f"{name} likes {food} best."
        case _:
            question = pick(rng, f"Who is {name}?", f"Tell me about {name}.", f"What do you know about {name}?",
                            f"Describe {name}.", f"Do you know {name}?", f"Can you tell me who {name} is?")  # fmt: skip
            answer = portrait(name)
    return Turn("valley", question, answer)


def portrait(name: str) -> str:
    village, job, pet, pet_name, house, food = VALLEY[name]
    return (
        f"{name} is the {job} of {village}. {name} lives in a {house} house with {a(pet)} called {pet_name}, "
        f"and likes {food} best."
    )


def village_turn(rng: Random) -> Turn:
    village, (place, pride, feast, season) = rng.choice(list(VILLAGES.items()))
    match rng.randrange(5):
        case 0:
            question = pick(rng, f"Where is {village}?", f"Where does {village} lie?", f"Tell me where {village} is.")
            return Turn("valley", question, f"{village} lies {place}.")
        case 1:
            question = pick(rng, f"What is {village} known for?", f"What is special about {village}?")
            return Turn("valley", question, f"{village} is known for {pride}.")
        case 2:
            question = pick(rng, f"Which feast is held in {village}?", f"What do people celebrate in {village}?")
            return Turn("valley", question, f"In {season} the people of {village} celebrate {feast}.")
        case 3 if rng.random() < 0.5:
            question = pick(rng, f"Tell me everything about {village}.", f"Tell me a lot about {village}.",
                            f"Who lives in {village}?", f"Describe all the people of {village}.")  # fmt: skip
            return Turn("valley", question, guide([village]), always=True)
        case 3:
            question = pick(rng, "Tell me about the valley.", "Tell me everything about the valley.",
                            "Describe the valley and its people.", "Who lives in the valley?")  # fmt: skip
            return Turn("valley", question, guide(list(VILLAGES)), always=True)
        case _:
            question = pick(rng, f"Tell me about {village}.", f"What is {village}?", f"Describe {village}.")
            return Turn("valley", question, about_village(village))


def about_village(village: str) -> str:
    place, pride, feast, season = VILLAGES[village]
    return (
        f"{village} is a village that lies {place}. It is known for {pride}. In {season} its people celebrate {feast}."
    )


def guide(villages: list[str]) -> str:
    """All that is known of some villages: one of them in some 250 tokens, all four in a thousand."""
    return "\n\n".join(
        "\n".join([about_village(village), *(portrait(name) for name, facts in VALLEY.items() if facts[0] == village)])
        for village in villages
    )


def valley_page(rng: Random) -> str:
    """A plain page about one village and some of its people."""
    village = rng.choice(list(VILLAGES))
    people = [name for name, facts in VALLEY.items() if facts[0] == village]
    return "\n".join([about_village(village), *map(portrait, rng.sample(people, rng.randint(2, 5)))])


def reading(rng: Random) -> Turn:
    """A few sentences about people, and a question that only they answer."""
    names = rng.sample(NAMES, rng.randint(2, 4))
    things, colours = rng.sample(THINGS, len(names)), [rng.choice(COLOUR_NAMES) for _ in names]
    told: list[str]
    asked = rng.randrange(len(names))
    name, thing, shade = names[asked], things[asked], colours[asked]
    match rng.randrange(4):
        case 0:
            told = [f"{n} has {a(c)} {t}." for n, c, t in zip(names, colours, things, strict=True)]
            question, answer = rng.choice((
                (f"Who has the {thing}?", f"{name} has the {thing}."),
                (f"What colour is the {thing}?", f"The {thing} is {shade}."),
                (f"What does {name} have?", f"{name} has {a(shade)} {thing}."),
            ))  # fmt: skip
        case 1:
            places = rng.sample(CITIES, len(names))
            told = [f"{n} lives in {p}." for n, p in zip(names, places, strict=True)]
            question, answer = rng.choice((
                (f"Where does {name} live?", f"{name} lives in {places[asked]}."),
                (f"Who lives in {places[asked]}?", f"{name} lives in {places[asked]}."),
            ))  # fmt: skip
        case 2:
            jobs = rng.sample(JOBS, len(names))
            told = [f"{n} is {a(j)}." for n, j in zip(names, jobs, strict=True)]
            question, answer = rng.choice((
                (f"What is {name}'s job?", f"{name} is {a(jobs[asked])}."),
                (f"Who is the {jobs[asked]}?", f"{name} is the {jobs[asked]}."),
            ))  # fmt: skip
        case _:
            foods, ages = rng.sample(FOODS, len(names)), rng.sample(range(2, 90), len(names))
            if rng.random() < 0.5:
                told = [f"{n} likes {f}." for n, f in zip(names, foods, strict=True)]
                question, answer = f"What does {name} like?", f"{name} likes {foods[asked]}."
            else:
                told = [f"{n} is {age} years old." for n, age in zip(names, ages, strict=True)]
                question, answer = f"How old is {name}?", f"{name} is {ages[asked]} years old."
    text = " ".join(told)
    shape = pick(rng, f"{text} {question}", f"{text}\n{question}", f"Read this: {text}\n{question}")
    return Turn("reading", shape, answer, key=f"reading {sorted(told)}")


def memory(rng: Random) -> list[Turn]:
    """Something the user tells, something else perhaps, and what was told asked back."""
    name, shade, animal, city = rng.choice(NAMES), rng.choice(COLOUR_NAMES), rng.choice(ANIMALS), rng.choice(CITIES)
    number = rng.randint(10, 99)
    statement, reply, question, answer = rng.choice((
        (pick(rng, f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}."),
         f"Hello {name}! Nice to meet you.", pick(rng, "What is my name?", "Who am I?", "Do you remember my name?"),
         f"Your name is {name}."),
        (f"My favourite colour is {shade}.", f"{shade.capitalize()} is a nice colour!",
         pick(rng, "What is my favourite colour?", "Which colour do I like best?"),
         f"Your favourite colour is {shade}."),
        (f"I have {a(animal)}.", f"{a(animal).capitalize()}! That is nice.",
         pick(rng, "Which animal do I have?", "What animal do I have?"), f"You have {a(animal)}."),
        (f"I live in {city}.", f"{city} is a nice place to live.", pick(rng, "Where do I live?",
         "Which city do I live in?"),
         f"You live in {city}."),
        (f"Remember the number {number}.", f"I will remember {number}.",
         pick(rng, "Which number did I tell you?", "What was the number?"), f"The number was {number}."),
    ))  # fmt: skip
    return [Turn("memory", statement, reply, key=statement), Turn("memory", question, answer, key=statement)]
