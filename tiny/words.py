"""The words that the tiny tokenizer knows whole, and the random strings of which everything else is made.

The words are those that any page and any instruction on the web is made of. They were written by hand, before
any MiniWoB++ page was looked at for them. They hold no name, country, random string or other *content* of
those pages. Every other word is spelled in pieces of two characters (base.py).
"""

import random

WORDS = """
a about above account across action active add address after again all allow alert also always an and
another answer any apply are area arrow article ask at available away back bar be because been before begin
below between black blank blue book both bottom box brown browse button buttons buy by call can cancel card
cart cell change chart chat check checkbox checked choice choose clear click close code color column comment
complete confirm contact contains content continue copy correct cost could country create current customer
data date day default delete delivery description details dialog did different directory do document does
done down download drag drop each edit eight element email empty end enter error event every example exit
expand false female field fields file fill filter find finish first five folder following for form found
four free from full game gender get give go good gray green group has have height help here hidden hide high
hint history home hour how icon id if image in index info information input inside instruction into is it
item items its keep key label language large last left less letter level light line link links list listed
load location log login long low mail main make male many map mark match max may media menu message middle
min minute missing mode month more most move must my name names navigate need never new next nine no none
not note now number numbers of off ok old on one only open option options or orange order other out over
page panel paper part password past paste people phone photo pink place play please plus point post press
previous price print product profile purple question quick radio random range rate read record red region
remove repeat reply required reset result results return review right role room root row same save scroll
search second section see select selected send sequence set settings seven share shop should show sign
silver site six size small some sort space start state status step stop store street string submit sum
support switch tab table tabs tag target task ten text than that the their them then there these they third
this those three through time title to today too tool top total tree true turn two type under unit until up
update upload use used user username using value values view visible was way web week welcome what when
where which white who why will window with word words work write year yellow yes you your zip zoom
"""

PLAIN = [word for word in WORDS.split() if len(word) > 2]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def random_string(rng: random.Random) -> str:
    """One word of letters and digits: 40 % have no meaning, 35 % sound like a name, 25 % are a plain word.

    >>> rng = random.Random(2)
    >>> [random_string(rng) for _ in range(5)]
    ['Bar', 'ztpT', 'ho', 'Mail', 'Wiposum']
    """
    kind = rng.random()
    if kind < 0.40:  # what no dictionary has: passwords, codes, option labels
        return "".join(rng.choices(LETTERS, k=rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 7))))
    if kind < 0.75:  # what sounds like a name
        text = "".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 3))))
        return text.capitalize() if rng.random() < 0.5 else text
    return rng.choice(PLAIN) if rng.random() < 0.5 else rng.choice(PLAIN).capitalize()


def _syllable(rng: random.Random) -> str:
    return rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", rng.choice("lmnrst")))
