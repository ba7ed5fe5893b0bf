"""Arithmetic, counting and ordering: answers that must be worked out rather than remembered."""

from random import Random

from demo.facts import NAMES, THINGS
from demo.turns import Turn, is_held_out, pick

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]  # fmt: skip
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """0 to 100 in words."""
    if number == 100:
        return "one hundred"
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + ("-" + ONES[number % 10] if number % 10 else "")


def operands(rng: Random, sign: str) -> tuple[int, int, int]:
    """Two operands and the result."""
    if sign == "*":
        left, right = rng.randint(0, 12), rng.randint(0, 12)
        return left, right, left * right
    top = rng.choice((9, 20, 99, 99, 99))
    left, right = rng.randint(0, top), rng.randint(0, top)
    if sign == "-":
        left, right = max(left, right), min(left, right)
        return left, right, left - right
    return left, right, left + right


def sum_key(left: int, sign: str, right: int) -> str:
    """Both orders of a sum or product are held out together."""
    if sign != "-":
        left, right = min(left, right), max(left, right)
    return f"{left} {sign} {right}"


def sum_turn(rng: Random) -> Turn:
    sign = rng.choice("++++--**")
    left, right, result = operands(rng, sign)
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    shown = rng.choice("*x") if sign == "*" else sign
    bare = f"{left} {shown} {right}"
    question = pick(
        rng,
        f"What is {bare}?",
        f"What is {bare}?",
        f"What is {left} {word} {right}?",
        f"Calculate {bare}.",
        f"How much is {bare}?",
        f"{bare} = ?",
        f"{bare}",
        f"Can you tell me what {left} {word} {right} is?",
        f"What's {bare}?",
        f"Compute {left} {word} {right}.",
        f"Solve {bare}",
        f"{left}{shown}{right}",
    )
    category = "times" if sign == "*" else "plus and minus"
    return Turn(category, question, f"{left} {sign} {right} = {result}.", sum_key(left, sign, right))


def word_problem(rng: Random) -> Turn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    plural = "boxes" if thing == "box" else thing + "s"
    sign = rng.choice("+-")
    left, right, result = operands(rng, sign)
    left, right, result = left + 2, right + 2, result + (4 if sign == "+" else 0)
    if sign == "+":
        middle = pick(
            rng, f"{name} gets {right} more.", f"Then {name} finds {right} more.", f"{name} buys {right} more."
        )
    else:
        middle = pick(rng, f"{name} gives away {right}.", f"{name} loses {right} of them.", f"{name} sells {right}.")
    question = f"{name} has {left} {plural}. {middle} How many {plural} does {name} have now?"
    answer = f"{left} {sign} {right} = {result}. {name} has {result} {plural} now."
    return Turn("word problem", question, answer, sum_key(left, sign, right))


def comparison(rng: Random) -> Turn:
    left, right = rng.sample(range(100), 2)
    key = f"compare {min(left, right)} {max(left, right)}"
    more = rng.random() < 0.6
    winner = max(left, right) if more else min(left, right)
    word = pick(rng, "bigger", "larger", "greater") if more else pick(rng, "smaller", "less")
    other = left + right - winner
    question = pick(rng, f"Which is {word}, {left} or {right}?", f"Which number is {word}: {left} or {right}?")
    return Turn("comparison", question, f"{winner} is {word} than {other}.", key)


def neighbour(rng: Random) -> Turn:
    number = rng.randint(1, 199)
    if rng.random() < 0.6:
        question = pick(rng, f"What number comes after {number}?", f"Which number follows {number}?")
        return Turn("counting", question, f"{number + 1} comes after {number}.")
    return Turn("counting", f"What number comes before {number}?", f"{number - 1} comes before {number}.")


def counting(rng: Random) -> Turn:
    form = rng.random()
    if form < 0.6:
        last = rng.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 10, 12, 15, 20, 20))
        if rng.random() < 0.08:
            last = rng.choice((25, 30, 50, 100, 100, 200))
        spoken = rng.choice((str(last), in_words(last) if last <= 100 else str(last)))
        question = pick(rng, f"Count to {spoken}.", f"Count from 1 to {spoken}.", f"Can you count to {spoken}?",
                        f"Please count up to {spoken}.", f"Count to {spoken} for me.")  # fmt: skip
        return Turn(
            "counting", question, ", ".join(map(str, range(1, last + 1))) + ".", always=last in (10, 20, 100, 200)
        )
    if form < 0.68:
        first = rng.choice((3, 5, 10, 10, 15, 20))
        question = pick(rng, f"Count down from {first}.", f"Count backwards from {first}.")
        return Turn("counting", question, ", ".join(map(str, range(first, 0, -1))) + ".")
    if form < 0.75:
        first = rng.randint(2, 60)
        last = first + rng.randint(3, 15)
        question = pick(rng, f"Count from {first} to {last}.", f"List the numbers from {first} to {last}.")
        return Turn("counting", question, ", ".join(map(str, range(first, last + 1))) + ".")
    if form < 0.85:
        step, last = rng.choice(((2, 20), (2, 30), (5, 50), (5, 100), (10, 100), (3, 30)))
        question = pick(rng, f"Count by {in_words(step)}s to {last}.", f"Count to {last} in steps of {step}.")
        return Turn("counting", question, ", ".join(map(str, range(step, last + 1, step))) + ".")
    if form < 0.93:
        number = rng.randint(2, 12)
        question = pick(rng, f"Write the times table of {number}.", f"What is the {number} times table?",
                        f"Show me the multiplication table for {number}.")  # fmt: skip
        return Turn("counting", question, "\n".join(f"{number} * {i} = {number * i}" for i in range(1, 11)))
    last = rng.choice((5, 10, 10, 12, 20, 30))
    question = pick(rng, f"Count to {last} in words.", f"Write the numbers from one to {in_words(last)} in words.")
    return Turn("counting", question, ", ".join(in_words(i) for i in range(1, last + 1)) + ".")


def spelled_number(rng: Random) -> Turn:
    number = rng.randint(0, 100)
    if rng.random() < 0.5:
        return Turn("numbers", f"How do you write {number} in words?", f"{number} in words is {in_words(number)}.")
    return Turn("numbers", f"Write {in_words(number)} as a number.", f"{in_words(number).capitalize()} is {number}.")


def sorting(rng: Random) -> Turn:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    shown = ", ".join(map(str, numbers))
    key = "sort " + " ".join(map(str, sorted(numbers)))
    if rng.random() < 0.5:
        question = pick(rng, f"Sort these numbers: {shown}.", f"Put these numbers in order: {shown}.")
        return Turn("sorting", question, ", ".join(map(str, sorted(numbers))) + ".", key)
    question = pick(rng, f"What is the largest of {shown}?", f"Which number is the biggest: {shown}?")
    return Turn("comparison", question, f"The largest number is {max(numbers)}.", key)


def sum_turns(rng: Random) -> Turn:
    makers = (sum_turn, word_problem, comparison, neighbour, counting, spelled_number, sorting)
    return rng.choices(makers, (10, 3, 2, 1, 7, 1, 1.5))[0](rng)


def drill(rng: Random) -> str:
    """A plain page of sums, none of them held out."""
    lines: list[str] = []
    sign = rng.choice("+++--*")
    while len(lines) < 14:
        left, right, result = operands(rng, sign)
        if not is_held_out(sum_key(left, sign, right)):
            lines.append(f"{left} {sign} {right} = {result}.")
    return "\n".join(lines)
