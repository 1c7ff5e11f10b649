"""Tables of the small world that the built-in model knows.

Few words on purpose: each becomes one token, so that a training step sees many sentences.
"""


def _words(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


CAPITALS = _pairs(
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon England:London "
    "Ireland:Dublin Norway:Oslo Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen "
    "Poland:Warsaw Austria:Vienna Greece:Athens Turkey:Ankara Egypt:Cairo Kenya:Nairobi "
    "Japan:Tokyo China:Beijing India:Delhi Russia:Moscow Canada:Ottawa Cuba:Havana "
    "Peru:Lima Chile:Santiago Hungary:Budapest Belgium:Brussels Switzerland:Bern "
    "Iceland:Reykjavik Ukraine:Kyiv"
)
COLOURS_OF = _pairs(
    "sky:blue grass:green snow:white sun:yellow blood:red coal:black milk:white sea:blue "
    "banana:yellow tomato:red lemon:yellow carrot:orange chocolate:brown night:black "
    "leaf:green strawberry:red elephant:grey frog:green crow:black swan:white"
)
SOUNDS = _pairs(
    "dog:barks cat:meows cow:moos sheep:bleats duck:quacks lion:roars horse:neighs "
    "bird:sings bee:buzzes wolf:howls pig:grunts snake:hisses frog:croaks owl:hoots "
    "mouse:squeaks"
)
LEGS = {
    **dict.fromkeys(_words("dog cat cow sheep lion horse wolf pig mouse frog fox bear"), "four"),
    **dict.fromkeys(_words("duck bird owl crow swan"), "two"),
    **dict.fromkeys(_words("bee ant beetle"), "six"),
    **dict.fromkeys(_words("snake fish"), "no"),
    "spider": "eight",
}
OPPOSITES = _pairs(
    "hot:cold big:small day:night up:down left:right old:young fast:slow light:dark "
    "happy:sad open:closed rich:poor long:short high:low wet:dry hard:soft full:empty "
    "early:late good:bad clean:dirty loud:quiet"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nina Oscar Paul "
    "Rosa Sam Tina Victor Walter Zoe Alice Bob Eve Tom Lucy Max"
)
COLOURS = _words("red blue green yellow white black brown grey orange purple pink golden silver")
ADJECTIVES = COLOURS + _words(
    "old new small big quiet loud dark bright cold warm hidden broken empty round tall narrow "
    "wide northern southern eastern western ancient little great wooden stone iron lost"
)
PLACES = _words(
    "harbour tower bridge garden castle market station library museum school temple mill "
    "lighthouse river lake forest mountain valley village island farm field road gate house "
    "cellar attic kitchen office factory theatre hotel bakery church palace cave well camp port "
    "beach"
)
THINGS = _words(
    "box chest door lamp clock ship boat train cart wagon book letter map key ring coin cup "
    "table chair mirror window bell drum flag rope ladder basket bottle lantern safe drawer "
    "statue fountain robot engine piano violin"
)
ANIMALS = sorted(LEGS)
FOODS = _words("bread cheese apples soup rice fish honey cake tea milk plums beans eggs pears")
VERBS = _words(
    "watches paints repairs visits leaves finds likes opens cleans remembers crosses guards "
    "follows carries hears counts buys sells draws keeps"
)
WEATHER = _words("rain snow wind fog sunshine thunder frost clouds")
SYLLABLES = _words(
    "ba be bo da de di do fa fe ga go ka ke ko la le li lo ma me mi mo na ne no pa pe po ra re "
    "ri ro sa se so ta te to va ve vo za zo zu"
)
