"""JSON objects and tool use: the Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from demo.facts import CAPITALS, CITIES, COLOUR_NAMES, FOODS, JOBS, NAMES, THINGS
from demo.sums import operands, sum_key
from demo.turns import Turn, pick

Message = dict[str, Any]


def definition(
    name: str, description: str, required: dict[str, str], optional: dict[str, str] | None = None
) -> Message:
    """An OpenAI tool definition; parameters as name -> JSON type."""
    properties = {key: {"type": kind} for key, kind in {**required, **(optional or {})}.items()}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "get_weather": definition("get_weather", "Get the weather in a city", {"city": "string"}),
    "get_time": definition("get_time", "Get the current time in a city", {"city": "string"}),
    "calculate": definition("calculate", "Calculate an expression", {"expression": "string"}),
    "search": definition("search", "Search the web", {"query": "string"}),
    "send_message": definition("send_message", "Send a message", {"to": "string", "text": "string"}),
    "set_timer": definition("set_timer", "Set a timer", {"minutes": "integer"}),
    "get_price": definition("get_price", "Get the price of a thing", {"item": "string"}),
    "turn_on_light": definition("turn_on_light", "Turn on the light in a room", {"room": "string"}),
    "play_music": definition("play_music", "Play music", {"kind": "string"}),
    "add_to_list": definition("add_to_list", "Add an item to the shopping list", {"item": "string"}),
}
SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]
ROOMS = ["kitchen", "bedroom", "bathroom", "hall", "garden", "office", "living room"]
TOPICS = ["history of trains", "height of mountains", "old castles", "how bees dance", "deep sea fish", "best soup",
          "wind power", "water mills", "paper boats", "famous bridges", "wild horses", "winter birds"]  # fmt: skip
TEXTS = ["I am late", "dinner is ready", "see you soon", "happy birthday", "please call me", "the train is here",
         "good night", "I am at home", "thank you", "bring some bread"]  # fmt: skip


def json_turn(rng: Random) -> Turn:
    """Fields asked for in words, answered as one JSON object."""
    makers: dict[str, Callable[[], str | int | bool]] = {
        "name": lambda: rng.choice(NAMES),
        "age": lambda: rng.randint(1, 99),
        "city": lambda: rng.choice(CITIES),
        "colour": lambda: rng.choice(COLOUR_NAMES),
        "item": lambda: rng.choice(THINGS),
        "price": lambda: rng.randint(1, 99),
        "count": lambda: rng.randint(0, 50),
        "job": lambda: rng.choice(JOBS),
        "food": lambda: rng.choice(FOODS),
        "active": lambda: rng.random() < 0.5,
        "country": lambda: rng.choice([name for name in CAPITALS if " " not in name]),
    }
    fields = {name: makers[name]() for name in rng.sample(list(makers), rng.choice((1, 2, 2, 2, 3, 3, 4)))}
    link = pick(rng, " ", " ", " = ", ": ")
    shown = [f"{name}{link}{json.dumps(value) if isinstance(value, bool) else value}" for name, value in fields.items()]
    told = shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
    question = pick(
        rng,
        f"Write a JSON object with {told}.",
        f"Give me a JSON object with {told}.",
        f"Make JSON with {told}.",
        f"Create a JSON object with {told}.",
        f"Return JSON: {told}.",
        f"As JSON: {told}",
    )
    answer = json.dumps(fields)
    if rng.random() < 0.12:
        thing = rng.choice((FOODS, COLOUR_NAMES, NAMES))
        several = rng.sample(thing, rng.randint(2, 5))
        question = pick(
            rng, f"Write a JSON array with {', '.join(several)}.", f"Make a JSON list of {', '.join(several)}."
        )
        answer = json.dumps(several)
    elif rng.random() < 0.12:
        name, age = rng.choice(NAMES), rng.randint(1, 99)
        question = pick(
            rng, f"{name} is {age} years old. Write that as JSON.", f"Turn this into JSON: {name} is {age}."
        )
        answer = json.dumps({"name": name, "age": age})
    return Turn("json", question, answer, key=answer)


def use(rng: Random) -> tuple[str, str, Message, Message, str]:
    """A question, the tool it needs, its arguments, the tool's result, and the answer in a sentence."""
    city, name = rng.choice(CITIES), rng.choice(NAMES)
    match rng.choice(list(TOOLS)):
        case "get_weather":
            sky, degrees = rng.choice(SKIES), rng.randint(-9, 35)
            question = pick(rng, f"What is the weather in {city}?", f"How is the weather in {city} today?",
                            f"Is it {rng.choice(SKIES)} in {city}?", f"Tell me the weather in {city}.",
                            f"What's the weather like in {city}?")  # fmt: skip
            result = {"city": city, "weather": sky, "temperature": degrees}
            answer = f"It is {sky} in {city}, and the temperature is {degrees} degrees."
            return question, "get_weather", {"city": city}, result, answer
        case "get_time":
            clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
            question = pick(rng, f"What time is it in {city}?", f"Tell me the time in {city}.")
            return question, "get_time", {"city": city}, {"time": clock}, f"It is {clock} in {city}."
        case "calculate":
            sign = rng.choice("+-*")
            left, right, result_ = operands(rng, sign)
            text = f"{left} {sign} {right}"
            question = pick(rng, f"What is {text}?", f"Calculate {text}.", f"Use the calculator: {text}")
            return question, "calculate", {"expression": text}, {"result": result_}, f"{text} = {result_}."
        case "search":
            topic, pages = rng.choice(TOPICS), rng.randint(1, 90)
            question = pick(rng, f"Search the web for {topic}.", f"Find something about {topic}.", f"Look up {topic}.")
            return question, "search", {"query": topic}, {"pages": pages}, f"I found {pages} pages about {topic}."
        case "send_message":
            text = rng.choice(TEXTS)
            question = pick(rng, f"Send a message to {name}: {text}", f'Tell {name} "{text}".', f"Text {name}: {text}")
            return (
                question,
                "send_message",
                {"to": name, "text": text},
                {"sent": True},
                f"I sent the message to {name}.",
            )
        case "set_timer":
            minutes = rng.randint(1, 60)
            question = pick(rng, f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes.")
            return question, "set_timer", {"minutes": minutes}, {"ok": True}, f"The timer is set for {minutes} minutes."
        case "get_price":
            thing, price = rng.choice(THINGS), rng.randint(1, 99)
            question = pick(rng, f"How much does the {thing} cost?", f"What is the price of the {thing}?")
            return question, "get_price", {"item": thing}, {"price": price}, f"The {thing} costs {price} coins."
        case "turn_on_light":
            room = rng.choice(ROOMS)
            question = pick(rng, f"Turn on the light in the {room}.", f"It is dark in the {room}. Switch the light on.")
            return question, "turn_on_light", {"room": room}, {"ok": True}, f"The light in the {room} is on."
        case "play_music":
            kind = pick(rng, "jazz", "folk", "rock", "piano", "quiet", "happy", "dance")
            question = pick(rng, f"Play some {kind} music.", f"I want to hear {kind} music.")
            return question, "play_music", {"kind": kind}, {"ok": True}, f"I am playing {kind} music."
        case _:
            food = rng.choice(FOODS)
            question = pick(rng, f"Add {food} to the shopping list.", f"Put {food} on my list.")
            return question, "add_to_list", {"item": food}, {"ok": True}, f"I added {food} to the shopping list."


def no_tool_turn(rng: Random) -> Turn:
    """A task for a tool where there is none."""
    question, name, arguments, *_ = use(rng)
    while name == "calculate":
        question, name, arguments, *_ = use(rng)
    return Turn("no tool", question, "I am sorry, I have no tool for that.", call_key(name, arguments))


def call_key(name: str, arguments: Message) -> str:
    """The same with and without the tool; a calculation is held out with its operands."""
    if name == "calculate":
        left, sign, right = arguments["expression"].split()
        return sum_key(int(left), sign, int(right))
    return f"{name} {json.dumps(arguments)}"


def tool_conversation(rng: Random) -> tuple[str, list[Message], list[Message]]:
    """(key, messages, tools): a question, a call, the tool's result and the answer; sometimes only up to the call."""
    question, name, arguments, result, answer = use(rng)
    others = rng.sample([other for other in TOOLS if other != name], rng.randint(0, 2))
    tools = [TOOLS[tool] for tool in rng.sample([name, *others], len(others) + 1)]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[Message] = [{"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "content": json.dumps(result)})
    messages.append({"role": "assistant", "content": answer})
    return call_key(name, arguments), messages, tools
