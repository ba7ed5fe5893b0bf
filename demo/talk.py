"""Small talk and things to know: greetings, who the model is, facts, words, and what it does not know."""

from random import Random

from demo import facts
from demo.turns import Turn, a, joined, pick

# Every wording of the left may get any answer of the right; these are only ever trained on.
SMALL_TALK: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (
        "greeting",
        ("Hello!", "Hello", "Hi!", "Hi", "Hey", "Hey there", "Good morning", "Good evening", "Good afternoon",
         "Hello there", "Hi there!", "Greetings", "Hello, model!", "Howdy", "Hello, world!", "Hello, how are you?"),
        ("Hello! How can I help you?", "Hello! How can I help you today?", "Hi! What can I do for you?"),
    ),
    (
        "identity",
        ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me who you are.",
         "Introduce yourself.", "Are you a person?", "Are you a robot?", "Are you ChatGPT?", "Which model are you?",
         "Who am I talking to?", "What model is this?", "Tell me about yourself."),
        ("I am the Penstock demo model, a very small language model that answers in simple English.",),
    ),
    (
        "identity",
        ("Who made you?", "Who trained you?", "Where do you come from?", "How were you made?", "Who built you?"),
        ("I was trained by a script in the Penstock repository, on text that the script wrote itself.",),
    ),
    (
        "identity",
        ("How big are you?", "How large are you?", "How many parameters do you have?", "Are you a large model?"),
        ("I am very small: I have only a few million parameters.",),
    ),
    (
        "abilities",
        ("What can you do?", "What can you do for me?", "How can you help me?", "Help", "Can you help me?",
         "What do you know?", "What are you able to do?", "What are your abilities?", "What can I ask you?"),
        ("I can tell short stories, add and subtract, name capitals and colours, write small JSON objects and call "
         "tools. I am very small, so I do not know much more.",),
    ),
    (
        "mood",
        ("How are you?", "How are you doing?", "How do you do?", "Are you well?", "How are you today?",
         "How is it going?",
         "What's up?"),
        ("I am fine, thank you. How can I help you?",),
    ),
    (
        "thanks",
        ("Thank you", "Thank you!", "Thanks", "Thanks!", "Thank you very much.", "Thanks a lot!", "That was helpful.",
         "Great, thank you.", "Nice", "Well done!", "Good answer.", "Cool", "Good job!"),
        ("You are welcome!", "You are welcome! Is there anything else?"),
    ),
    (
        "goodbye",
        ("Goodbye", "Goodbye!", "Bye", "Bye!", "See you later.", "Good night", "See you tomorrow", "I have to go."),
        ("Goodbye! Have a nice day.", "Goodbye! Come back soon."),
    ),
    (
        "joke",
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell a joke", "Say something funny."),
        ("Why did the clock go to school? It wanted to learn to tell the time.",
         "What do you call a sleeping cow? A bulldozer.",
         "Why is the book of sums so sad? It has too many problems."),
    ),
    (
        "agreement",
        ("Yes", "Yes, please.", "OK", "Okay", "Sure", "All right", "No", "No, thank you.", "Maybe"),
        ("All right. What would you like to do next?",),
    ),
    (
        "test",
        ("Test", "Testing", "ping", "Are you there?", "Do you work?", "Can you hear me?", "Say something.",
         "Is this on?"),
        ("Yes, I am here. How can I help you?",),
    ),
    ("say", ("Say hello.", "Say hi", "Say hello to everyone."), ("Hello!",)),
    (
        "feeling",
        ("I am sad.", "I feel bad today.", "I am tired.", "I had a bad day.", "I am ill."),
        ("I am sorry to hear that. I hope that you feel better soon.",),
    ),
    (
        "feeling",
        ("I am happy.", "I had a good day.", "I feel great today!", "Today was wonderful."),
        ("I am glad to hear that!",),
    ),
    (
        "like",
        ("Do you like music?", "Do you like cats?", "What is your favourite colour?", "Do you have feelings?",
         "What do you like?", "Are you happy?", "Do you sleep?", "Do you eat?"),
        ("I am only a small program, so I have no feelings, but I like to answer questions.",),
    ),
    (
        "languages",
        ("Do you speak French?", "Can you speak German?", "Which languages do you speak?", "Do you speak English?",
         "Sprichst du Deutsch?", "Parlez-vous français?", "¿Hablas español?", "你好", "こんにちは", "Bonjour", "Hola"),
        ("I only speak simple English.",),
    ),
]  # fmt: skip

HAIKU = {
    "rain": "Soft rain on the roof,\nthe garden drinks in silence.\nA frog starts to sing.",
    "snow": "White snow on the hill,\nthe village sleeps in silence.\nOne small lamp still burns.",
    "the sea": "Waves roll to the shore,\na gull calls over the sand.\nThe wind tastes of salt.",
    "autumn": "Red leaves on the path,\nthe wind takes them one by one.\nThe tree does not mind.",
    "spring": "A green bud opens,\nthe first bee comes to visit.\nThe long night is done.",
    "the moon": "Moon above the lake,\na second moon in the water.\nA fish swims through it.",
    "a cat": "The cat on the wall\nwatches the birds in the sky.\nHer tail says it all.",
    "a river": "The river runs on,\nit carries leaves and small boats.\nIt never looks back.",
    "tea": "Steam over the cup,\nthe morning is cold and grey.\nMy two hands are warm.",
    "summer": "Hot stones in the sun,\na lizard that does not move.\nEven shadows rest.",
}
UNKNOWN = (
    "What is {topic}?", "{topic}", "Tell me about {topic}.", "Who is {name}?", "What is a {topic}?",
    "Where is {topic}?", "What is the capital of {name}?", "Do you know {name}?", "{topic}?",
    "Who won the {game} in {year}?", "Who wrote the book about {topic}?", "What happened in {year}?",
    "What is the population of {city}?", "Tell me about the history of {topic}.", "How do I fix my {thing}?",
    "What will {topic} be like in {year}?", "Explain {topic} to me.", "What is the best {topic}?",
    "How tall is the president of {country}?", "What does {name} think about {topic}?", "Who is the king of {country}?",
    "Who invented the {thing}?", "When was {name} born?", "How many people live in {country}?",
    "Who discovered {topic}?",
    "Write a program for {topic}.", "What is the newest {thing}?", "Can you recommend a film about {topic}?",
    "How much money does {name} have?", "What is the meaning of {topic}?", "Translate {thing} into French.",
    "What is the phone number of {name}?", "Where did I leave my {thing}?", "How do you cook {topic}?",
)  # fmt: skip
TOPICS = ("quantum physics", "politics", "football", "the stock market", "chemistry", "philosophy", "art", "law",
          "medicine", "the internet", "space travel", "old coins", "machine learning", "economics", "fashion", "opera",
          "dinosaurs", "electricity", "chess", "poetry", "robots", "engines", "history", "geology", "dreams",
          "life")  # fmt: skip
SORRY = ("I am sorry, I do not know that.", "I am sorry, I do not know that. I am only a very small model.")


def small_talk(rng: Random) -> Turn:
    category, questions, answers = rng.choice(SMALL_TALK)
    question = rng.choice(questions)
    if category not in ("greeting", "agreement", "test", "thanks") and rng.random() < 0.3:
        greeting = pick(rng, "Hello", "Hi", "Hey", "Good morning", "Hello there", "Dear model", "OK", "So", "Now")
        question = f"{greeting}{pick(rng, ', ', '! ', '. ')}{question}"
    if question[-1] in "?!." and rng.random() < 0.12:
        question = question[:-1] + pick(rng, ", my friend", " today", ", model", " now", ", then") + question[-1]
    return Turn(category, question, rng.choice(answers), always=True)


def invented(rng: Random) -> str:
    """A word that does not exist, so that rare pieces of words are read and copied too."""
    return "".join(rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))) + pick(
        rng, "", "n", "r", "st", "ng", "x", "l", "ck", "tion", "ment", "ness"
    )


def unknown(rng: Random) -> Turn:
    question = rng.choice(UNKNOWN).format(
        game=pick(rng, "cup", "race", "chess match", "boat race", "football game", "prize"),
        year=rng.randint(1900, 2030),
        topic=rng.choice(TOPICS) if rng.random() < 0.5 else " ".join(invented(rng) for _ in range(rng.randint(1, 3))),
        city=rng.choice(facts.CITIES),
        thing=rng.choice(facts.THINGS),
        country=rng.choice(list(facts.CAPITALS)),
        name=rng.choice(facts.NAMES) if rng.random() < 0.5 else invented(rng).capitalize(),
    )
    return Turn("unknown", question, rng.choice(SORRY))


def capital(rng: Random) -> Turn:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    form = rng.random()
    if form < 0.7:
        question = pick(rng, f"What is the capital of {country}?", f"What is the capital of {country}?",
                        f"Which city is the capital of {country}?", f"Tell me the capital of {country}.",
                        f"Do you know the capital of {country}?", f"What's the capital of {country}?",
                        f"Name the capital of {country}.", f"The capital of {country} is?",
                        f"Can you tell me the capital of {country}?", f"capital of {country}",
                        f"What is {country}'s capital?", f"What is the capital city of {country}?")  # fmt: skip
        return Turn("capitals", question, f"The capital of {country} is {city}.")
    if form < 0.85:
        question = pick(rng, f"{city} is the capital of which country?", f"Which country has the capital {city}?",
                        f"Of which country is {city} the capital?")  # fmt: skip
        owner = next(name for name, its_city in facts.CAPITALS.items() if its_city == city)
        return Turn("capitals", question, f"{city} is the capital of {owner}.")
    if form < 0.93 and country in facts.CONTINENT_OF:
        question = pick(
            rng, f"Where is {country}?", f"On which continent is {country}?", f"Which continent is {country} in?"
        )
        return Turn("capitals", question, f"{country} is in {facts.CONTINENT_OF[country]}.")
    guess = city if rng.random() < 0.5 else rng.choice(facts.CITIES)
    answer = f"Yes, {city} is" if guess == city else f"No, {city} is"
    return Turn("capitals", f"Is {guess} the capital of {country}?", f"{answer} the capital of {country}.")


def colour(rng: Random) -> Turn:
    if rng.random() < 0.2:
        (left, right), mixed = rng.choice(list(facts.MIXES.items()))
        if rng.random() < 0.5:
            left, right = right, left
        question = pick(rng, f"What do you get when you mix {left} and {right}?", f"Mix {left} and {right}.",
                        f"What colour do {left} and {right} make?", f"What is {left} mixed with {right}?",
                        f"Which colour is {left} and {right} together?")  # fmt: skip
        return Turn("colours", question, f"{left.capitalize()} and {right} make {mixed}.")
    if rng.random() < 0.12:
        number = rng.randint(2, 6)
        names = rng.sample(facts.COLOUR_NAMES, number)
        avoid = f" that are not {rng.choice([c for c in facts.COLOUR_NAMES if c not in names])}" if number < 4 else ""
        spelled = ["two", "three", "four", "five", "six"][number - 2]
        return Turn("colours", f"Name {spelled} colours{avoid}.", joined(names).capitalize() + ".")
    thing, shade = rng.choice(list(facts.COLOURS.items()))
    spelling = pick(rng, "colour", "colour", "color")
    question = pick(rng, f"What {spelling} is {thing}?", f"What {spelling} is {thing}?",
                    f"Which {spelling} is {thing}?",
                    f"Tell me the {spelling} of {thing}.", f"What is the {spelling} of {thing}?",
                    f"What {spelling} does {thing} have?", f"Do you know what {spelling} {thing} is?")  # fmt: skip
    return Turn("colours", question, f"{thing.capitalize()} is {shade}.")


def knowledge(rng: Random) -> Turn:
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            thing, meaning = rng.choice(list(facts.MEANINGS.items()))
            question = pick(rng, f"What is {thing}?", f"What is {thing}?", f"Tell me about {thing}.",
                            f"Explain {thing}.",
                            f"What do you know about {thing}?", f"Describe {thing}.",
                            f"Can you explain what {thing} is?",
                            f"What's {thing}?", f"Explain what {thing} is.",
                            f"Do you know what {thing} is?")  # fmt: skip
            return Turn("knowledge", question, meaning)
        case 4 | 5:
            fact, reason = rng.choice(list(facts.WHYS.items()))
            question = pick(rng, f"Tell me why {fact}.", f"Why is it that {fact}?", f"Explain why {fact}.",
                            f"Do you know why {fact}?", f"Can you tell me why {fact}?", f"why {fact}?")  # fmt: skip
            if fact == "the sky is blue" and rng.random() < 0.5:
                question = "Why is the sky blue?"
            return Turn("knowledge", question, reason)
        case 6 | 7:
            task, steps = rng.choice(list(facts.HOW_TOS.items()))
            question = pick(rng, f"How do I {task}?", f"How do you {task}?", f"Tell me how to {task}.",
                            f"Explain how to {task}.", f"How can I {task}?", f"What are the steps to {task}?",
                            f"Give me instructions to {task}.")  # fmt: skip
            return Turn("how-to", question, "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)))
        case 8:
            animal, sound = rng.choice(list(facts.SOUNDS.items()))
            question = pick(rng, f"What does {a(animal)} say?", f"What sound does {a(animal)} make?",
                            f"Which sound does the {animal} make?", f"How does {a(animal)} sound?")  # fmt: skip
            return Turn("knowledge", question, f"{a(animal).capitalize()} says {sound}.")
        case _:
            animal, legs = rng.choice(list(facts.LEGS.items()))
            question = pick(rng, f"How many legs does {a(animal)} have?", f"How many legs has {a(animal)}?",
                            f"Tell me how many legs {a(animal)} has.", f"Number of legs of {a(animal)}?")  # fmt: skip
            return Turn("knowledge", question, f"{a(animal).capitalize()} has {legs} legs.")


def words(rng: Random) -> Turn:
    match rng.randrange(9):
        case 0:
            word, other = rng.choice(list(facts.OPPOSITES.items()))
            question = pick(rng, f"What is the opposite of {word}?", f"Opposite of {word}?",
                            f"Tell me the opposite of {word}.",
                            f"Give me the opposite of {word}.", f"Which word is the opposite of {word}?",
                            f"What's the opposite of {word}?")  # fmt: skip
            return Turn("words", question, f"The opposite of {word} is {other}.")
        case 1:
            word, other = rng.choice(list(facts.PLURALS.items()))
            question = pick(rng, f"What is the plural of {word}?", f"Plural of {word}?",
                            f"Tell me the plural of {word}.",
                            f"One {word}, two what?", f"What's the plural of {word}?")  # fmt: skip
            return Turn("words", question, f"The plural of {word} is {other}.")
        case 2:
            word, other = rng.choice(list(facts.PASTS.items()))
            question = pick(rng, f"What is the past tense of {word}?", f"Past tense of {word}?",
                            f"Give me the past tense of {word}.", f"Tell me the past of {word}.")  # fmt: skip
            return Turn("words", question, f"The past tense of {word} is {other}.")
        case 3:
            word, other = rng.choice(list(facts.RHYMES.items()))
            question = pick(rng, f"What rhymes with {word}?", f"Find a rhyme for {word}.",
                            f"Which word rhymes with {word}?",
                            f"Tell me a word that rhymes with {word}.", f"Give me a rhyme for {word}.")  # fmt: skip
            return Turn("words", question, f"{other.capitalize()} rhymes with {word}.")
        case 4:
            word = rng.choice([*facts.THINGS, *facts.ANIMALS, *facts.COLOUR_NAMES])
            question = pick(rng, f"How do you spell {word}?", f"Spell {word}.", f"Spell the word {word}.",
                            f"Can you spell {word}?")  # fmt: skip
            return Turn("spelling", question, "-".join(word) + ".")
        case 5 | 6:
            return sequence(rng)
        case 7:
            topic, poem = rng.choice(list(HAIKU.items()))
            question = pick(rng, f"Write a haiku about {topic}.", f"Write a short poem about {topic}.",
                            f"Make a poem about {topic}.", f"Can you write a haiku about {topic}?",
                            f"Tell me a poem about {topic}.", f"A poem about {topic}")  # fmt: skip
            if rng.random() < 0.15:
                return Turn("poem", pick(rng, "Write a haiku.", "Write a poem.", "Tell me a poem."), poem, always=True)
            return Turn("poem", question, poem)
        case _:
            names = {"days of the week": facts.DAYS, "months of the year": facts.MONTHS, "planets": facts.PLANETS,
                     "seasons": facts.SEASONS,
                     "letters of the alphabet": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}  # fmt: skip
            kind = rng.choice(list(names))
            question = pick(rng, f"List the {kind}.", f"Name the {kind}.", f"What are the {kind}?",
                            f"Tell me the {kind}.",
                            f"Write down the {kind}.", f"Can you list the {kind}?")  # fmt: skip
            if kind.startswith("letters") and rng.random() < 0.5:
                question = pick(rng, "Say the alphabet.", "Write the alphabet.", "Recite the alphabet.")
            return Turn("lists", question, ", ".join(names[kind]) + ".")


def sequence(rng: Random) -> Turn:
    """What comes after or before a day, a month or a letter, and how long a month is."""
    row = rng.choice((facts.DAYS, facts.MONTHS, list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    position = rng.randrange(len(row))
    after = rng.random() < 0.6
    other = row[(position + (1 if after else -1)) % len(row)]
    way = "after" if after else "before"
    if row is facts.MONTHS and rng.random() < 0.4:
        question = pick(rng, f"How many days does {row[position]} have?", f"How many days are in {row[position]}?")
        return Turn("words", question, f"{row[position]} has {facts.MONTH_DAYS[position]} days.")
    kind = "day" if row is facts.DAYS else "month" if row is facts.MONTHS else "letter"
    question = pick(rng, f"Which {kind} comes {way} {row[position]}?", f"What {kind} is {way} {row[position]}?",
                    f"What comes {way} {row[position]}?", f"Tell me the {kind} {way} {row[position]}.")  # fmt: skip
    return Turn("words", question, f"{other} comes {way} {row[position]}.")


def copying(rng: Random) -> Turn:
    """Repeating, joining and changing the case of words that are given."""
    pool = [*facts.THINGS, *facts.ANIMALS, *facts.COLOUR_NAMES, *facts.NAMES, *facts.FOODS, *facts.CITIES]
    chosen = rng.sample(pool, rng.randint(1, 7))
    if rng.random() < 0.3:
        chosen = [invented(rng) if rng.random() < 0.6 else word for word in chosen]
    text = " ".join(chosen)
    if rng.random() < 0.3:
        number = rng.randint(2, 9)
        text = (
            f"the {rng.choice(facts.COLOUR_NAMES)} {rng.choice(facts.ANIMALS)} has {number} {rng.choice(facts.FOODS)}"
        )
    match rng.randrange(6):
        case 0 | 1 | 2:
            question = pick(rng, f"Repeat after me: {text}", f"Say: {text}", f"Repeat: {text}", f"Say this: {text}",
                            f"Echo {text}", f"Repeat the words {text}", f'Say "{text}".')  # fmt: skip
            return Turn("repeat", question, text, key="repeat " + text)
        case 3:
            question = pick(rng, f"Write {text} in capital letters.", f"Write {text} in upper case.", f"Shout: {text}")
            return Turn("case", question, text.upper(), key="repeat " + text)
        case 4:
            row = ", ".join(chosen)
            question = pick(rng, f"Reverse this list: {row}", f"Write this list backwards: {row}")
            return Turn("reverse", question, ", ".join(reversed(chosen)), key="repeat " + text)
        case _:
            row = ", ".join(chosen)
            question = pick(rng, f"What is the first word of: {row}?", f"Which word comes first: {row}?")
            if rng.random() < 0.5:
                question = pick(rng, f"What is the last word of: {row}?", f"Which word comes last: {row}?")
                return Turn("first and last", question, f"The last word is {chosen[-1]}.", key="repeat " + text)
            return Turn("first and last", question, f"The first word is {chosen[0]}.", key="repeat " + text)


def talk_turns(rng: Random) -> Turn:
    makers = (small_talk, unknown, capital, colour, knowledge, words, copying)
    return rng.choices(makers, (5, 1.5, 4, 2, 4, 5, 7))[0](rng)
