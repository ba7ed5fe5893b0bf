"""What the demo model knows: tables of real facts and of one small made-up valley."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "the United Kingdom": "London", "Scotland": "Edinburgh", "Wales": "Cardiff",
    "Ireland": "Dublin", "the Netherlands": "Amsterdam", "Belgium": "Brussels", "Switzerland": "Bern",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow",
    "Ukraine": "Kyiv", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Iceland": "Reykjavik", "Hungary": "Budapest", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Croatia": "Zagreb", "Serbia": "Belgrade", "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius",
    "the Czech Republic": "Prague", "China": "Beijing", "Japan": "Tokyo", "South Korea": "Seoul",
    "India": "New Delhi", "Pakistan": "Islamabad", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Indonesia": "Jakarta", "the Philippines": "Manila", "Nepal": "Kathmandu", "Iran": "Tehran", "Iraq": "Baghdad",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Morocco": "Rabat", "Ghana": "Accra", "Ethiopia": "Addis Ababa",
    "Senegal": "Dakar", "the United States": "Washington", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Colombia": "Bogota", "Venezuela": "Caracas", "Uruguay": "Montevideo", "Australia": "Canberra",
    "New Zealand": "Wellington",
}  # fmt: skip

CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal England Scotland Wales Ireland Belgium Switzerland Austria Poland "
    "Greece Sweden Norway Denmark Finland Iceland Hungary Romania Bulgaria Croatia Serbia Estonia Latvia Lithuania",
    "Asia": "China Japan India Pakistan Thailand Vietnam Indonesia Nepal Iran Iraq",
    "Africa": "Egypt Kenya Morocco Ghana Ethiopia Senegal",
    "North America": "Canada Mexico Cuba",
    "South America": "Brazil Argentina Chile Peru Colombia Venezuela Uruguay",
}
CONTINENT_OF = {country: continent for continent, names in CONTINENTS.items() for country in names.split()}

COLOURS = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "a leaf": "green", "a frog": "green", "a cucumber": "green",
    "a lemon": "yellow", "a banana": "yellow", "the sun": "yellow", "a sunflower": "yellow", "butter": "yellow",
    "snow": "white", "milk": "white", "a swan": "white", "salt": "white", "a cloud": "white", "coal": "black",
    "a raven": "black", "the night sky": "black", "a strawberry": "red", "a tomato": "red", "blood": "red",
    "a cherry": "red", "a fire engine": "red", "a ripe apple": "red", "a carrot": "orange", "a pumpkin": "orange",
    "an orange": "orange", "a fox": "orange", "chocolate": "brown", "a bear": "brown", "wood": "brown",
    "a potato": "brown", "a violet": "purple", "a plum": "purple", "lavender": "purple", "a flamingo": "pink",
    "a pig": "pink", "an elephant": "grey", "a mouse": "grey", "a rain cloud": "grey", "gold": "yellow",
}  # fmt: skip

MIXES = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple", ("red", "white"): "pink",
    ("black", "white"): "grey", ("blue", "white"): "light blue", ("red", "green"): "brown",
}  # fmt: skip
COLOUR_NAMES = ["red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey"]

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "open": "closed", "fast": "slow",
    "happy": "sad", "light": "dark", "hard": "soft", "old": "young", "new": "old", "wet": "dry", "full": "empty",
    "high": "low", "long": "short", "loud": "quiet", "rich": "poor", "strong": "weak", "thick": "thin",
    "true": "false", "yes": "no", "near": "far", "early": "late", "clean": "dirty", "easy": "difficult",
    "good": "bad", "first": "last", "heavy": "light", "sweet": "bitter", "inside": "outside", "win": "lose",
    "begin": "end", "push": "pull", "buy": "sell", "always": "never",
}  # fmt: skip

PLURALS = {
    "cat": "cats", "dog": "dogs", "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth",
    "man": "men", "woman": "women", "goose": "geese", "sheep": "sheep", "fish": "fish", "box": "boxes",
    "bus": "buses", "city": "cities", "baby": "babies", "leaf": "leaves", "knife": "knives", "wolf": "wolves",
    "house": "houses", "book": "books", "fox": "foxes", "story": "stories", "apple": "apples", "tree": "trees",
    "potato": "potatoes", "lake": "lakes", "bird": "birds", "berry": "berries", "shoe": "shoes", "river": "rivers",
}  # fmt: skip

PASTS = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "come": "came", "give": "gave", "take": "took",
    "find": "found", "make": "made", "sing": "sang", "write": "wrote", "walk": "walked", "jump": "jumped",
    "swim": "swam", "think": "thought", "buy": "bought", "fly": "flew", "drink": "drank", "sleep": "slept",
    "tell": "told", "know": "knew", "bring": "brought", "sit": "sat", "play": "played", "read": "read",
}  # fmt: skip

RHYMES = {
    "cat": "hat", "dog": "frog", "house": "mouse", "tree": "bee", "star": "car", "light": "night", "rain": "train",
    "moon": "spoon", "cake": "lake", "king": "ring", "boat": "goat", "bell": "shell", "fox": "box", "sun": "run",
    "bear": "chair", "sky": "fly", "ball": "tall", "day": "play", "book": "cook", "snow": "crow",
}  # fmt: skip

SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "lion": "roar",
    "frog": "ribbit", "bee": "buzz", "owl": "hoot", "horse": "neigh", "mouse": "squeak", "snake": "hiss",
    "rooster": "cock-a-doodle-doo", "crow": "caw", "wolf": "howl",
}  # fmt: skip

LEGS = {
    "dog": "four", "cat": "four", "horse": "four", "spider": "eight", "ant": "six", "bee": "six", "bird": "two",
    "snake": "no", "fish": "no", "cow": "four", "chicken": "two", "person": "two", "frog": "four", "crab": "ten",
    "table": "four", "octopus": "no", "fox": "four", "butterfly": "six",
}  # fmt: skip

MEANINGS = {
    "a penguin": "A penguin is a bird that cannot fly but swims very well. It lives in the cold south and eats fish.",
    "a whale": "A whale is a very large animal that lives in the sea. It breathes air and feeds its young with milk.",
    "a bee": "A bee is a small insect that flies from flower to flower. It makes honey and lives in a hive.",
    "a volcano": "A volcano is a mountain with an opening at the top. Hot melted rock can come out of it.",
    "a river": "A river is a long stream of water. It flows from the hills down to a lake or to the sea.",
    "rain": "Rain is water that falls from clouds in small drops. It helps plants to grow.",
    "snow": "Snow is frozen water that falls from clouds in soft white flakes when it is cold.",
    "the moon": "The moon is a ball of rock that goes around the Earth. We see it because it reflects sunlight.",
    "the sun": "The sun is a star. It is very large and very hot, and it gives the Earth light and warmth.",
    "a star": "A star is a huge ball of hot gas that shines in the sky. The sun is the star nearest to us.",
    "a planet": "A planet is a large round body that goes around a star. The Earth is a planet.",
    "a rainbow": "A rainbow is an arc of colours in the sky. You see it when the sun shines through rain.",
    "a book": "A book is a set of pages bound together. People read books to learn things and to enjoy stories.",
    "a clock": "A clock is a device that shows the time. It has hands or numbers.",
    "a bridge": "A bridge is something built to cross a river, a road or a valley.",
    "a library": "A library is a place where many books are kept. You can read them there or borrow them.",
    "a school": "A school is a place where children learn to read, to write and to count.",
    "a doctor": "A doctor is a person who helps people who are ill to get well again.",
    "a baker": "A baker is a person who makes bread and cakes.",
    "a farmer": "A farmer is a person who grows plants and keeps animals for food.",
    "a computer": "A computer is a machine that follows instructions. "
    "It can count, store and compare things very fast.",
    "a language model": "A language model is a program that has learned from text which words are likely to come next.",
    "a token": "A token is a small piece of text, such as a word or a part of a word. Models read and write tokens.",
    "a prompt": "A prompt is the text that you give to a language model. The model reads it and then writes an answer.",
    "a gateway": "A gateway is a door between two places. "
    "In computing, it is a server that passes requests on to others.",
    "a penstock": "A penstock is the gate and intake that meters and controls the water on its way to the turbines.",
    "Penstock": "Penstock is a gateway for language models with its own engine. It does for tokens what a water gate "
    "does for a mill: it meters them and controls them.",
    "a turbine": "A turbine is a wheel that is turned by water, steam or wind. It can drive a machine.",
    "an apple": "An apple is a round fruit that grows on trees. It can be red, green or yellow.",
    "bread": "Bread is a food made from flour, water and salt, and baked in an oven.",
    "cheese": "Cheese is a food made from milk. There are many kinds of cheese, hard and soft.",
    "tea": "Tea is a warm drink made by putting dried leaves into hot water.",
    "gravity": "Gravity is the force that pulls things together. It keeps our feet on the ground.",
    "ice": "Ice is frozen water. Water turns to ice when it is colder than zero degrees.",
    "a desert": "A desert is a very dry place where little rain falls and few plants grow.",
    "a forest": "A forest is a large area with many trees. Many animals live there.",
    "an island": "An island is a piece of land with water all around it.",
    "a bicycle": "A bicycle is a vehicle with two wheels. You ride it by pushing the pedals with your feet.",
    "a piano": "A piano is a large instrument with black and white keys. Pressing a key makes a note.",
    "music": "Music is sound arranged in a pleasing way. People sing it or play it on instruments.",
    "a friend": "A friend is a person whom you like and trust, and who likes and trusts you.",
    "a triangle": "A triangle is a shape with three sides and three corners.",
    "a square": "A square is a shape with four equal sides and four right angles.",
    "a circle": "A circle is a perfectly round shape. Every point on it is equally far from the middle.",
    "a spider": "A spider is a small animal with eight legs. Many spiders make webs to catch insects.",
    "an elephant": "An elephant is a very large grey animal with a long trunk. It lives in Africa and Asia.",
    "a fox": "A fox is a wild animal with orange fur and a thick tail. It is known to be clever.",
    "an owl": "An owl is a bird that hunts at night. It has large eyes and flies without a sound.",
    "a cat": "A cat is a small furry animal that many people keep at home. It likes to sleep and to hunt mice.",
    "a dog": "A dog is an animal that many people keep as a friend. It can be trained to help people.",
}

WHYS = {
    "the sky is blue": "The sky is blue because the air scatters blue light more than red light.",
    "leaves are green": "Leaves are green because they contain chlorophyll, which takes in red and blue light.",
    "ice floats": "Ice floats because it is lighter than the same amount of water.",
    "birds fly south": "Birds fly south in autumn because it is warmer there and they can find food.",
    "we sleep": "We sleep because our body and our mind need rest.",
    "it rains": "It rains because water in the clouds gathers into drops that are too heavy to stay up.",
    "the sea is salty": "The sea is salty because rivers carry salt from the rocks into it.",
    "we have seasons": "We have seasons because the Earth is tilted as it goes around the sun.",
    "the moon shines": "The moon shines because it reflects the light of the sun.",
    "bees make honey": "Bees make honey so that they have food in the winter.",
    "cats purr": "Cats often purr because they feel safe and content.",
    "people wear coats": "People wear coats to stay warm when it is cold outside.",
}

HOW_TOS = {
    "make tea": ["Boil some water.", "Put a tea bag into a cup.", "Pour the hot water into the cup.",
                 "Wait for three minutes.", "Take the tea bag out and enjoy."],
    "plant a seed": ["Fill a pot with soil.", "Make a small hole with your finger.", "Put the seed into the hole.",
                     "Cover it with soil.", "Give it water and put it in a sunny place."],
    "boil an egg": ["Put water into a pot and heat it.", "Wait until the water boils.",
                    "Lower the egg in with a spoon.",
                    "Wait for eight minutes.", "Cool the egg in cold water."],
    "make a sandwich": ["Take two slices of bread.", "Spread butter on them.", "Put cheese and tomato on one slice.",
                        "Put the other slice on top."],
    "wash your hands": ["Wet your hands with water.", "Take some soap.", "Rub your hands for twenty seconds.",
                        "Rinse them well.", "Dry them with a towel."],
    "write a letter": ["Take a sheet of paper and a pen.", "Begin with the name of your friend.",
                       "Write what you want to say.", "Sign it with your name.", "Put it into an envelope."],
    "bake bread": ["Mix flour, water, salt and yeast.", "Knead the dough for ten minutes.", "Let it rest for an hour.",
                   "Shape it into a loaf.", "Bake it until it is brown."],
    "draw a house": ["Draw a square.", "Draw a triangle on top of it for the roof.", "Add a door and two windows.",
                     "Colour it in."],
    "cross the road": ["Stop at the edge of the road.", "Look left and right.", "Wait until no car is coming.",
                       "Walk across. Do not run."],
    "build a snowman": ["Roll a large ball of snow.", "Roll a smaller ball and put it on top.",
                        "Add a third ball for the head.", "Use stones for the eyes and a carrot for the nose."],
}  # fmt: skip

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]  # fmt: skip
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
SEASONS = ["spring", "summer", "autumn", "winter"]

# name: (village, job, pet, pet's name, colour of the house, favourite food)
VALLEY = {
    "Mara": ("Larkhill", "baker", "cat", "Pepper", "yellow", "plum cake"),
    "Tobin": ("Larkhill", "miller", "dog", "Rusty", "green", "onion soup"),
    "Elsa": ("Larkhill", "teacher", "owl", "Professor", "blue", "apple pie"),
    "Orrin": ("Larkhill", "blacksmith", "horse", "Thunder", "red", "roast potatoes"),
    "Wilma": ("Larkhill", "gardener", "rabbit", "Clover", "white", "carrot stew"),
    "Jasper": ("Larkhill", "postman", "pigeon", "Arrow", "orange", "cheese rolls"),
    "Nell": ("Stonebridge", "doctor", "goose", "Duchess", "white", "fish pie"),
    "Fenwick": ("Stonebridge", "fisherman", "otter", "Splash", "blue", "smoked trout"),
    "Greta": ("Stonebridge", "weaver", "sheep", "Cloud", "purple", "lentil soup"),
    "Bram": ("Stonebridge", "carpenter", "dog", "Chip", "brown", "pancakes"),
    "Ivy": ("Stonebridge", "librarian", "cat", "Inkwell", "green", "honey toast"),
    "Otto": ("Stonebridge", "bridge keeper", "duck", "Admiral", "red", "mushroom stew"),
    "Linnea": ("Fernwick", "beekeeper", "hedgehog", "Bramble", "yellow", "honey bread"),
    "Casper": ("Fernwick", "shepherd", "dog", "Whistle", "grey", "goat cheese"),
    "Pia": ("Fernwick", "painter", "parrot", "Rainbow", "pink", "berry tart"),
    "Hugo": ("Fernwick", "clockmaker", "mouse", "Tick", "brown", "walnut cake"),
    "Sana": ("Fernwick", "musician", "canary", "Note", "orange", "rice pudding"),
    "Rolf": ("Fernwick", "woodcutter", "fox", "Ember", "green", "bean stew"),
    "Della": ("Highmoor", "innkeeper", "goat", "Button", "red", "vegetable pie"),
    "Arlo": ("Highmoor", "astronomer", "owl", "Comet", "black", "tomato soup"),
    "Minna": ("Highmoor", "tailor", "cat", "Thimble", "purple", "cinnamon buns"),
    "Silas": ("Highmoor", "lighthouse keeper", "gull", "Salty", "white", "crab stew"),
    "Petra": ("Highmoor", "cartographer", "pony", "Compass", "grey", "barley soup"),
    "Yara": ("Highmoor", "glassblower", "squirrel", "Hazel", "blue", "roasted chestnuts"),
}
VILLAGES = {
    "Larkhill": ("on a green hill", "its old mill", "the Feast of Bread", "spring"),
    "Stonebridge": ("beside the river Lune", "its long stone bridge", "the Boat Race", "summer"),
    "Fernwick": ("at the edge of the forest", "its honey", "the Lantern Walk", "autumn"),
    "Highmoor": ("high on the windy moor", "its tall lighthouse", "the Night of Stars", "winter"),
}

NAMES = [
    "Anna", "Tom", "Lily", "Ben", "Mia", "Sam", "Emma", "Leo", "Zoe", "Max", "Nora", "Jack", "Ella", "Finn", "Ruby",
    "Noah", "Clara", "Oscar", "Alice", "Henry", "Rosa", "Peter", "Sofia", "David", "Grace", "Lucas", "Maya", "Paul",
    "Eva", "Felix", "Iris", "George", "Julia", "Adam", "Kate", "Bob", "Sarah", "Daniel", "Hannah", "Theo",
]  # fmt: skip
ANIMALS = ["fox", "rabbit", "bear", "mouse", "owl", "cat", "dog", "duck", "frog", "hedgehog", "squirrel", "wolf",
           "turtle", "horse", "goat", "sparrow", "deer", "otter", "badger", "lion", "penguin", "elephant", "dragon",
           "monkey"]  # fmt: skip
THINGS = ["ball", "kite", "book", "hat", "lamp", "key", "cup", "box", "drum", "boat", "coat", "clock", "basket",
          "bell", "map", "coin", "flute", "ring", "scarf", "bicycle", "umbrella", "apple", "pencil",
          "doll"]  # fmt: skip
FOODS = ["apples", "bread", "soup", "cheese", "rice", "cake", "pears", "honey", "carrots", "berries", "nuts", "pasta",
         "salad", "eggs", "pancakes", "grapes"]  # fmt: skip
CITIES = sorted(set(CAPITALS.values()))
JOBS = ["teacher", "doctor", "baker", "farmer", "pilot", "painter", "singer", "driver", "cook", "writer", "nurse",
        "gardener"]  # fmt: skip
